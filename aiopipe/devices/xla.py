"""Backends for every `jax.Device`: CPU, GPU, TPU.

Launching is JAX's own asynchronous dispatch; XLA keeps the order on each device (on CPUs: the order
of each dispatching thread). What JAX does not offer is a callback when an array is ready, so each
backend has a completion thread that waits for arrays, in order, and calls back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .. import _jax, _jax_compile, _jax_memory, _jax_types, _threads
from .._fork import ADVICE, in_child
from .._threads import in_thread
from ..backend import Backend, Dispatch, Executable, Lane, ThreadLane
from ..devices.base import BufferType, Device, DeviceProps, DeviceType, Program
from ..errors import BackendClosedError, ForkedError, PlacementError, first_error
from ..graph import Node, Tensor
from ..handle import Handle
from ..tensor_range import Range

__all__ = ["CPU_ONLY_OPS", "SPEEDS", "TYPES", "XlaBackend", "XlaDevice", "open_xla", "xla_devices"]

VIEW_NBYTES = 1 << 20
"""Up to this size a ready value of another CPU device is handed over as a view, not copied."""

_LOWERING = _threads.Lock()
"""One thread lowers at a time: it holds the GIL anyway, and each one more makes the event loop wait longer."""

INLINE_NBYTES = 1 << 17
"""A computation that XLA runs in the caller may touch this much memory and still count as instant."""

_SLOW_OPS = frozenset({"cholesky", "eig", "eigh", "fft", "lu", "qr", "schur", "sort", "svd", "triangular_solve"})
"""Ops whose cost XLA's flop count does not show."""

CPU_ONLY_OPS = frozenset({"eig", "schur"})
"""Ops that JAX implements on the CPU alone."""

TYPES = {
    "cpu": DeviceType.CPU,
    "gpu": DeviceType.GPU,
    "cuda": DeviceType.GPU,
    "rocm": DeviceType.GPU,
    "tpu": DeviceType.TPU,
}
"""Kinds of hardware by JAX's names of platforms."""

SPEEDS = {DeviceType.CPU: (5e10, 1e10), DeviceType.GPU: (5e13, 1.5e12), DeviceType.TPU: (1e14, 1e12)}
"""Rough (operations, bytes of memory) for each second."""



class XlaDevice(Device):
    """A `jax.Device`."""

    def __init__(self, device: jax.Device) -> None:
        kind = TYPES.get(device.platform, DeviceType.OTHER)
        flops, bandwidth = SPEEDS.get(kind, (5e10, 1e10))
        host = kind is DeviceType.CPU
        self.jax_device = device
        self.name = f"{'gpu' if kind is DeviceType.GPU else device.platform}:{_index_of(device)}"
        self.props = DeviceProps(
            type=kind,
            client=id(device.client),
            aliases_host=host,
            view_nbytes=VIEW_NBYTES if host else 0,
            memory_nbytes=_memory_nbytes(device),
            flops_per_s=flops,
            bytes_per_s=bandwidth,
        )

    def buffer_types(self) -> tuple[BufferType, ...]:
        """Its memory spaces, the default one first."""
        default = self.jax_device.default_memory().kind
        kinds = sorted({m.kind for m in self.jax_device.addressable_memories()}, key=lambda kind: kind != default)
        host = self.props.aliases_host
        return tuple(BufferType(self.name, kind, is_host=host or "host" in kind) for kind in kinds)

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        """Whether it is the memory that it computes in."""
        return buffer_type.device == self.name and buffer_type.memory_kind == self.jax_device.default_memory().kind

    def supports_op(self, node: Node) -> bool:
        """Whether JAX implements the op on this platform."""
        return self.is_host_cpu or node.op not in CPU_ONLY_OPS


def _index_of(device: jax.Device) -> int:
    return list(jax.local_devices(backend=device.platform)).index(device)


def _memory_nbytes(device: jax.Device) -> int | None:
    stats = device.memory_stats()  # None on the CPU
    limit = (stats or {}).get("bytes_limit")
    return int(limit) if limit else None


def xla_devices(platform: str | None = None) -> tuple[XlaDevice, ...]:
    """Every device of a platform, or of all platforms; empty where the platform is missing."""
    platforms = (platform,) if platform else ("cpu", "gpu", "tpu")
    found: list[XlaDevice] = []
    for name in platforms:
        try:
            found += [XlaDevice(device) for device in jax.local_devices(backend=name)]
        except RuntimeError:  # JAX's way to say that it has no such platform
            continue
    return tuple(found)


def open_xla(platform: str) -> Callable[..., Backend]:
    """The factory for one platform: ``open_xla("cpu")("1")`` opens ``cpu:1``."""

    def factory(params: str = "", *, dispatch: Dispatch = "auto") -> Backend:
        found = xla_devices(platform)
        spec = f"{platform}:{params}" if params else platform
        if params and not params.isdecimal():
            raise PlacementError(f"unknown device {spec!r}: expected a number after the colon, as in '{platform}:0'")
        index = int(params or 0)
        if index >= len(found):
            have = ", ".join(d.name for d in xla_devices()) or "none"
            hint = " For more CPU devices call jax.config.update('jax_num_cpu_devices', n) before JAX starts."
            raise PlacementError(f"unknown device {spec!r}: JAX has {have}.{hint if platform == 'cpu' else ''}")
        return XlaBackend(found[index], dispatch=dispatch)

    return factory


