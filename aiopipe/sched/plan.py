"""`Plan`: everything that is decided about a graph before it runs, as one frozen value.

`make_plan` composes the passes (assign, split, alloc, lower) and adds the launch lists: for each
split, which slots of an evaluation's environment its operands come from, what must be brought
over first, and what may be let go afterwards. The environment of an evaluation is one flat list:
first the captured inputs, then every value that crosses a split boundary, once for each backend
that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..devices.base import Device, Program
from ..graph import Graph, Kind
from .alloc import BackendSize, backend_sizes, donations, marker_of
from .assign import Assignment, assign
from .lower import lower
from .plan_dot import plan_dot
from .plan_text import Detail, plan_text
from .split import HOST, Split, split_graph

__all__ = ["LaunchList", "Plan", "Segment", "feeds_for_lanes", "make_plan", "segments_of"]


@dataclass(frozen=True, slots=True)
class LaunchList:
    """How one split gets its operands and where its results go, as environment slots.

    Attributes:
        weights: (operand position, tensor id) of the weights.
        gather: (operand position, environment slot) of the rest.
        moves: (slot to read, slot to fill) of the values to bring to this backend first.
        outputs: slots of the results, in order.
        frees: slots whose value nobody needs after this split, if splits are launched in order.
        marker: which of its results shows that the split is done, kept until the evaluation ends:
            the smallest that is no state; or the token behind them.
    """

    weights: tuple[tuple[int, int], ...]
    gather: tuple[tuple[int, int], ...]
    moves: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    marker: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Splits that one lane launches back to back.

    Attributes:
        lane: index of the lane.
        splits: indices of the splits, in order.
        depends: segments of other lanes that must have been launched before.
    """

    lane: int
    splits: tuple[int, ...]
    depends: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Plan:
    """A graph, cut and placed for some devices.

    Attributes:
        graph: what is evaluated; planning never changes it.
        devices: in order of priority; a split's backend is an index into it.
        assignment: which backend each tensor got, and why.
        splits: runs of nodes, in the order in which they are launched.
        programs: what each split compiles to.
        launch_lists: how each split is fed.
        used_inputs: positions in `graph.inputs` that are captured, in environment order.
        n_slots: length of an evaluation's environment.
        results: for each output ``("env", slot)``, ``("input", slot)`` or ``("weight", tensor id)``.
        state: for each leaf of the state that is read or replaced (its position, the slot that it is read
            from, the slot of its next value), -1 where there is none.
        state_homes: for each leaf of the state the index of its backend.
        sinks: splits whose end means that every split has ended.
        weights: for each backend the ids of the weights that its splits read, or that the graph returns.
        sizes: bytes for each backend, without the compilers' temporaries.
    """

    graph: Graph
    devices: tuple[Device, ...]
    assignment: Assignment = field(repr=False)
    splits: tuple[Split, ...]
    programs: tuple[Program, ...] = field(repr=False)
    launch_lists: tuple[LaunchList, ...] = field(repr=False)
    used_inputs: tuple[int, ...]
    n_slots: int
    results: tuple[tuple[str, int], ...]
    sinks: tuple[int, ...]
    weights: tuple[frozenset[int], ...] = field(repr=False)
    sizes: tuple[BackendSize, ...]
    state: tuple[tuple[int, int, int], ...] = ()
    state_homes: tuple[int, ...] = ()

    @property
    def n_splits(self) -> int:
        """How many splits there are."""
        return len(self.splits)

    @property
    def copied_nbytes(self) -> int:
        """Bytes that each evaluation moves between backends, the host's inputs not counted."""
        return sum(c.nbytes for split in self.splits for c in split.copies if c.src != HOST)

    def text(self, detail: Detail = 1) -> str:
        """The plan for people to read; ``print(plan)`` shows level 1.

        Args:
            detail: 0 is one line: how much, where. 1 adds a table of the splits (backend, nodes, the
                user's line, inputs, bytes moved, weights, causes) and the bytes for each backend.
                2 adds every leaf, node and copy with its backend and cause.

        Raises:
            TensorError: there is no such level.
        """
        return plan_text(self, detail)

    def dot(self) -> str:
        """The plan in Graphviz's DOT language, for ``dot -Tsvg``.

        A cluster for each backend with its splits; a solid edge for what is copied, with its bytes;
        a dashed one for what stays on its backend.
        """
        return plan_dot(self)

    def __str__(self) -> str:
        return plan_text(self)


