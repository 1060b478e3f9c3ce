"""Splitting: runs of nodes on one backend, and what travels between them.

Pass 5 of ggml-backend.c (`ggml_backend_sched_split_graph`) cuts its node list wherever the backend
changes. Here three passes do it, each a walk over the graph, and none touches the graph:

1. *demand*: backwards, which value is wanted on which backend. What nobody wants is dropped; a
   cheap node is repeated where its operands are fewer bytes than its result.
2. *order* (`order.py`): in which order, so that the backend changes seldom.
3. *build*: the splits, their inputs, copies and outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..graph import Graph, Kind, Node
from .assign import Assignment
from .order import Runs, in_rounds, make_runs

__all__ = ["HOST", "Copy", "Split", "last_uses", "split_graph"]

HOST = -1
"""`Copy.src` of a graph input: the host's staging buffer."""


class Copy(NamedTuple):
    """A value that a split brings to its backend, once per evaluation.

    Weights are never among them: one that is read where `Assignment.leaf_backends` does not
    have it is brought there once, when the plan is made.

    Attributes:
        tensor: id of the value.
        src: backend that makes it, or `HOST` for a graph input.
        nbytes: its size.
    """

    tensor: int
    src: int
    nbytes: int


class Split(NamedTuple):
    """A run of nodes on one backend, compiled as one executable.

    A tuple, as there may be as many as nodes: a frozen dataclass takes four times as long to make.

    Attributes:
        index: position among the splits; each backend runs its splits in this order.
        backend: index of the backend.
        nodes: indices of the nodes, in execution order, which is ascending.
        inputs: ids of the tensors that it reads from outside (weights, graph inputs, state, other
            splits' outputs), without duplicates: state that is replaced here first, the rest in order of
            first use.
        outputs: ids of the tensors made here that another split or the caller needs: the next values of
            that state in the same order, so that each takes over the memory of its own, then the rest,
            ascending. Empty only where nothing but an effect is wanted.
        brings: those inputs that it brings to its backend, being the first there to read them: the fields of
            a `Copy` each. Plain tuples, for what holds nothing but numbers the garbage collector need not
            look at again, and there may be as many as nodes.
        depends: indices of the earlier splits whose values or copies it uses, ascending.
        recomputed: indices of the nodes that are repeated here instead of being received.
    """

    index: int  # type: ignore[assignment]  # in place of tuple's method
    backend: int
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    brings: tuple[tuple[int, int, int], ...]
    depends: tuple[int, ...]
    recomputed: tuple[int, ...]

    @property
    def copies(self) -> tuple[Copy, ...]:
        """What it brings, by name."""
        return tuple(map(Copy._make, self.brings))


def split_graph(graph: Graph, assignment: Assignment) -> tuple[Split, ...]:
    """Cut a graph into splits.

    An output of the graph is made on its node's own backend. A value is copied at most once to each
    backend, from the backend that its node is assigned to; graph inputs come from the host. There are
    never more splits than cutting the nodes in their own order would make, but for those that are
    parted so that two backends can work at the same time.

    Args:
        graph: what to cut; not changed.
        assignment: from `assign`, for the same graph.

    Returns:
        The splits in an order in which they can run. There is no limit on splits, inputs or backends.
    """
    made_by = graph.producers()
    constant = _constant(graph, made_by)
    wanted = _wanted(graph, assignment, made_by, constant)
    runs = make_runs(graph, assignment, made_by, wanted.at_home, wanted.repeated)
    results = [(t.id, assignment.node_backend[made_by[t.id]]) for t in graph.kept if t.kind is Kind.NODE]
    homes = {t.id: assignment.leaf_backends[t.id][0] for t in graph.state}
    return _build(graph, runs, in_rounds(graph, runs), results, homes)


def last_uses(splits: Sequence[Split], stride: int) -> dict[int, int]:
    """For each value that a split reads, on the backend where it reads it: the last split that does.

    A value on a backend is one number, ``tensor * stride + backend``, for a dict of numbers costs the
    garbage collector nothing, where one of pairs would be traversed again and again.

    Args:
        splits: in launch order.
        stride: more than the number of backends, for `HOST`, where inputs are copied from, is -1.
    """
    last: dict[int, int] = {}
    for split in splits:
        index, here = split.index, split.backend
        for t in split.inputs:
            last[t * stride + here] = index
        for t, src, _ in split.brings:
            last[t * stride + src] = index
    return last


def _constant(graph: Graph, made_by: Sequence[int]) -> bytearray:
    """For each node whether it reads nothing but weights (or iotas), by itself or through others like it."""
    constant = bytearray(len(graph.nodes))
    tensors, weight = graph.tensors, Kind.WEIGHT
    for node in graph.nodes:
        for t in node.inputs:
            source = made_by[t]
            if not (constant[source] if source >= 0 else tensors[t].kind is weight):
                break
        else:
            # What reads nothing at all may be made once for all readers, unless it costs nothing.
            constant[node.index] = bool(node.inputs) or node.is_cheap
    return constant


