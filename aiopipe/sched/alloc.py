"""Sizes and donation: what each backend must hold, and which memory outputs may take over."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass

from ..devices.base import BufferType, Device, DeviceProps, DeviceType, MemoryStats
from ..errors import AllocationError, PlacementError
from ..graph import Graph, Tensor
from .split import HOST, Split, last_uses

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


def donations(
    graph: Graph, splits: Sequence[Split], props: Sequence[DeviceProps], last: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """For each split the positions of the inputs that its outputs may take over.

    State, by its own next value, where no other split reads it. Copies that the scheduler itself made from
    another backend, in the last split that reads them there, each matched with an output of its own shape
    and dtype. A user's input is never donated (it may be the user's own array), nor a value that may be a
    view of its producer's memory (`DeviceProps.view_nbytes`).

    Args:
        graph: what is evaluated.
        splits: from `split_graph`.
        props: of each backend's device.
        last: from `last_uses` with one more than the backends.
    """
    stride = len(props) + 1
    replaced = _replaced(graph, splits)
    later: dict[int, set[int]] = {}  # for splits to come, the copies that nobody reads after them
    result: list[tuple[int, ...]] = []
    for split in splits:
        index, here, inputs = split.index, split.backend, split.inputs
        own = later.pop(index, set())
        for t, src, nbytes in split.brings:
            if src != HOST and nbytes > props[here].view_nbytes:
                reader = last[t * stride + here]
                if reader == index:
                    own.add(t)
                else:
                    later.setdefault(reader, set()).add(t)
        state: list[int] = []
        if replaced:
            made = set(split.outputs)
            state = [i for i, t in enumerate(inputs) if replaced.get(t) in made]
        if own:
            taken = {replaced[inputs[position]] for position in state}
            state += _matched(graph, split, [i for i, t in enumerate(inputs) if t in own], taken)
        result.append(tuple(state))
    return tuple(result)


def _replaced(graph: Graph, splits: Sequence[Split]) -> dict[int, int]:
    """State that a single split reads -> the value that takes its place."""
    new = {leaf.id: made.id for leaf, made in zip(graph.state, graph.new_state, strict=True) if made is not leaf}
    readers = dict.fromkeys(new, 0)
    for split in splits if new else ():
        for t in split.inputs:
            if t in readers:
                readers[t] += 1
    return {t: made for t, made in new.items() if readers[t] == 1}


def marker_of(tensors: Sequence[Tensor], outputs: Sequence[int], new_state: Container[int]) -> int:
    """Which of a split's outputs marks its end: the position of the smallest, or their number: a token behind them.

    State does not mark anything: the next evaluation may take over its memory before anybody has looked.
    """
    sizes = [(tensors[t].nbytes, i) for i, t in enumerate(outputs) if t not in new_state]
    return min(sizes)[1] if sizes else len(outputs)


def _matched(graph: Graph, split: Split, own: Sequence[int], taken: Container[int]) -> list[int]:
    """Those of the positions in a split's inputs that have an output of the same type, each one of its own.

    Outputs that are `taken` already are no one's.
    """
    tensors = graph.tensors
    free: dict[tuple[Hashable, str], int] = {}
    for t in split.outputs:
        if t not in taken:
            kind = tensors[t].shape, tensors[t].dtype
            free[kind] = free.get(kind, 0) + 1
    matched = []
    for position in own:
        tensor = tensors[split.inputs[position]]
        kind = tensor.shape, tensor.dtype
        if free.get(kind, 0) > 0:
            free[kind] -= 1
            matched.append(position)
    return matched


def backend_sizes(
    graph: Graph,
    splits: Sequence[Split],
    props: Sequence[DeviceProps],
    *,
    weights: Sequence[frozenset[int]],
    donate: Sequence[tuple[int, ...]],
    state_homes: Sequence[int] = (),
    memory: Sequence[MemoryStats] = (),
    last: Mapping[int, int] | None = None,
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
        last: from `last_uses` with one more than the backends, if that is known already.
    """
    temp = [0] * len(props)
    for split, stats in zip(splits, memory, strict=False):
        temp[split.backend] = max(temp[split.backend], stats.temp_nbytes)
    held = _Held(graph, splits, props, last_uses(splits, len(props) + 1) if last is None else last)
    for split, donated in zip(splits, donate, strict=True):
        held.launch(split, donated)
    held_weights = [sum([graph.tensors[t].nbytes for t in ids]) for ids in weights]
    of_state = [0] * len(props)
    for leaf, b in zip(graph.state, state_homes, strict=True):
        of_state[b] += leaf.nbytes
    return tuple(map(BackendSize, held_weights, held.peak, temp, of_state))


