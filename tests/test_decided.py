"""What is decided before the passes of `assign`: weights that are held, pins, state, and the cut of a partition."""

from __future__ import annotations

import re

import pytest

from aiopipe.errors import PlacementError
from aiopipe.graph import Graph
from aiopipe.sched.assign import Assignment, assign
from graphs import Draft, gpus

LEAF = ((8,), "int8", 8)


def placed(assignment: Assignment) -> list[tuple[int, str]]:
    """Backend and cause of each node."""
    return list(zip(assignment.node_backend, assignment.node_cause, strict=True))


# -- weights and pins ----------------------------------------------------------------------------


def test_a_weight_that_one_backend_holds_twice_decides() -> None:
    b = Draft()
    w = b.w()
    graph = b.build([b.op("dot_general", b.x(), w)])
    assignment = assign(graph, gpus(2), weights={w: (1, 1)})
    assert (placed(assignment), assignment.leaf_backends[w]) == ([(1, "1.wgt1")], (1,))


@pytest.mark.parametrize("pin", [0, 1, 2])
def test_a_pin_decides_before_the_weight(pin: int) -> None:
    b = Draft()
    w = b.w()
    h = b.op("dot_general", b.x(), w)
    shown = b.op("reshape", h)
    cast = b.op("cast", w)
    y = b.op("dot_general", shown, cast)
    for weight in (0, 1, 2):
        assignment = assign(b.build([y]), gpus(2), weights={w: (weight,)}, pins={h: pin, cast: pin})
        assert placed(assignment) == [(pin, "usr"), (pin, "1.vsrc"), (pin, "usr"), (pin, "1.wgt1")]


@pytest.mark.parametrize("pin", [0, 1])
def test_a_view_of_an_input_stays_where_it_is_pinned(pin: int) -> None:
    b = Draft()
    rows, w = b.op("reshape", b.x()), b.w()
    graph = b.build([b.op("dot_general", rows, w)])
    assert placed(assign(graph, gpus(2), weights={w: (1 - pin,)}, pins={rows: pin})) == [
        (pin, "usr"),
        (1 - pin, "1.wgt1"),
    ]


def test_what_a_pin_asks_for_too_much_says_what_would_do() -> None:
    b = Draft()
    y = b.op("eig", b.x(), source="model.py:7 (f)")
    graph, devices = b.build([y]), gpus(3)
    devices[1].lacks = ["eig"]
    message = (
        "'eig#0' int8[8] is pinned to 'gpu:1', which lacks the op eig of eig#0 (model.py:7 (f)); "
        "pin it to 'gpu:0' or 'gpu:2' or 'cpu:0'"
    )
    with pytest.raises(PlacementError, match=f"^{re.escape(message)}$"):
        assign(graph, devices, pins={y: 1})
    with pytest.raises(PlacementError, match=r"\(f\)\); no other backend has it either$"):
        assign(graph, gpus(1, lacks=["eig"], cpu_lacks=["eig"]), pins={y: 0})


# -- the cut of a partition ----------------------------------------------------------------------


@pytest.mark.parametrize("pin", [0, 1])
def test_a_cut_leaves_pins_alone(pin: int) -> None:
    b = Draft()
    h = b.op("exp", b.x())
    y = b.op("exp", h)
    for lacks in ((), ("exp",)):
        devices = gpus(2)
        devices[1 - pin].lacks = lacks
        assignment = assign(b.build([y]), devices, pins={h: pin}, cut=[1 - pin, 1 - pin])
        assert placed(assignment)[0] == (pin, "usr")
        assert placed(assignment)[1] == ((pin, "3.best") if lacks else (1 - pin, "part"))


def test_what_a_device_of_the_cut_lacks_goes_to_the_first_that_has_it() -> None:
    b = Draft()
    y = b.op("fft", b.op("exp", b.x()))
    devices = gpus(2)
    devices[1].lacks = ["fft"]
    assert placed(assign(b.build([y]), devices, cut=[1, 1])) == [(1, "part"), (0, "3.best")]


# -- state ---------------------------------------------------------------------------------------


def caches(*, views: bool = False) -> tuple[Graph, list[int]]:
    """Two leaves: a node writes the first, which another reads; the second stays as it is. Ids of the leaves."""
    b = Draft()
    x, w = b.x(), b.w()
    first, second = b.state("first", *LEAF), b.state("second", *LEAF)
    new = b.op("update", x, first)
    read = b.op("attend", x, first, second)
    y = b.op("dot_general", read, w)
    if views:
        new = b.op("reshape", b.op("transpose", new))
    return b.build([y], new_state=[new, second]), [first, second]


@pytest.mark.parametrize("home", [0, 1, 2])
def test_state_stays_where_it_is_with_what_writes_and_reads_it(home: int) -> None:
    graph, (first, second) = caches()
    w = graph.weights[0].id
    weight = (home + 1) % 3
    assignment = assign(graph, gpus(2), state={first: home}, weights={w: (weight,)})
    assert placed(assignment) == [(home, "1.dst"), (home, "1.dst"), (weight, "1.wgt1")]
    assert assignment.leaf_backends[first] == (home,)
    # The other leaf goes beside who reads it: nobody has said where it is.
    assert assignment.leaf_backends[second] == (home,)
    assert [assignment.leaf_cause[t] for t in (first, second)] == ["1.dst", "3"]


