"""Sizes and donation: what each backend must hold, and which memory outputs may take over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from ..devices.base import BufferType, Device, DeviceProps, DeviceType, MemoryStats
from ..errors import AllocationError, PlacementError
from ..graph import Graph, Tensor
from .split import HOST, Split

__all__ = [
    "BackendSize",
    "backend_sizes",
    "check_buffers",
    "check_memory",
    "choose_buffer_types",
    "donations",
    "largest_n_copies",
    "marker_of",
    "memory_limits",
]


@dataclass(frozen=True, slots=True)
class BackendSize:
    """Bytes that one backend holds for a plan.

    Attributes:
        weights_nbytes: weights, held once.
        copy_nbytes: for each of the `n_copies` slots: the most that one evaluation holds at a time of
            staged inputs, copies from other backends, and what its splits return. A value that is
            handed over as a view counts like a copy. Inputs count where they are staged: on their
            first reader, if it reads host memory in place, else on the host CPU.
        temp_nbytes: the largest scratch that one of its executables needs (0 before compiling).
        state_nbytes: one state's arrays (those of all states, for what a scheduler holds).
    """

    weights_nbytes: int = 0
    copy_nbytes: int = 0
    temp_nbytes: int = 0
    state_nbytes: int = 0

    @property
    def fixed_nbytes(self) -> int:
        """Bytes that do not depend on the number of slots."""
        return self.weights_nbytes + self.state_nbytes + self.temp_nbytes

    def total(self, n_copies: int) -> int:
        """Bytes with `n_copies` slots."""
        return self.fixed_nbytes + n_copies * self.copy_nbytes


def donations(graph: Graph, splits: Sequence[Split], props: Sequence[DeviceProps]) -> tuple[tuple[int, ...], ...]:
    """For each split the positions of the inputs that its outputs may take over.

    State, by its own next value, where no other split reads it. Copies that the scheduler itself made from
    another backend, in the last split that reads
    them there, each matched with an output of its own shape and dtype. A user's input is never
    donated (it may be the user's own array), nor a value that may be a view of its producer's
    memory (`DeviceProps.view_nbytes`).
    """
    last_reader: dict[tuple[int, int], int] = {}
    copied: set[tuple[int, int]] = set()
    for split in splits:
        for t in split.inputs:
            last_reader[t, split.backend] = split.index
        copied.update((c.tensor, split.backend) for c in split.copies if c.src != HOST)
    tensors = graph.tensors
    replaced = {leaf.id: new.id for leaf, new in zip(graph.state, graph.new_state, strict=True) if new is not leaf}
    readers = Counter(t for split in splits for t in split.inputs if t in replaced)
    result: list[tuple[int, ...]] = []
    for split in splits:
        made = set(split.outputs) if replaced else set()
        state = [
            position
            for position, t in enumerate(split.inputs)
            if t in replaced and readers[t] == 1 and replaced[t] in made
        ]
        view_nbytes = props[split.backend].view_nbytes
        own = [
            position
            for position, t in enumerate(split.inputs)
            if (t, split.backend) in copied
            and last_reader[t, split.backend] == split.index
            and tensors[t].nbytes > view_nbytes
        ]
        if not own:
            result.append(tuple(state))
            continue
        taken = {replaced[split.inputs[position]] for position in state}
        free = Counter((tensors[t].shape, tensors[t].dtype) for t in split.outputs if t not in taken)
        donated = state
        for position in own:
            tensor = tensors[split.inputs[position]]
            kind = (tensor.shape, tensor.dtype)
            if free[kind] > 0:
                free[kind] -= 1
                donated.append(position)
        result.append(tuple(donated))
    return tuple(result)


def marker_of(tensors: Sequence[Tensor], outputs: Sequence[int], new_state: Container[int]) -> int:
    """Which of a split's outputs marks its end: the position of the smallest, or their number: a token behind them.

    State does not mark anything: the next evaluation may take over its memory before anybody has looked.
    """
    sizes = [(tensors[t].nbytes, i) for i, t in enumerate(outputs) if t not in new_state]
    return min(sizes)[1] if sizes else len(outputs)


def backend_sizes(
    graph: Graph,
    splits: Sequence[Split],
    props: Sequence[DeviceProps],
    *,
    weights: Sequence[frozenset[int]],
    donate: Sequence[tuple[int, ...]],
    state_homes: Sequence[int] = (),
    memory: Sequence[MemoryStats] = (),
) -> tuple[BackendSize, ...]:
    """The size of a plan on each backend.

    Args:
        graph: what is evaluated.
        splits: from `split_graph`.
        props: of each backend's device; the last is the host.
        weights: for each backend the ids of the weights that it holds.
        donate: from `donations`.
        state_homes: for each leaf of the state the index of its backend.
        memory: for each split what its executable needs; empty before compiling.
    """
    temp = [0] * len(props)
    for split, stats in zip(splits, memory, strict=False):
        temp[split.backend] = max(temp[split.backend], stats.temp_nbytes)
    held = _Held(graph, splits, props)
    for split, donated in zip(splits, donate, strict=True):
        held.launch(split, donated)
    of_state = [0] * len(props)
    for leaf, b in zip(graph.state, state_homes, strict=True):
        of_state[b] += leaf.nbytes
    return tuple(
        BackendSize(sum(graph.tensors[t].nbytes for t in weights[b]), held.peak[b], temp[b], of_state[b])
        for b in range(len(props))
    )


class _Held:
    """What one evaluation holds on each backend while its splits are launched one after the other.

    The same rules by which `launch_splits` lets values go: a value after the last split that reads
    it, a result of the graph never, and of each split the smallest output (its marker) never. All
    evaluations in flight may be at their worst point at once, as where a slow device makes them queue.
    """

    def __init__(self, graph: Graph, splits: Sequence[Split], props: Sequence[DeviceProps]) -> None:
        self.tensors = graph.tensors
        self.props = props
        self.now = [0] * len(props)
        self.made_by = graph.producers()
        self.results = {t.id for t in graph.kept}
        self.new_state = {new.id: leaf.id for leaf, new in zip(graph.state, graph.new_state, strict=True)}
        self.last_use: dict[tuple[int, int], int] = {}  # (tensor, backend) -> the last split that reads it there
        self.alive: dict[tuple[int, int], int] = {}  # (tensor, backend) -> bytes
        first: dict[int, int] = {}  # input -> the backend that reads it first
        for split in splits:
            for t in split.inputs:
                self.last_use[t, split.backend] = split.index
            for c in split.copies:
                if c.src == HOST:
                    first.setdefault(c.tensor, split.backend)
                else:
                    self.last_use[c.tensor, c.src] = split.index
        self.first = first
        self.uses: dict[int, list[tuple[int, int]]] = {}
        for value, index in self.last_use.items():
            self.uses.setdefault(index, []).append(value)
        for tensor in graph.inputs:
            self._capture(tensor.id, tensor.nbytes)
        self.peak = list(self.now)

    def _capture(self, t: int, nbytes: int) -> None:
        """An input's staging buffer, in memory that its first reader shares with the host, or else on the host."""
        host = len(self.props) - 1
        reader = self.first.get(t, -1)
        if t in self.results:  # the caller will hold it: it is uploaded for each evaluation
            self.now[reader if reader >= 0 else host] += nbytes
        elif reader >= 0 and self.props[reader].aliases_host:
            self.now[reader] += nbytes
        elif reader >= 0 and self.props[host].type is DeviceType.CPU:
            self.now[host] += nbytes

    def launch(self, split: Split, donated: Sequence[int]) -> None:
        """Add what a split brings and makes, note the peak, let go of what nobody reads afterwards."""
        here, alive, tensors = split.backend, self.alive, self.tensors
        for copy in split.copies:
            if copy.src == HOST and copy.tensor in self.results:
                in_place = here == self.first[copy.tensor]
            else:
                in_place = copy.src == HOST and self.props[here].aliases_host
            if not in_place:
                self._add(copy.tensor, here, copy.nbytes)
        self.peak[here] = max(self.peak[here], self.now[here])
        for position in donated:
            self.now[here] -= alive.pop((split.inputs[position], here), 0)
        old = {split.inputs[position] for position in donated}
        for t in split.outputs:  # state that takes over the memory of the state before it is counted with the states
            self._add(t, here, 0 if self.new_state.get(t) in old else tensors[t].nbytes)
        position = marker_of(tensors, split.outputs, self.new_state)
        marker = -1 if position == len(split.outputs) else split.outputs[position]
        if marker < 0:
            self.now[here] += 1  # a token
        self.peak[here] = max(self.peak[here], self.now[here])
        again = set(split.recomputed)
        for t in split.outputs:
            if t == marker or (t in self.results and self.made_by[t] not in again):
                alive.pop((t, here))  # to the end: nothing will subtract it
        for t, backend in self.uses.get(split.index, ()):
            self.now[backend] -= alive.pop((t, backend), 0)

    def _add(self, t: int, backend: int, nbytes: int) -> None:
        self.alive[t, backend] = nbytes
        self.now[backend] += nbytes


def check_memory(
    sizes: Sequence[BackendSize], names: Sequence[str], limits: Sequence[int | None], n_copies: int
) -> None:
    """Refuse a plan that does not fit, before anything is allocated.

    Raises:
        AllocationError: names the backend, the bytes, and the largest `n_copies` that would fit on all of them.
    """
    for size, name, limit in zip(sizes, names, limits, strict=True):
        asked = size.total(n_copies)
        if limit is None or asked <= limit:
            continue
        fits = largest_n_copies(sizes, limits, n_copies)
        todo = f"n_copies={fits} would fit" if fits >= 1 else "move weights to another device, or use smaller batches"
        raise AllocationError(
            f"backend {name!r} needs {asked} bytes (weights {size.weights_nbytes}, "
            + (f"state {size.state_nbytes}, " if size.state_nbytes else "")
            + f"temporaries {size.temp_nbytes}, "
            f"{n_copies} {'copy' if n_copies == 1 else 'copies'} of {size.copy_nbytes}), but may use {limit}: {todo}",
            backend=name,
            asked_nbytes=asked,
            available_nbytes=limit,
            fits_n_copies=fits,
        )


def largest_n_copies(sizes: Sequence[BackendSize], limits: Sequence[int | None], at_most: int) -> int:
    """The largest `n_copies`, up to `at_most`, with which every backend stays within its limit; 0 for none."""
    for size, limit in zip(sizes, limits, strict=True):
        if limit is None or size.total(at_most) <= limit:
            continue
        room = limit - size.fixed_nbytes
        at_most = max(0, min(at_most, room // size.copy_nbytes)) if size.copy_nbytes else 0
    return at_most


def check_buffers(graph: Graph, splits: Sequence[Split], names: Sequence[str], limits: Sequence[int | None]) -> None:
    """Refuse tensors that are larger than the largest single buffer of their backend.

    Args:
        graph: what is evaluated.
        splits: from `split_graph`.
        names: of the backends.
        limits: for each backend `BufferType.max_nbytes` of the memory that it works in.

    Raises:
        AllocationError: names the tensor, the backend, and both sizes.
    """
    if all(limit is None for limit in limits):
        return
    for split in splits:
        limit = limits[split.backend]
        for t in (*split.inputs, *split.outputs) if limit is not None else ():
            tensor = graph.tensors[t]
            if limit is not None and tensor.nbytes > limit:
                raise AllocationError(
                    f"tensor {tensor.describe()} has {tensor.nbytes} bytes, but a single buffer on "
                    f"{names[split.backend]!r} at most {limit}: cut it, or choose another buffer type",
                    backend=names[split.backend],
                    asked_nbytes=tensor.nbytes,
                    available_nbytes=limit,
                )


def memory_limits(devices: Sequence[Device], given: int | Mapping[str, int] | None) -> list[int | None]:
    """For each device the bytes that it may use: those given, for all or by its name, else what it reports."""
    if isinstance(given, Mapping):
        return [given.get(device.name, device.props.memory_nbytes) for device in devices]
    return [device.props.memory_nbytes if given is None else given for device in devices]


def choose_buffer_types(
    devices: Sequence[Device], given: Sequence[BufferType | str | None] | Mapping[str, BufferType | str] | None
) -> tuple[BufferType, ...]:
    """For each device the memory that it works in: the one asked for, or its default one.

    Args:
        devices: in order of priority.
        given: a buffer type, or the name of one of the device's memory kinds, for each device in order
            (None, or missing at the end: the default), or by the device's name.

    Raises:
        PlacementError: the device has no such memory, or cannot work in it; or there is no such device.
    """
    names = [device.name for device in devices]
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in names]
        if unknown:
            raise PlacementError(f"buffer_types names {unknown[0]!r}, expected one of the backends {names}")
        wanted: list[BufferType | str | None] = [given.get(name) for name in names]
    else:
        wanted = list(given or ())
        if len(wanted) > len(names):
            raise PlacementError(f"buffer_types has {len(wanted)} entries, expected at most one for each of {names}")
        wanted += [None] * (len(names) - len(wanted))
    chosen = []
    for device, want in zip(devices, wanted, strict=True):
        known = device.buffer_types()
        kind = known[0] if want is None else want
        if isinstance(kind, str):
            found = next((k for k in known if k.memory_kind == kind), None)
            if found is None:
                kinds = [k.memory_kind for k in known]
                raise PlacementError(f"{device.name!r} has no memory kind {kind!r}, expected one of {kinds}")
            kind = found
        if not device.supports_buffer_type(kind):
            raise PlacementError(
                f"{device.name!r} cannot work in buffer type {kind.memory_kind!r} of {kind.device!r}: "
                f"give one of its own, {[k.memory_kind for k in known if device.supports_buffer_type(k)]}"
            )
        chosen.append(kind)
    return tuple(chosen)