# -- demand: what is wanted where ----------------------------------------------------------------


@dataclass(slots=True)
class _Wanted:
    """Where nodes run: `at_home[i]` is 0 (not at home), 1 (for home alone) or 2, 3 (its result leaves home, too).

    Sets of backends are numbers, one bit for each, to spare the garbage collector.
    """

    at_home: bytearray
    abroad: dict[int, int] = field(default_factory=dict)  # node -> other backends where its result is read
    repeated: dict[int, list[int]] = field(default_factory=dict)  # node -> those where it runs again
    candidates: list[int] = field(default_factory=list)  # nodes of `abroad` that may be repeated


def _wanted(graph: Graph, assignment: Assignment, made_by: Sequence[int], constant: bytearray) -> _Wanted:
    """Decide where nodes run: first what could be wanted, then what repeating costs, then what is wanted."""
    could = _demand(graph, assignment.node_backend, made_by, constant, None)
    candidates = sorted(could.candidates)
    if not candidates:
        return could
    worth = _worth_repeating(graph, assignment, made_by, constant, could, candidates)
    return _demand(graph, assignment.node_backend, made_by, constant, worth)


def _repeatable(node: Node, constant: bytearray) -> bool:
    """Whether a consumer may run the node again: it costs little, or its operands can be there for good."""
    return node.is_cheap or (constant[node.index] == 1 and not node.has_effect)


def _demand(
    graph: Graph,
    home: Sequence[int],
    made_by: Sequence[int],
    constant: bytearray,
    worth: set[tuple[int, int]] | None,
) -> _Wanted:
    """Walk backwards from the outputs and the effects.

    Args:
        graph: the graph.
        home: backend of each node.
        made_by: node of each tensor, or -1.
        constant: for each node whether it reads nothing but weights.
        worth: the (node, backend) that are repeated rather than received. Without it, what could
            be wanted: the operands of a cheap node both at home and wherever its result is read.
    """
    wanted = _Wanted(bytearray(len(graph.nodes)))
    at_home, abroad = wanted.at_home, wanted.abroad
    for tensor in graph.kept:
        if made_by[tensor.id] >= 0:
            at_home[made_by[tensor.id]] = 2
    for node in reversed(graph.nodes):
        i = node.index
        here = home[i]
        reads = [here]
        away = abroad.get(i)
        if away is not None:
            again = []
            if _repeatable(node, constant):
                wanted.candidates.append(i)
                again = [b for b in _bits(away) if worth is None or (i, b) in worth]
                if worth is not None:
                    wanted.repeated[i] = again[:]
            if len(again) < away.bit_count():
                at_home[i] |= 2
            if at_home[i] or worth is None:
                again.append(here)
            reads = again
        elif not at_home[i]:
            if not node.has_effect:
                continue
            at_home[i] = 1
        for t in node.inputs:
            source = made_by[t]
            if source >= 0:
                at = home[source]
                for b in reads:
                    if b == at:
                        at_home[source] |= 1
                    else:
                        abroad[source] = abroad.get(source, 0) | 1 << b
    return wanted


def _bits(mask: int) -> list[int]:
    """The positions of the ones in a number, ascending."""
    found = []
    while mask:
        rest = mask & (mask - 1)
        found.append((mask ^ rest).bit_length() - 1)
        mask = rest
    return found


def _worth_repeating(
    graph: Graph,
    assignment: Assignment,
    made_by: Sequence[int],
    constant: bytearray,
    could: _Wanted,
    candidates: Sequence[int],
) -> set[tuple[int, int]]:
    """The (node, backend) whose operands, as far as they are not there yet, are fewer bytes than their result.

    What is computed from weights alone is repeated also at the same number of bytes: a weight is
    brought there once, the result would be in every evaluation.

    In the order of the graph, so that a chain (iota, convert, broadcast) is weighed as a whole.
    """
    nodes, tensors, home = graph.nodes, graph.tensors, assignment.node_backend
    operands = {t for i in candidates for t in nodes[i].inputs}
    there: set[tuple[int, int]] = set()  # read there in any case, by a node that is not cheap
    for node in nodes:
        i = node.index
        if not operands.isdisjoint(node.inputs) and not node.is_cheap and (could.at_home[i] or i in could.abroad):
            there.update((t, home[i]) for t in node.inputs)
    costs: dict[tuple[int, int], int] = {}
    worth: set[tuple[int, int]] = set()
    for i in candidates:
        node = nodes[i]
        result = sum(tensors[t].nbytes for t in node.outputs)
        for b in _bits(could.abroad[i]):
            cost = 0
            for t in set(node.inputs):
                source = made_by[t]
                if (t, b) in there:
                    continue
                if source >= 0:
                    received = tensors[t].nbytes
                    cost += 0 if home[source] == b else min(received, costs.get((source, b), received))
                elif tensors[t].kind is Kind.INPUT or b not in assignment.leaf_backends[t]:
                    cost += tensors[t].nbytes
            costs[i, b] = cost
            if cost < result or (constant[i] and cost == result):
                worth.add((i, b))
    return worth


