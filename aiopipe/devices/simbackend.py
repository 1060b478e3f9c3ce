"""The backend of a simulated device: every launch and every copy is a few additions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from .. import _threads
from ..backend import Backend, Dispatch, Executable, InlineLane, Lane, Told
from ..errors import AllocationError, PlacementError, TensorError
from ..graph import Tensor
from ..tensor_range import Range, written
from .base import BufferType, MemoryStats, Program
from .clock import VirtualClock
from .simops import FailOp
from .simvalue import (
    PENDING,
    Link,
    SimDevice,
    SimValue,
    Spec,
    Unit,
    arrive,
    evaluate,
    frozen,
    numpy_dtype,
    overlay,
    read,
    spec_of,
)

__all__ = ["Record", "SimBackend"]

_TOKEN = Spec((), "bool", 1)
"""What a program that only has effects returns: something to wait for."""


class Record(NamedTuple):
    """What happened on a device, in virtual seconds.

    Attributes:
        backend: who ran it, or received it.
        program: what was launched; None for a copy.
        start_s: when it began to occupy the device, or the link.
        end_s: when its results were there.
        kind: ``"launch"`` or ``"copy"``.
        src: for a copy, the backend that it came from; None for the host.
        dst: for a copy, the same as `backend`.
        nbytes: bytes copied.
    """

    backend: SimBackend
    program: Program | None
    start_s: float
    end_s: float
    kind: Literal["launch", "copy"] = "launch"
    src: SimBackend | None = None
    dst: SimBackend | None = None
    nbytes: int = 0


class World(Protocol):
    """What a simulated backend is part of: `aiopipe.devices.sim.Cluster` documents it."""

    clock: VirtualClock
    lane: InlineLane
    log: list[Record]
    compute: bool
    record: bool
    temp_nbytes: int | Callable[[Program], int]

    @property
    def backends(self) -> Sequence[SimBackend]: ...

    def program_cost_s(self, program: Program, device: SimDevice) -> float: ...

    def link_between(self, src: Unit | None, dst: Unit) -> Link: ...


class SimBackend(Backend):
    """A simulated device's queue, as a backend. `Cluster` makes them; nothing that they do blocks."""

    device: SimDevice
    has_threads = False
    tells_times: ClassVar[bool] = True

    def __init__(self, cluster: World, unit: Unit, *, dispatch: Dispatch = "auto") -> None:
        super().__init__(unit.device.name, unit.device, dispatch=dispatch)
        self.cluster = cluster
        self.unit = unit
        self._notified_at = 0.0
        if unit.backend is None:
            unit.backend = self

    def load(self, program: Program) -> Executable:
        """Look up what the program costs; no code is made.

        Raises:
            AllocationError: asked for by `Cluster.fail_next_allocation`.
            PlacementError: the device does not support an op of the program.
            ValueError: a cost is negative or not finite.
        """
        self.check_open()
        for node in program.nodes:
            if not self.device.supports_op(node):
                raise PlacementError(f"{self.name} does not support {node.name} ({node.source or 'no source line'})")
        temp = self.cluster.temp_nbytes
        memory = MemoryStats(
            temp_nbytes=temp(program) if callable(temp) else temp,
            output_nbytes=sum(tensor.nbytes for tensor in program.outputs),
            argument_nbytes=sum(tensor.nbytes for tensor in program.inputs),
        )
        self._allocate(memory.temp_nbytes + memory.output_nbytes)
        cost_s = self.cluster.program_cost_s(program, self.device)
        return Executable(program, _launcher(self, program, cost_s), memory, blocks=False, launch_s=1e-6)

    def upload(self, value: Any, tensor: Tensor) -> SimValue:
        """Put a value here at once: it takes no virtual time.

        Raises:
            AllocationError: asked for by `Cluster.fail_next_allocation`.
            TensorError: the cluster computes, and the value is None or not of the tensor's shape.
        """
        self.check_open()
        self._allocate(tensor.nbytes)
        spec = Spec(tensor.shape, tensor.dtype, tensor.nbytes)
        if isinstance(value, SimValue):
            if value.unit is self.unit:
                return value
            value = self.download(value)
        if not self.cluster.compute:
            return SimValue(self.unit, spec, 0.0, None, None)
        if value is None or tuple(np.shape(value)) != tensor.shape:
            raise TensorError(f"{tensor.describe()} got {'no value' if value is None else f'shape {np.shape(value)}'}")
        dtype = numpy_dtype(tensor.dtype)
        return SimValue(self.unit, spec, 0.0, None, frozen(value if dtype is None else np.array(value, dtype)))

    def duplicate(self, value: Any, tensor: Tensor) -> SimValue:
        """Copied at once: it takes no virtual time."""
        self.check_open()
        self._allocate(tensor.nbytes)
        return SimValue(self.unit, value.spec, value.ready_at, value.error, value.data)

    def transfer(self, values: Sequence[Any]) -> Sequence[SimValue]:
        """Send values over the links to here, each after what its link already carries.

        Raises:
            TensorError: a value was donated, or belongs to another cluster.
        """
        if self.closed:
            self.check_open()
        unit, cluster = self.unit, self.cluster
        links, clock = unit.inbound, cluster.clock
        compute, now = cluster.compute, clock.now
        arrived: list[SimValue] = []
        for value in values:
            if value.__class__ is SimValue:
                src = value.unit
                if src is unit:
                    arrived.append(value)
                    continue
                if src is None or src.clock is not clock:
                    raise TensorError(f"{value!r} cannot be copied to {self.name}: {_unusable(value, unit)}")
                begin, spec, error = value.ready_at, value.spec, value.error
            else:
                if not hasattr(value, "dtype"):
                    value = np.asarray(value)
                src, begin, spec, error = None, now, spec_of(value), None
            link = links.get(src) or cluster.link_between(src, unit)
            if now > begin:
                begin = now
            if link.free_at > begin:
                begin = link.free_at
            link.free_at = free_at = begin + spec.nbytes / link.bytes_per_s
            end = free_at + link.latency_s
            if end > unit.arrives_at:
                unit.arrives_at = end
            if compute:
                copy = SimValue(unit, spec, end, None, PENDING)
                clock.complete_at(end, partial(arrive, value, copy))
            else:
                copy = SimValue(unit, spec, end, error, None)
            arrived.append(copy)
            if self.told is not None:
                self.told.append(Told(begin, end, "" if src is None else src.device.name, spec.nbytes))
            if cluster.record:
                source = None if src is None else cluster.backends[src.device.index]
                cluster.log.append(Record(self, None, begin, end, "copy", source, self, spec.nbytes))
        return arrived

    def all_ready(self, values: Sequence[Any]) -> bool:
        now = self.cluster.clock.now
        return all(value.ready_at <= now and value.data is not PENDING for value in values)

    def error_of(self, values: Sequence[Any]) -> BaseException | None:
        now = self.cluster.clock.now
        for value in values:
            if value.error is not None and value.ready_at <= now:
                error: BaseException = value.error
                return error
        return None

    def now(self) -> float:
        """Virtual seconds."""
        return self.cluster.clock.now

    def notify(self, values: Sequence[Any], callback: Callable[[BaseException | None], None]) -> None:
        """Call back, on the loop's thread, at the virtual time when all values are there.

        Not before what was asked for earlier on this backend has been answered.
        """
        when, error = self._notified_at, None
        for value in values:
            if value.ready_at > when:
                when = value.ready_at
            if error is None:
                error = value.error
        self._notified_at = when
        if self.cluster.compute:  # errors are known only then
            self.cluster.clock.call_at(when, partial(_report, tuple(values), callback))
        else:
            self.cluster.clock.call_at(when, partial(callback, error))

    def store(self, value: Any, tensor: Tensor, buffer_type: BufferType) -> SimValue:
        """Send an array over the host's link to here.

        Raises:
            AllocationError: asked for by `Cluster.fail_next_allocation`.
        """
        self._allocate(tensor.nbytes)
        return self.transfer((value,))[0]

    def copy_from(self, value: Any, tensor: Tensor, buffer_type: BufferType) -> SimValue | None:
        """Send a value over the link from its device to here."""
        return self.transfer((value,))[0] if self.accepts(value) else None

    def write_range(
        self, value: Any, tensor: Tensor, buffer_type: BufferType, where: Range, data: np.ndarray[Any, Any]
    ) -> SimValue:
        """Send the elements over the host's link; they are in the new value when both are there."""
        if value is None:
            return self.store(written(None, tensor, where, data), tensor, buffer_type)
        part = self.transfer((data,))[0]
        clock, when = self.cluster.clock, max(part.ready_at, value.ready_at)
        spec = Spec(tensor.shape, tensor.dtype, tensor.nbytes)
        if not self.cluster.compute:
            return SimValue(self.unit, spec, when, value.error, None)
        made = SimValue(self.unit, spec, when, None, PENDING)
        clock.complete_at(when, partial(overlay, value, part, made, lambda old, new: written(old, tensor, where, new)))
        return made

    def check_room(self, nbytes: int) -> None:
        """As every backend, and as `Cluster.fail_next_allocation` asks."""
        self._allocate(nbytes)
        super().check_room(nbytes)

    def download(self, value: Any) -> Any:
        """The value as a read-only NumPy array (as it is, for a type that NumPy lacks); takes no virtual time.

        Zeros, in a cluster that does not compute. In a thread it waits; on the loop's thread, where that
        would stop the clock, a value that is not ready is an error.

        Raises:
            TensorError: the value was donated, or is not ready and cannot be waited for.
            Exception: what the value failed with.
        """
        self._wait(value)
        data = read(value)
        return data if numpy_dtype(value.spec.dtype) is None else np.asarray(data)

    def host_buffer(self, tensor: Tensor) -> Any:
        dtype = numpy_dtype(tensor.dtype)
        return None if dtype is None else np.empty(tensor.shape, dtype)

    def accepts(self, value: Any) -> bool:
        return isinstance(value, SimValue) and value.unit is not None and value.unit.clock is self.cluster.clock

    def holds(self, value: Any) -> bool:
        return isinstance(value, SimValue) and value.unit is self.unit

    def make_lane(self, *, own: bool) -> Lane:
        """The cluster's inline lane, also when `own`: no launch can block."""
        return self.cluster.lane

    async def synchronize(self) -> None:
        try:
            await self.queue.synchronize()
        finally:
            await self._idle()

    async def aclose(self) -> None:
        if not self.closed:
            try:
                await super().aclose()
            finally:
                await self._idle()

    async def _idle(self) -> None:
        when = max(self.unit.free_at, self.unit.arrives_at)
        if when > self.cluster.clock.now or self.cluster.compute:
            await self.cluster.clock.wait_until(when)

    def _allocate(self, nbytes: int) -> None:
        if self.unit.fail_allocation:
            self.unit.fail_allocation = False
            available = self.device.props.memory_nbytes or 0
            raise AllocationError(
                f"{self.name} has no room for {nbytes} bytes: it was told to fail this allocation",
                backend=self.name,
                asked_nbytes=nbytes,
                available_nbytes=available,
            )

    def _wait(self, value: SimValue) -> None:
        if value.is_ready():
            return
        clock = self.cluster.clock
        if clock.running and not clock.in_loop:
            there = _threads.Event()
            clock.call_at(value.ready_at, there.set)
            while not there.wait(0.1) and clock.running:
                pass


