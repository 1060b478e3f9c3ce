"""Graphs for simulated devices that hypothesis draws, and what they compute, failures included."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from aiopipe.devices.sim import HostOp
from aiopipe.graph import Graph
from aiopipe.graph_builder import GraphBuilder
from simgraphs import SPEC, array

POISON: Any = type("_Poison", (), {"__repr__": lambda self: "<poison>"})()
"""What an op that fails makes, and every op that reads it."""

bad: set[int] = set()
"""First elements of inputs for which a node that can fail does."""


class NodeSpec(NamedTuple):
    """A node: which tensors it reads (modulo what there is), how many it makes, what it costs, whether it can fail."""

    reads: tuple[int, ...]
    n_outputs: int
    cost_s: float
    can_fail: bool


class GraphSpec(NamedTuple):
    """A graph as numbers. `new` says for each leaf which tensor takes its place, modulo those that may."""

    n_inputs: int
    n_weights: int
    n_leaves: int
    nodes: tuple[NodeSpec, ...]
    outputs: tuple[int, ...]
    new: tuple[int, ...]
    cut: tuple[int, ...]


NODES = st.builds(
    NodeSpec,
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.sampled_from([False, False, False, True]),
)


@st.composite
def graph_specs(draw: st.DrawFn, *, n_leaves: int | None = None, max_nodes: int = 12) -> GraphSpec:
    nodes = draw(st.lists(NODES, min_size=1, max_size=max_nodes))
    leaves = draw(st.integers(0, 3)) if n_leaves is None else n_leaves
    numbers = st.integers(0, 40)
    return GraphSpec(
        draw(st.integers(1, 3)),
        draw(st.integers(0, 2)),
        leaves,
        tuple(nodes),
        tuple(draw(st.lists(numbers, min_size=1, max_size=3))),
        tuple(draw(st.lists(numbers, min_size=leaves, max_size=leaves))),
        tuple(draw(st.lists(st.integers(0, 3), min_size=len(nodes), max_size=len(nodes)))),
    )


def random_spec(rng: random.Random, *, n_leaves: int, n_nodes: int, fails: bool = True) -> GraphSpec:
    """The same without hypothesis: a graph that a seed decides."""

    def numbers(k: int) -> tuple[int, ...]:
        return tuple(rng.randint(0, 40) for _ in range(k))

    nodes = tuple(
        NodeSpec(
            numbers(rng.randint(0, 3)),
            rng.choice((1, 1, 1, 2)),
            rng.choice((0.0, 0.5, 1.0, 3.0)),
            fails and rng.random() < 0.25,
        )
        for _ in range(n_nodes)
    )
    outputs, new, cut = numbers(rng.randint(1, 3)), numbers(n_leaves), numbers(n_nodes)
    return GraphSpec(rng.randint(1, 3), rng.randint(0, 2), n_leaves, nodes, outputs, new, cut)


def _mix(i: int, n_outputs: int, can_fail: bool, *xs: Any) -> Any:
    if can_fail and int(xs[0][0]) in bad:
        raise ArithmeticError("poisoned")
    mixed = functools.reduce(lambda a, c: a * 5 + c, xs, array(i))
    return tuple(mixed * (1 + 2 * k) for k in range(n_outputs))


def build(spec: GraphSpec) -> Graph:
    """The graph: a node that can fail reads the first input, whose first element says whether it does."""
    b = GraphBuilder("drawn")
    tensors = [b.input(f"x{i}", *SPEC) for i in range(spec.n_inputs)]
    tensors += [b.weight(f"w{i}", *SPEC, source=array(7 + i)) for i in range(spec.n_weights)]
    leaves = [b.state(f"s{i}", *SPEC) for i in range(spec.n_leaves)]
    tensors += leaves
    made: list[int] = []
    for i, node in enumerate(spec.nodes):
        reads = [tensors[r % len(tensors)] for r in node.reads]
        fn = HostOp(functools.partial(_mix, i, node.n_outputs, node.can_fail), cost_s=node.cost_s)
        inputs = [tensors[0], *reads] if node.can_fail else reads
        made += b.node("mix", inputs, [SPEC] * node.n_outputs, fn=fn)
        tensors = [*tensors, *made[-node.n_outputs :]]
    new: list[int] = []
    for leaf, number in zip(leaves, spec.new, strict=True):
        free = [leaf, *(t for t in made if t not in new)]
        new.append(free[number % len(free)])
    # Neither the memory of a leaf nor that of its next value may be a result's, too.
    free = [t for t in tensors if t not in new and t not in leaves]
    return b.build([free[o % len(free)] for o in spec.outputs], new_state=new)


def expected(graph: Graph, inputs: Sequence[Any], state: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
    """Outputs and the new state, node after node; `POISON` where a failure leaves nothing."""
    values: dict[int, Any] = {t.id: np.array(v) for t, v in zip(graph.inputs, inputs, strict=True)}
    values.update((t.id, t.source) for t in graph.weights)
    values.update((t.id, v) for t, v in zip(graph.state, state, strict=True))
    for node in graph.nodes:
        operands = [values[t] for t in node.inputs]
        try:
            made = [POISON] * len(node.outputs) if any(v is POISON for v in operands) else node.fn(*operands)
        except ArithmeticError:
            made = [POISON] * len(node.outputs)
        values.update(zip(node.outputs, made, strict=True))
    return [values[t.id] for t in graph.outputs], [values[t.id] for t in graph.new_state]


def same(got: Sequence[Any], want: Sequence[Any]) -> bool:
    """Equal to the last bit, and nothing of it poisoned."""
    return len(got) == len(want) and all(
        b is not POISON and np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(got, want, strict=True)
    )
