"""The order of a graph's nodes: few changes of backend, but nothing waits that could run.

A greedy list schedule makes rounds, each a run of nodes on one backend. A round is parted in two
where its first part could work while another backend still makes what its second part needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..graph import Graph, Node
from .assign import Assignment

__all__ = ["Runs", "in_rounds", "make_runs"]

WORTH_PARTING_S = 2e-5
"""A split more costs a launch. It is worth it where this much work (estimated) can overlap with as much."""


@dataclass(slots=True)
class Runs:
    """Each (node, backend) that is computed: a run. Ascending by node; flat, to spare the garbage collector."""

    node: list[int] = field(default_factory=list)
    backend: list[int] = field(default_factory=list)
    again: bytearray = field(default_factory=bytearray)  # away from home: a repeat
    lazy: bytearray = field(default_factory=bytearray)  # belongs into the first split that reads it
    sources: list[int] = field(default_factory=list)  # runs that make the operands; -1: a leaf
    begin: list[int] = field(default_factory=lambda: [0])  # run r's part of `sources` is begin[r]:begin[r + 1]


def make_runs(
    graph: Graph,
    assignment: Assignment,
    made_by: Sequence[int],
    wanted_at_home: bytearray,
    repeated: Mapping[int, Sequence[int]],
) -> Runs:
    """Number the runs and link them.

    A run is lazy where it would otherwise be drawn into the first split of its backend, long before its
    only readers, and its result would have to be kept: values computed from weights or from nothing,
    and cheap ones that are no smaller than their operands.
    """
    runs = Runs()
    tensors, home, sources, begin = graph.tensors, assignment.node_backend, runs.sources, runs.begin
    constant = bytearray(len(tensors))
    for tensor in graph.weights:
        constant[tensor.id] = 1
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
        if wanted_at_home[i]:
            here = home[i]
            for t in inputs:
                source = made_by[t]
                sources.append(away.get(source * stride + here, at_home[source]))
            if node.has_effect:  # effects keep their order
                sources.append(newest_effect.get(here, -1))
                newest_effect[here] = len(runs.node)
            alone = wanted_at_home[i] == 1
            if alone and not light and node.is_cheap:
                read = sum([tensors[t].nbytes for t in inputs if made_by[t] >= 0])
                light = read <= sum([tensors[t].nbytes for t in node.outputs])
            at_home[i] = add(i, here, False, alone and light)
        for b in repeated.get(i, ()):
            sources.extend([away.get(made_by[t] * stride + b, at_home[made_by[t]]) for t in inputs])
            away[i * stride + b] = add(i, b, True, True)
    return runs


def in_rounds(graph: Graph, runs: Runs) -> list[tuple[int, ...]]:
    """The runs of each split, ascending, in the order of the splits.

    Tuples, not lists: there may be as many as nodes, and the garbage collector looks at a tuple of
    numbers but once.
    """
    rounds = _part(graph, runs, _schedule(runs))
    return _with_lazy(runs, rounds) if 1 in runs.lazy else rounds


def _schedule(runs: Runs) -> list[tuple[int, ...]]:
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
    waiting = [-1] * n  # run -> the newest that waits on it
    behind = [-1] * n  # run that waits -> the one that came before it, on the same
    looked = begin[:]
    rounds: list[tuple[int, ...]] = []
    for first in range(n):
        if done[first] or lazy[first]:
            continue
        backend = backends[first]
        queue, ready[backend] = ready[backend], []
        members = []
        for run in queue:  # grows on the way
            for k in range(looked[run], begin[run + 1]):
                source = sources[k]
                if not done[source]:
                    looked[run] = k
                    behind[run], waiting[source] = waiting[source], run
                    break
            else:
                done[run] = 1
                if not lazy[run]:
                    members.append(run)
                woken = waiting[run]
                while woken >= 0:
                    (queue if backends[woken] == backend else ready[backends[woken]]).append(woken)
                    woken = behind[woken]
        members.sort()
        rounds.append(tuple(members))
    return rounds


def _with_lazy(runs: Runs, rounds: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The rounds with each lazy run in the first that reads it."""
    left = runs.lazy + b"\x00"  # the last entry answers for -1, a leaf
    full = []
    for round_ in rounds:
        members = list(round_)
        for run in members:  # grows on the way
            for source in runs.sources[runs.begin[run] : runs.begin[run + 1]]:
                if left[source]:
                    left[source] = 0
                    members.append(source)
        full.append(tuple(sorted(members)))
    return full


def _seconds(node: Node) -> float:
    """What a node may take; only its order of magnitude counts. Host callbacks and effects count as long."""
    if node.has_effect or "callback" in node.op:
        return 1.0
    cost: float | None = getattr(node.fn, "cost_s", None)
    if cost is not None:
        return cost
    return 0.0 if node.is_view or node.is_cheap else node.flops / 5e10 + node.nbytes / 1e10


def _seconds_of(graph: Graph, runs: Runs, members: Sequence[int]) -> float:
    return sum([_seconds(graph.nodes[runs.node[run]]) for run in members])


def _part(graph: Graph, runs: Runs, rounds: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Part rounds whose beginning need not wait for what their end waits for.

    For each run: the newest other round that it needs, by itself or through runs of its own round. Runs
    that need only older rounds go first, as a round of their own, if both they and the round that
    the others wait for are long enough.
    """
    home = [-1] * (len(runs.node) + 1)  # the last entry answers for -1, a leaf; so it does in `needs`
    needs = home[:]
    for r, members in enumerate(rounds):
        for run in members:
            home[run] = r
    sources, begin = runs.sources, runs.begin
    lazy = runs.lazy + b"\x00" if 1 in runs.lazy else b""
    seconds: dict[int, float] = {}  # of those rounds that others were parted for
    parted: list[tuple[int, ...]] = []
    for r, members in enumerate(rounds):
        newest = -1
        for run in members:
            read = sources[begin[run] : begin[run + 1]]
            need = -1
            for source in _through_lazy(runs, lazy, read) if lazy else read:
                known = needs[source] if home[source] == r else home[source]
                if known > need:
                    need = known
            needs[run] = need
            if need > newest:
                newest = need
        early = [run for run in members if needs[run] < newest] if len(members) > 1 else []
        if early and newest not in seconds:
            seconds[newest] = _seconds_of(graph, runs, rounds[newest])
        if early and seconds[newest] >= WORTH_PARTING_S and _seconds_of(graph, runs, early) >= WORTH_PARTING_S:
            parted.append(tuple(early))
            parted.append(tuple([run for run in members if needs[run] == newest]))
        else:
            parted.append(members)
    return parted


def _through_lazy(runs: Runs, lazy: Sequence[int], read: list[int]) -> list[int]:
    """What `read` comes down to: a lazy run will be in the round that reads it, so what it needs counts."""
    if not any([lazy[source] for source in read]):
        return read
    found, stack, seen = [], read, set[int]()
    while stack:
        source = stack.pop()
        if not lazy[source]:
            found.append(source)
        elif source not in seen:
            seen.add(source)
            stack.extend(runs.sources[runs.begin[source] : runs.begin[source + 1]])
    return found
