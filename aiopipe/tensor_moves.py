"""Moving values of tensors between arrays, buffers and backends: what is queued, and in which order.

`aiopipe.tensor_io` has checked by then that the elements exist.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ._threads import in_thread
from .buffer import Buffer
from .devices.base import BufferType
from .errors import TensorError
from .events import Event
from .graph import Tensor
from .queue import Queue
from .tensor_range import Range, captured, check_handle, check_layout, is_small, locate

__all__ = ["Reading", "Write", "happened", "tensor_copy_async", "value_of"]


class Mover(Protocol):
    """What moving values needs of a backend: `aiopipe.tensor_io.TensorIO` documents it."""

    queue: Queue

    def check_open(self) -> None: ...

    def accepts(self, value: Any) -> bool: ...

    def download(self, value: Any) -> Any: ...

    def store(self, value: Any, tensor: Tensor, buffer_type: BufferType) -> Any: ...

    def copy_from(self, value: Any, tensor: Tensor, buffer_type: BufferType) -> Any | None: ...

    def read_range(self, value: Any, tensor: Tensor, where: Range) -> np.ndarray[Any, Any]: ...

    def write_range(
        self, value: Any, tensor: Tensor, buffer_type: BufferType, where: Range, data: np.ndarray[Any, Any]
    ) -> Any: ...

    def asking_for(self, tensor: Tensor) -> AbstractContextManager[None]: ...


class Reading:
    """A read that is queued: await it for the array. May be awaited several times."""

    __slots__ = ("_box", "event")

    def __init__(self, event: Event, box: list[np.ndarray[Any, Any]]) -> None:
        self.event = event
        self._box = box

    def done(self) -> bool:
        """Whether the array is there, or reading it has failed."""
        return self.event.done()

    def __await__(self) -> Generator[object, None, np.ndarray[Any, Any]]:
        yield from self.event.__await__()
        return self._box[0]


class Write:
    """Elements to write: where, and what."""

    def __init__(
        self, backend: Mover, tensor: Tensor, data: Any, buffer: Buffer, root: Tensor, where: Range
    ) -> None:
        self.backend = backend
        self.tensor = tensor
        self.data = data
        self.buffer = buffer
        self.root = root
        self.where = where

    async def capture(self) -> Any:
        """What to post: the data as nobody can change it. Large arrays are copied in a thread."""
        if is_small(self.data) or self.backend.accepts(self.data):
            return self.capture_now()
        return await in_thread(self.capture_now, "capture")

    def capture_now(self) -> Any:
        data = self.data
        if not self.backend.accepts(data):
            return captured(self.tensor, data, self.where.count)
        check_handle(self.tensor, data, self.where.count)
        return data  # immutable: it needs no copy

    def post(self, data: Any) -> Event:
        """Queue the write of what `capture` gave."""
        backend, where = self.backend, self.where
        if isinstance(data, np.ndarray):
            return backend.queue.post(lambda: self.put(data), name="set")
        if where.is_whole(self.root) and tuple(data.shape) == self.root.shape:
            return backend.queue.post(lambda: self.take_over(data), name="set")
        box: list[np.ndarray[Any, Any]] = []
        spec = replace(self.root, shape=tuple(data.shape))
        read = backend.queue.post(
            lambda: (data,), lambda: box.append(backend.read_range(data, spec, Range(0, where.count))), name="set"
        )
        _hold_for(backend.queue, read)
        return backend.queue.post(lambda: self.put(_only(box, read)), name="set")

    def take_over(self, handle: Any) -> Sequence[Any]:
        """Have an immutable handle, of this backend or one that it accepts, as the value. On the lane."""
        backend, buffer = self.backend, self.buffer
        buffer.check()
        with backend.asking_for(self.root):
            value = backend.copy_from(handle, self.root, buffer.buffer_type)
            if value is None:
                value = backend.store(backend.download(handle), self.root, buffer.buffer_type)
        buffer.value = value
        return (value,)

    def put(self, data: np.ndarray[Any, Any]) -> Sequence[Any]:
        """Write an array that nobody else has. On the lane."""
        backend, buffer, root, where = self.backend, self.buffer, self.root, self.where
        buffer.check()
        with backend.asking_for(root):
            if where.is_whole(root):
                value = backend.store(data.reshape(root.shape), root, buffer.buffer_type)
            else:
                rows = data.reshape(where.n, where.size)
                value = backend.write_range(buffer.value, root, buffer.buffer_type, where, rows)
        buffer.value = value
        return (value,)


def tensor_copy_async(src_backend: Mover, dst_backend: Mover, src: Tensor, dst: Tensor) -> Event:
    """Copy a tensor's value to another tensor, after all that is queued on either backend; nobody waits.

    The destination is asked first (`Backend.copy_from`), for values that it `accepts`; the way over the host
    comes last. What is queued afterwards, on either backend, may overwrite the source: its old value is copied.

    Args:
        src_backend: reads `src`, which it holds.
        dst_backend: writes `dst`, which it holds.
        src: of the same type and shape as `dst`; a tensor copied onto itself stays as it is.
        dst: where to.

    Returns:
        An event that happens when the value is there.

    Raises:
        TensorError: the layouts differ; no buffer, freed, or borrowed memory to write to.
        BackendClosedError: a backend is closed.
    """
    check_layout(src, dst)
    if src is dst:
        return happened("copy")
    for backend in (src_backend, dst_backend):
        backend.check_open()
    everything = Range(0, src.size)
    src_buffer, src_root, src_where = locate(src_backend, src, everything, "read")
    dst_buffer, dst_root, dst_where = locate(dst_backend, dst, everything, "write")
    if src.size == 0:
        return happened("copy")
    whole = src_where.is_whole(src_root) and dst_where.is_whole(dst_root) and src_root.shape == dst_root.shape
    write = Write(dst_backend, dst, None, dst_buffer, dst_root, dst_where)
    taken: list[Any] = []
    box: list[np.ndarray[Any, Any]] = []

    def take_value() -> Sequence[Any]:
        taken.append(value_of(src_buffer, src))
        return () if direct() else taken  # a direct copy is ordered by its data, the host waits for it

    def direct() -> bool:
        return whole and dst_backend.accepts(taken[0])

    def read() -> None:
        if not direct():
            box.append(src_backend.read_range(taken[0], src_root, src_where))

    def copy() -> Sequence[Any]:
        handle = _only(taken, left)
        return write.take_over(handle) if direct() else write.put(_only(box, left))

    left = src_backend.queue.post(take_value, read, name="copy")
    _hold_for(dst_backend.queue, left)
    return dst_backend.queue.post(copy, name="copy")


def _only(box: list[Any], made: Event) -> Any:
    """What an earlier entry of a queue left here, or its error."""
    if not box:
        error = made.exception()
        raise TensorError(f"{made.name} left nothing to write") if error is None else error
    return box[0]


def _hold_for(queue: Queue, event: Event) -> None:
    """Hold a queue for an event without failing everything behind it where the event fails."""
    passed = Event(event.name)
    event.add_callback(lambda _: passed.set())
    queue.wait(passed)


def happened(name: str) -> Event:
    event = Event(name)
    event.set()
    return event


def value_of(buffer: Buffer, tensor: Tensor) -> Any:
    value = buffer.value
    if value is None:
        raise TensorError(
            f"read of {tensor.describe()}: it has no value on {buffer.backend.name} yet; tensor_set it first"
        )
    return value
