"""Splitting: what runs where, in which order, and what travels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopipe.graph import Graph
from aiopipe.sched.assign import Assignment, assign
from aiopipe.sched.order import _schedule, in_rounds, make_runs
from aiopipe.sched.split import HOST, Copy, Split, _constant, _wanted, split_graph
from graphs import Draft, chain, gpus, naive_splits, random_graph, sanity, transformer


def placed(graph: Graph, backends: Sequence[int], weights: dict[int, tuple[int, ...]] | None = None) -> Assignment:
    """An assignment with these nodes' backends, on as many accelerators as they name and a host."""
    devices = gpus(max(backends, default=0) + 1)
    return assign(graph, devices, cut=backends, weights=weights or {})


def split(
    graph: Graph, backends: Sequence[int], weights: dict[int, tuple[int, ...]] | None = None
) -> tuple[Split, ...]:
    assignment = placed(graph, backends, weights)
    splits = split_graph(graph, assignment)
    sanity(graph, splits, assignment)
    return splits


def test_one_backend_one_split() -> None:
    graph = chain(3)
    (only,) = split(graph, [0] * 6)
    assert only.nodes == tuple(range(6))
    assert only.inputs == (graph.inputs[0].id, *(w.id for w in graph.weights))
    assert only.outputs == (graph.outputs[0].id,)
    assert only.copies == (Copy(graph.inputs[0].id, HOST, 8),)
    assert only.depends == only.recomputed == ()


def test_two_backends_two_splits() -> None:
    graph = chain(2)
    first, second = split(graph, [0, 0, 1, 1])
    between = graph.nodes[1].outputs[0]
    assert (first.backend, first.nodes, first.outputs, first.depends) == (0, (0, 1), (between,), ())
    assert (second.backend, second.nodes, second.inputs) == (1, (2, 3), (between, graph.weights[1].id))
    assert second.copies == (Copy(between, 0, 8),)
    assert second.depends == (0,)


