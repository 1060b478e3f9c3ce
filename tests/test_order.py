"""The order of a graph's nodes: when a round is parted so that two backends work at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from aiopipe.graph import Graph
from aiopipe.sched.assign import assign
from aiopipe.sched.order import WORTH_PARTING_S
from aiopipe.sched.split import Split, split_graph
from graphs import Draft, FakeOp, gpus, sanity

SECOND_S = 1.0
FLOPS_PER_S = 5e10
BYTES_PER_S = 1e10


class Costly(FakeOp):
    """An operation that says itself what it takes, as those of simulated devices do."""

    def __init__(self, cost_s: float) -> None:
        super().__init__("costly")
        self.cost_s = cost_s


def split(graph: Graph, cut: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Backend and nodes of each split."""
    assignment = assign(graph, gpus(max(cut) + 1), cut=cut)
    splits: tuple[Split, ...] = split_graph(graph, assignment)
    sanity(graph, splits, assignment)
    return [(s.backend, s.nodes) for s in splits]


TOGETHER = [(0, (0,)), (1, (1, 2))]
PARTED = [(0, (0,)), (1, (1,)), (1, (2,))]


def joined(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[int, tuple[int, ...]]]:
    """The splits of a node on device 0, another on device 1, and one there that reads both; each may take long."""
    b = Draft()
    x, y = b.x(), b.x("y")
    made = []
    for leaf, how in ((x, first), (y, second)):
        arguments = {"op": "mul", "fn": FakeOp("mul"), "nbytes": 0.0} | how
        op = arguments.pop("op")
        made += b.node(op, [leaf], [((8,), "int8", 8)], **arguments)
    return split(b.build([b.op("add", *made)]), [0, 1, 1])


@pytest.mark.parametrize(
    "how",
    [
        {"flops": FLOPS_PER_S},
        {"flops": FLOPS_PER_S * WORTH_PARTING_S},
        {"nbytes": BYTES_PER_S},
        {"nbytes": BYTES_PER_S * WORTH_PARTING_S},
        {"flops": FLOPS_PER_S * WORTH_PARTING_S / 2, "nbytes": BYTES_PER_S * WORTH_PARTING_S / 2},
        {"fn": Costly(SECOND_S)},
        {"fn": Costly(WORTH_PARTING_S)},
        {"op": "pure_callback"},
        {"op": "io_callback"},
        {"op": "print", "has_effect": True},
        {"op": "reshape", "has_effect": True},
    ],
)
def test_what_takes_long_is_worth_a_split_of_its_own(how: dict[str, Any]) -> None:
    long = {"flops": FLOPS_PER_S}
    assert joined(how, long) == joined(long, how) == PARTED


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"flops": FLOPS_PER_S * WORTH_PARTING_S / 2},
        {"nbytes": BYTES_PER_S * WORTH_PARTING_S / 2},
        {"fn": Costly(0.0), "flops": FLOPS_PER_S},
        {"fn": Costly(WORTH_PARTING_S / 2), "flops": FLOPS_PER_S},
        {"op": "transpose", "flops": FLOPS_PER_S, "nbytes": BYTES_PER_S},
    ],
)
def test_what_is_short_is_not(how: dict[str, Any]) -> None:
    long = {"flops": FLOPS_PER_S}
    assert joined(how, long) == joined(long, how) == TOGETHER


def test_cheap_nodes_count_nothing() -> None:
    b = Draft()
    far = b.op("mul", b.x(), flops=FLOPS_PER_S)
    near = b.node("convert_element_type", [b.x("y")], [((8,), "int8", 8)], fn=FakeOp("c"), flops=FLOPS_PER_S)
    assert split(b.build([b.op("add", far, *near)]), [0, 1, 1]) == TOGETHER


def test_what_waits_counts_as_a_whole() -> None:
    """Half of it each is long enough together, in both rounds."""
    b = Draft()
    x, y, half = b.x(), b.x("y"), FLOPS_PER_S * WORTH_PARTING_S / 2
    far, near = x, y
    for _ in range(2):
        far, near = b.op("mul", far, flops=half), b.op("mul", near, flops=half)
    graph = b.build([b.op("add", far, near)])
    assert split(graph, [0, 1, 0, 1, 1]) == [(0, (0, 2)), (1, (1, 3)), (1, (4,))]


def test_what_needs_only_older_rounds_goes_first() -> None:
    """Node 2 waits for node 0, as it must; node 4 waits for node 3, which node 2 need not wait for."""
    b = Draft()
    long = FLOPS_PER_S
    a = b.op("mul", b.x(), flops=long)  # 0 on 0
    c = b.op("mul", a, flops=long)  # 1 on 1
    near = b.op("mul", a, flops=long)  # 2 on 0: in the round of 0
    far = b.op("mul", c, flops=long)  # 3 on 2
    more = b.op("exp", c, flops=long)  # 4 on 0: needs 1
    end = b.op("add", more, far, flops=long)  # 5 on 0: needs 3
    graph = b.build([near, end])
    assert split(graph, [0, 1, 0, 2, 0, 0]) == [(0, (0, 2)), (1, (1,)), (2, (3,)), (0, (4,)), (0, (5,))]