def make_plan(
    graph: Graph,
    devices: Sequence[Device],
    *,
    weights: Mapping[int, tuple[int, ...]] | None = None,
    pins: Mapping[int, int] | None = None,
    state: Mapping[int, int] | None = None,
    cut: Sequence[int] | None = None,
    op_offload: bool = False,
) -> Plan:
    """Plan a graph for some devices: assign, split, size, lower.

    Args:
        graph: the graph; not changed.
        devices: in order of priority; the last is a host CPU.
        weights: tensor id -> indices of the devices that already hold that weight.
        pins: tensor id -> index of the device that the user wants it on.
        state: tensor id -> index of the device where that leaf of the state is.
        cut: for each node the index of the device that `partition` chose.
        op_offload: large operations on weights of the last device may run on another one (``1.off``).

    Raises:
        PlacementError: no device can run some op, or a pin asks for one that cannot.
    """
    held_already, pinned, kept = weights or {}, pins or {}, state or {}
    assignment = assign(
        graph, devices, weights=held_already, pins=pinned, state=kept, cut=cut, op_offload=op_offload
    )
    splits = split_graph(graph, assignment)
    props = [device.props for device in devices]
    donated = donations(graph, splits, props)
    programs = lower(graph, splits, donated)
    held: list[set[int]] = [set() for _ in devices]
    for split in splits:
        held[split.backend].update(t for t in split.inputs if graph.tensors[t].kind is Kind.WEIGHT)
    for tensor in graph.outputs:  # a weight that is returned is held somewhere, read or not
        if tensor.kind is Kind.WEIGHT and not any(tensor.id in h for h in held):
            held[assignment.leaf_backends[tensor.id][0]].add(tensor.id)
    frozen = tuple(frozenset(h) for h in held)
    homes = tuple(assignment.leaf_backends[leaf.id][0] for leaf in graph.state)
    feed = _Feed(graph, splits, assignment, homes)
    return Plan(
        graph=graph,
        devices=tuple(devices),
        assignment=assignment,
        splits=splits,
        programs=programs,
        launch_lists=tuple(feed.launch_lists),
        used_inputs=tuple(feed.used_inputs),
        n_slots=feed.n_slots,
        results=tuple(feed.results),
        sinks=_sinks(splits),
        weights=frozen,
        sizes=backend_sizes(graph, splits, props, weights=frozen, donate=donated, state_homes=homes),
        state=tuple(feed.state),
        state_homes=homes,
    )


def _sinks(splits: Sequence[Split]) -> tuple[int, ...]:
    feeding = {d for split in splits for d in split.depends}
    return tuple(split.index for split in splits if split.index not in feeding)


