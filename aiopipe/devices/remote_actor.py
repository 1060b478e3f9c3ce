"""The far end of a backend on another machine: one backend there, driven by messages.

`RemoteActor` knows nothing of what carries the messages. They may arrive out of order: each has a number, and they
are carried out by it. Values stay here under the numbers that the sender gave them, until it lets them go.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import _jax_export
from ..backend import Backend, Executable
from ..graph import Tensor
from ..lanes import ThreadLane
from ..registry import open_backend
from ..tensor_range import Range

__all__ = ["UNORDERED", "Command", "Outcome", "Ref", "RemoteActor", "Worker", "error_in"]


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value over there."""

    id: int


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do.

    Attributes:
        op: which of `RemoteActor`'s operations.
        args: its arguments: `Ref`s, NumPy arrays, `Bits`, descriptions.
        out: numbers under which to keep its results.
    """

    op: str
    args: tuple[Any, ...]
    out: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command: its results are ready.

    Attributes:
        error: the exception that it failed with, pickled; see `error_in`.
        value: what it answers.
    """

    error: bytes | None = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Worker:
    """The process at the far end.

    Attributes:
        node: address of its machine.
        pid: its process there.
        device: the device that it computes on, by the name that it has there.
        platform: what to export programs for.
        jax_version: of the JAX there.
        memory_nbytes: bytes that its device may use, or None when unknown.
    """

    node: str
    pid: int
    device: str
    platform: str
    jax_version: str
    memory_nbytes: int | None