def test_pipeline_keeps_its_layers() -> None:
    graph = transformer(8)
    backends = [min(3, (node.index - 1) // 20) if node.index else 0 for node in graph.nodes]
    splits = split(graph, backends)
    assert [s.backend for s in splits] == [0, 1, 2, 3]
    assert [i for s in splits for i in s.nodes] == list(range(len(graph.nodes)))
    assert [len(s.copies) for s in splits] == [1, 1, 1, 1]


def test_interleaved_towers_are_two_splits() -> None:
    b = Draft()
    x, left, right = b.x(), b.x("l"), b.x("r")
    for _ in range(50):
        left, right = b.op("mul", left, x), b.op("mul", right, x)
    graph = b.build([left, right])
    splits = split(graph, [0, 1] * 50)
    assert [s.backend for s in splits] == [0, 1]
    assert [s.depends for s in splits] == [(), ()]
    # The input that both read comes from the host to both, never from one to the other.
    assert all(c.src == HOST for s in splits for c in s.copies)
    assert sum(c.tensor == x for s in splits for c in s.copies) == 2


def test_zigzag_of_600_nodes() -> None:  # S10
    graph = chain(300)
    splits = split(graph, [0, 1] * 300)
    assert len(splits) == 600
    assert all(s.depends == ((s.index - 1,) if s.index else ()) for s in splits)


def test_many_inputs() -> None:  # S9
    b = Draft()
    xs = [b.x(f"x{i}") for i in range(40)]
    far = [b.op("neg", xs[i % 40]) for i in range(64)]
    y = b.op("concatenate", *far, *xs)
    graph = b.build([y])
    splits = split(graph, [0] * 64 + [1])
    assert len(splits) == 2
    assert len(splits[1].inputs) == 104
    assert [c.src for c in splits[1].copies] == [0] * 64 + [HOST] * 40
    assert len(splits[0].outputs) == 64


def test_more_than_sixteen_backends() -> None:
    graph = chain(100)
    splits = split(graph, [i // 2 for i in range(200)])
    assert [s.backend for s in splits] == list(range(100))


def test_a_split_is_not_held_up_by_lower_nodes() -> None:
    b = Draft()
    x = b.x()
    a = b.op("mul", x)  # 0 on 0
    far = b.op("mul", a)  # 1 on 1
    late = b.op("mul", far)  # 2 on 0, waits for 1
    feeds = b.op("mul", a)  # 3 on 0, feeds 4 on 1
    end = b.op("add", feeds, far)  # 4 on 1
    graph = b.build([late, end])
    splits = split(graph, [0, 1, 0, 0, 1])
    assert [(s.backend, s.nodes) for s in splits] == [(0, (0, 3)), (1, (1, 4)), (0, (2,))]


def test_a_value_is_copied_once_to_each_backend() -> None:
    b = Draft()
    x = b.x()
    a = b.op("mul", x, nbytes=16)  # 0 on 0
    p = b.op("mul", a)  # 1 on 1
    q = b.op("mul", p)  # 2 on 0
    r = b.op("add", a, q)  # 3 on 1: the copy of `a` is there already
    s = b.op("add", a, r)  # 4 on 2
    graph = b.build([s])
    splits = split(graph, [0, 1, 0, 1, 2])
    assert [s.backend for s in splits] == [0, 1, 0, 1, 2]
    copies = [(s.index, c.src) for s in splits for c in s.copies if c.tensor == a]
    assert copies == [(1, 0), (4, 0)]
    assert splits[3].inputs == (a, q)
    assert splits[3].depends == (1, 2)
    assert splits[0].outputs == (a,)


def test_an_input_is_brought_once_to_each_backend() -> None:
    b = Draft()
    x = b.x()
    h = x
    for _ in range(4):
        h = b.op("add", h, x)
    splits = split(b.build([h]), [0, 1, 0, 1])
    assert [[c.src for c in s.copies if c.tensor == x] for s in splits] == [[HOST], [HOST], [], []]
    assert splits[2].depends == (0, 1)


def test_weights_are_inputs_but_no_copies() -> None:
    b = Draft()
    w = b.w()
    y = b.op("dot_general", b.op("dot_general", b.x(), w), w)
    first, second = split(b.build([y]), [0, 1], {w: (0,)})
    assert w in first.inputs and w in second.inputs
    assert all(c.tensor != w for c in (*first.copies, *second.copies))


def test_what_nobody_needs_is_dropped() -> None:
    b = Draft()
    x = b.x()
    dead = b.op("mul", x)
    b.op("mul", dead)
    used, unused = b.ops("split", x, nbytes=(8, 8))
    graph = b.build([b.op("mul", used)])
    (only,) = split(graph, [1, 2, 0, 0])
    assert only.nodes == (2, 3)
    assert unused not in only.outputs


def test_effects_stay() -> None:
    b = Draft()
    x = b.x()
    b.op("print", b.op("mul", x), effect=True)
    y = b.op("mul", x)
    splits = split(b.build([y]), [1, 1, 0])
    assert [(s.backend, s.nodes, s.outputs) for s in splits] == [(1, (0, 1), ()), (0, (2,), (y,))]


def test_effects_keep_their_order() -> None:
    b = Draft()
    x = b.x()
    far = b.op("mul", x)  # on 1
    b.op("print", b.op("mul", far), effect=True)  # on 0, waits for 1
    b.op("print", x, effect=True)  # on 0, could go at once
    y = b.op("mul", x)  # on 0
    splits = split(b.build([y]), [1, 0, 0, 0, 0])
    assert [(s.backend, s.nodes) for s in splits] == [(1, (0,)), (0, (1, 2, 3, 4))]


def test_cheap_ops_with_an_effect_are_not_repeated() -> None:
    b = Draft()
    big = b.op("broadcast_in_dim", b.x(nbytes=1), nbytes=1000, effect=True)
    first, second = split(b.build([b.op("mul", big)]), [0, 1])
    assert first.nodes == (0,)
    assert second.recomputed == ()


# -- cheap nodes ---------------------------------------------------------------------------------


def test_iota_is_repeated() -> None:
    b = Draft()
    i = b.op("iota", nbytes=1000)
    here, there = b.op("mul", i), b.op("mul", i)
    first, second = split(b.build([here, there]), [0, 0, 1])
    assert first.nodes == (0, 1) and first.recomputed == ()
    assert second.nodes == (0, 2) and second.recomputed == (0,)
    assert second.copies == () and second.depends == ()


def test_iota_is_repeated_on_each_backend_that_reads_it() -> None:
    b = Draft()
    i = b.op("iota", nbytes=1000)
    readers = [b.op("mul", i) for _ in range(4)]
    splits = split(b.build(readers), [1, 0, 1, 2, 3])
    assert {s.backend: (s.nodes, s.recomputed) for s in splits} == {
        0: ((0, 1), (0,)),
        1: ((0, 2), ()),
        2: ((0, 3), (0,)),
        3: ((0, 4), (0,)),
    }
    assert not any(s.brings for s in splits)


def test_repeated_and_not_run_at_home() -> None:
    b = Draft()
    i = b.op("iota", nbytes=1000)
    (only,) = split(b.build([b.op("mul", i)]), [0, 1])
    assert (only.backend, only.nodes, only.recomputed) == (1, (0, 1), (0,))


def test_broadcast_brings_its_operand() -> None:
    b = Draft()
    small = b.op("mul", b.x(), nbytes=4)
    big = b.op("broadcast_in_dim", small, nbytes=400)
    first, second = split(b.build([b.op("mul", big)]), [0, 0, 1])
    assert first.outputs == (small,)
    assert second.copies == (Copy(small, 0, 4),)
    assert second.nodes == (1, 2)


@pytest.mark.parametrize(("before", "after", "repeated"), [(4, 2, False), (4, 4, False), (2, 4, True)])
def test_convert_moves_the_smaller_side(before: int, after: int, repeated: bool) -> None:
    b = Draft()
    small = b.op("mul", b.x(), nbytes=before)
    converted = b.op("convert_element_type", small, nbytes=after)
    _, second = split(b.build([b.op("mul", converted)]), [0, 0, 1])
    assert second.recomputed == ((1,) if repeated else ())
    assert second.copies == ((Copy(small, 0, before) if repeated else Copy(converted, 0, after)),)


def test_a_chain_is_repeated_as_a_whole() -> None:
    b = Draft()
    i = b.op("iota", nbytes=10)
    c = b.op("convert_element_type", i, nbytes=10)  # alone it would not be smaller
    big = b.op("broadcast_in_dim", c, nbytes=1000)
    (only,) = split(b.build([b.op("mul", big)]), [0, 0, 0, 1])
    assert only.nodes == (0, 1, 2, 3)
    assert only.recomputed == (0, 1, 2)


def test_a_long_chain_does_not_recurse() -> None:
    b = Draft()
    h = b.op("iota", nbytes=10)
    for _ in range(1500):
        h = b.op("convert_element_type", h, nbytes=10)
    (only,) = split(b.build([b.op("mul", h)]), [0] * 1501 + [1])
    assert len(only.recomputed) == 1501


@pytest.mark.parametrize(
    ("weight", "held_by", "repeated"), [(10, 1, True), (10, 0, True), (500, 1, True), (500, 0, False)]
)
def test_a_weight_counts_unless_it_is_there(weight: int, held_by: int, repeated: bool) -> None:
    b = Draft()
    w = b.w(nbytes=weight)
    big = b.op("broadcast_in_dim", w, nbytes=100)
    splits = split(b.build([b.op("mul", big), b.op("mul", big)]), [0, 0, 1], {w: (held_by,)})
    assert splits[-1].recomputed == ((0,) if repeated else ())


@pytest.mark.parametrize(("nbytes", "repeated"), [(10, True), (100, False)])
def test_an_input_counts_its_bytes(nbytes: int, repeated: bool) -> None:
    b = Draft()
    big = b.op("broadcast_in_dim", b.x(nbytes=nbytes), nbytes=100)
    splits = split(b.build([b.op("mul", big), b.op("mul", big)]), [0, 0, 1])
    assert splits[-1].recomputed == ((0,) if repeated else ())


def test_an_operand_that_is_there_anyway_costs_nothing() -> None:
    b = Draft()
    a = b.op("mul", b.x(), nbytes=100)
    c = b.op("convert_element_type", a, nbytes=50)
    graph = b.build([b.op("mul", a, nbytes=8), b.op("mul", c, nbytes=8)])
    _, second = split(graph, [0, 0, 1, 1])
    assert second.copies == (Copy(a, 0, 100),)
    assert second.recomputed == (1,)


def test_an_operand_read_twice_is_brought_once() -> None:
    b = Draft()
    a = b.op("mul", b.x(), nbytes=60)
    big = b.op("broadcast_in_dim", a, a, nbytes=100)
    _, second = split(b.build([b.op("mul", big)]), [0, 0, 1])
    assert second.recomputed == (1,)


@pytest.mark.parametrize("result", [8, 1])
def test_an_operand_that_is_made_there_costs_nothing(result: int) -> None:
    b = Draft()
    a = b.op("mul", b.x(), nbytes=100)  # on 1
    c = b.op("convert_element_type", a, nbytes=result)  # on 0
    (only,) = split(b.build([b.op("mul", c)]), [1, 0, 1])
    assert (only.backend, only.recomputed) == (1, (1,))


def test_a_chain_on_a_value_costs_what_the_value_does() -> None:
    """Its end is smaller than its middle, but need not be made from that elsewhere."""
    b = Draft()
    a = b.op("mul", b.x(), nbytes=4)
    middle = b.op("broadcast_in_dim", a, nbytes=100)
    end = b.op("convert_element_type", middle, nbytes=50)
    first, second = split(b.build([b.op("mul", end)]), [0, 0, 0, 1])
    assert (first.nodes, second.nodes) == ((0,), (1, 2, 3))
    assert second.copies == (Copy(a, 0, 4),)


@pytest.mark.parametrize(("nbytes", "repeated"), [((60, 39), True), ((60, 40), False), ((60, 60), False)])
@pytest.mark.parametrize("kind", ["nodes", "inputs", "weights"])
def test_all_operands_that_are_not_there_count(kind: str, nbytes: tuple[int, int], repeated: bool) -> None:
    b = Draft()
    if kind == "nodes":
        operands = [b.op("mul", b.x(str(i)), nbytes=n) for i, n in enumerate(nbytes)]
    elif kind == "inputs":
        operands = [b.x(str(i), n) for i, n in enumerate(nbytes)]
    else:
        operands = [b.x("x", nbytes[0]), b.w("w", nbytes[1])]
    big = b.op("broadcast_in_dim", *operands, nbytes=100)
    cut = [0] * (2 if kind == "nodes" else 0) + [0, 0, 1]
    held = {operands[1]: (0,)} if kind == "weights" else {}
    splits = split(b.build([b.op("mul", big), b.op("mul", big)]), cut, held)
    assert bool(splits[-1].recomputed) is repeated


def test_operands_that_are_there_do_not_hide_those_that_are_not() -> None:
    b = Draft()
    here, missing = b.op("mul", b.x(), nbytes=10), b.op("exp", b.x("y"), nbytes=200)
    big = b.op("broadcast_in_dim", here, missing, nbytes=100)
    graph = b.build([b.op("mul", here), b.op("mul", big), b.op("mul", big)])
    splits = split(graph, [0, 0, 0, 1, 0, 1])
    assert splits[-1].recomputed == ()
    assert {c.nbytes for c in splits[-1].copies} == {10, 100}


@pytest.mark.parametrize("dead", [False, True])
def test_an_operand_is_there_only_if_somebody_reads_it_there(dead: bool) -> None:
    """A cheap node of that backend that runs elsewhere, or a node that nobody wants, does not bring it."""
    b = Draft()
    a = b.op("mul", b.x(), nbytes=100)
    if dead:
        b.op("mul", a)
    else:
        away = b.op("broadcast_in_dim", a, nbytes=1000)
    small = b.op("convert_element_type", a, nbytes=60)
    outputs = [b.op("mul", small), a] if dead else [b.op("mul", small), a, b.op("mul", away)]
    cut = [0, 1, 0, 1] if dead else [0, 1, 0, 1, 2]
    splits = split(b.build(outputs), cut)
    (second,) = (s for s in splits if s.backend == 1)
    assert second.recomputed == () and second.copies == (Copy(small, 0, 60),)


def test_a_constant_that_another_is_made_from_is_repeated_with_it() -> None:
    b = Draft()
    w = b.w("w", 64)
    turned = b.op("transpose", w, nbytes=64)
    again = b.op("transpose", turned, nbytes=64)
    graph = b.build([b.op("mul", again), b.op("dot_general", b.x(), again)])
    splits = split(graph, [0, 0, 0, 1], {w: (0,)})
    assert [s.recomputed for s in splits] == [(), (0, 1)]
    assert splits[1].copies == (Copy(graph.inputs[0].id, HOST, 8),)


def test_a_graph_output_is_made_at_home_and_repeated_elsewhere() -> None:
    b = Draft()
    i = b.op("iota", nbytes=1000)
    first, second = split(b.build([i, b.op("mul", i)]), [0, 1])
    assert (first.nodes, first.outputs) == ((0,), (i,))
    assert second.nodes == (0, 1)


def test_a_repeat_serves_all_splits_of_its_backend() -> None:
    b = Draft()
    x = b.x()
    i = b.op("iota", nbytes=1000)  # home 0
    p = b.op("add", x, i)  # on 1
    q = b.op("mul", p)  # on 0
    r = b.op("add", q, i)  # on 1 again
    splits = split(b.build([r]), [0, 1, 0, 1])
    assert [s.recomputed for s in splits] == [(0,), (), ()]
    assert i in splits[0].outputs
    assert i in splits[2].inputs and splits[2].depends == (0, 1)


# -- lazy ----------------------------------------------------------------------------------------


def test_values_from_weights_wait_for_their_reader() -> None:
    """They could run in the first split, but then their results would be kept until the last."""
    b = Draft()
    w = b.w("head", 1000)
    wide = b.op("dequantize", w, nbytes=4000)
    h = b.op("dot_general", b.x(), b.w("w0"))
    h = b.op("dot_general", h, b.w("w1"))
    y = b.op("dot_general", h, wide)
    first, _, last = split(b.build([y]), [0, 0, 1, 0])
    assert first.nodes == (1,)
    assert last.nodes == (0, 3)
    assert w in last.inputs


@pytest.mark.parametrize(("nbytes", "waits"), [(16, True), (8, True), (4, False)])
def test_cheap_values_wait_unless_their_operand_is_larger(nbytes: int, waits: bool) -> None:
    b = Draft()
    a = b.op("mul", b.x(), nbytes=8)
    cheap = b.op("convert_element_type", a, nbytes=nbytes)
    far = b.op("mul", a)
    first, _, last = split(b.build([b.op("add", far, cheap)]), [0, 0, 1, 0])
    assert first.nodes == ((0,) if waits else (0, 1))
    assert last.nodes == ((1, 3) if waits else (3,))


def test_values_from_weights_that_another_backend_needs_do_not_wait() -> None:
    b = Draft()
    row = b.op("reduce_sum", b.w(), nbytes=4)  # too small to bring the weight instead
    h = b.op("dot_general", b.x(), row)
    y = b.op("dot_general", h, row)
    first, second = split(b.build([y]), [0, 0, 1])
    assert first.nodes == (0, 1)
    assert second.copies[-1] == Copy(row, 0, 4)


# -- state ---------------------------------------------------------------------------------------


def test_state_that_is_replaced_comes_first_in_the_order_of_its_next_values() -> None:
    b = Draft()
    x, w = b.x(), b.w()
    one, kept, two = (b.state(name, (8,), "int8", 8) for name in ("one", "kept", "two"))
    y = b.op("attend", x, w, kept, two, one)
    new_two, new_one = b.op("update", two, y), b.op("update", one, y)
    graph = b.build([y], new_state=[new_one, kept, new_two])
    (only,) = split_graph(graph, assign(graph, gpus(1)))
    assert only.inputs == (one, two, x, w, kept)
    assert only.outputs == (new_one, new_two, y)


def test_state_is_brought_from_where_it_is() -> None:
    b = Draft()
    cache = b.state("cache", (8,), "int8", 8)
    y = b.op("attend", b.x(), cache)
    new = b.op("update", cache)
    graph = b.build([y], new_state=[new])
    splits = split_graph(graph, assign(graph, gpus(2), cut=[1, 0]))
    by_backend = {s.backend: s for s in splits}
    assert by_backend[1].copies == (Copy(graph.inputs[0].id, HOST, 8), Copy(cache, 0, 8))
    assert by_backend[0].copies == ()
    assert (by_backend[0].inputs, by_backend[0].outputs) == ((cache,), (new,))


# -- the whole -----------------------------------------------------------------------------------


def test_an_input_may_be_an_output() -> None:
    b = Draft()
    x, w = b.x(), b.w()
    graph = b.build([x, w, b.op("mul", x)])
    (only,) = split(graph, [0])
    assert only.outputs == (graph.outputs[2].id,)


def test_nothing_to_split() -> None:
    assert split(Draft().build([]), []) == ()


def test_the_same_graph_split_twice() -> None:  # S14
    graph = transformer(4)
    before = (graph.tensors, graph.nodes, [(n.inputs, n.outputs) for n in graph.nodes])
    backends = [i % 3 for i in range(len(graph.nodes))]
    first = split(graph, backends)
    other = split(graph, [0] * len(backends))
    assert split(graph, backends) == first
    assert len(other) == 1
    assert (graph.tensors, graph.nodes, [(n.inputs, n.outputs) for n in graph.nodes]) == before


def test_an_empty_share_gets_no_split() -> None:  # S12
    graph = chain(4)
    splits = split(graph, [0] * 6 + [2] * 2)
    assert [s.backend for s in splits] == [0, 2]


@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 5))
def test_random_graphs(seed: int, n_nodes: int, n_backends: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, n_nodes)
    devices = gpus(n_backends)
    weights = {
        w.id: tuple(rng.sample(range(n_backends), k=rng.randint(0, n_backends))) for w in graph.weights
    }
    pins = {t.id: rng.randrange(n_backends + 1) for t in graph.tensors if rng.random() < 0.3}
    pins = {t: b for t, b in pins.items() if graph.tensors[t].kind.value != "node" or "." not in graph.tensors[t].name}
    cut = [rng.randrange(n_backends + 1) for _ in graph.nodes] if rng.random() < 0.5 else None
    assignment = assign(graph, devices, weights=weights, pins=pins, cut=cut)
    splits = split_graph(graph, assignment)
    sanity(graph, splits, assignment)
    assert splits == split_graph(graph, assignment)
    made_by = graph.producers()
    wanted = _wanted(graph, assignment, made_by, _constant(graph, made_by))
    rounds = _schedule(make_runs(graph, assignment, made_by, wanted.at_home, wanted.repeated))
    naive = naive_splits(graph, assignment.node_backend)
    assert len(rounds) <= naive
    assert len(splits) <= 2 * naive  # each round may be parted once


class CountingList(list[int]):
    """Counts how often its elements are looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("n", [100, 1000])
def test_scheduling_looks_at_each_edge_a_bounded_number_of_times(n: int) -> None:
    """Also where one node waits for many, and is looked at whenever its backend has a turn."""
    b = Draft()
    h = b.x()
    links = []
    for _ in range(n):
        h = b.op("mul", h)
        links.append(h)
    graph = b.build([b.op("concatenate", *links) for _ in range(3)])
    assignment = placed(graph, [i % 7 for i in range(n)] + [3, 3, 3])
    made_by = graph.producers()
    wanted = _wanted(graph, assignment, made_by, _constant(graph, made_by))
    runs = make_runs(graph, assignment, made_by, wanted.at_home, wanted.repeated)
    counting = runs.sources = CountingList(runs.sources)
    assert len(in_rounds(graph, runs)) == n + 1
    assert counting.looks <= 3 * len(counting)


def towers_and_join(flops: float) -> tuple[Graph, Sequence[Split]]:
    """Two towers on two devices, and a node on the second that joins them."""
    b = Draft()
    x = b.x()
    left = b.op("dot_general", x, b.w("l"), flops=flops)
    right = b.op("dot_general", x, b.w("r"), flops=flops)
    graph = b.build([b.op("dot_general", right, left, b.w("j"))])
    weights = {t.id: (i,) for t, i in zip(graph.weights, (0, 1, 1), strict=True)}
    return graph, split_graph(graph, assign(graph, gpus(2), weights=weights))


def test_a_tower_does_not_wait_for_the_one_that_it_joins_later() -> None:
    """The work before the join overlaps with the other tower's: worth a split of its own."""
    _, splits = towers_and_join(flops=1e9)
    assert [(s.backend, s.nodes, s.depends) for s in splits] == [(0, (0,), ()), (1, (1,), ()), (1, (2,), (0, 1))]


def test_work_too_short_to_overlap_is_worth_no_split() -> None:
    _, splits = towers_and_join(flops=10)
    assert [(s.backend, s.nodes, s.depends) for s in splits] == [(0, (0,), ()), (1, (1, 2), (0,))]


def test_a_pipeline_is_parted_nowhere() -> None:
    graph = chain(8, flops=1e9)
    weights = {t.id: (i // 2,) for i, t in enumerate(graph.weights)}
    splits = split_graph(graph, assign(graph, gpus(4), weights=weights))
    assert [s.backend for s in splits] == [0, 1, 2, 3]


def test_what_is_computed_from_weights_alone_follows_its_reader() -> None:
    """The weight goes there once; its transpose would go there in every evaluation."""
    b = Draft()
    w = b.w("w", 64)
    h = b.op("dot_general", b.x(), w)
    turned = b.op("transpose", w, nbytes=64)
    graph = b.build([b.op("dot_general", b.op("dot_general", h, b.w("v")), turned)])
    weights = {t.id: (i,) for i, t in enumerate(graph.weights)}
    pins = {graph.outputs[0].id: 1}
    splits = split_graph(graph, assign(graph, gpus(2), weights=weights, pins=pins))
    assert [[c.tensor for c in s.copies] for s in splits] == [[graph.inputs[0].id], [h]]
    assert w in splits[1].inputs and splits[1].recomputed == (1,)


def test_a_small_value_computed_from_a_large_weight_is_moved() -> None:
    b = Draft()
    w = b.w("w", 64)
    h = b.op("dot_general", b.x(), w)
    row = b.op("reduce_sum", w, nbytes=4)
    graph = b.build([b.op("dot_general", b.op("dot_general", h, b.w("v")), row)])
    weights = {t.id: (i,) for i, t in enumerate(graph.weights)}
    splits = split_graph(graph, assign(graph, gpus(2), weights=weights, pins={graph.outputs[0].id: 1}))
    assert row in [c.tensor for c in splits[1].copies]
    assert w not in splits[1].inputs
