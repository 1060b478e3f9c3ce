"""Plans: sizes, donation, programs, launch lists, segments. No JAX, no loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from aiopipe.devices.base import DeviceProps, DeviceType, MemoryStats, Program
from aiopipe.errors import AllocationError
from aiopipe.graph import Graph, Kind, Node
from aiopipe.sched.alloc import BackendSize, backend_sizes, check_memory, donations
from aiopipe.sched.lower import lower
from aiopipe.sched.plan import Plan, make_plan, segments_of
from aiopipe.sched.split import Split, last_uses
from graphs import Draft, FakeDevice, FakeOp, chain, gpus, random_graph


def split(index: int, backend: int, *depends: int) -> Split:
    return Split(index, backend, (), (), (), (), depends, ())


def on(graph: Graph, *backends: int) -> dict[int, tuple[int, ...]]:
    """Weights on these backends, in order."""
    return {t.id: (b,) for t, b in zip(graph.weights, backends, strict=True)}


def evaluate(plan: Plan, values: list[Any]) -> list[Any]:
    """Carry out a plan's launch lists with the programs' own ops, as a lane would."""
    slots: list[Any] = [None] * plan.n_slots
    for slot, position in enumerate(plan.used_inputs):
        slots[slot] = values[position]
    for feed, program in zip(plan.launch_lists, plan.programs, strict=True):
        for read, fill in feed.moves:
            assert slots[read] is not None, "moved after it was let go"
            slots[fill] = slots[read]
        args: list[Any] = [None] * len(program.inputs)
        for position, tid in feed.weights:
            args[position] = f"weight {tid}"
        for position, slot in feed.gather:
            assert slots[slot] is not None, "used after it was let go"
            args[position] = slots[slot]
        assert None not in args
        env = {t.id: a for t, a in zip(program.inputs, args, strict=True)}
        for node in program.nodes:
            env.update(zip(node.outputs, node.fn(*(env[t] for t in node.inputs)), strict=True))
        for slot, tensor in zip(feed.outputs, program.outputs, strict=True):
            assert slots[slot] is None, "a slot is filled twice"
            slots[slot] = env[tensor.id]
        for slot in feed.frees:
            slots[slot] = None
    found = {"env": lambda i: slots[i], "input": lambda i: slots[i], "weight": lambda i: f"weight {i}"}
    return [found[kind](i) for kind, i in plan.results]


def reference(graph: Graph, values: list[Any]) -> list[Any]:
    env: dict[int, Any] = {t.id: v for t, v in zip(graph.inputs, values, strict=True)}
    env.update({t.id: f"weight {t.id}" for t in graph.weights})
    for node in graph.nodes:
        env.update(zip(node.outputs, node.fn(*(env[t] for t in node.inputs)), strict=True))
    return [env[t.id] for t in graph.outputs]


@pytest.mark.parametrize("seed", range(60))
def test_launch_lists_compute_what_the_graph_says(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randrange(1, 40))
    devices = gpus(rng.randrange(1, 4))
    pins = {n.outputs[0]: rng.randrange(len(devices)) for n in graph.nodes if rng.random() < 0.5 and n.outputs}
    plan = make_plan(graph, devices, pins=pins)
    values = [f"input {i}" for i in range(len(graph.inputs))]
    assert evaluate(plan, values) == reference(graph, values)


def test_a_plan_and_its_parts_are_frozen() -> None:
    plan = make_plan(chain(2), gpus(1))
    for value in (plan, plan.splits[0], plan.launch_lists[0], plan.programs[0], plan.assignment, plan.sizes[0]):
        with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
            value.name = 1  # type: ignore[union-attr]


def test_launch_lists_are_a_sequence() -> None:
    plan = make_plan(graph := chain(3), gpus(3), weights=on(graph, 0, 1, 2))
    lists = plan.launch_lists
    assert len(lists) == 3 == len({feed.outputs for feed in lists})
    assert [lists[0], lists[1], lists[-1]] == list(lists)
    assert lists[1:] == tuple(lists)[1:]
    with pytest.raises(IndexError):
        lists[3]


def test_equal_splits_of_one_backend_share_their_program() -> None:
    b = Draft()
    h = b.x()
    for _ in range(6):
        h = b.node("dot_general", [h, b.w()], [((8,), "int8", 8)], fn=FakeOp("dot"))[0]
    graph = b.build([h])
    programs = make_plan(graph, gpus(2), weights=on(graph, 0, 1, 0, 1, 0, 1)).programs
    assert programs[2] is programs[4] and programs[3] is programs[5]
    assert programs[2] is not programs[3] and programs[2].key == programs[3].key
    assert programs[2].name == "graph_dot_general_2", "the first one's"
    assert [t.id for t in programs[4].inputs] == [t.id for t in programs[2].inputs], "the first one's"


def test_splits_that_return_another_result_of_the_same_node_are_not_alike() -> None:
    b = Draft()
    h = b.x()
    for wanted in (0, 1, 1, 0, 0):
        h = b.node("top_k", [h, b.w()], [((8,), "int8", 8)] * 2, fn=FakeOp("top_k"))[wanted]
    graph = b.build([h])
    keys = [p.key for p in make_plan(graph, gpus(2), weights=on(graph, 0, 1, 0, 1, 0)).programs]
    assert keys[1] == keys[2] != keys[3] == keys[4]


def test_programs_are_a_sequence() -> None:
    plan = make_plan(graph := chain(3), gpus(3), weights=on(graph, 0, 1, 2))
    programs = plan.programs
    assert [p.name for p in programs] == [f"chain_dot_general_{i}" for i in range(3)]
    assert len(programs) == 3
    assert programs[-1] is programs[2] is list(programs)[2]
    assert programs[1:] == (programs[1], programs[2]) and programs[1:][0] is programs[1]
    with pytest.raises(IndexError):
        programs[3]


def test_a_program_is_made_once_though_two_threads_ask_for_it() -> None:
    made: list[Program] = []
    asked = False

    class Asking(tuple[Any, ...]):
        """Tensors: whoever looks at one is overtaken by another who wants the same program."""

        def __getitem__(self, index: Any) -> Any:
            nonlocal asked
            if not asked:
                asked = True
                made.append(programs[0])
            return super().__getitem__(index)

    graph = chain(1)
    splits = make_plan(graph, gpus(1)).splits
    programs = lower(graph, splits, [()])
    object.__setattr__(graph, "tensors", Asking(graph.tensors))
    assert programs[0] is made[0]


def test_a_part_of_a_split_is_lowered_by_itself() -> None:
    plan = make_plan(graph := chain(4), gpus(2), weights=on(graph, 0, 0, 1, 1))
    split = plan.splits[1]
    nodes = [graph.nodes[i] for i in split.nodes]
    middle = nodes[2].inputs[0]
    parts = [
        split._replace(nodes=split.nodes[:2], inputs=split.inputs[:2], outputs=(middle,)),
        split._replace(nodes=split.nodes[2:], inputs=(middle, split.inputs[2])),
    ]
    programs = lower(graph, parts, [(), (0,)])
    assert [list(p.nodes) for p in programs] == [nodes[:2], nodes[2:]]
    assert [[t.id for t in p.outputs] for p in programs] == [[middle], list(split.outputs)]
    (alone,) = lower(graph, parts[1:], [(0,)])
    assert (list(alone.nodes), alone.donate) == (nodes[2:], (0,))


def test_what_nobody_needs_any_more_is_let_go() -> None:
    graph = chain(3)
    plan = make_plan(graph, gpus(3), weights=on(graph, 0, 1, 2))
    first, second, last = plan.launch_lists
    assert first.outputs[0] not in first.frees
    assert set(second.frees) == {read for read, _ in second.moves} | {fill for _, fill in second.moves}
    assert plan.results[0][1] not in last.frees


def test_the_marker_is_the_smallest_result() -> None:
    b = Draft()
    x = b.x()
    big, small = b.ops("top_k", x, b.w(), nbytes=(64, 4))
    y = b.op("add", big, small, b.w("w2"))
    graph = b.build([y])
    plan = make_plan(graph, gpus(2), weights=on(graph, 0, 1))
    feed = plan.launch_lists[0]
    assert plan.programs[0].outputs[feed.marker].nbytes == 4


def test_sinks_are_the_splits_that_feed_nobody() -> None:
    b = Draft()
    x = b.x()
    trunk = b.op("dot_general", x, b.w("t"))
    left = b.op("dot_general", trunk, b.w("l"))
    right = b.op("dot_general", trunk, b.w("r"))
    graph = b.build([left, right])
    plan = make_plan(graph, gpus(3), weights=on(graph, 0, 1, 2))
    assert plan.sinks == (1, 2)


def test_who_only_brought_what_another_reads_is_a_sink_too() -> None:
    b = Draft()
    x = b.x()
    first = b.op("dot_general", x, b.w("a"))
    there = b.op("dot_general", x, b.w("b"))
    second = b.op("add", x, there)
    graph = b.build([first, second])
    plan = make_plan(graph, gpus(2), cut=[0, 1, 0])
    assert [split.depends for split in plan.splits] == [(), (), (0, 1)], "the last uses the copy of x that #0 brought"
    assert plan.sinks == (0, 2)


class TestDonation:
    PROPS = (DeviceProps(DeviceType.GPU, "a"), DeviceProps(DeviceType.GPU, "a"))

    def plan(self, graph: Graph, *backends: int) -> tuple[tuple[int, ...], ...]:
        plan = make_plan(graph, gpus(2), weights=on(graph, *backends))
        return donations(graph, plan.splits, [*self.PROPS, DeviceProps(DeviceType.CPU, "b")], last_uses(plan.splits, 4))

    def test_a_copy_from_another_backend_is_donated_in_its_last_split(self) -> None:
        assert self.plan(chain(2), 0, 1) == ((), (0,))

    def test_a_users_input_never_is(self) -> None:
        assert self.plan(chain(2), 0, 0) == ((),)

    def test_nor_without_an_output_of_its_type(self) -> None:
        b = Draft()
        h = b.op("dot_general", b.x(), b.w("w0"), nbytes=8)
        y = b.op("dot_general", h, b.w("w1"), nbytes=16)
        assert self.plan(b.build([y]), 0, 1) == ((), ())

    def test_nor_before_its_last_reader(self) -> None:
        b = Draft()
        h = b.op("dot_general", b.x(), b.w("w0"))
        first = b.op("dot_general", h, b.w("w1"))
        back = b.op("dot_general", first, b.w("w2"))
        again = b.op("dot_general", back, h, b.w("w3"))
        graph = b.build([again])
        result = self.plan(graph, 0, 1, 0, 1)
        plan = make_plan(graph, gpus(2), weights=on(graph, 0, 1, 0, 1))
        donated = [[plan.splits[i].inputs[p] for p in positions] for i, positions in enumerate(result)]
        assert [h in d for d in donated] == [False, False, False, True] or donated[-1] == [back]
        assert h not in donated[1]

    def test_but_by_its_last_reader_though_another_split_brought_it(self) -> None:
        b = Draft()
        h = b.op("dot_general", b.x(), b.w("w0"))
        first = b.op("dot_general", h, b.w("w1"))
        other = b.op("dot_general", first, b.w("w2"), nbytes=16)  # of another type than what comes of it
        again = b.op("dot_general", other, h, b.w("w3"))
        graph = b.build([first, again])
        plan = make_plan(graph, gpus(2), weights=on(graph, 0, 1, 0, 1))
        assert [[t for t, *_ in split.brings] for split in plan.splits] == [[0], [h], [first], [other]]
        donated = [[plan.splits[i].inputs[p] for p in ps] for i, ps in enumerate(self.plan(graph, 0, 1, 0, 1))]
        assert donated == [[], [], [], [h]]

    def test_nor_a_value_that_may_be_a_view(self) -> None:
        graph = chain(2)
        plan = make_plan(graph, gpus(2), weights=on(graph, 0, 1))
        shared = DeviceProps(DeviceType.CPU, "a", view_nbytes=8)
        assert donations(graph, plan.splits, [shared] * 3, last_uses(plan.splits, 4)) == ((), ())


def test_equal_layers_have_equal_keys_and_others_do_not() -> None:
    class Same:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, *inputs: Any) -> list[Any]:
            return [(self.name, *inputs)]

        def signature(self) -> str:
            return self.name

    def build(ops: list[str], widths: list[int]) -> Plan:
        b = Draft()
        h = b.x()
        for op, width in zip(ops, widths, strict=True):
            h = b.node(op, [h, b.w(f"w{width}", width)], [((8,), "int8", 8)], fn=Same(op))[0]
        graph = b.build([h])
        return make_plan(graph, gpus(2), weights=on(graph, *(i % 2 for i in range(len(ops)))))

    first, *keys = [p.key for p in build(["dot"] * 5, [4, 4, 4, 4, 5]).programs]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert first != keys[0]  # the user's input, which it reads, is not donated
    keys = [p.key for p in build(["dot", "dot", "mul", "dot"], [4, 4, 4, 4]).programs]
    assert keys[1] == keys[3] != keys[2]
    assert all(isinstance(hash(key), int) for key in keys)


def test_a_token_is_part_of_the_key() -> None:
    """A split that makes nothing but state returns one more value than one that computes the same for the caller."""

    def program(as_state: bool) -> Program:
        b = Draft()
        leaf = b.state("s", (8,), "int8", 8)
        made = b.op("update", b.x())
        graph = b.build([], new_state=[made]) if as_state else b.build([made], new_state=[leaf])
        return make_plan(graph, gpus(1)).programs[0]

    alone, returned = program(as_state=True), program(as_state=False)
    assert (len(alone.outputs), len(returned.outputs)) == (2, 1)
    assert alone.key != returned.key


def test_which_operand_is_read_is_part_of_the_key() -> None:
    """``f(a, b, a)`` is not ``f(a, b, b)``, nor with values that are made on the way."""

    def key(choose: Callable[[list[int]], list[int]], *, made: bool) -> Any:
        b = Draft()
        pair = [b.x("x"), b.x("y")]
        if made:
            pair = [b.node("g", [t], [((8,), "int8", 8)], fn=FakeOp("g"))[0] for t in pair]
        out = b.node("f", choose(pair), [((8,), "int8", 8)], fn=FakeOp("f"))
        return make_plan(b.build(out), gpus(1)).programs[0].key

    for made in (False, True):
        keys = [
            key(choose, made=made)
            for choose in (lambda p: [p[0], p[1], p[0]], lambda p: [p[0], p[1], p[1]], lambda p: [p[0], p[0], p[1]])
        ]
        assert len(set(keys)) == 3


def test_how_many_operands_a_node_has_is_part_of_the_key() -> None:
    """A signature may be a number, and look like one more operand of the node before."""

    class Numbered(FakeOp):
        def signature(self) -> int:
            return 1

    def key(fused: bool) -> Any:
        b = Draft()
        x, y = b.x("x"), b.x("y")
        specs = [((8,), "int8", 8)]
        made = b.node("g", [x, y], specs, fn=FakeOp("g"))
        if fused:
            made += b.node("f", [x, y, x], specs * 2, fn=FakeOp("f"))
        else:
            made += b.node("f", [x], specs, fn=FakeOp("f"))
            made += b.node("h", [x], specs, fn=Numbered("h"))
        return make_plan(b.build(made), gpus(1)).programs[0].key

    assert key(True) != key(False)


def test_settings_of_the_trace_are_part_of_a_program() -> None:
    def program(config: str | None) -> Any:
        b = Draft()
        y = b.node("f", [b.x()], [((8,), "int8", 8)], fn=FakeOp("f"))
        return make_plan(b.build(y, config=config), gpus(1)).programs[0]

    precise, default = program("precise"), program(None)
    assert (precise.config, default.config) == ("precise", None)
    assert precise.key != default.key


def test_a_split_of_nothing_but_state_returns_a_token_behind_it() -> None:
    b = Draft()
    x, cache = b.x(), b.state("cache", (8,), "int8", 8)
    new = b.op("update", cache, x)
    for outputs, names in (([], ["update#0", "token"]), ([b.op("mul", x)], ["mul#1", "update#0"])):
        plan = make_plan(b.build(outputs, new_state=[new]), gpus(1))
        (program,), (feed,) = plan.programs, plan.launch_lists
        assert sorted(t.name for t in program.outputs) == sorted(names)
        assert program.outputs[feed.marker].name != "update#0"
        assert len(feed.outputs) == len(plan.splits[0].outputs)
        assert [node.op for node in program.nodes].count("full") == (0 if outputs else 1)
    (program,) = make_plan(b.build([], new_state=[new]), gpus(1)).programs
    token, tensor = program.nodes[-1], program.outputs[-1]
    (value,) = token.fn()
    assert (token.inputs, token.outputs) == ((), (tensor.id,))
    assert (value.shape, value.dtype, value.nbytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
    assert token.fn.signature() == "token"


def test_what_is_known_of_the_state() -> None:
    """Read and replaced, only read, only replaced, neither."""
    b = Draft()
    x = b.x()
    both, read, replaced, _ = (b.state(name, (8,), "int8", 8) for name in ("both", "read", "replaced", "neither"))
    y = b.op("attend", x, both, read)
    new = b.op("update", both), b.op("make", x)
    graph = b.build([y], new_state=[new[0], read, new[1], 4])
    plan = make_plan(graph, gpus(2), state={both: 0, read: 0, replaced: 1}, pins={y: 0})
    assert plan.state_homes == (0, 0, 1, 2)
    assert [position for position, _, _ in plan.state] == [0, 1, 2]
    assert [(enter >= 0, leave >= 0) for _, enter, leave in plan.state] == [(True, True), (True, False), (False, True)]
    slots = [slot for entry in plan.state for slot in entry[1:] if slot >= 0]
    assert len(set(slots)) == len(slots) and max(slots) < plan.n_slots
    assert not any(slot in feed.frees for slot in slots[1:2] + slots[3:] for feed in plan.launch_lists)
    assert plan.sizes[0].state_nbytes == 16 and plan.sizes[1].state_nbytes == 8


def test_what_a_plan_is_told_decides() -> None:
    graph = chain(2)
    w = on(graph, 1, 1)
    first = graph.nodes[0].outputs[0]
    plan = make_plan(graph, gpus(2), weights=w, pins={first: 0})
    assert plan.assignment.node_cause == ("usr", "2.2", "1.wgt1", "2.2")
    plan = make_plan(graph, gpus(2), weights=w, cut=[0, 1, 0, 1])
    assert plan.assignment.node_backend == (0, 1, 0, 1)

    class Wanting(FakeDevice):
        def offload_op(self, node: Node) -> bool:
            return node.op == "dot_general"

    devices = [Wanting("gpu:0"), *gpus(0)]
    assert "1.off" in make_plan(graph, devices, weights=w, op_offload=True).assignment.node_cause
    assert "1.off" not in make_plan(graph, devices, weights=w).assignment.node_cause


def test_weights_that_are_returned_are_held_once() -> None:
    b = Draft()
    read, other = b.w("read"), b.w("other")
    y = b.op("dot_general", b.x(), read)
    graph = b.build([y, read, other])
    plan = make_plan(graph, gpus(2), weights={read: (1, 0), other: (0, 1)}, pins={y: 1})
    assert plan.results == (plan.results[0], ("weight", read), ("weight", other))
    assert plan.weights == (frozenset({other}), frozenset({read}), frozenset())


def test_the_order_of_operands_is_part_of_the_key() -> None:
    class Sub:
        def __call__(self, a: Any, b: Any) -> list[Any]:
            return [(a, b)]

        def signature(self) -> str:
            return "sub"

    def key(swap: bool) -> Any:
        b = Draft()
        x, y = b.x("x"), b.x("y")
        mid = b.op("copy", x), y
        pair = mid[::-1] if swap else mid
        out = b.node("sub", pair, [((8,), "int8", 8)], fn=Sub())[0]
        return make_plan(b.build([out]), gpus(1)).programs[0].key

    assert key(False) != key(True)


class TestSizes:
    def test_weights_once_and_each_copy_for_every_slot(self) -> None:
        graph = chain(2, width=8, weight=100)
        plan = make_plan(graph, gpus(2), weights=on(graph, 0, 1))
        # The host stages an input of 8 bytes. Where it comes in, a result of 8 bytes goes out; where that
        # is copied to, the result takes over the copy's memory.
        assert [(s.weights_nbytes, s.copy_nbytes) for s in plan.sizes] == [(100, 16), (100, 8), (0, 8)]
        assert plan.sizes[0].total(4) == 100 + 4 * 16
        assert plan.copied_nbytes == 8

    def test_the_largest_temporary_counts_once(self) -> None:
        graph = chain(4)
        plan = make_plan(graph, gpus(2), weights=on(graph, 0, 1, 0, 1))
        stats = [MemoryStats(temp_nbytes=n) for n in (5, 7, 9, 1)]
        sizes = backend_sizes(
            graph,
            plan.splits,
            [device.props for device in plan.devices],
            weights=plan.weights,
            donate=[program.donate for program in plan.programs],
            memory=stats,
        )
        assert [s.temp_nbytes for s in sizes] == [9, 7, 0]

    def test_what_fits_passes(self) -> None:
        check_memory([BackendSize(100, 10, 5)], ["a"], [145], 4)
        check_memory([BackendSize(100, 10, 5)], ["a"], [None], 400)

    def test_what_does_not_says_what_would(self) -> None:
        with pytest.raises(AllocationError, match="n_copies=3 would fit") as caught:
            check_memory([BackendSize(), BackendSize(100, 10, 5)], ["a", "b"], [0, 144], 4)
        assert (caught.value.backend, caught.value.asked_nbytes, caught.value.available_nbytes) == ("b", 145, 144)
        with pytest.raises(AllocationError, match="move weights to another device"):
            check_memory([BackendSize(100, 10)], ["a"], [99], 4)


class TestSegments:
    def test_one_lane_is_one_segment(self) -> None:
        splits = [split(0, 0), split(1, 1, 0), split(2, 0, 1)]
        segments = segments_of(splits, [0, 0])
        assert [(s.splits, s.depends) for s in segments] == [((0, 1, 2), ())]

    def test_a_lane_for_each_backend(self) -> None:
        splits = [split(0, 0), split(1, 1, 0), split(2, 2, 1)]
        segments = segments_of(splits, [0, 1, 2])
        assert [(s.lane, s.splits, s.depends) for s in segments] == [(0, (0,), ()), (1, (1,), (0,)), (2, (2,), (1,))]

    def test_back_and_forth_keeps_each_lanes_order(self) -> None:
        splits = [split(0, 0), split(1, 1, 0), split(2, 0, 1), split(3, 1, 2)]
        segments = segments_of(splits, [0, 1])
        assert [(s.splits, s.depends) for s in segments] == [((0,), ()), ((1,), (0,)), ((2,), (0, 1)), ((3,), (1, 2))]

    def test_independent_towers_do_not_wait_for_each_other(self) -> None:
        segments = segments_of([split(0, 0), split(1, 1)], [0, 1])
        assert [s.depends for s in segments] == [(), ()]

    def test_a_split_that_waits_for_another_lane_does_not_hold_up_the_ones_before_it(self) -> None:
        segments = segments_of([split(0, 0), split(1, 1), split(2, 0, 1)], [0, 1])
        assert [(s.splits, s.depends) for s in segments] == [((0,), ()), ((1,), ()), ((2,), (0, 1))]

    @pytest.mark.parametrize("seed", range(30))
    def test_segments_hold_every_split_once_and_depend_only_on_earlier_ones(self, seed: int) -> None:
        rng = random.Random(seed)
        n_lanes = rng.randrange(1, 4)
        splits = [
            split(i, rng.randrange(6), *sorted(rng.sample(range(i), min(i, rng.randrange(3))))) for i in range(20)
        ]
        lane_of = [rng.randrange(n_lanes) for _ in range(6)]
        segments = segments_of(splits, lane_of)
        where = {s: k for k, segment in enumerate(segments) for s in segment.splits}
        assert sorted(where) == list(range(20))
        for k, segment in enumerate(segments):
            assert all(d < k for d in segment.depends)
            for s in segment.splits:
                assert lane_of[splits[s].backend] == segment.lane
                for d in splits[s].depends:
                    assert where[d] == k or where[d] in segment.depends or segments[where[d]].lane == segment.lane


def test_a_plan_prints_as_a_table() -> None:
    graph = chain(2)
    text = str(make_plan(graph, gpus(2), weights=on(graph, 0, 1)))
    lines = text.splitlines()
    assert lines[0] == "plan of 'chain': 4 nodes, 2 splits"
    assert lines[1].split() == ["split", "backend", "nodes", "from", "inputs", "moved", "weights", "causes"]
    assert "gpu:0" in lines[2] and "1.wgt1:1" in lines[2]
    assert "8 B" in lines[3]
    assert lines[-1].startswith("cpu:0: weights 0 B")


def test_a_plan_is_a_table_in_notebooks_too() -> None:
    graph = chain(2)
    shown = make_plan(graph, gpus(2), weights=on(graph, 0, 1))._repr_html_()
    assert "<table" in shown
    assert "gpu:0" in shown and "gpu:1" in shown


def test_planning_leaves_the_graph_as_it_was() -> None:  # S14
    graph = chain(4)
    before = ([*graph.nodes], [*graph.tensors])
    make_plan(graph, gpus(2), weights=on(graph, 0, 1, 0, 1))
    make_plan(graph, gpus(3), weights=on(graph, 0, 1, 2, 0))
    assert before == ([*graph.nodes], [*graph.tensors])
    assert all(t.kind is not Kind.STATE for t in graph.tensors)


def test_a_device_may_not_change() -> None:
    device = FakeDevice()
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        device.props.flops_per_s = 2.0  # type: ignore[misc]
