"""Graphs node by node: what is frozen, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aiopipe.errors import TensorError
from aiopipe.graph import Graph, Kind
from graphs import Draft, FakeOp

LEAF = ((8,), "int8", 8)


def with_state(new: str, *, outputs: tuple[str, ...] = ("y",), n_new: int = 1) -> Graph:
    """A graph with one leaf of state; `new` says what takes its place."""
    b = Draft("cached")
    x, w, cache = b.x(), b.w("w", 8), b.state("cache", *LEAF)
    known = {"x": x, "w": w, "cache": cache, "y": b.op("update", cache, x), "z": b.op("mul", x)}
    known["wide"] = b.op("mul", x, nbytes=16)
    known["other type"] = b.node("cast", [x], [((8,), "uint8", 8)], fn=FakeOp("cast"))[0]
    return b.build([known[name] for name in outputs], new_state=[known[new]] * n_new)


def test_what_may_take_the_place_of_state() -> None:
    for new, outputs in (("y", ("z",)), ("z", ("y",)), ("cache", ("y",))):
        graph = with_state(new, outputs=outputs)
        assert [t.kind for t in graph.state] == [Kind.STATE]
        assert graph.kept == graph.outputs + tuple(t for t in graph.new_state if t.kind is Kind.NODE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"new": "y", "n_new": 2},
            "graph 'cached' got 2 new values for a state of 1 leaves: give one for each, the leaf itself where it "
            "does not change",
        ),
        ({"new": "y", "n_new": 0}, "graph 'cached' got 0 new values for a state of 1 leaves"),
        ({"new": "wide"}, "'mul#2' int8[16] cannot replace state 'cache' int8[8]: it has another type"),
        ({"new": "other type"}, "'cast#3' uint8[8] cannot replace state 'cache' int8[8]: it has another type"),
        ({"new": "x"}, "'x' int8[8] cannot replace state 'cache' int8[8]: it has to be made by a node"),
        ({"new": "w"}, "'w' int8[8] cannot replace state 'cache' int8[8]: it has to be made by a node"),
        ({"new": "y", "outputs": ("y",)}, "'update#0' int8[8] cannot replace state 'cache' int8[8]: it has to be made"),
        ({"new": "cache", "outputs": ("cache",)}, "'cache' int8[8] cannot replace state 'cache' int8[8]"),
    ],
)
def test_what_may_not(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TensorError, match=f"^{re.escape(message)}"):
        with_state(**arguments)


def test_a_value_takes_the_place_of_one_leaf_alone() -> None:
    b = Draft()
    one, two = b.state("one", *LEAF), b.state("two", *LEAF)
    made = b.op("update", one, two)
    with pytest.raises(TensorError, match=r"'update#0' .* cannot replace state 'two' .* add a node that copies it$"):
        b.build([], new_state=[made, made])


def test_inputs_are_counted() -> None:
    b = Draft("sum")
    graph = b.build([b.op("add", b.x("x"), b.x("y"))])
    assert graph.flatten_inputs((1, 2)) == (1, 2)
    with pytest.raises(TensorError, match=r"^graph 'sum' got 1 inputs, expected 2$"):
        graph.flatten_inputs((1,))


def test_outputs_take_the_first_of_their_names() -> None:
    b = Draft()
    x = b.x()
    y = b.op("mul", x)
    graph = b.build([x, y, y], output_names=["passed on", "first", "second"])
    assert [t.name for t in graph.outputs] == ["x", "first", "first"]
    assert graph.tensors[y] is graph.outputs[1]


def test_one_output_is_the_result_and_several_are_a_tuple() -> None:
    b = Draft()
    y = b.op("mul", b.x())
    assert b.build([y]).unflatten_outputs([7]) == 7
    assert b.build([y, y]).unflatten_outputs([7, 8]) == (7, 8)
    assert b.build([]).unflatten_outputs([]) == ()


def test_what_a_node_moves_is_what_it_reads_and_makes_unless_told() -> None:
    b = Draft()
    x, y = b.x("x", 8), b.x("y", 16)
    b.node("mul", [x, y], [((4,), "int8", 4)] * 2, fn=FakeOp("mul"))
    b.node("mul", [x, y], [((4,), "int8", 4)], fn=FakeOp("mul"), nbytes=7)
    assert [node.nbytes for node in b.build([]).nodes] == [8 + 16 + 4 + 4, 7]


def test_views_of_one_operand_without_effects_know_their_source() -> None:
    b = Draft()
    x = b.x()
    view, effect, two = b.op("reshape", x), b.op("reshape", x, effect=True), b.op("reshape", x, x)
    graph = b.build([view])
    assert [graph.tensors[t].view_src for t in (view, effect, two)] == [x, None, None]
    assert [node.is_view for node in graph.nodes] == [True, False, False]