# -- build -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Flow:
    """What goes in and out of the splits, as `Split` has it: each list has an entry for each split.

    A tensor on a backend is one number, ``tensor * stride + backend``.
    """

    stride: int
    handed_on: set[int]  # tensors on backends that leave the split that makes them
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    brings: list[tuple[tuple[int, int, int], ...]] = field(default_factory=list)
    depends: list[tuple[int, ...]] = field(default_factory=list)


def _build(
    graph: Graph,
    runs: Runs,
    rounds: Sequence[tuple[int, ...]],
    results: Iterable[tuple[int, int]],
    homes: Mapping[int, int],
) -> tuple[Split, ...]:
    """Make the splits. `results` are the (tensor, backend) that are kept, `homes` the backends of the state."""
    stride = max(runs.backend, default=0) + 1
    flow = _Flow(stride, {t * stride + backend for t, backend in results})
    _follow(graph, runs, rounds, flow, homes)
    nodes, handed_on, run_nodes = graph.nodes, flow.handed_on, runs.node
    renumbered = run_nodes != list(range(len(run_nodes)))  # else runs are nodes, and one tuple does for both
    repeats = 1 in runs.again
    splits: list[Split] = []
    for members, inputs, brings, depends in zip(rounds, flow.inputs, flow.brings, flow.depends, strict=True):
        backend = runs.backend[members[0]]
        here = tuple([run_nodes[run] for run in members]) if renumbered else members
        outputs = []
        for i in here:
            for t in nodes[i].outputs:
                if t * stride + backend in handed_on:
                    outputs.append(t)
        outputs.sort()
        if homes:
            inputs, outputs = _state_first(graph, inputs, outputs)
        again = tuple([run_nodes[run] for run in members if runs.again[run]]) if repeats else ()
        splits.append(Split(len(splits), backend, here, inputs, tuple(outputs), brings, depends, again))
    return tuple(splits)


def _state_first(graph: Graph, entering: Sequence[int], leaving: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
    """State that a split replaces, in the same order among its inputs and its outputs, before the rest.

    JAX matches donated operands with results of their type one after the other.
    """
    reads, makes = set(entering), set(leaving)
    old = {
        leaf.id: new.id
        for leaf, new in zip(graph.state, graph.new_state, strict=True)
        if leaf.id in reads and new.id in makes
    }
    made = set(old.values())
    return (*old, *(t for t in entering if t not in old)), [*old.values(), *(t for t in leaving if t not in made)]


def _follow(
    graph: Graph, runs: Runs, rounds: Sequence[tuple[int, ...]], flow: _Flow, homes: Mapping[int, int]
) -> None:
    """Who reads, brings and hands on what."""
    tensors, nodes, stride, handed_on = graph.tensors, graph.nodes, flow.stride, flow.handed_on
    run_nodes, backends, sources, begin = runs.node, runs.backend, runs.sources, runs.begin
    split_of = [-1] * (len(run_nodes) + 1)  # the last entry answers for -1, a leaf
    for index, members in enumerate(rounds):
        for run in members:
            split_of[run] = index
    brought: dict[int, int] = {}  # tensor on a backend -> split that brings it there
    listed = [-1] * len(tensors)  # the newest split that has the tensor among its inputs
    followed = [-1] * len(rounds)  # the newest split that has the split among those that it depends on
    weight = Kind.WEIGHT  # looked up once: an enum's member takes ten times as long as a name
    for index, members in enumerate(rounds):
        backend = backends[members[0]]
        inputs: list[int] = []
        brings: list[tuple[int, int, int]] = []
        depends: list[int] = []
        for run in members:
            k = begin[run]
            for t in nodes[run_nodes[run]].inputs:
                source = sources[k]
                k += 1
                before = split_of[source]
                if before == index or listed[t] == index:
                    continue
                listed[t] = index
                inputs.append(t)
                if source >= 0:
                    src = backends[source]
                    handed_on.add(t * stride + src)
                elif tensors[t].kind is weight:
                    continue
                else:
                    src = homes.get(t, HOST)
                if src != backend:
                    first = brought.setdefault(t * stride + backend, index)
                    if first == index:
                        brings.append((t, src, tensors[t].nbytes))
                    else:
                        before = first
                if before >= 0 and followed[before] != index:
                    followed[before] = index
                    depends.append(before)
        depends.sort()
        flow.inputs.append(tuple(inputs))
        flow.brings.append(tuple(brings))
        flow.depends.append(tuple(depends))
