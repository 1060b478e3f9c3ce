"""Assignment: each cause, in the order in which they are asked."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopipe.devices.base import DeviceType
from aiopipe.errors import PlacementError
from aiopipe.graph import Graph, Node
from aiopipe.sched.assign import Assignment, assign
from graphs import Draft, FakeDevice, FakeOp, chain, gpus, random_graph, transformer


def placed(assignment: Assignment) -> list[tuple[int, str]]:
    """Backend and cause of each node."""
    return list(zip(assignment.node_backend, assignment.node_cause, strict=True))


def on(graph: Graph, backends: Mapping[int, int], n_gpus: int = 2) -> list[tuple[int, str]]:
    """Backend and cause of each node with these weights held by one backend each."""
    return placed(assign(graph, gpus(n_gpus), weights={t: (b,) for t, b in backends.items()}))


# -- pass 1 --------------------------------------------------------------------------------------


def test_beside_the_weight() -> None:
    b = Draft()
    w, v = b.w("w"), b.w("v")
    h = b.op("dot_general", b.x(), w)
    h = b.op("dot_general", v, h)
    assert on(b.build([h]), {w: 1, v: 0}) == [(1, "1.wgt1"), (0, "1.wgt0")]


def test_the_first_weight_decides() -> None:
    b = Draft()
    w, v = b.w("w"), b.w("v")
    h = b.op("scale_shift", b.x(), w, v)
    assert on(b.build([h]), {w: 1, v: 0}) == [(1, "1.wgt1")]


@pytest.mark.parametrize("n", [0, 1, 15, 16, 20])
def test_many_operands(n: int) -> None:
    b = Draft()
    xs = [b.x(f"x{i}") for i in range(n)]
    w, later = b.w(), b.w("later")
    y = b.op("concatenate", *xs, w, later)
    assert on(b.build([y]), {w: 1, later: 0}) == [(1, f"1.wgt{n}")]


def test_a_weight_on_the_host_keeps_its_node_there() -> None:
    graph = chain(3)
    held = {graph.weights[0].id: 0, graph.weights[1].id: 1, graph.weights[2].id: 0}
    assert [backend for backend, _ in on(graph, held, n_gpus=1)] == [0, 0, 1, 0, 0, 0]


def test_leaves() -> None:
    b = Draft()
    x, w, free, unread = b.x(), b.w("w"), b.w("free"), b.w("unread")
    h = b.op("dot_general", b.op("dot_general", x, w), free)
    graph = b.build([h])
    assignment = assign(graph, gpus(2), weights={w: (1,)})
    assert assignment.leaf_backends == ((2,), (1,), (1,), (2,), (), ())
    assert assignment.leaf_cause == ("1.inp", "1.wgt", "3", "3", "", "")
    assert [assignment.backends_of(graph, t) for t in (x, w, free, unread, h)] == [(2,), (1,), (1,), (2,), (1,)]
    assert [assignment.cause_of(graph, t) for t in (x, w, free, h)] == ["1.inp", "1.wgt", "3", "2.2"]


def test_a_view_follows_its_source() -> None:
    b = Draft()
    w, v = b.w("w"), b.w("v")
    turned = b.op("transpose", w)  # 1.vsrc: of a weight
    h = b.op("dot_general", b.x(), v)
    shown = b.op("reshape", h)  # 1.vsrc: of a node that has its place
    y = b.op("dot_general", shown, turned)  # beside the weight that it is a view of
    assert on(b.build([y]), {w: 1, v: 0}) == [(1, "1.vsrc"), (0, "1.wgt1"), (0, "1.vsrc"), (1, "1.wgt1")]


@pytest.mark.parametrize("backend", [0, 1])
def test_a_view_of_the_first_node(backend: int) -> None:
    b = Draft()
    w, v = b.w("w"), b.w("v")
    h = b.op("dot_general", b.x(), w)
    shown = b.op("reshape", h)
    y = b.op("dot_general", shown, v)
    expected = [(backend, "1.wgt1"), (backend, "1.vsrc"), (1 - backend, "1.wgt1")]
    assert on(b.build([y]), {w: backend, v: 1 - backend}) == expected


def test_a_value_from_nothing_counts_as_no_weight() -> None:
    """It joins its neighbours: it does not follow its reader as a value from weights would."""
    b = Draft()
    w = b.w()
    counted = b.op("cast", b.op("iota"))
    h = b.op("dot_general", b.x(), w)
    y = b.op("add", h, counted)
    assert on(b.build([y]), {w: 1}) == [(1, "2.1"), (1, "2.1"), (1, "1.wgt1"), (1, "2.2")]


def test_a_value_from_weights_alone_counts_as_the_weight() -> None:
    b = Draft()
    w, s = b.w("w"), b.w("scale")
    cast = b.op("convert_element_type", w)
    scaled = b.op("mul", b.op("iota"), cast, s)  # what is made of nothing decides nothing
    y = b.op("dot_general", b.op("dot_general", b.x(), s), scaled)
    expected = [(1, "1.wgt0"), (1, "2.2"), (1, "1.wgt1"), (0, "1.wgt1"), (1, "1.wgt1")]
    assert on(b.build([y]), {w: 1, s: 0}) == expected


def test_a_value_from_weights_is_read_where_its_weight_is_even_if_made_elsewhere() -> None:
    b = Draft()
    w = b.w()
    roots = b.op("eig", w)
    y = b.op("dot_general", b.x(), roots)
    assignment = assign(b.build([y]), gpus(1, lacks=["eig"]), weights={w: (0,)})
    assert placed(assignment) == [(1, "3.best"), (0, "1.wgt1")]


def test_an_effect_is_no_weight() -> None:
    b = Draft()
    w, v = b.w("w"), b.w("v")
    h = b.op("dot_general", b.x(), v)
    logged = b.op("print", w, effect=True)
    y = b.op("add", h, logged)
    assert on(b.build([y]), {w: 1, v: 0})[1:] == [(1, "1.wgt0"), (1, "2.2")]


# -- replicated and unplaced weights -------------------------------------------------------------


def test_a_replicated_weight_does_not_decide() -> None:
    """A tied embedding: looked up on the first backend, multiplied with on the last."""
    b = Draft()
    tied, w, v = b.w("tied"), b.w("w"), b.w("v")
    h = b.op("gather", tied, b.x("tokens"))
    h = b.op("dot_general", h, w)
    h = b.op("dot_general", h, v)
    turned = b.op("transpose", tied)
    y = b.op("dot_general", h, turned)
    assignment = assign(b.build([y]), gpus(2), weights={tied: (0, 1), w: (0,), v: (1,)})
    assert placed(assignment) == [(0, "2.1"), (0, "1.wgt1"), (1, "1.wgt1"), (1, "3"), (1, "2.2")]
    assert assignment.leaf_backends[tied] == (0, 1)


def test_replicated_weights_decide_when_nothing_else_does() -> None:
    b = Draft()
    w = b.w()
    h = b.op("exp", b.x())
    h = b.op("dot_general", h, w)
    turned = b.op("transpose", w)
    graph = b.build([b.op("exp", h), turned])
    assignment = assign(graph, gpus(3), weights={w: (2, 1)})
    assert placed(assignment) == [(1, "2.1"), (1, "1.wgt1"), (1, "1.vsrc"), (1, "2.2")]


def test_each_replicated_weight_decides_for_its_reader() -> None:
    b = Draft()
    one, two = b.w("one"), b.w("two")
    h = b.op("dot_general", b.x(), one)
    y = b.op("dot_general", h, two)
    assignment = assign(b.build([y]), gpus(3), weights={one: (1, 2), two: (0, 2)})
    assert placed(assignment) == [(1, "1.wgt1"), (0, "1.wgt1")]


def test_the_best_holder_that_has_the_op() -> None:
    b = Draft()
    w = b.w()
    devices = gpus(3)
    devices[1].lacks = ["dequantize", "dot_general"]
    graph = b.build([b.op("dequantize", w), b.op("dot_general", b.x(), w)])
    assert placed(assign(graph, devices, weights={w: (1, 2)})) == [(2, "1.wgt0"), (2, "1.wgt1")]


def test_a_value_from_a_replicated_weight_counts_as_replicated() -> None:
    b = Draft()
    w = b.w()
    cast = b.op("cast", w)
    scaled = b.op("mul", cast, cast)
    graph = b.build([b.op("dot_general", b.x(), scaled)])
    assignment = assign(graph, gpus(3), weights={w: (2, 1)})
    assert placed(assignment) == [(1, "3"), (1, "3"), (1, "1.wgt1")]


@pytest.mark.parametrize("reader", [0, 3])
def test_a_value_from_a_replicated_weight_follows_its_reader_wherever_that_is(reader: int) -> None:
    b = Draft()
    w = b.w()
    cast = b.op("cast", w)
    y = b.op("dot_general", b.x(), cast)
    assignment = assign(b.build([y]), gpus(3), weights={w: (2, 1)}, pins={y: reader})
    assert placed(assignment) == [(reader, "3"), (reader, "usr")]


def test_a_replicated_weight_does_not_decide_where_another_weight_does_in_vain() -> None:
    """The accelerator that has the one weight lacks the op; the holders of the other have no claim."""
    b = Draft()
    w, tied = b.w("w"), b.w("tied")
    y = b.op("fft", b.x(), w, tied)
    devices = gpus(3)
    devices[1].lacks = ["fft"]
    held = {w: (1,), tied: (2, 3)}
    assert placed(assign(b.build([y]), devices, weights=held)) == [(0, "3.best")]


@pytest.mark.parametrize("lacking", [0, 1])
def test_values_from_weights_whose_reader_is_where_their_op_is_not(lacking: int) -> None:
    b = Draft()
    free = b.w("free")
    cast = b.op("cast", free)
    y = b.op("dot_general", b.x(), cast)
    devices = gpus(2)
    devices[lacking].lacks = ["cast"]
    assignment = assign(b.build([y]), devices, pins={y: lacking})
    assert placed(assignment) == [(1 - lacking, "3.best"), (lacking, "usr")]


def test_values_from_unplaced_weights_follow_their_reader() -> None:
    b = Draft()
    free, w, v = b.w("free"), b.w("w"), b.w("v")
    cast = b.op("cast", free)
    turned = b.op("transpose", cast)
    h = b.op("dot_general", b.op("dot_general", b.x(), w), v)
    graph = b.build([b.op("dot_general", h, turned)])
    assignment = assign(graph, gpus(2), weights={w: (0,), v: (1,), free: ()})
    assert placed(assignment) == [(1, "3"), (1, "3"), (0, "1.wgt1"), (1, "1.wgt1"), (1, "2.2")]
    assert assignment.leaf_backends[free] == (1,)


def test_values_from_weights_that_nobody_reads() -> None:
    b = Draft()
    graph = b.build([b.op("cast", b.w())])
    assert placed(assign(graph, gpus(2))) == [(0, "3")]
    devices = gpus(2)
    devices[0].lacks = ["cast"]
    assert placed(assign(graph, devices)) == [(1, "3.best")]


# -- host weights that move to an accelerator ----------------------------------------------------


class Wanting(FakeDevice):
    """An accelerator that wants large products."""

    def offload_op(self, node: Node) -> bool:
        return node.op == "dot_general" and node.flops >= 100


def test_large_operations_on_host_weights_move_to_the_first_that_wants_them() -> None:
    b = Draft()
    x = b.x()
    small = b.op("dot_general", x, b.w("small"), flops=10)
    large = b.op("dot_general", small, b.w("large"), flops=100)
    lookup = b.op("gather", b.w("table"), large, flops=1000)
    graph = b.build([lookup])
    host = dict.fromkeys((t.id for t in graph.weights), (2,))
    cpu = FakeDevice("cpu:0", type=DeviceType.CPU, client="cpu")
    devices = [Wanting("gpu:0", lacks=["dot_general"]), Wanting("gpu:1"), cpu]
    off = assign(graph, devices, weights=host, op_offload=True)
    assert off.node_cause == ("1.wgt1", "1.off", "1.wgt0")
    assert off.node_backend == (2, 1, 2)
    assert off.leaf_backends[graph.weights[1].id] == (2,)
    on = assign(graph, devices, weights=host)
    assert on.node_backend == (2, 2, 2) and "1.off" not in on.node_cause


def test_weights_of_accelerators_are_not_offloaded() -> None:
    b = Draft()
    graph = b.build([b.op("dot_general", b.x(), b.w(), flops=1000)])
    devices = [Wanting("gpu:0"), Wanting("gpu:1"), gpus(0)[0]]
    placed = assign(graph, devices, weights={graph.weights[0].id: (1,)}, op_offload=True)
    assert (placed.node_backend, placed.node_cause) == ((1,), ("1.wgt1",))


# -- pass 2 --------------------------------------------------------------------------------------


def test_accelerators_spread_down_then_up() -> None:
    b = Draft()
    h = b.op("exp", b.x())  # nothing before it: up
    w, v = b.w("w"), b.w("v")
    h = b.op("dot_general", h, w)
    h = b.op("exp", h)  # down comes first
    h = b.op("dot_general", h, v)
    h = b.op("exp", h)
    assert on(b.build([h]), {w: 0, v: 1}) == [(0, "2.1"), (0, "1.wgt1"), (0, "2.2"), (1, "1.wgt1"), (1, "2.2")]


def test_the_host_does_not_spread_over_accelerators() -> None:
    b = Draft()
    w, v = b.w("w"), b.w("v")
    h = b.op("dot_general", b.x(), w)  # on the host
    h = b.op("exp", h)
    h = b.op("dot_general", h, v)
    assert on(b.build([h]), {w: 1, v: 0}, n_gpus=1) == [(1, "1.wgt1"), (0, "2.1"), (0, "1.wgt1")]


def test_the_host_clears_what_is_carried() -> None:
    """Down from the accelerator stops at the host's node; what follows is the host's, in the rest passes."""
    b = Draft()
    w, v = b.w("w"), b.w("v")
    h = b.op("dot_general", b.x(), v)  # on the accelerator
    h = b.op("dot_general", h, w)  # on the host
    h = b.op("exp", h)
    assert on(b.build([h]), {w: 1, v: 0}, n_gpus=1) == [(0, "1.wgt1"), (1, "1.wgt1"), (1, "2.4")]


def test_the_rest_spreads_up() -> None:
    b = Draft()
    w = b.w("w")
    h = b.op("dot_general", b.op("exp", b.x()), w)
    assert on(b.build([h]), {w: 1}, n_gpus=1) == [(1, "2.3"), (1, "1.wgt1")]


def test_views_neither_spread_nor_are_spread_over() -> None:
    b = Draft()
    w, v = b.w("w"), b.w("v")
    h = b.op("exp", b.x())
    shown = b.op("reshape", h)  # after pass 2, from its source
    turned = b.op("transpose", v)  # on 1, but a view
    y = b.op("exp", shown)
    h = b.op("dot_general", y, w)
    graph = b.build([h, turned])
    assert on(graph, {w: 0, v: 1}) == [(0, "2.1"), (0, "3"), (1, "1.vsrc"), (0, "2.1"), (0, "1.wgt1")]


@pytest.mark.parametrize("backend", [0, 1])
def test_a_view_between_nodes_that_the_expansion_reaches(backend: int) -> None:
    b = Draft()
    w = b.w()
    shown = b.op("reshape", b.op("exp", b.x()))
    graph = b.build([b.op("dot_general", shown, w)])
    assert on(graph, {w: backend}) == [(backend, "2.1"), (backend, "3"), (backend, "1.wgt1")]
    devices = gpus(2)
    devices[backend].lacks = ["reshape"]
    able = 1 - backend
    assert placed(assign(graph, devices, weights={w: (backend,)}))[1] == (able, "3.best")


def test_expansion_passes_over_unsupported_ops() -> None:
    b = Draft()
    w = b.w()
    h = b.op("dot_general", b.x(), w)
    h = b.op("fft", h)
    h = b.op("exp", h)
    devices = gpus(2)
    devices[0].lacks = ["fft"]
    assert placed(assign(b.build([h]), devices, weights={w: (0,)})) == [(0, "1.wgt1"), (1, "3.best"), (0, "2.2")]


# -- pass 3 --------------------------------------------------------------------------------------


def test_nothing_decides() -> None:
    b = Draft()
    h = b.op("exp", b.op("exp", b.x()))
    assert placed(assign(b.build([h]), gpus(2))) == [(0, "3"), (0, "3")]
    assert placed(assign(b.build([h]), gpus(0))) == [(0, "3"), (0, "3")]


def test_a_view_of_an_input_follows_its_reader() -> None:
    """Not its source, which is on the host only in name: that would compute on the host."""
    b = Draft()
    w = b.w()
    rows = b.op("reshape", b.op("squeeze", b.x()))
    h = b.op("dot_general", rows, w)
    assert on(b.build([h]), {w: 1}) == [(1, "3"), (1, "3"), (1, "1.wgt1")]


def test_eig_runs_on_the_host_and_the_rest_stays() -> None:  # S35
    b = Draft()
    w = [b.w(f"w{i}") for i in range(2)]
    h = b.op("dot_general", b.x(), w[0])
    h = b.op("exp", h)
    values, vectors = b.ops("eig", h, nbytes=(8, 64))
    h = b.op("mul", values, vectors)
    h = b.op("dot_general", h, w[1])
    assignment = assign(b.build([h]), gpus(2, lacks=["eig"]), weights={w[0]: (0,), w[1]: (1,)})
    assert placed(assignment) == [(0, "1.wgt1"), (0, "2.2"), (2, "3.best"), (0, "2.2"), (1, "1.wgt1")]


def test_the_first_that_has_the_op() -> None:
    b = Draft()
    w = b.w()
    devices = gpus(3)
    for device in devices[:2]:
        device.lacks = ["dot_general"]
    assert placed(assign(b.build([b.op("dot_general", b.x(), w)]), devices, weights={w: (1,)})) == [(2, "3.best")]


def test_a_node_beside_its_weight_does_not_join_its_neighbours() -> None:
    b = Draft()
    w, v = b.w("w"), b.w("v")
    h = b.op("dot_general", b.x(), v)
    h = b.op("fft", h, w)
    devices = gpus(3)
    devices[0].lacks = ["fft"]
    held = {w: (0,), v: (2,)}
    assert placed(assign(b.build([h]), devices, weights=held)) == [(2, "1.wgt1"), (1, "3.best")]


def test_the_first_that_has_the_op_may_be_the_first_of_all() -> None:
    b = Draft()
    w, tied = b.w("w"), b.w("tied")
    h = b.op("dot_general", b.x(), w)
    h = b.op("fft", h)
    h = b.op("fft", h, tied)
    devices = gpus(3)
    devices[1].lacks = ["fft"]
    held = {w: (1,), tied: (2, 3)}
    assert placed(assign(b.build([h]), devices, weights=held)) == [(1, "1.wgt1"), (0, "3.best"), (0, "3.best")]


def test_support_may_depend_on_the_node() -> None:
    def only_small(node: Node) -> bool:
        return len(node.inputs) > 2

    b = Draft()
    x, w = b.x(), b.w()
    h = b.op("add", x, w)
    h = b.op("add", h, w, x)
    devices = [FakeDevice("npu:0", lacks=only_small), FakeDevice("cpu:0", type=DeviceType.CPU)]
    assert placed(assign(b.build([h]), devices, weights={w: (0,)})) == [(0, "1.wgt1"), (1, "3.best")]


def test_a_node_is_upgraded_to_where_its_operands_are() -> None:
    b = Draft()
    w, v = b.w("w"), b.w("v")
    a = b.op("dot_general", b.x(), v)  # accelerator
    c = b.op("dot_general", a, w)  # host
    d = b.op("exp", a)  # the rest pass gives it to the host, but its operand is on the accelerator
    e = b.op("exp", d)
    f = b.op("add", c, e)
    expected = [(0, "1.wgt1"), (1, "1.wgt1"), (0, "3.upg"), (0, "3.upg"), (1, "2.4")]
    assert on(b.build([f]), {w: 1, v: 0}, n_gpus=1) == expected


def test_without_weights_the_first_that_has_the_op() -> None:
    b = Draft()
    devices = gpus(2)
    devices[0].lacks = ["fft"]
    assert placed(assign(b.build([b.op("fft", b.x())]), devices)) == [(1, "3.best")]


def upgraded(operands: Sequence[str]) -> tuple[int, str]:
    """Where a node goes that the rest pass gave to the host (3), by where its operands are.

    ``a0`` and ``a1`` are made on accelerators 0 and 1, ``i0`` is an input that is pinned to 0, ``x`` one that is not;
    ``cast`` is not decided yet, ``tied`` is on several.
    """
    b = Draft()
    x, i0 = b.x("x"), b.x("i0")
    weights = {name: b.w(name) for name in ("w0", "w1", "host", "free", "tied")}
    known = {"x": x, "i0": i0, "cast": b.op("cast", weights["free"]), "tied": weights["tied"]}
    known["a0"] = b.op("dot_general", x, weights["w0"])
    known["a1"] = b.op("dot_general", x, weights["w1"])
    c = b.op("dot_general", x, weights["host"])
    d = b.op("add", *(known[name] for name in operands))
    graph = b.build([b.op("dot_general", d, weights["host"]), c])
    held = {weights["w0"]: (0,), weights["w1"]: (1,), weights["host"]: (3,), weights["tied"]: (0, 2)}
    return placed(assign(graph, gpus(3), weights=held, pins={i0: 0}))[4]


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        (["a1"], (1, "3.upg")),
        (["a0", "x", "a0"], (0, "3.upg")),
        (["x", "a1"], (1, "3.upg")),
        (["a1", "x"], (1, "3.upg")),
        (["cast", "a1"], (1, "3.upg")),
        (["a1", "cast"], (1, "3.upg")),
        (["tied", "a1"], (1, "3.upg")),
        (["i0"], (0, "3.upg")),
        (["i0", "a1"], (3, "2.4")),
        (["a0", "a1"], (3, "2.4")),
        (["a1", "a0"], (3, "2.4")),
        (["x", "tied"], (3, "2.4")),
    ],
)
def test_an_upgrade_is_to_where_all_operands_are(operands: list[str], expected: tuple[int, str]) -> None:
    assert upgraded(operands) == expected


def test_what_the_host_reached_upwards_is_upgraded_too() -> None:
    b = Draft()
    x, w = b.x(), b.w()
    graph = b.build([b.op("dot_general", b.op("exp", x), w)])
    assert placed(assign(graph, gpus(1), weights={w: (1,)}, pins={x: 0})) == [(0, "3.upg"), (1, "1.wgt1")]
    assert placed(assign(graph, gpus(1), weights={w: (1,)}, pins={x: 1})) == [(1, "2.3"), (1, "1.wgt1")]
    assert placed(assign(graph, gpus(1, lacks=["exp"]), weights={w: (1,)}, pins={x: 0}))[0] == (1, "2.3")


# -- pins and cuts -------------------------------------------------------------------------------


def test_pins_come_first() -> None:
    graph = chain(3)
    w = {t.id: (0,) for t in graph.weights}
    first, last = graph.nodes[0].outputs[0], graph.nodes[3].outputs[0]
    assignment = assign(graph, gpus(2), weights=w, pins={first: 1, last: 2})
    assert placed(assignment)[0] == (1, "usr")
    assert placed(assignment)[3] == (2, "usr")
    assert placed(assignment)[1:3] == [(1, "2.2"), (0, "1.wgt1")]


def test_a_pinned_leaf() -> None:
    b = Draft()
    x, w = b.x(), b.w()
    graph = b.build([b.op("dot_general", x, w)])
    assignment = assign(graph, gpus(2), weights={w: (0,)}, pins={w: 1, x: 0})
    assert placed(assignment) == [(1, "1.wgt1")]
    assert assignment.leaf_backends[:2] == ((0,), (1,))
    assert assignment.leaf_cause[:2] == ("usr", "usr")


def test_a_pin_carries_values_from_weights() -> None:
    b = Draft()
    w = b.w()
    cast = b.op("cast", w)
    counted = b.op("iota")
    y = b.op("dot_general", b.x(), cast)
    z = b.op("add", y, counted)
    assignment = assign(b.build([z]), gpus(2), weights={w: (0,)}, pins={cast: 1, counted: 0})
    assert placed(assignment) == [(1, "usr"), (0, "usr"), (1, "1.wgt1"), (1, "2.2")]


def test_a_cut_replaces_the_passes() -> None:
    graph = chain(2)
    w = {t.id: (0,) for t in graph.weights}
    assignment = assign(graph, gpus(2), weights=w, cut=[0, 1, 1, 1], pins={graph.nodes[3].outputs[0]: 2})
    assert placed(assignment) == [(0, "part"), (1, "part"), (1, "part"), (2, "usr")]


def test_a_cut_yields_to_what_a_device_lacks() -> None:
    b = Draft()
    h = b.op("exp", b.op("eig", b.x()))
    assert placed(assign(b.build([h]), gpus(1, lacks=["eig"]), cut=[0, 0])) == [(1, "3.best"), (0, "part")]


def test_unplaced_weights_go_beside_the_cut() -> None:
    graph = chain(2)
    assignment = assign(graph, gpus(2), cut=[0, 0, 1, 1])
    assert [assignment.leaf_backends[w.id] for w in graph.weights] == [(0,), (1,)]


# -- errors --------------------------------------------------------------------------------------


def test_no_backend_has_the_op() -> None:  # S34
    b = Draft()
    y = b.op("eig", b.x(), source="model.py:7 (attention)")
    with pytest.raises(PlacementError, match=r"op eig of eig#0 \(model.py:7 \(att.*'eig#0' int8.*'gpu:0', 'cpu:0'"):
        assign(b.build([y]), gpus(1, lacks=["eig"], cpu_lacks=["eig"]))


def test_what_no_backend_has_is_told_in_full() -> None:
    b = Draft()
    p, _ = b.ops("eig", b.x(), nbytes=(4, 8), source="model.py:7 (f)")
    message = (
        "no backend has the op eig of eig#0 (model.py:7 (f)), which makes 'eig#0.0' int8[4], 'eig#0.1' int8[8]; asked "
        "'gpu:0', 'cpu:0': add a device that has it"
    )
    with pytest.raises(PlacementError, match=f"^{re.escape(message)}$"):
        assign(b.build([p]), gpus(1, lacks=["eig"], cpu_lacks=["eig"]))
    b = Draft()
    b.node("log", [b.x()], [], fn=FakeOp("log", 0), has_effect=True)
    with pytest.raises(PlacementError, match=r"of log#0 \(\), which makes nothing; asked 'cpu:0': add"):
        assign(b.build([]), gpus(0, cpu_lacks=["log"]))


def test_a_pin_to_a_backend_that_lacks_the_op() -> None:  # S34
    b = Draft()
    y = b.op("eig", b.x(), source="model.py:7 (f)")
    graph = b.build([y])
    with pytest.raises(PlacementError, match=r"int8\[8\] is pinned to 'gpu:0'.*op eig.*model.py:7.*pin it to 'cpu:0'"):
        assign(graph, gpus(1, lacks=["eig"]), pins={y: 0})
    with pytest.raises(PlacementError, match=r"no other backend has it either"):
        assign(graph, gpus(1, lacks=["eig"], cpu_lacks=["eig"]), pins={y: 0})


def test_two_pins_of_one_node() -> None:
    b = Draft()
    p, q = b.ops("split", b.x(), nbytes=(4, 4))
    graph = b.build([p, q])
    assert placed(assign(graph, gpus(2), pins={p: 1, q: 1})) == [(1, "usr")]
    with pytest.raises(PlacementError, match=r"'split#0.1'.* pinned to 'gpu:1', another output .* to 'gpu:0'"):
        assign(graph, gpus(2), pins={p: 0, q: 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": {1: (3,)}}, r"'w' int8\[100\] names backend 3, expected 0 to 2: an index of the devices$"),
        ({"weights": {1: (0, -1)}}, r"'w' int8\[100\] names backend -1"),
        ({"weights": {0: (0,)}}, r"weights name 'x' int8\[8\], which is of kind 'input'"),
        ({"weights": {99: (0,)}}, r"name tensor 99, expected 0 to 2"),
        ({"weights": {3: (0,)}}, r"name tensor 3, expected 0 to 2"),
        ({"pins": {2: -1}}, r"the pin of 'dot_general#0' int8\[8\] names backend -1"),
        ({"pins": {2: 3}}, r"^the pin of 'dot_general#0' int8\[8\] names backend 3"),
        ({"pins": {-1: 0}}, r"name tensor -1"),
        ({"cut": [-1]}, r"^the cut names backend -1"),
        ({"cut": [3]}, r"the cut names backend 3"),
        ({"cut": [7]}, r"the cut names backend 7"),
        ({"cut": [0, 0]}, r"the cut has 2 backends, expected one for each of 1 nodes"),
    ],
)
def test_wrong_indices(arguments: dict[str, object], message: str) -> None:
    b = Draft()
    graph = b.build([b.op("dot_general", b.x(), b.w())])
    with pytest.raises(PlacementError, match=message):
        assign(graph, gpus(2), **arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_no_devices() -> None:
    with pytest.raises(PlacementError, match=r"^got no devices; expected at least one, the last of them a host CPU$"):
        assign(chain(1), [])


# -- the whole -----------------------------------------------------------------------------------


def test_the_same_graph_assigned_twice() -> None:  # S14
    graph = transformer(3)
    before = (graph.tensors, graph.nodes)
    one = {w.id: (k % 2,) for k, w in enumerate(graph.weights)}
    first = assign(graph, gpus(2), weights=one)
    assign(graph, gpus(1))
    assert assign(graph, gpus(2), weights=one) == first
    assert (graph.tensors, graph.nodes) == before


def test_devices_are_asked_a_bounded_number_of_times() -> None:
    asked = 0

    def lacks(node: Node) -> bool:
        nonlocal asked
        asked += 1
        return node.op == "relu"

    graph = chain(500)
    devices = [FakeDevice(f"gpu:{i}", lacks=lacks) for i in range(3)] + [FakeDevice("cpu:0", type=DeviceType.CPU)]
    assign(graph, devices, weights={w.id: (k % 3,) for k, w in enumerate(graph.weights)})
    assert asked <= (4 + len(devices)) * len(graph.nodes)  # once in each pass, and in the search for one that can


@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 4))
def test_random_graphs(seed: int, n_nodes: int, n_gpus: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, n_nodes)
    devices: Sequence[FakeDevice] = gpus(n_gpus)
    for device in devices[:-1]:
        device.lacks = rng.sample(["dot_general", "reshape", "convert_element_type", "transpose"], k=rng.randint(0, 3))
    weights = {w.id: tuple(rng.sample(range(n_gpus), k=rng.randint(0, n_gpus))) for w in graph.weights}
    pins = {t.id: n_gpus for t in graph.tensors if rng.random() < 0.1}
    cut = [rng.randrange(n_gpus + 1) for _ in graph.nodes] if rng.random() < 0.3 else None
    assignment = assign(graph, devices, weights=weights, pins=pins, cut=cut)
    made_by = graph.producers()
    pinned = {made_by[t] for t in pins}
    known = {"usr", "part", "1.vsrc", "2.1", "2.2", "2.3", "2.4", "3", "3.best", "3.upg"}
    for node, backend, cause in zip(graph.nodes, assignment.node_backend, assignment.node_cause, strict=True):
        assert devices[backend].supports_op(node)
        assert cause in known or cause.startswith("1.wgt")
        assert (cause == "usr") == (node.index in pinned)
        assert cut is None or cause in {"usr", "3", "3.best"} or (cause, backend) == ("part", cut[node.index])
    for t, leaf in zip(graph.tensors, assignment.leaf_backends, strict=True):
        assert bool(leaf) == (made_by[t.id] < 0)
        assert not weights.get(t.id) or t.id in pins or leaf == weights[t.id]
