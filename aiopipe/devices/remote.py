"""`RemoteBackend`: a device of another machine, under the same scheduler as those of this one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _jax, _jax_compile, _jax_export, _jax_types
from .._threads import in_thread
from ..backend import Backend, Dispatch, Executable
from ..errors import BackendClosedError, first_error
from ..graph import Node, Tensor
from ..lanes import Lane, ThreadLane
from ..tensor_range import Range
from .base import BufferType, Device, DeviceProps, Program
from .remote_actor import Ref
from .remote_link import Carrier, Link, RemoteArray, RemoteProgram, Reply
from .xla import CPU_ONLY_OPS, SPEEDS, TYPES

__all__ = ["RemoteBackend", "RemoteDevice"]

CLOSE_S = 30.0
"""How long closing waits for what is still being computed."""

LAUNCH_S = 3e-4
"""Roughly what sending a launch costs the caller."""

class RemoteDevice(Device):
    """A device of JAX on another machine. Only its kind is known before somebody computes on it.

    Args:
        name: of the backend, such as ``"ray:gpu:0"``.
        spec: what it is over there, such as ``"gpu:0"``.
    """

    def __init__(self, name: str, spec: str) -> None:
        kind = TYPES[spec.partition(":")[0]]
        flops, bandwidth = SPEEDS[kind]
        self.name = name
        self.props = DeviceProps(
            type=kind, client=name, remote=True, flops_per_s=flops, bytes_per_s=bandwidth
        )

    @property
    def is_host_cpu(self) -> bool:
        """No: it is another host's."""
        return False

    def supports_op(self, node: Node) -> bool:
        """Whether JAX implements the op there, and it can travel: what calls back into Python cannot."""
        missing = self.props.type.value != "cpu" and node.op in CPU_ONLY_OPS
        return not missing and not _jax_compile.calls_back(node)


