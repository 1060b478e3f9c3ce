"""Splitting: runs of nodes on one backend, and what travels between them.

Pass 5 of ggml-backend.c (`ggml_backend_sched_split_graph`) cuts its node list wherever the backend
changes. Here three passes do it, each a walk over the graph, and none touches the graph:

1. *demand*: backwards, which value is wanted on which backend. What nobody wants is dropped; a
   cheap node is repeated where its operands are fewer bytes than its result.
2. *schedule*: in which order, so that the backend changes seldom.
3. *build*: the splits, their inputs, copies and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..graph import Graph, Kind
from .assign import Assignment

__all__ = ["HOST", "Copy", "Split", "split_graph"]

HOST = -1
"""`Copy.src` of a graph input: the host's staging buffer."""


@dataclass(frozen=True, slots=True)
class Copy:
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


@dataclass(frozen=True, slots=True)
class Split:
    """A run of nodes on one backend, compiled as one executable.

    Attributes:
        index: position among the splits; each backend runs its splits in this order.
        backend: index of the backend.
        nodes: indices of the nodes, in execution order, which is ascending.
        inputs: ids of the tensors that it reads from outside (weights, graph inputs, other
            splits' outputs), in order of first use, without duplicates.
        outputs: ids of the tensors made here that another split or the caller needs, ascending;
            empty only where nothing but an effect is wanted.
        copies: those inputs that it brings to its backend, being the first there to read them.
        depends: indices of the earlier splits whose values or copies it uses, ascending.
        recomputed: indices of the nodes that are repeated here instead of being received.
    """

    index: int
    backend: int
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    copies: tuple[Copy, ...]
    depends: tuple[int, ...]
    recomputed: tuple[int, ...]


def split_graph(graph: Graph, assignment: Assignment) -> tuple[Split, ...]:
    """Cut a graph into splits.

    An output of the graph is made on its node's own backend. A value is copied at most once to each
    backend, from the backend that its node is assigned to; graph inputs come from the host. There are
    never more splits than cutting the nodes in their own order would make.

    Args:
        graph: what to cut; not changed.
        assignment: from `assign`, for the same graph.

    Returns:
        The splits in an order in which they can run. There is no limit on splits, inputs or backends.
    """
    made_by = graph.producers()
    runs = _runs(graph, assignment, made_by, _wanted(graph, assignment, made_by))
    return _build(graph, runs, _schedule(runs))


# -- demand: what is wanted where ----------------------------------------------------------------


@dataclass(slots=True)
class _Wanted:
    """Where nodes run: `at_home[i]` is 0 (not at home), 1 (for home alone) or 2, 3 (its result leaves home, too)."""

    at_home: bytearray
    abroad: dict[int, set[int]] = field(default_factory=dict)  # node -> other backends where its result is read
    repeated: dict[int, list[int]] = field(default_factory=dict)  # node -> those where it runs again


def _wanted(graph: Graph, assignment: Assignment, made_by: Sequence[int]) -> _Wanted:
    """Decide where nodes run: first what could be wanted, then what repeating costs, then what is wanted."""
    could = _demand(graph, assignment.node_backend, made_by, None)
    candidates = [i for i in sorted(could.abroad) if graph.nodes[i].is_cheap]
    if not candidates:
        return could
    worth = _worth_repeating(graph, assignment, made_by, could, candidates)
    return _demand(graph, assignment.node_backend, made_by, worth)


def _demand(
    graph: Graph, home: Sequence[int], made_by: Sequence[int], worth: set[tuple[int, int]] | None
) -> _Wanted:
    """Walk backwards from the outputs and the effects.

    Args:
        graph: the graph.
        home: backend of each node.
        made_by: node of each tensor, or -1.
        worth: the (node, backend) that are repeated rather than received. Without it, what could
            be wanted: the operands of a cheap node both at home and wherever its result is read.
    """
    wanted = _Wanted(bytearray(len(graph.nodes)))
    at_home, abroad = wanted.at_home, wanted.abroad
    for tensor in graph.outputs:
        if made_by[tensor.id] >= 0:
            at_home[made_by[tensor.id]] = 2
    for node in reversed(graph.nodes):
        i = node.index
        here = home[i]
        reads = [here]
        if i in abroad:
            again = []
            if node.is_cheap:
                again = [b for b in abroad[i] if worth is None or (i, b) in worth]
                if again and worth is not None:
                    wanted.repeated[i] = sorted(again)
            if len(again) < len(abroad[i]):
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
                for b in reads:
                    if b == home[source]:
                        at_home[source] |= 1
                    else:
                        abroad.setdefault(source, set()).add(b)
    return wanted


