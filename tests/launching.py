"""Plans carried out by `launch_splits` on values that say only what they are, where they are, and how large."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from aiopipe.devices.base import DeviceProps, DeviceType, Program
from aiopipe.graph import Graph, Kind, Tensor
from aiopipe.sched.launch import BoundSplit, Environment, launch_splits
from aiopipe.sched.launch_lists import LaunchList
from aiopipe.sched.plan import Plan, feeds_for_lanes, make_plan, segments_of
from aiopipe.sched.split import HOST
from graphs import Draft, FakeDevice, gpus


class Value:
    """A number for what it is, the backend that can read it (`HOST`: a staging buffer), and its bytes."""

    __slots__ = ("__weakref__", "backend", "deleted", "nbytes", "what")

    def __init__(self, what: int, backend: int, nbytes: int) -> None:
        self.what = what
        self.backend = backend
        self.nbytes = nbytes
        self.deleted = False


class Meanings:
    """One number for each computation: an operation and the numbers of its operands."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def of(self, *what: Any) -> int:
        return self.numbers.setdefault(what, len(self.numbers))

    def unsplit(self, graph: Graph) -> dict[int, int]:
        """For each tensor what it is, node after node in the graph's own order."""
        known = {t.id: self.of("leaf", t.id) for t in graph.leaves}
        for node in graph.nodes:
            operands = [known[t] for t in node.inputs]
            for position, t in enumerate(node.outputs):
                known[t] = self.of(node.fn.signature(), position, *operands)
        return known


class Launching:
    """One evaluation of a plan, split by split.

    Attributes:
        peaks: for each backend the most bytes that were held at once, as an allocator there would see it.
    """

    def __init__(self, plan: Plan, feeds: Sequence[LaunchList] | None = None) -> None:
        self.plan = plan
        self.meanings = Meanings()
        self.values: weakref.WeakSet[Value] = weakref.WeakSet()
        self.staged = [0] * len(plan.devices)
        self.env = Environment(plan.n_slots, plan.n_splits)
        self._fill()
        self.peaks = [self.held(b) for b in range(len(plan.devices))]
        backends = [_Backend(self, b) for b in range(len(plan.devices))]
        self.bound = [
            BoundSplit(split, feed, _Executable(self, program, split.backend), backends[split.backend], weights)  # type: ignore[arg-type]
            for split, feed, program in zip(plan.splits, feeds or plan.launch_lists, plan.programs, strict=True)
            for weights in [{t: self.leaf(t, split.backend) for t in plan.weights[split.backend]}]
        ]

    def _fill(self) -> None:
        """Captured inputs, and the state, in their slots."""
        plan, slots = self.plan, self.env.slots
        readers: dict[int, int] = {}
        for split, feed in zip(plan.splits, plan.launch_lists, strict=True):
            for read, _ in feed.moves:
                readers.setdefault(read, split.backend)
        returned = {i for kind, i in plan.results if kind == "input"}
        host = len(plan.devices) - 1
        for slot, position in enumerate(plan.used_inputs):
            tensor = plan.graph.inputs[position]
            reader = readers.get(slot, host)
            slots[slot] = self.leaf(tensor.id, reader if slot in returned else HOST)
            if slot in returned:  # the caller gets it: an array on its first reader
                self.values.add(slots[slot])
            else:
                if plan.devices[reader].props.aliases_host:
                    self.staged[reader] += tensor.nbytes
                elif plan.devices[host].props.type is DeviceType.CPU:
                    self.staged[host] += tensor.nbytes
        for position, enter, _ in plan.state:
            if enter >= 0:
                slots[enter] = self.leaf(plan.graph.state[position].id, plan.state_homes[position])

    def leaf(self, tensor: int, backend: int) -> Value:
        """A weight, state, or staged input: not counted with what an evaluation holds."""
        return Value(self.meanings.of("leaf", tensor), backend, self.plan.graph.tensors[tensor].nbytes)

    def new(self, what: int, backend: int, nbytes: int) -> Value:
        value = Value(what, backend, nbytes)
        self.values.add(value)
        return value

    def held(self, backend: int) -> int:
        return self.staged[backend] + sum(v.nbytes for v in self.values if v.backend == backend and not v.deleted)

    def note(self) -> None:
        self.peaks = [max(peak, self.held(b)) for b, peak in enumerate(self.peaks)]

    def run(self) -> list[int]:
        """Launch every split, in order; return what the results are."""
        launch_splits(self.bound, self.env)
        return self.results()

    def run_in_lanes(self, lane_of: Sequence[int], choose: Callable[[int], int]) -> list[int]:
        """Launch the segments of lanes that go on at any time; `choose(n)` says which of n goes on next."""
        segments = segments_of(self.plan.splits, lane_of)
        queues = {lane: [k for k, s in enumerate(segments) if s.lane == lane] for lane in set(lane_of)}
        at = dict.fromkeys(queues, 0)  # position in the lane's segment
        done: set[int] = set()
        while any(queues.values()):
            able = [lane for lane, queue in queues.items() if queue and done.issuperset(segments[queue[0]].depends)]
            lane = able[choose(len(able))]
            segment = queues[lane][0]
            launch_splits([self.bound[segments[segment].splits[at[lane]]]], self.env)
            at[lane] += 1
            if at[lane] == len(segments[segment].splits):
                done.add(queues[lane].pop(0))
                at[lane] = 0
        return self.results()

    def results(self) -> list[int]:
        slots = self.env.slots
        return [self.meanings.of("leaf", i) if kind == "weight" else slots[i].what for kind, i in self.plan.results]

    def new_state(self) -> dict[int, int]:
        """Position among the leaves of the state -> what takes its place, where it changes."""
        return {i: self.env.slots[leave].what for i, _, leave in self.plan.state if leave >= 0}

    def expected(self) -> tuple[list[int], dict[int, int]]:
        """What `results` and `new_state` have to be."""
        graph, known = self.plan.graph, self.meanings.unsplit(self.plan.graph)
        changed = enumerate(zip(graph.state, graph.new_state, strict=True))
        return [known[t.id] for t in graph.outputs], {i: known[new.id] for i, (old, new) in changed if new is not old}