class _Failed:
    """In the place of a value that could not even be launched."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # some can be written and not be read
    except Exception:  # somebody else's class may do anything
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


def error_in(outcome: Outcome) -> BaseException | None:
    """The exception of an outcome. One of a class that this process does not have becomes a `RuntimeError`."""
    if outcome.error is None:
        return None
    try:
        error: BaseException = pickle.loads(outcome.error)
    except Exception as why:
        error = RuntimeError(f"it failed with an exception that cannot be read on this machine: {why}")
    return error


class RemoteActor:
    """An asyncio actor that owns a backend.

    A thread launches, in the order of the messages; what waits for values or for a compiler runs in others. The
    loop of the actor only passes on.

    Args:
        spec: of the backend to open here, such as ``"cpu:0"``.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._backend: Backend
        self._copies_arrays = False
        self._values: dict[int, Any] = {}
        self._lane = ThreadLane("remote-dispatch")
        self._waiting = ThreadPoolExecutor(max_workers=max(4, os.cpu_count() or 1))
        self._next = 0
        self._early: dict[int, tuple[Sequence[Command], Sequence[asyncio.Future[Outcome]]]] = {}

    async def open(self) -> Worker:
        """Start JAX and open the backend.

        Raises:
            PlacementError: this machine has no such device.
        """
        return await asyncio.get_running_loop().run_in_executor(self._waiting, self._open)

    def _open(self) -> Worker:
        if self._spec.startswith("cpu"):
            _jax_export.keep_to("cpu")
        backend = self._backend = open_backend(self._spec)
        props = backend.device.props
        self._copies_arrays = props.aliases_host
        platform, version = _jax_export.describe(self._spec.partition(":")[0])
        node = socket.gethostname()
        return Worker(node, os.getpid(), backend.name, platform, version, props.memory_nbytes)

    async def watch(self) -> None:
        """Never returns: that the call ends tells its caller that this process has."""
        await asyncio.get_running_loop().create_future()

    async def execute(self, number: int, commands: Sequence[Command]) -> list[Outcome]:
        """Carry out commands, after those of all messages with lower numbers; return when their results are ready.

        Args:
            number: counts up from 0 without a gap; or negative, for those of `UNORDERED`, which are begun at once.
            commands: in order.
        """
        loop = asyncio.get_running_loop()
        outcomes: list[asyncio.Future[Outcome]] = [loop.create_future() for _ in commands]
        if number < 0:
            self._carry_out(loop, commands, outcomes)
            return [await outcome for outcome in outcomes]
        self._early[number] = commands, outcomes
        while (message := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self._lane.post(partial(self._carry_out, loop, *message))
        return [await outcome for outcome in outcomes]

    # On the lane (or on the loop, what is not ordered: that only begins here) -----------------------

    def _carry_out(
        self,
        loop: asyncio.AbstractEventLoop,
        commands: Sequence[Command],
        outcomes: Sequence[asyncio.Future[Outcome]],
    ) -> None:
        for command, outcome in zip(commands, outcomes, strict=True):
            self._start(command, partial(_tell, loop, outcome))

    def _start(self, command: Command, tell: Callable[[Outcome], None]) -> None:
        try:
            args = [self._value_of(arg) for arg in command.args]
            if command.op in _WAITING:
                self._waiting.submit(self._wait, command, args, tell)
                return
            results = _LAUNCHING[command.op](self, *args)
        except Exception as error:  # to whoever gave the command
            self._fail(command, error, tell)
            return
        self._values.update(zip(command.out, results, strict=False))  # a token, behind them, has no number
        arrays = [value for value in results if hasattr(value, "block_until_ready")]
        if self._backend.all_ready(arrays):
            tell(_outcome(self._backend.error_of(arrays)))
        else:
            self._backend.notify(arrays, lambda error: tell(_outcome(error)))

    def _value_of(self, arg: Any) -> Any:
        if not isinstance(arg, Ref):
            return _jax_export.unpack(arg)
        value = self._values[arg.id]
        if isinstance(value, _Failed):
            raise value.error
        return value

    def _fail(self, command: Command, error: Exception, tell: Callable[[Outcome], None]) -> None:
        error = error.with_traceback(None)  # whose frames hold values
        self._values.update((number, _Failed(error)) for number in command.out)
        tell(_outcome(error))

    def _launch(self, executable: Executable, *args: Any) -> Sequence[Any]:
        return executable.call(*args)

    def _transfer(self, *values: Any) -> Sequence[Any]:
        return self._backend.transfer([self._private(value) for value in values])

    def _private(self, value: Any) -> Any:
        # What has arrived lies in memory that messages share, read-only; XLA would take it as it is, and a donated
        # one write to it.
        return np.array(value) if self._copies_arrays and isinstance(value, np.ndarray) else value

    def _store(self, value: Any, tensor: Tensor) -> Sequence[Any]:
        return (self._backend.store(self._private(value), tensor, self._backend.device.buffer_types()[0]),)

    def _write_range(self, value: Any, tensor: Tensor, where: Range, data: Any) -> Sequence[Any]:
        kind = self._backend.device.buffer_types()[0]
        return (self._backend.write_range(value, tensor, kind, where, self._private(data)),)

    def _free(self, *numbers: int) -> Sequence[Any]:
        for number in numbers:
            self._values.pop(number, None)
        return ()

    # In threads that may wait ---------------------------------------------------------------------

    def _wait(self, command: Command, args: Sequence[Any], tell: Callable[[Outcome], None]) -> None:
        try:
            results, answer = _WAITING[command.op](self, *args)
        except Exception as error:  # to whoever gave the command
            self._fail(command, error, tell)
            return
        # Nobody else knows these numbers before the outcome is told.
        self._values.update(zip(command.out, results, strict=True))
        tell(Outcome(value=answer))

    def _load(self, shipped: _jax_export.Shipped) -> tuple[Sequence[Any], Any]:
        executable = self._backend.load(_jax_export.import_program(shipped))
        return (executable,), (executable.memory, executable.launch_s)

    def _upload(self, value: Any, tensor: Tensor) -> tuple[Sequence[Any], Any]:
        return (self._backend.upload(value, tensor),), None

    def _duplicate(self, value: Any, tensor: Tensor) -> tuple[Sequence[Any], Any]:
        # Not `Backend.duplicate` of an array that came with a launch: that one is NumPy's.
        made = self._backend.upload(value, tensor)
        return (self._backend.duplicate(made, tensor) if made is value else made,), None

    def _download(self, value: Any) -> tuple[Sequence[Any], Any]:
        return (), self._backend.download(value)

    def _count(self) -> tuple[Sequence[Any], Any]:
        return (), len(self._values)

    def _read_range(self, value: Any, tensor: Tensor, where: Range) -> tuple[Sequence[Any], Any]:
        if isinstance(value, np.ndarray):
            value = self._backend.upload(value, tensor)
        return (), self._backend.read_range(value, tensor, where)


_LAUNCHING: dict[str, Callable[..., Sequence[Any]]] = {
    "free": RemoteActor._free,
    "launch": RemoteActor._launch,
    "store": RemoteActor._store,
    "transfer": RemoteActor._transfer,
    "write_range": RemoteActor._write_range,
}
_WAITING: dict[str, Callable[..., tuple[Sequence[Any], Any]]] = {
    "count": RemoteActor._count,
    "download": RemoteActor._download,
    "duplicate": RemoteActor._duplicate,
    "load": RemoteActor._load,
    "read_range": RemoteActor._read_range,
    "upload": RemoteActor._upload,
}
UNORDERED = frozenset({"count", "load", "upload"})
"""These read no value of here, so they do not wait for launches, one of which may hold up the lane for long."""


def _tell(loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[Outcome], outcome: Outcome) -> None:
    loop.call_soon_threadsafe(lambda: waiting.set_result(outcome))


def _outcome(error: BaseException | None) -> Outcome:
    return Outcome(None if error is None else _pickled(error))