_left_behind = False
"""Whether JAX had opened its devices in a process that this one was forked from."""


def _leave_behind() -> None:
    global _left_behind
    _left_behind = _left_behind or _jax.has_started()


in_child(_leave_behind)


class XlaBackend(Backend):
    """A `jax.Device` as an actor.

    Raises:
        ForkedError: JAX had its devices open in a process that this one was forked from: they do not work here.
    """

    device: XlaDevice

    def __init__(self, device: XlaDevice, *, dispatch: Dispatch = "auto") -> None:
        if _left_behind:
            raise ForkedError(
                f"{device.name!r} cannot be opened: JAX used its devices before this process was forked, and its "
                f"threads are in the parent only; {ADVICE}"
            )
        super().__init__(device.name, device, dispatch=dispatch)
        self.jax_device = device.jax_device
        self._sharding = _jax.sharding_of(device.jax_device)
        self._aliases_host = device.props.aliases_host
        self._view_nbytes = device.props.view_nbytes
        self._move = _jax.Mover(device.jax_device)
        self._completion = ThreadLane(f"{self.name}-completion")

    def load(self, program: Program) -> Executable:
        """Compile with XLA."""
        self.check_open()
        compiled = _jax_compile.compile_program(program, self.jax_device, lowering=_LOWERING)
        return Executable(
            program=program,
            call=compiled.call,
            memory=compiled.memory,
            blocks=_can_block(program, compiled, self.device.props.type),
            instant=compiled.in_caller,
            launch_s=8e-6 + 4e-7 * len(program.inputs) + min(compiled.bytes_accessed or 0.0, INLINE_NBYTES) / 5e9,
        )

    def upload(self, value: Any, tensor: Tensor) -> Any:
        """`jax.device_put`, of a private copy where JAX would alias NumPy memory."""
        self.check_open()
        if not isinstance(value, jax.Array):
            value = np.array(value, dtype=_jax_types.dtype_of(tensor.dtype), copy=True)
        elif self._is_here(value):
            return value
        elif value.devices() == {self.jax_device}:  # in another of its memories
            return _jax_memory.put_in(value, self.jax_device, None).block_until_ready()
        with _jax.undisturbed(), _jax.wide_context((value,)):
            return jax.device_put(value, self.jax_device).block_until_ready()

    def duplicate(self, value: Any, tensor: Tensor) -> Any:
        """Copied on the device."""
        self.check_open()
        return _jax_memory.duplicate(value, self.jax_device)

    def transfer(self, values: Sequence[Any]) -> Sequence[Any]:
        """Views of ready values where memory is shared; else asynchronous copies. Waits for those of other machines."""
        out = list(values)
        moving: list[int] = []
        in_place = self._aliases_host
        for i, value in enumerate(out):
            kind = type(value)
            if kind is _jax.ArrayImpl:
                if value.sharding is self._sharding:
                    continue  # here already, as what `show` shows
                if in_place and _jax.platform_of(value) == "cpu" and value.is_ready():
                    view = np.asarray(value)
                    if view.nbytes <= self._view_nbytes:
                        out[i] = view
                        continue
            elif kind is np.ndarray:
                if in_place:
                    continue  # the compiled call reads it in place
            elif isinstance(value, Handle):
                out[i] = value.numpy()
                if in_place:
                    continue
            moving.append(i)
        if len(moving) == 1:
            out[moving[0]] = self._move(out[moving[0]])
        elif moving:
            sources = [out[i] for i in moving]
            with _jax.wide_context(sources):
                for i, value in zip(moving, _jax.put(sources, self.jax_device), strict=True):
                    out[i] = value
        return out

    def all_ready(self, values: Sequence[Any]) -> bool:
        for value in values:  # no generator: this is asked in every evaluation
            if not _jax.is_ready(value):
                return False
        return True

    def error_of(self, values: Sequence[Any]) -> BaseException | None:
        return _wait(values)

    def notify(self, values: Sequence[Any], callback: Callable[[BaseException | None], None]) -> None:
        try:
            self._completion.post(lambda: callback(_wait(values)))
        except BackendClosedError:  # closed under an evaluation, which must still hear of its end
            _threads.Thread(target=lambda: callback(_wait(values)), name=f"aiopipe-{self.name}-late").start()

    def download(self, value: Any) -> Any:
        """The value as a NumPy array; a typed PRNG key as its bits."""
        return _jax.host_view(value)

    def host_buffer(self, tensor: Tensor) -> Any:
        """An uninitialised NumPy array, aligned so that XLA reads it in place; None for PRNG keys."""
        dtype = _jax_types.dtype_of(tensor.dtype)
        if tensor.dtype.startswith("key<"):
            return None
        raw = np.empty(tensor.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + tensor.nbytes].view(dtype).reshape(tensor.shape)

    def show(self, buffer: Any) -> Any:
        """An array of JAX that is the buffer's memory, where there can be one."""
        if not self._aliases_host or type(buffer) is not np.ndarray:
            return buffer
        with _jax.wide_context((buffer,)):
            shown = _jax.show(buffer, self.jax_device)
        return buffer if shown is None else shown

    def accepts(self, value: Any) -> bool:
        """Whether it is an array of this client; other clients' arrays are read by way of the host."""
        if type(value) is _jax.ArrayImpl:
            return bool(_jax.platform_of(value) == self.jax_device.platform)
        return isinstance(value, jax.Array) and not value.is_deleted()

    def holds(self, value: Any) -> bool:
        """Whether it is an array committed to this device, in the memory that it computes in."""
        return isinstance(value, jax.Array) and value.committed and not value.is_deleted() and self._is_here(value)

    def _is_here(self, value: jax.Array) -> bool:
        return value.devices() == {self.jax_device} and _jax_memory.in_default_memory(value, self.jax_device)

    def store(self, value: Any, tensor: Tensor, buffer_type: BufferType) -> Any:
        """`jax.device_put` into that memory; where the device reads the host's, without a copy if aligned."""
        self.check_open()
        return _jax_memory.put_in(value, self.jax_device, buffer_type.memory_kind)

    def copy_from(self, value: Any, tensor: Tensor, buffer_type: BufferType) -> Any | None:
        """`jax.device_put` of an array: asynchronous within a client."""
        self.check_open()
        if not isinstance(value, jax.Array):
            return None
        if buffer_type.memory_kind == self.jax_device.default_memory().kind and _jax_memory.in_default_memory(
            value, self.jax_device
        ):
            with _jax.undisturbed():
                return _jax.put_one(value, self.jax_device)
        return _jax_memory.put_in(value, self.jax_device, buffer_type.memory_kind)

    def borrow(self, array: np.ndarray[Any, Any], tensor: Tensor) -> Any:
        """`jax.device_put`, which shows aligned memory of the host in place. CPU only."""
        if not self._aliases_host:
            return super().borrow(array, tensor)
        return _jax_memory.put_in(array, self.jax_device, None)

    def read_range(self, value: Any, tensor: Tensor, where: Range) -> np.ndarray[Any, Any]:
        """Picked out on the device, where that is not the host, so that no more than that travels."""
        if self._on_host(value, tensor) or where.is_whole(tensor):
            return super().read_range(value, tensor, where)
        return _jax_memory.read_on_device(value, where)

    def write_range(
        self, value: Any, tensor: Tensor, buffer_type: BufferType, where: Range, data: np.ndarray[Any, Any]
    ) -> Any:
        """Put together on the device, where that is not the host."""
        if value is None or self._on_host(value, tensor):
            return super().write_range(value, tensor, buffer_type, where, data)
        return _jax_memory.write_on_device(value, where, data)

    def _on_host(self, value: Any, tensor: Tensor) -> bool:
        in_place = _jax_memory.in_default_memory(value, self.jax_device) and _jax_memory.ranges_on_device(tensor)
        return self._aliases_host or not in_place

    def make_lane(self, *, own: bool) -> Lane:
        """Its own thread, or one for all devices of the client."""
        return ThreadLane(self.name if own else f"{self.device.props.type.value}-dispatch")

    async def synchronize(self) -> None:
        """Wait for what each thread launched last: the device works in order for each."""
        try:
            await super().synchronize()
        finally:
            if not (self.closed or self.origin.forked):
                done = _threads.Event()
                self.notify(tuple(self.newest.values()), lambda _: done.set())
                await in_thread(done.wait, "synchronize")

    def end_threads(self) -> None:
        self._completion.close()


def _can_block(program: Program, compiled: _jax_compile.Compiled, kind: DeviceType) -> bool:
    """Whether launching may hold up the caller.

    Host callbacks do, everywhere, and so does looking at the results. The CPU client runs what it counts as fewer than
    `_jax_compile.INLINE_FLOPS` flops in the caller, whatever it costs: transcendentals, gathers and all but one
    round of a loop count nothing.
    """
    if compiled.has_callback or compiled.waits:
        return True
    if kind is not DeviceType.CPU or not (compiled.flops is None or compiled.in_caller):
        return False
    if compiled.has_loop or any(node.op in _SLOW_OPS for node in program.nodes):
        return True
    return (compiled.bytes_accessed or 0.0) > INLINE_NBYTES


def _wait(values: Sequence[Any]) -> BaseException | None:
    """Wait for all; the first error, if any."""
    first: BaseException | None = None
    for value in values:
        try:
            value.block_until_ready()
        except Exception as error:  # whatever the device raised goes to the caller of that evaluation
            first = first_error(first, error)
    return first