class RemoteBackend(Backend):
    """An actor on another machine, as a backend.

    Calls on it block for no longer than sending takes, except those that `Backend` says may. Its process is
    started when it is first used.

    Args:
        device: what it computes on.
        start: starts the actor; blocks.
        dispatch: as for every backend.
    """

    device: RemoteDevice

    def __init__(self, device: RemoteDevice, start: Callable[[], Carrier], *, dispatch: Dispatch = "auto") -> None:
        super().__init__(device.name, device, dispatch=dispatch)
        self.link = Link(device.name, start)
        self._completion = ThreadLane(f"{self.name}-completion")

    def check_open(self) -> None:
        """Raise `BackendClosedError` after `aclose`, `BackendLostError` when the actor or its machine is gone."""
        super().check_open()
        self.link.check()

    # Programs -------------------------------------------------------------------------------------

    def load(self, program: Program) -> Executable:
        """Export it here, compile it there.

        Raises:
            PlacementError: it cannot be exported, or the actor cannot be started.
            BackendLostError: the actor is gone.
        """
        self.check_open()
        worker = self.link.connect()
        shipped = _jax_export.export_program(program, worker.platform, self.name)
        there = RemoteProgram(self.link)
        memory, _ = self.link.send("load", shipped, out=(there.id,)).wait()
        types = [(t.shape, _jax_types.dtype_of(t.dtype)) for t in program.outputs] or [((), np.dtype(np.bool_))]

        def call(*args: Any) -> Sequence[RemoteArray]:
            self.check_open()
            reply = Reply()
            results = [RemoteArray(self.link, shape, dtype, reply) for shape, dtype in types]
            operands = [Ref(arg.id) for arg in args]
            self.link.send("launch", Ref(there.id), *operands, out=[made.id for made in results], reply=reply)
            return results

        # It does not hold up the caller for as long as it runs, but a lane of its own it must have.
        return Executable(program, call, memory, blocks=True, launch_s=LAUNCH_S)

    # Values ---------------------------------------------------------------------------------------

    def upload(self, value: Any, tensor: Tensor) -> RemoteArray:
        """Sent there, and waited for."""
        self.check_open()
        if self.holds(value):
            kept: RemoteArray = value
            return kept
        made = self._make(tensor, "upload", _jax_export.pack(value), _jax_export.bare(tensor))
        made.reply.wait()
        return made

    def duplicate(self, value: Any, tensor: Tensor) -> RemoteArray:
        """Copied over there."""
        self.check_open()
        made = self._make(tensor, "duplicate", Ref(value.id), _jax_export.bare(tensor))
        made.reply.wait()
        return made

    def transfer(self, values: Sequence[Any]) -> Sequence[Any]:
        """Sent with the launch that follows; waits for values of other clients to be ready, and until they are sent."""
        self.check_open()
        here = [v if self.holds(v) or _jax_export.is_array(v) else np.asarray(v) for v in values]
        away = [value for value in here if not self.holds(value)]
        reply = Reply()
        made = [RemoteArray(self.link, tuple(value.shape), value.dtype, reply) for value in away]
        if made:
            packed, out = map(_jax_export.pack, away), [handle.id for handle in made]
            self.link.send("transfer", *packed, out=out, reply=reply, at_once=False)
        moved = iter(made)
        return [value if self.holds(value) else next(moved) for value in here]

    def _make(self, tensor: Tensor, op: str, *args: Any) -> RemoteArray:
        """The result of an operation that makes one value, of the tensor's type."""
        made = RemoteArray(self.link, tensor.shape, _jax_types.dtype_of(tensor.dtype), Reply())
        self.link.send(op, *args, out=(made.id,), reply=made.reply)
        return made

    def download(self, value: Any) -> Any:
        """The value as a read-only NumPy array, or the bits of PRNG keys."""
        return value.numpy() if isinstance(value, RemoteArray) else _jax.host_view(value)

    def accepts(self, value: Any) -> bool:
        """Whether it lives here, or is an array of this process's JAX."""
        return self.holds(value) or _jax_export.is_intact(value)

    def holds(self, value: Any) -> bool:
        """Whether it lives in this actor."""
        return isinstance(value, RemoteArray) and value.link is self.link

    # Tensors in buffers ---------------------------------------------------------------------------

    def store(self, value: Any, tensor: Tensor, buffer_type: BufferType) -> RemoteArray:
        """Sent there; does not wait until it is there."""
        self.check_open()
        return self._make(tensor, "store", _jax_export.pack(value), _jax_export.bare(tensor))

    def copy_from(self, value: Any, tensor: Tensor, buffer_type: BufferType) -> Any | None:
        """Values of this actor are immutable: the same one. Others go over the host."""
        self.check_open()
        return value if self.holds(value) else None

    def read_range(self, value: Any, tensor: Tensor, where: Range) -> np.ndarray[Any, Any]:
        """Picked out over there, so that no more than that travels."""
        if not self.holds(value):
            return super().read_range(value, tensor, where)
        rows = self.link.send("read_range", Ref(value.id), _jax_export.bare(tensor), where).wait()
        return np.array(rows)

    def write_range(
        self, value: Any, tensor: Tensor, buffer_type: BufferType, where: Range, data: np.ndarray[Any, Any]
    ) -> RemoteArray:
        """Put together over there."""
        self.check_open()
        old = None if value is None else Ref(value.id)
        return self._make(tensor, "write_range", old, _jax_export.bare(tensor), where, data)

    # Completion -----------------------------------------------------------------------------------

    def all_ready(self, values: Sequence[Any]) -> bool:
        return all(v.reply.done() if isinstance(v, RemoteArray) else _jax.is_ready(v) for v in values)

    def error_of(self, values: Sequence[Any]) -> BaseException | None:
        return self._wait(values)

    def notify(self, values: Sequence[Any], callback: Callable[[BaseException | None], None]) -> None:
        try:
            self._completion.post(lambda: callback(self._wait(values)))
        except BackendClosedError:  # closed under an evaluation, which must still hear of its end
            threading.Thread(target=lambda: callback(self._wait(values)), name=f"aiopipe-{self.name}-late").start()

    def _wait(self, values: Sequence[Any]) -> BaseException | None:
        """Wait for all; the first error, if any."""
        first: BaseException | None = None
        for value in values:
            try:
                if isinstance(value, RemoteArray):
                    if not value.reply.done():
                        self.link.flush()
                    value.reply.wait()
                else:
                    _jax_export.wait_for(value)
            except Exception as error:  # whatever the device raised goes to the caller of that evaluation
                first = first_error(first, error)
        return first

    def make_lane(self, *, own: bool) -> Lane:
        """A thread of its own: no other backend is of the same client."""
        return ThreadLane(f"{self.name}-dispatch")

    async def synchronize(self) -> None:
        """Wait for what each thread launched last: the actor works in order."""
        try:
            await super().synchronize()
        finally:
            if not (self.closed or self.origin.forked):
                newest = tuple(self.newest.values())
                await in_thread(lambda: self._wait(newest), "synchronize")

    def end_threads(self) -> None:
        """Wait for what is running, for half a minute at most, then end the actor's process."""
        self.link.wait_idle(CLOSE_S)
        self.link.close()
        self._completion.close()
