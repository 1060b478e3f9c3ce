"""Devices that hang, fail and die when a test says so. They launch at once; what they launched ends when told to."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import aiopipe as ap
from aiopipe import Backend, Device, DeviceProps, DeviceType, Tensor
from aiopipe.backend import Executable
from aiopipe.devices.base import MemoryStats, Program
from aiopipe.graph import Node

__all__ = ["Later", "Value"]


_all: weakref.WeakSet[Later] = weakref.WeakSet()
"""What one device lets go, others may wait for."""


class LaterDevice(Device):
    def __init__(self, index: int) -> None:
        self.name = f"later:{index}"
        self.props = DeviceProps(DeviceType.OTHER, client="later", is_async=True, events=True)

    def supports_op(self, node: Node) -> bool:
        return True


@dataclass(eq=False)
class Value:
    """A result: the array is there, but counts as computed only when its device has let it go."""

    home: Later
    array: np.ndarray[Any, Any]
    after: Sequence[Any] = ()
    done: bool = False
    error: BaseException | None = field(default=None)

    @property
    def ready(self) -> bool:
        return self.done and all(v.ready for v in self.after if isinstance(v, Value))

    @property
    def failure(self) -> BaseException | None:
        if self.error is not None:
            return self.error
        return next((v.failure for v in self.after if isinstance(v, Value) and v.failure is not None), None)


class Later(Backend):
    """A device that hangs while `hangs` is set, and has lost everything once `die` was called.

    Args:
        index: which one.
        blocks: it computes while its launcher waits, so that the launcher is a thread of aiopipe's.

    Attributes:
        hangs: what is launched now is not done before `let_go`.
        fails: raised by the next launch.
        fails_later: what the next launch ends with.
    """

    def __init__(self, index: int = 0, *, blocks: bool = False) -> None:
        device = LaterDevice(index)
        self.blocks = blocks
        super().__init__(device.name, device)
        self.hangs = False
        self.fails: BaseException | None = None
        self.fails_later: BaseException | None = None
        self.lost: ap.BackendLostError | None = None
        self._held: list[Value] = []
        self._asked: deque[tuple[Sequence[Any], Callable[[BaseException | None], None]]] = deque()
        _all.add(self)

    def let_go(self) -> None:
        """All that hangs is done."""
        self.hangs = False
        held, self._held = self._held, []
        for value in held:
            value.done = True
        for backend in list(_all):
            backend._answer()

    def die(self) -> None:
        """The device is gone, and with it what it was working on."""
        self.lost = ap.BackendLostError(f"{self.name} is gone")
        for value in self._held:
            value.error = self.lost
        self.let_go()

    def load(self, program: Program) -> Executable:
        def call(*inputs: Any) -> Sequence[Any]:
            if self.lost is not None:
                raise self.lost
            if self.fails is not None:
                error, self.fails = self.fails, None
                raise error
            values = {t.id: _array(value) for t, value in zip(program.inputs, inputs, strict=True)}
            for node in program.nodes:
                values.update(zip(node.outputs, node.fn(*(values[t] for t in node.inputs)), strict=True))
            error, self.fails_later = self.fails_later, None
            return [self._made(values[t.id], inputs, error) for t in program.outputs]

        return Executable(program, call, MemoryStats(), blocks=self.blocks)

    def upload(self, value: Any, tensor: Tensor) -> Value:
        return self._made(np.array(_array(value), tensor.dtype), (), None, at_once=True)

    def download(self, value: Any) -> np.ndarray[Any, Any]:
        return _array(value)

    def transfer(self, values: Sequence[Any]) -> Sequence[Any]:
        return [v if self.holds(v) else self._made(np.array(_array(v)), (v,), None, at_once=True) for v in values]

    def holds(self, value: Any) -> bool:
        return isinstance(value, Value) and value.home is self

    def all_ready(self, values: Sequence[Any]) -> bool:
        return all(value.ready for value in values)

    def error_of(self, values: Sequence[Any]) -> BaseException | None:
        return next((value.failure for value in values if value.failure is not None), None)

    def notify(self, values: Sequence[Any], callback: Callable[[BaseException | None], None]) -> None:
        self._asked.append((values, callback))
        self._answer()

    def _made(
        self, array: Any, after: Sequence[Any], error: BaseException | None, *, at_once: bool = False
    ) -> Value:
        value = Value(self, np.asarray(array), after, done=at_once or not self.hangs, error=error)
        if not value.done:
            self._held.append(value)
        return value

    def _answer(self) -> None:
        """In the order of asking."""
        while self._asked and self.all_ready(self._asked[0][0]):
            values, callback = self._asked.popleft()
            callback(self.error_of(values))


def _array(value: Any) -> np.ndarray[Any, Any]:
    return value.array if isinstance(value, Value) else np.asarray(value)