def _launcher(backend: SimBackend, program: Program, cost_s: float) -> Callable[..., Sequence[SimValue]]:
    """What `Executable.call` is: some arithmetic, as everything that can be known before is known here."""
    unit, cluster = backend.unit, backend.cluster
    clock, log, record, compute = cluster.clock, cluster.log, cluster.record, cluster.compute
    outputs: Sequence[Tensor | Spec] = program.outputs or (_TOKEN,)
    donate, n_inputs = program.donate, len(program.inputs)
    failing = [node.fn for node in program.nodes if isinstance(node.fn, FailOp)]

    def launch(*args: SimValue) -> Sequence[SimValue]:
        if backend.closed:
            backend.check_open()
        if len(args) != n_inputs:
            raise TensorError(f"{program.name} got {len(args)} values, expected {n_inputs}")
        start, error = unit.free_at, None
        if clock.now > start:
            start = clock.now
        try:
            for arg in args:
                if arg.unit is not unit:
                    raise TensorError(f"{arg!r} cannot be used by {program.name}: {_unusable(arg, unit)}")
                if arg.ready_at > start:
                    start = arg.ready_at
                if error is None:
                    error = arg.error
        except AttributeError:
            got = type(arg).__name__
            raise TensorError(f"{program.name} got a {got}: `transfer` it to {backend.name} first") from None
        unit.free_at = end = start + cost_s
        unit.busy_s += cost_s
        if backend.told is not None:
            backend.told.append(Told(start, end))
        if record:
            log.append(Record(backend, program, start, end))
        if compute:
            results = [SimValue(unit, tensor, end, None, PENDING) for tensor in outputs]
            clock.complete_at(end, partial(evaluate, program, args, results))
        else:
            for op in failing:
                error = op.next_error() if error is None else error
            results = [SimValue(unit, tensor, end, error, None) for tensor in outputs]
        for i in donate:
            args[i].unit = None
        return results

    return launch


def _unusable(value: SimValue, unit: Unit) -> str:
    if value.unit is None:
        return "an earlier launch took its memory; donate a value at its last use only"
    if value.unit.clock is not unit.clock:
        return "it belongs to another cluster; copy it with `download` and `upload`"
    return "it is on another device; `transfer` it first"


def _report(values: Sequence[SimValue], callback: Callable[[BaseException | None], None]) -> None:
    callback(next((value.error for value in values if value.error is not None), None))