def test_a_pipeline_of_two_nodes_for_each_device_is_parted_nowhere() -> None:
    b = Draft()
    h = b.x()
    for _ in range(6):
        h = b.op("mul", h, flops=FLOPS_PER_S)
    assert split(b.build([h]), [0, 0, 1, 1, 2, 2]) == [(0, (0, 1)), (1, (2, 3)), (2, (4, 5))]


# -- with values that wait for their reader ------------------------------------------------------


def waiting_for(*, through: int, flops: float = FLOPS_PER_S) -> list[tuple[int, tuple[int, ...]]]:
    """As `joined`, but the node on device 1 reads the other's value through cheap nodes there, which wait for it."""
    b = Draft()
    far = b.op("mul", b.x(), flops=flops, nbytes=4)  # 0 on 0
    h = far
    for _ in range(through):
        h = b.op("convert_element_type", h, nbytes=4)  # on 1
    near = b.op("mul", b.x("y"), flops=flops)  # on 1
    graph = b.build([b.op("add", near, h, h)])
    return split(graph, [0] + [1] * (through + 2))


@pytest.mark.parametrize("through", [1, 2, 3])
def test_what_a_lazy_value_waits_for_counts(through: int) -> None:
    lazy = tuple(range(1, through + 1))
    near, end = through + 1, through + 2
    assert waiting_for(through=through) == [(0, (0,)), (1, (near,)), (1, (*lazy, end))]
    assert waiting_for(through=through, flops=1.0) == [(0, (0,)), (1, (*lazy, near, end))]


def test_what_another_node_waits_for_does_not_count() -> None:
    """Node 4 reads node 2, which is lazy and waits for node 0 alone; it is node 3 that waits for node 1."""
    b = Draft()
    long = FLOPS_PER_S
    a = b.op("mul", b.x(), flops=long, nbytes=4)  # 0 on 0
    c = b.op("mul", b.x("c"), flops=long)  # 1 on 2
    lazy = b.op("convert_element_type", a, nbytes=4)  # 2 on 1
    late = b.op("mul", c)  # 3 on 1
    early = b.op("add", lazy, b.x("y"), flops=long)  # 4 on 1
    graph = b.build([b.op("add", late, early)])  # 5 on 1
    assert split(graph, [0, 2, 1, 1, 1, 1]) == [(0, (0,)), (2, (1,)), (1, (2, 4)), (1, (3, 5))]


def test_a_lazy_value_from_weights_holds_up_nobody() -> None:
    b = Draft()
    w = b.w()
    far = b.op("mul", b.x(), flops=FLOPS_PER_S)  # 0 on 0
    wide = b.op("dequantize", w, nbytes=400)  # 1 on 1, lazy
    near = b.op("dot_general", b.x("y"), wide, flops=FLOPS_PER_S)  # 2 on 1
    graph = b.build([b.op("add", near, far)])
    assert split(graph, [0, 1, 1, 1]) == [(0, (0,)), (1, (1, 2)), (1, (3,))]


def test_lazy_values_that_read_each_other_are_looked_at_once() -> None:
    """Each reads the one before it twice: a walk over all the ways would not end."""
    b = Draft()
    far = b.op("mul", b.x(), flops=FLOPS_PER_S, nbytes=4)
    h = far
    for i in range(60):  # no smaller than what they read: else they would not wait
        h = b.op("broadcast_in_dim", h, h, nbytes=8 << i)
    near = b.op("mul", b.x("y"), flops=FLOPS_PER_S)
    graph = b.build([b.op("add", near, h)])
    splits = split(graph, [0] + [1] * 62)
    assert splits == [(0, (0,)), (1, (61,)), (1, (*range(1, 61), 62))]


def test_a_cheap_result_does_not_wait() -> None:
    """The caller wants it: nothing is gained by making it late."""
    b = Draft()
    a = b.op("mul", b.x())  # 0 on 0
    cheap = b.op("convert_element_type", a)  # 1 on 0
    far = b.op("mul", a)  # 2 on 1
    y = b.op("add", far, cheap)  # 3 on 0
    assert split(b.build([cheap, y]), [0, 0, 1, 0]) == [(0, (0, 1)), (1, (2,)), (0, (3,))]
    assert split(b.build([y]), [0, 0, 1, 0]) == [(0, (0,)), (1, (2,)), (0, (1, 3))]


def test_an_effect_waits_for_the_one_before_it_on_its_backend_alone() -> None:
    b = Draft()
    x = b.x()
    near = b.op("mul", x)  # 0 on 0
    far = b.op("mul", x)  # 1 on 1
    b.op("print", far, effect=True)  # 2 on 0, waits for 1
    b.op("print", near, effect=True)  # 3 on 0, waits for 2
    b.op("print", x, effect=True)  # 4 on 1, waits for nobody
    assert split(b.build([near]), [0, 1, 0, 0, 1]) == [(0, (0,)), (1, (1, 4)), (0, (2, 3))]