class _Held:
    """What one evaluation holds on each backend while its splits are launched one after the other.

    The same rules by which `launch_splits` lets values go: a value after the last split that reads
    it, a result of the graph never, and of each split the smallest output (its marker) never. All
    evaluations in flight may be at their worst point at once, as where a slow device makes them queue.
    """

    def __init__(
        self, graph: Graph, splits: Sequence[Split], props: Sequence[DeviceProps], last: Mapping[int, int]
    ) -> None:
        self.graph = graph
        self.props = props
        self.now = [0] * len(props)
        self.results = {t.id for t in graph.kept}
        self.new_state = {new.id: leaf.id for leaf, new in zip(graph.state, graph.new_state, strict=True)}
        self.stride = len(props) + 1
        self.last_use = last
        self.alive: dict[int, int] = {}  # tensor on a backend -> bytes
        self.first: dict[int, int] = {}  # input -> the backend that reads it first
        for split in splits:
            for t, src, _ in split.brings:
                if src == HOST:
                    self.first.setdefault(t, split.backend)
        for tensor in graph.inputs:
            self._capture(tensor.id, tensor.nbytes)
        self.peak = list(self.now)

    def _capture(self, t: int, nbytes: int) -> None:
        """An input's staging buffer, in memory that its first reader shares with the host, or else on the host."""
        host = len(self.props) - 1
        reader = self.first.get(t)
        if t in self.results:  # the caller will hold it: it is uploaded for each evaluation
            self.now[host if reader is None else reader] += nbytes
        elif reader is None:
            return
        elif self.props[reader].aliases_host:
            self.now[reader] += nbytes
        elif self.props[host].type is DeviceType.CPU:
            self.now[host] += nbytes

    def launch(self, split: Split, donated: Sequence[int]) -> None:
        """Add what a split brings and makes, note the peak, let go of what nobody reads afterwards."""
        here, stride, now, alive, tensors = split.backend, self.stride, self.now, self.alive, self.graph.tensors
        held = now[here]
        for t, src, nbytes in split.brings:
            if src != HOST or not self._is_in_place(t, here):
                alive[t * stride + here] = nbytes
                held += nbytes
        peak = max(self.peak[here], held)
        for position in donated:
            held -= alive.pop(split.inputs[position] * stride + here, 0)
        for t in split.outputs:
            held += tensors[t].nbytes
        if self.new_state:  # what takes over the memory of the state before it is counted with the states
            old = {split.inputs[position] for position in donated}
            held -= sum(tensors[t].nbytes for t in split.outputs if self.new_state.get(t) in old)
        if not split.outputs or (self.new_state and self.new_state.keys() >= set(split.outputs)):
            held += 1  # a token
        now[here] = held
        self.peak[here] = max(peak, held)
        if len(split.outputs) > 1:  # one alone is the marker, and stays to the end
            self._note_outputs(split)
        if alive:
            self._let_go(split)

    def _is_in_place(self, t: int, here: int) -> bool:
        """Whether an input is read where it was captured."""
        return here == self.first[t] if t in self.results else self.props[here].aliases_host

    def _note_outputs(self, split: Split) -> None:
        """The outputs that will be let go: not the marker, nor the graph's results."""
        tensors = self.graph.tensors
        position = marker_of(tensors, split.outputs, self.new_state)
        marker = split.outputs[position] if position < len(split.outputs) else None
        again = {t for i in split.recomputed for t in self.graph.nodes[i].outputs}
        for t in split.outputs:
            if t != marker and (t not in self.results or t in again):
                self.alive[t * self.stride + split.backend] = tensors[t].nbytes

    def _let_go(self, split: Split) -> None:
        """Subtract what no split reads after this one."""
        index, here, stride, last_use = split.index, split.backend, self.stride, self.last_use
        now, alive = self.now, self.alive
        for t in split.inputs:
            place = t * stride + here
            if last_use[place] == index and place in alive:
                now[here] -= alive.pop(place)
        for t, src, _ in split.brings:
            place = t * stride + src
            if src != HOST and last_use[place] == index and place in alive:
                now[src] -= alive.pop(place)


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
    for split in splits:
        limit = limits[split.backend]
        if limit is None:
            continue
        for t in (*split.inputs, *split.outputs):
            tensor = graph.tensors[t]
            if tensor.nbytes > limit:
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