def _worth_repeating(
    graph: Graph, assignment: Assignment, made_by: Sequence[int], could: _Wanted, candidates: Sequence[int]
) -> set[tuple[int, int]]:
    """The cheap (node, backend) whose operands, as far as they are not there yet, are fewer bytes than their result.

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
        for b in could.abroad[i]:
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
            if cost < result:
                worth.add((i, b))
    return worth


# -- schedule: in which order ----------------------------------------------------------------------


@dataclass(slots=True)
class _Runs:
    """Each (node, backend) that is computed: a run. Ascending by node; flat, to spare the garbage collector."""

    node: list[int] = field(default_factory=list)
    backend: list[int] = field(default_factory=list)
    again: bytearray = field(default_factory=bytearray)  # away from home: a repeat
    lazy: bytearray = field(default_factory=bytearray)  # belongs into the first split that reads it
    sources: list[int] = field(default_factory=list)  # runs that make the operands; -1: a leaf
    begin: list[int] = field(default_factory=lambda: [0])  # run r's part of `sources` is begin[r]:begin[r + 1]


def _runs(graph: Graph, assignment: Assignment, made_by: Sequence[int], wanted: _Wanted) -> _Runs:
    """Number the runs and link them.

    A run is lazy where it would otherwise be drawn into the first split of its backend, long before its
    only readers, and its result would have to be kept: values computed from weights or from nothing,
    and cheap ones that are no smaller than their operands.
    """
    runs = _Runs()
    tensors, home, sources, begin = graph.tensors, assignment.node_backend, runs.sources, runs.begin
    constant = bytearray(tensor.kind is Kind.WEIGHT for tensor in tensors)
    at_home = [-1] * (len(graph.nodes) + 1)  # node -> its run at home; the last entry answers for -1, a leaf
    away: dict[int, int] = {}  # node and backend -> a run elsewhere
    newest_effect: dict[int, int] = {}
    stride = max(home, default=0) + 1

    def add(node: int, backend: int, again: bool, lazy: bool) -> int:
        runs.node.append(node)
        runs.backend.append(backend)
        runs.again.append(again)
        runs.lazy.append(lazy)
        begin.append(len(sources))
        return len(runs.node) - 1

    for node in graph.nodes:
        i, inputs = node.index, node.inputs
        light = not node.has_effect
        for t in inputs:
            if not constant[t]:
                light = False
                break
        if light:
            for t in node.outputs:
                constant[t] = 1
        if wanted.at_home[i]:
            here = home[i]
            for t in inputs:
                source = made_by[t]
                if home[source] == here or source < 0:
                    sources.append(at_home[source])
                else:
                    sources.append(away.get(source * stride + here, at_home[source]))
            if node.has_effect:  # effects keep their order
                sources.append(newest_effect.get(here, -1))
                newest_effect[here] = len(runs.node)
            alone = wanted.at_home[i] == 1
            if alone and not light and node.is_cheap:
                read = sum([tensors[t].nbytes for t in inputs if made_by[t] >= 0])
                light = read <= sum([tensors[t].nbytes for t in node.outputs])
            at_home[i] = add(i, here, False, alone and light)
        for b in wanted.repeated.get(i, ()):
            sources.extend([away.get(made_by[t] * stride + b, at_home[made_by[t]]) for t in inputs])
            away[i * stride + b] = add(i, b, True, True)
    return runs


def _schedule(runs: _Runs) -> list[list[int]]:
    """Group the runs into splits: stay on a backend while anything there can run.

    Then go on with the first run, in the graph's order, that is left. It can always run, and its round
    runs whatever a split made by following the graph's order would: so there are never more rounds
    than such splits. A run that cannot go yet waits on one of the runs that it needs, and its
    iterator remembers how far it has looked: each edge is looked at once.
    """
    n, lazy, backends, sources, begin = len(runs.node), runs.lazy, runs.backend, runs.sources, runs.begin
    done = bytearray(n) + b"\x01"  # the last entry answers for -1, a leaf
    ready: dict[int, list[int]] = {}
    for run, backend in enumerate(backends):
        ready.setdefault(backend, []).append(run)
    waiting: dict[int, list[int]] = {}
    looked = begin[:]
    rounds: list[list[int]] = []
    for first in range(n):
        if done[first] or lazy[first]:
            continue
        backend = backends[first]
        queue, ready[backend] = ready[backend], []
        members = []
        for run in queue:  # grows on the way
            for k in range(looked[run], begin[run + 1]):
                if not done[sources[k]]:
                    looked[run] = k
                    waiting.setdefault(sources[k], []).append(run)
                    break
            else:
                done[run] = 1
                if not lazy[run]:
                    members.append(run)
                if run in waiting:
                    for woken in waiting.pop(run):
                        (queue if backends[woken] == backend else ready[backends[woken]]).append(woken)
        rounds.append(members)
    _pull_lazy(runs, rounds)
    for members in rounds:
        members.sort()
    return rounds


def _pull_lazy(runs: _Runs, rounds: list[list[int]]) -> None:
    """Put each lazy run into the first round that reads it."""
    if 1 not in runs.lazy:
        return
    left = runs.lazy + b"\x00"
    for members in rounds:
        for run in members:  # grows on the way
            for source in runs.sources[runs.begin[run] : runs.begin[run + 1]]:
                if left[source]:
                    left[source] = 0
                    members.append(source)


# -- build -----------------------------------------------------------------------------------------


def _build(graph: Graph, runs: _Runs, rounds: list[list[int]]) -> tuple[Split, ...]:
    """Make the splits: who reads, brings and hands on what."""
    tensors, nodes, backends = graph.tensors, graph.nodes, runs.backend
    split_of = [-1] * (len(runs.node) + 1)
    for index, members in enumerate(rounds):
        for run in members:
            split_of[run] = index
    stride = max(backends, default=0) + 1
    handed_on = _results(graph, runs)  # runs' tensors that leave their split: tensor and backend
    brought: dict[int, int] = {}  # tensor and backend -> split that brings it there
    listed = [-1] * len(tensors)  # the newest split that has the tensor among its inputs
    drafts: list[tuple[tuple[int, ...], tuple[Copy, ...], tuple[int, ...]]] = []
    for index, members in enumerate(rounds):
        backend = backends[members[0]]
        inputs: list[int] = []
        copies: list[Copy] = []
        depends: set[int] = set()
        for run in members:
            k = runs.begin[run]
            for t in nodes[runs.node[run]].inputs:
                source = runs.sources[k]
                k += 1
                if split_of[source] == index or listed[t] == index:
                    continue
                listed[t] = index
                inputs.append(t)
                if source < 0 and tensors[t].kind is Kind.WEIGHT:
                    continue
                if source < 0 or backends[source] != backend:
                    place = t * stride + backend
                    if place in brought:
                        depends.add(brought[place])
                        continue
                    brought[place] = index
                    copies.append(Copy(t, HOST if source < 0 else backends[source], tensors[t].nbytes))
                if source >= 0:
                    depends.add(split_of[source])
                    handed_on.add(t * stride + backends[source])
        drafts.append((tuple(inputs), tuple(copies), tuple(sorted(depends))))
    splits = []
    for index, (members, (entering, copied, before)) in enumerate(zip(rounds, drafts, strict=True)):
        backend = backends[members[0]]
        here = [runs.node[run] for run in members]
        leaving = [t for i in here for t in nodes[i].outputs if t * stride + backend in handed_on]
        again = [runs.node[run] for run in members if runs.again[run]]
        splits.append(
            Split(index, backend, tuple(here), entering, tuple(sorted(leaving)), copied, before, tuple(again))
        )
    return tuple(splits)


def _results(graph: Graph, runs: _Runs) -> set[int]:
    """The graph's outputs, as tensor and backend: they leave the split that makes them at home."""
    stride = max(runs.backend, default=0) + 1
    made = {tensor.id for tensor in graph.outputs if tensor.kind is Kind.NODE}
    return {
        t * stride + backend
        for i, backend, again in zip(runs.node, runs.backend, runs.again, strict=True)
        if not again
        for t in graph.nodes[i].outputs
        if t in made
    }