class _Feed:
    """Numbers the environment's slots and writes the launch lists."""

    def __init__(
        self, graph: Graph, splits: Sequence[Split], assignment: Assignment, homes: Sequence[int]
    ) -> None:
        self.graph = graph
        self.new_state = frozenset(t.id for t in graph.new_state)
        self.state: list[tuple[int, int, int]] = []
        self.launch_lists: list[LaunchList] = []
        self.used_inputs: list[int] = []
        self.results: list[tuple[str, int]] = []
        self.n_slots = 0
        self._host: dict[int, int] = {}  # input tensor -> slot of its captured value
        self._slots: dict[tuple[int, int], int] = {}  # (tensor, backend) -> slot
        self._number_inputs(splits)
        self._number_state(splits, homes)
        drafts = [self._draft(split) for split in splits]
        self._collect_results(assignment)
        self._collect_state(assignment, homes)
        self._finish(drafts)

    def _number_inputs(self, splits: Sequence[Split]) -> None:
        read = {t for split in splits for t in split.inputs}
        read.update(t.id for t in self.graph.outputs)
        for position, tensor in enumerate(self.graph.inputs):
            if tensor.id in read:
                self._host[tensor.id] = self._new_slot()
                self.used_inputs.append(position)

    def _number_state(self, splits: Sequence[Split], homes: Sequence[int]) -> None:
        read = {t for split in splits for t in split.inputs} if homes else set()
        for leaf, home in zip(self.graph.state, homes, strict=True):
            if leaf.id in read:
                self._slots[leaf.id, home] = self._new_slot()

    def _collect_state(self, assignment: Assignment, homes: Sequence[int]) -> None:
        made_by = self.graph.producers() if homes else []
        for position, (leaf, new, home) in enumerate(
            zip(self.graph.state, self.graph.new_state, homes, strict=True)
        ):
            enter, leave = self._slots.get((leaf.id, home), -1), -1
            if new is not leaf:
                leave = self._slots[new.id, assignment.node_backend[made_by[new.id]]]
            if enter >= 0 or leave >= 0:
                self.state.append((position, enter, leave))

    def _new_slot(self) -> int:
        self.n_slots += 1
        return self.n_slots - 1

    def _draft(self, split: Split) -> LaunchList:
        moves = []
        for copy in split.copies:
            read = self._host[copy.tensor] if copy.src == HOST else self._slots[copy.tensor, copy.src]
            fill = self._slots[copy.tensor, split.backend] = self._new_slot()
            moves.append((read, fill))
        weights, gather = [], []
        for position, t in enumerate(split.inputs):
            if self.graph.tensors[t].kind is Kind.WEIGHT:
                weights.append((position, t))
            else:
                gather.append((position, self._slots[t, split.backend]))
        outputs = []
        for t in split.outputs:
            slot = self._slots[t, split.backend] = self._new_slot()
            outputs.append(slot)
        marker = marker_of(self.graph.tensors, split.outputs, self.new_state)
        return LaunchList(tuple(weights), tuple(gather), tuple(moves), tuple(outputs), (), marker)

    def _collect_results(self, assignment: Assignment) -> None:
        made_by = self.graph.producers()
        for tensor in self.graph.outputs:
            if tensor.kind is Kind.WEIGHT:
                self.results.append(("weight", tensor.id))
            elif tensor.kind is Kind.INPUT:
                self.results.append(("input", self._host[tensor.id]))
            else:
                home = assignment.node_backend[made_by[tensor.id]]
                self.results.append(("env", self._slots[tensor.id, home]))

    def _finish(self, drafts: Sequence[LaunchList]) -> None:
        """Let each slot go after its last use: backwards, where a slot that was not seen yet is used last."""
        used_later = {slot for kind, slot in self.results if kind != "weight"}
        used_later.update(leave for _, _, leave in self.state)
        for draft in reversed(drafts):
            touched = [*draft.outputs, *(slot for _, slot in draft.gather), *(s for move in draft.moves for s in move)]
            frees = tuple(slot for slot in dict.fromkeys(touched) if slot not in used_later)
            used_later.update(frees)
            self.launch_lists.append(
                LaunchList(draft.weights, draft.gather, draft.moves, draft.outputs, frees, draft.marker)
            )
        self.launch_lists.reverse()


def feeds_for_lanes(plan: Plan, lane_of: Sequence[int]) -> list[LaunchList]:
    """The launch lists for given lanes: a split lets go only what no other lane may still read.

    The last reader in launch order need not be launched last: independent splits of different
    lanes overtake each other. What they share stays until the evaluation ends.

    Args:
        plan: whose launch lists.
        lane_of: for each backend the index of its lane.
    """
    users: dict[int, set[int]] = {}
    for split, feed in zip(plan.splits, plan.launch_lists, strict=True):
        moved = [slot for move in feed.moves for slot in move]
        for slot in (*feed.outputs, *moved, *(slot for _, slot in feed.gather)):
            users.setdefault(slot, set()).add(split.index)
    feeds = []
    for split, feed in zip(plan.splits, plan.launch_lists, strict=True):
        lane, before = lane_of[split.backend], {split.index, *split.depends}
        frees = tuple(
            slot
            for slot in feed.frees
            if all(i in before or lane_of[plan.splits[i].backend] == lane for i in users[slot])
        )
        feeds.append(replace(feed, frees=frees))
    return feeds


def segments_of(splits: Sequence[Split], lane_of: Sequence[int]) -> tuple[Segment, ...]:
    """Group splits that one lane can launch back to back.

    A split joins its lane's newest segment unless that would make the segment wait for another
    lane longer than it does anyway.

    Args:
        splits: in launch order.
        lane_of: for each backend the index of its lane.
    """
    made: list[tuple[int, list[int], set[int]]] = []
    newest: dict[int, int] = {}
    home: list[int] = []
    for split in splits:
        lane = lane_of[split.backend]
        depends = {home[d] for d in split.depends if made[home[d]][0] != lane}
        current = newest.get(lane)
        if current is not None and depends <= made[current][2]:
            made[current][1].append(split.index)
        else:
            if current is not None:
                depends.add(current)  # one lane launches in order
            current = newest[lane] = len(made)
            made.append((lane, [split.index], depends))
        home.append(current)
    return tuple(Segment(lane, tuple(indices), tuple(sorted(depends))) for lane, indices, depends in made)
