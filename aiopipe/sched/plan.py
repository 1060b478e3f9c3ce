"""`Plan`: everything that is decided about a graph before it runs, as one frozen value.

`make_plan` composes the passes (assign, split, alloc, lower) and adds the launch lists: for each
split, which slots of an evaluation's environment its operands come from, what must be brought
over first, and what may be let go afterwards. The environment of an evaluation is one flat list:
first the captured inputs, then every value that crosses a split boundary, once for each backend
that holds it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..devices.base import Device
from ..graph import Graph, Kind
from .alloc import BackendSize, backend_sizes, donations, marker_of
from .assign import Assignment, assign
from .launch_lists import LaunchList, LaunchLists, Row
from .lower import Programs, lower
from .plan_dot import plan_dot
from .plan_html import plan_html
from .plan_text import Detail, plan_text
from .split import HOST, Split, last_uses, split_graph

__all__ = ["Plan", "Segment", "feeds_for_lanes", "make_plan", "segments_of"]


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
        programs: what each split compiles to, made when it is asked for; splits of one backend that are alike
            share the first one's.
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
    programs: Programs = field(repr=False)
    launch_lists: LaunchLists = field(repr=False)
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
        return sum(nbytes for split in self.splits for _, src, nbytes in split.brings if src != HOST)

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

    def _repr_html_(self) -> str:
        return plan_html(self)


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
    held, pinned, kept = weights or {}, pins or {}, state or {}
    assignment = assign(graph, devices, weights=held, pins=pinned, state=kept, cut=cut, op_offload=op_offload)
    splits = split_graph(graph, assignment)
    props = [device.props for device in devices]
    last = last_uses(splits, len(devices) + 1)
    donated = donations(graph, splits, props, last)
    programs = lower(graph, splits, donated)
    homes = tuple(assignment.leaf_backends[leaf.id][0] for leaf in graph.state)
    feed = _Feed(graph, splits, assignment, homes, len(devices), last)
    weights_read = tuple(frozenset(held) for held in feed.weights)
    return Plan(
        graph=graph,
        devices=tuple(devices),
        assignment=assignment,
        splits=splits,
        programs=programs,
        launch_lists=feed.launch_lists,
        used_inputs=tuple(feed.used_inputs),
        n_slots=feed.n_slots,
        results=tuple(feed.results),
        sinks=_sinks(splits, last, len(devices) + 1),
        weights=weights_read,
        sizes=backend_sizes(
            graph, splits, props, weights=weights_read, donate=donated, state_homes=homes, last=last
        ),
        state=tuple(feed.state),
        state_homes=homes,
    )


def _sinks(splits: Sequence[Split], read: Container[int], stride: int) -> tuple[int, ...]:
    """Whoever only uses a copy that a split brought neither waits for its end nor inherits its error."""
    sinks = []
    for split in splits:
        for t in split.outputs:
            if t * stride + split.backend in read:
                break
        else:
            sinks.append(split.index)
    return tuple(sinks)


class _Feed:
    """Numbers the environment's slots and writes the launch lists. What it finds are the fields of `Plan`.

    A value on a backend is one number, as in `last_uses`.
    """

    def __init__(
        self,
        graph: Graph,
        splits: Sequence[Split],
        assignment: Assignment,
        homes: Sequence[int],
        n_backends: int,
        last: Mapping[int, int],
    ) -> None:
        self.graph = graph
        self.used_inputs: list[int] = []
        self.weights: list[set[int]] = [set() for _ in range(n_backends)]
        self._stride = n_backends + 1
        self._slots: dict[int, int] = {}  # value on a backend, or on the host -> slot
        returned = self._returned(assignment)
        self._new_state = frozenset(t.id for t in graph.new_state)
        never_let_go = [place for kind, place in returned if kind != "weight"]
        never_let_go += [t.id * self._stride + b for t, b in zip(graph.new_state, homes, strict=True)]
        self._last = {**last, **dict.fromkeys(never_let_go, len(splits))}
        self._number_inputs()
        for leaf, home in zip(graph.state, homes, strict=True):
            if leaf.id * self._stride + home in last:
                self._slots[leaf.id * self._stride + home] = len(self._slots)
        self.launch_lists = LaunchLists(self._rows(splits))
        self.state = self._state(homes)
        self.n_slots = len(self._slots)
        self.results = [(kind, i if kind == "weight" else self._slots[i]) for kind, i in returned]
        for kind, t in returned:  # a weight that is returned is held somewhere, read or not
            if kind == "weight" and not any(t in held for held in self.weights):
                self.weights[assignment.leaf_backends[t][0]].add(t)

    def _returned(self, assignment: Assignment) -> list[tuple[str, int]]:
        """For each output of the graph its kind, and the value on its backend, or the weight's id."""
        made_by, returned = self.graph.producers(), []
        for tensor in self.graph.outputs:
            if tensor.kind is Kind.WEIGHT:
                returned.append(("weight", tensor.id))
            elif tensor.kind is Kind.INPUT:
                returned.append(("input", tensor.id * self._stride + HOST))
            else:
                returned.append(("env", tensor.id * self._stride + assignment.node_backend[made_by[tensor.id]]))
        return returned

    def _state(self, homes: Sequence[int]) -> list[tuple[int, int, int]]:
        """`Plan.state`."""
        found = []
        for position, (leaf, new, home) in enumerate(
            zip(self.graph.state, self.graph.new_state, homes, strict=True)
        ):
            enter = self._slots.get(leaf.id * self._stride + home, -1)
            leave = -1 if new is leaf else self._slots[new.id * self._stride + home]
            if enter >= 0 or leave >= 0:
                found.append((position, enter, leave))
        return found

    def _number_inputs(self) -> None:
        """Slots for the inputs that some split brings to its backend, or that are returned."""
        for position, tensor in enumerate(self.graph.inputs):
            place = tensor.id * self._stride + HOST
            if place in self._last:
                self._slots[place] = len(self._slots)
                self.used_inputs.append(position)

    def _rows(self, splits: Sequence[Split]) -> Iterator[Row]:
        stride, tensors, slots, last = self._stride, self.graph.tensors, self._slots, self._last
        weight, new_state = Kind.WEIGHT, self._new_state
        for split in splits:
            index, here = split.index, split.backend
            held = self.weights[here]
            weights: list[int] = []
            gather: list[int] = []
            moves: list[int] = []
            outputs: list[int] = []
            frees: list[int] = []
            moved: list[int] = []
            for t, src, _ in split.brings:
                place = t * stride + src
                read = slots[place]
                fill = slots[t * stride + here] = len(slots)
                moves += (read, fill)
                if last[place] == index:
                    moved.append(read)
            for t in split.outputs:
                slot = slots[t * stride + here] = len(slots)
                outputs.append(slot)
            for position, t in enumerate(split.inputs):
                if tensors[t].kind is weight:
                    weights += (position, t)
                    held.add(t)
                else:
                    place = t * stride + here
                    slot = slots[place]
                    gather += (position, slot)
                    if last[place] == index:
                        frees.append(slot)
            frees += moved
            marker = 0
            if len(outputs) > 1 or new_state:
                marker = marker_of(tensors, split.outputs, new_state)
            yield weights, gather, moves, outputs, frees, marker


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
        feeds.append(feed._replace(frees=frees))
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