@pytest.mark.parametrize("home", [0, 1])
def test_the_second_leaf_is_kept_without_the_first(home: int) -> None:
    graph, (first, second) = caches()
    assignment = assign(graph, gpus(2), state={second: home})
    assert placed(assignment)[1] == (home, "1.dst")
    assert assignment.leaf_cause[second] == "1.dst"
    assert placed(assignment)[0][1] != "1.dst"
    assert assignment.leaf_backends[first] == (placed(assignment)[0][0],)


@pytest.mark.parametrize("home", [0, 1, 2])
def test_a_pinned_leaf_takes_what_writes_and_reads_it_along(home: int) -> None:
    graph, (first, _) = caches()
    assignment = assign(graph, gpus(2), pins={first: home})
    assert placed(assignment)[:2] == [(home, "1.dst")] * 2
    assert (assignment.leaf_backends[first], assignment.leaf_cause[first]) == ((home,), "usr")
    assert assign(graph, gpus(2), pins={first: home}, state={first: home}) == assignment


@pytest.mark.parametrize("home", [0, 1, 2])
def test_a_view_that_replaces_state_takes_its_source_along(home: int) -> None:
    graph, (first, _) = caches(views=True)
    w = graph.weights[0].id
    assignment = assign(graph, gpus(2), state={first: home}, weights={w: (2 - home,)})
    assert [placed(assignment)[i] for i in (0, 1, 3, 4)] == [(home, "1.dst")] * 4


def test_a_view_takes_no_source_along_that_is_decided_or_cannot_go() -> None:
    b = Draft()
    x = b.x()
    cache = b.state("cache", *LEAF)
    made = b.op("exp", x)
    graph = b.build([x], new_state=[b.op("reshape", made)])
    assert placed(assign(graph, gpus(2), state={cache: 1})) == [(1, "1.dst"), (1, "1.dst")]
    assert placed(assign(graph, gpus(2), state={cache: 1}, pins={made: 0})) == [(0, "usr"), (1, "1.dst")]
    devices = gpus(2)
    devices[1].lacks = ["exp"]
    assert placed(assign(graph, devices, state={cache: 1})) == [(0, "3"), (1, "1.dst")]


def test_who_reads_state_but_is_decided_or_cannot_go_stays_away() -> None:
    graph, (first, second) = caches()
    read = graph.nodes[1].outputs[0]
    state = {first: 1, second: 1}
    assert placed(assign(graph, gpus(2), state=state, pins={read: 0}))[:2] == [(1, "1.dst"), (0, "usr")]
    devices = gpus(2)
    devices[1].lacks = ["attend"]
    assert placed(assign(graph, devices, state=state))[1][1] != "1.dst"


def test_a_leaf_that_nobody_has_placed_goes_where_its_next_value_is_made() -> None:
    b = Draft()
    x, v, w = b.x(), b.w("v"), b.w("w")
    cache = b.state("cache", *LEAF)
    new = b.op("dot_general", x, w)
    early = b.op("dot_general", cache, v)
    graph = b.build([early], new_state=[new])
    assignment = assign(graph, gpus(2), weights={v: (0,), w: (1,)})
    assert placed(assignment) == [(1, "1.wgt1"), (0, "1.wgt1")]
    assert (assignment.leaf_backends[cache], assignment.leaf_cause[cache]) == ((1,), "3")


def refused(graph: Graph, message: str, **arguments: dict[int, int]) -> None:
    with pytest.raises(PlacementError, match=f"^{re.escape(message)}$"):
        assign(graph, gpus(2, lacks=["write"]), **arguments)  # type: ignore[arg-type]


def test_state_that_is_pinned_elsewhere() -> None:
    graph, (first, _) = caches()
    message = "state 'first' int8[8] is on 'gpu:1', but pinned to 'gpu:0': pin it before it is used, or not at all"
    refused(graph, message, state={first: 1}, pins={first: 0})


@pytest.mark.parametrize("pin", [0, 1])
def test_a_pin_that_tears_a_next_value_from_its_state(pin: int) -> None:
    graph, (first, _) = caches()
    message = (
        f"state 'first' int8[8] is on 'gpu:{1 - pin}', but update#0 (model.py:0 (f)), which makes its next value, "
        f"is pinned to 'gpu:{pin}': keep them together"
    )
    refused(graph, message, state={first: 1 - pin}, pins={graph.nodes[0].outputs[0]: pin})
    together = assign(graph, gpus(2), state={first: pin}, pins={graph.nodes[0].outputs[0]: pin})
    assert placed(together)[0] == (pin, "usr")


def test_one_node_that_makes_state_of_two_backends() -> None:
    b = Draft()
    one, two = b.state("one", *LEAF), b.state("two", *LEAF)
    graph = b.build([], new_state=b.ops("update", one, two, nbytes=(8, 8)))
    message = (
        "state 'two' int8[8] is on 'gpu:1', but update#0 (model.py:0 (f)), which makes its next value, "
        "makes other state that is on 'gpu:0': keep them together"
    )
    refused(graph, message, state={one: 0, two: 1})


def test_state_on_a_backend_that_cannot_make_its_next_value() -> None:
    b = Draft()
    cache = b.state("cache", *LEAF)
    graph = b.build([], new_state=[b.op("write", cache)])
    message = (
        "state 'cache' int8[8] is on 'gpu:0', which lacks the op write of write#0 (model.py:0 (f)) that makes its "
        "next value: put the state on a backend that has it"
    )
    refused(graph, message, state={cache: 0})