class _Backend:
    def __init__(self, launching: Launching, index: int) -> None:
        self.launching = launching
        self.index = index

    def transfer(self, values: Sequence[Value]) -> list[Value]:
        moved = [self._moved(value) for value in values]
        self.launching.note()
        return moved

    def _moved(self, value: Value) -> Value:
        in_place = value.backend == HOST and self.launching.plan.devices[self.index].props.aliases_host
        if in_place or value.backend == self.index:
            return value
        return self.launching.new(value.what, self.index, value.nbytes)

    def launched(self, marker: Value) -> None:
        assert isinstance(marker, Value)


class _Executable:
    def __init__(self, launching: Launching, program: Program, backend: int) -> None:
        self.launching = launching
        self.program = program
        self.backend = backend

    def call(self, *operands: Value) -> list[Value]:
        launching, program, plan = self.launching, self.program, self.launching.plan
        assert len(operands) == len(program.inputs)
        readable = {self.backend, HOST} if plan.devices[self.backend].props.aliases_host else {self.backend}
        assert all(not value.deleted and value.backend in readable for value in operands)
        launching.note()
        known = {t.id: value.what for t, value in zip(program.inputs, operands, strict=True)}
        for node in program.nodes:
            read = [known[t] for t in node.inputs]
            for position, t in enumerate(node.outputs):
                known[t] = launching.meanings.of(node.fn.signature(), position, *read)
        donated = [program.inputs[position] for position in program.donate]
        for position in program.donate:
            operands[position].deleted = True
        results = []
        over = {t.id for t in donated if t.kind is Kind.STATE}
        replaces = {new.id: old.id for old, new in zip(plan.graph.state, plan.graph.new_state, strict=True)}
        for tensor in program.outputs or (TOKEN,):
            results.append(Value(known.get(tensor.id, -1), self.backend, tensor.nbytes))
            if replaces.get(tensor.id) not in over:  # else it has the memory of the state
                launching.values.add(results[-1])
        launching.note()
        return results


TOKEN = Tensor(-2, "token", (), "bool", Kind.NODE, 1)
"""What an executable without results returns, as something to wait for."""


def random_stateful_graph(rng: random.Random, n_nodes: int, n_state: int) -> Graph:
    """A graph with inputs, weights, state, effects and nodes of several outputs; values often have equal types."""
    b = Draft("random")
    sizes = [4, 8, 8, 8, 64]
    tensors = [b.x(f"x{i}", rng.choice(sizes)) for i in range(rng.randint(0, 3))]
    tensors += [b.w(f"w{i}", rng.choice(sizes)) for i in range(rng.randint(0, 2))]
    state = [(b.state(f"s{i}", (n,), "int8", n), n) for i, n in enumerate(rng.choices(sizes, k=n_state))]
    leaves = {leaf for leaf, _ in state}
    tensors += leaves
    made: list[tuple[int, int]] = []
    kinds = ["dot_general", "add", "mul", "split", "reshape", "broadcast_in_dim", "iota"]
    for _ in range(n_nodes):
        op = rng.choice(kinds)
        arity = {"add": 2, "dot_general": 3, "iota": 0}.get(op, 1)
        recent = tensors[-8:] if rng.random() < 0.7 else tensors
        inputs = [rng.choice(recent) for _ in range(arity)] if tensors else []
        out = rng.choices(sizes, k=2 if op == "split" else 1)
        found = b.ops(op, *inputs, nbytes=out, effect=rng.random() < 0.05)
        tensors += found
        made += zip(found, out, strict=True)
    rng.shuffle(made)
    new_state = []
    for leaf, n in state:
        able = [i for i, (_, size) in enumerate(made) if size == n]
        new_state.append(made.pop(able[0])[0] if able and rng.random() < 0.8 else leaf)
    given = [t for t in tensors if t not in leaves and t not in new_state]
    return b.build(rng.sample(given, k=min(len(given), rng.randint(0, 3))), new_state=new_state)


def lanes_for(plan: Plan, lane_of: Sequence[int]) -> Launching:
    """An evaluation whose values are let go as lanes that overtake each other need it."""
    return Launching(plan, feeds_for_lanes(plan, lane_of))


def random_devices(rng: random.Random, n: int) -> list[FakeDevice]:
    """Devices that may read the host's memory in place and hand small values over as views; the last is often a CPU."""
    devices = gpus(n)
    for device in devices:
        kind = DeviceType.SIM if rng.random() < 0.2 else device.props.type
        view = rng.choice([0, 0, 8])
        device.props = DeviceProps(kind, "fake", aliases_host=rng.random() < 0.4, view_nbytes=view)
    return devices


def random_plan(seed: int, n_nodes: int, n_gpus: int, n_state: int) -> Plan:
    rng = random.Random(seed)
    graph = random_stateful_graph(rng, n_nodes, n_state)
    devices = random_devices(rng, n_gpus)
    cut = [rng.randrange(len(devices)) for _ in graph.nodes]
    return make_plan(graph, devices, cut=cut)
