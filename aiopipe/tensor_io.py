"""Reading and writing tensors in buffers: the part of a backend that moves values at a user's request.

Everything goes through the backend's own queue (`aiopipe.queue`), so it happens in the order in which it
was asked for, off the event loop. The checks, and their order, are ggml's (`ggml_backend_tensor_set`): no
buffer, not allocated, out of bounds, and only then is nothing to do for no elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ._jax_types import dtype_of
from .buffer import Account, Buffer, backing
from .devices.base import BufferType, BufferUsage, Device
from .errors import AllocationError, PlacementError, TensorError, says_no_room
from .events import Event
from .graph import Tensor
from .queue import Queue
from .tensor_moves import Reading, Write, happened, tensor_copy_async, value_of
from .tensor_range import Range, count_of, filled, flat_bytes, locate, take, written

__all__ = ["TensorIO"]


class TensorIO(ABC):
    """The part of `Backend` that has buffers, and reads, writes and copies the tensors in them.

    What a kind of backend may add, all optional: `store`, `copy_from`, `borrow`, `read_range`, `write_range`.
    """

    name: str
    device: Device
    queue: Queue
    memory: Account

    @abstractmethod
    def check_open(self) -> None: ...

    @abstractmethod
    def upload(self, value: Any, tensor: Tensor) -> Any: ...

    @abstractmethod
    def download(self, value: Any) -> Any: ...

    @abstractmethod
    def accepts(self, value: Any) -> bool: ...

    # What a kind of backend may do better ---------------------------------------------------------

    def store(self, value: Any, tensor: Tensor, buffer_type: BufferType) -> Any:
        """Put a value here to stay: `upload` of an array that is handed over, into one of the device's memories.

        Called on the queue's lane. The array is nobody else's, so it may be read later or in place.
        """
        return self.upload(value, tensor)

    def copy_from(self, value: Any, tensor: Tensor, buffer_type: BufferType) -> Any | None:
        """Bring another backend's handle here, or None where that takes the way over the host.

        Called on the queue's lane. It need not wait for the value, nor for the copy.
        """
        return None

    def borrow(self, array: np.ndarray[Any, Any], tensor: Tensor) -> Any:
        """A handle that reads the array in place; only where `DeviceProps.aliases_host`.

        Raises:
            PlacementError: this kind of backend cannot.
        """
        raise PlacementError(f"{self.name} cannot read host memory in place: allocate a buffer and tensor_set it")

    def read_range(self, value: Any, tensor: Tensor, where: Range) -> np.ndarray[Any, Any]:
        """Elements of a value as an array of the caller's own, of shape ``(where.n, where.size)``. May block."""
        return take(self.download(value), tensor, where)

    def write_range(
        self, value: Any, tensor: Tensor, buffer_type: BufferType, where: Range, data: np.ndarray[Any, Any]
    ) -> Any:
        """A new value: the old one (or zeros, where it is None) with `data`, ``(where.n, where.size)``, in it."""
        old = None if value is None else self.download(value)
        return self.store(written(old, tensor, where, data), tensor, buffer_type)

    def check_room(self, nbytes: int) -> None:
        """Raise `AllocationError` when that many more bytes of buffers exceed the device's memory."""
        limit = self.device.props.memory_nbytes
        used = self.memory.nbytes
        if limit is not None and used + nbytes > limit:
            raise AllocationError(
                f"no room on {self.name!r} for a buffer of {nbytes} bytes: {limit - used} of {limit} are left; "
                "free a buffer, or allocate a smaller one",
                backend=self.name,
                asked_nbytes=nbytes,
                available_nbytes=max(0, limit - used),
            )

    # Buffers --------------------------------------------------------------------------------------

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        """Whether operations here can read memory of that type in place."""
        return self.device.supports_buffer_type(buffer_type)

    def alloc_buffer(
        self, nbytes: int, *, buffer_type: BufferType | None = None, usage: BufferUsage = BufferUsage.ANY
    ) -> Buffer:
        """A region to allocate tensors in.

        Args:
            nbytes: its size; 0 is fine.
            buffer_type: one of `Device.buffer_types`; default: the first, the device's own memory.
            usage: what it is for.

        Raises:
            AllocationError: larger than the type's largest buffer, or than what is left of the device's memory.
            PlacementError: the device has no such memory.
            TensorError: a negative size.
            BackendClosedError: after `aclose`.
        """
        self.check_open()
        kind = self.buffer_type(buffer_type)
        if nbytes < 0:
            raise TensorError(f"a buffer of {nbytes} bytes on {self.name!r}: expected 0 or more")
        if kind.max_nbytes is not None and nbytes > kind.max_nbytes:
            raise AllocationError(
                f"a buffer of {nbytes} bytes on {self.name!r} is larger than its memory {kind.memory_kind!r} allows, "
                f"{kind.max_nbytes}: allocate several",
                backend=self.name,
                asked_nbytes=nbytes,
                available_nbytes=kind.max_nbytes,
            )
        self.check_room(nbytes)
        return Buffer(self, kind, usage, nbytes)

    def buffer_from_array(self, array: np.ndarray[Any, Any], *, usage: BufferUsage = BufferUsage.WEIGHTS) -> Buffer:
        """A region that is the caller's own memory, such as a mapped file: its tensors read it in place.

        Nothing is copied where a tensor begins at a multiple of the alignment (64 bytes for XLA); elsewhere
        JAX copies it when it is allocated. The array must stay as it is for as long as a tensor of it is in
        use, and cannot be written through the buffer.

        Args:
            array: contiguous (C order) host memory; it may be read-only.
            usage: what it is for.

        Raises:
            PlacementError: the device cannot read host memory in place.
            TensorError: the array is not contiguous.
            BackendClosedError: after `aclose`.
        """
        self.check_open()
        if not self.device.props.aliases_host:
            raise PlacementError(f"{self.name} cannot read host memory in place: allocate a buffer and tensor_set it")
        flat = flat_bytes(array)
        return Buffer(self, self.buffer_type(None), usage, flat.nbytes, borrowed=flat)

    def buffer_clear(self, buffer: Buffer, byte: int) -> Event:
        """What `Buffer.clear` does."""
        self.check_open()
        buffer.check()
        if buffer.borrowed is not None:
            raise TensorError(f"clear of {buffer!r}: it is borrowed memory, which is read only")
        if buffer.parent is not None or buffer.value is not None:
            raise TensorError(f"clear of {buffer!r}: it holds one tensor and is no region; tensor_memset the tensor")
        filled(0, "uint8", byte)  # complains here of what is no byte
        parts = [(part, part.spec) for part in buffer.tensors if part.spec is not None]

        def clear() -> Sequence[Any]:
            for part, tensor in parts:
                where = Range(0, tensor.size)
                Write(self, tensor, None, part, tensor, where).put(filled(tensor.size, tensor.dtype, byte))
            return [part.value for part, _ in parts]

        return self.queue.post(clear, name="clear")

    def buffer_type(self, wanted: BufferType | None) -> BufferType:
        """One of the device's buffer types, the first by default.

        Raises:
            PlacementError: it is another device's, or the device has no memory of that kind.
        """
        have = self.device.buffer_types()
        if wanted is None:
            return have[0]
        if wanted.device != self.device.name or wanted.memory_kind not in {kind.memory_kind for kind in have}:
            kinds = ", ".join(repr(kind.memory_kind) for kind in have)
            raise PlacementError(
                f"{self.name} has no memory {wanted.memory_kind!r} of device {wanted.device!r}: "
                f"give one of its own buffer_types(), {kinds}"
            )
        return wanted

    # Setting and getting ----------------------------------------------------------------------------

    async def tensor_set(self, tensor: Tensor, data: Any, offset: int = 0, size: int | None = None) -> None:
        """Write elements of a tensor, and wait until they are there.

        Of a tensor that several backends hold, this one's copy is written. Elements of a tensor that has
        never been set are zeros when others are written.

        Args:
            tensor: in a buffer of this backend, or a view of such a one.
            data: an array of the tensor's type: of its shape, or flat. NumPy arrays are copied before this
                waits for the device.
            offset: the first element to write, of the flattened tensor.
            size: how many elements; default: as many as `data` has.

        Raises:
            TensorError: in this order: no buffer; freed; out of bounds. Or another type or shape of data.
            AllocationError: the device has no room for the value.
            BackendClosedError: after `aclose`.
        """
        write = self._write_of(tensor, data, offset, size)
        if write is not None:
            await write.post(await write.capture())

    def tensor_set_async(self, tensor: Tensor, data: Any, offset: int = 0, size: int | None = None) -> Event:
        """`tensor_set` without waiting: queued behind what was queued before.

        `data` is the caller's own again when this returns: it is copied here, on the event loop, so write
        large arrays with `tensor_set`, which does it in a thread.

        Returns:
            An event that happens when the elements are there; with the error, if that fails.
        """
        write = self._write_of(tensor, data, offset, size)
        return happened("set") if write is None else write.post(write.capture_now())

    async def tensor_get(self, tensor: Tensor, offset: int = 0, size: int | None = None) -> np.ndarray[Any, Any]:
        """Read elements of a tensor.

        Args:
            tensor: in a buffer of this backend, or a view of such a one.
            offset: the first element to read, of the flattened tensor.
            size: how many elements; default: all from `offset` on.

        Returns:
            An array of the caller's own: of the tensor's shape without `offset` and `size`, else flat.

        Raises:
            TensorError: in this order: no buffer; freed; out of bounds. Or the tensor has never been set.
            BackendClosedError: after `aclose`.
        """
        return await self.tensor_get_async(tensor, offset, size)

    def tensor_get_async(self, tensor: Tensor, offset: int = 0, size: int | None = None) -> Reading:
        """`tensor_get`, queued behind what was queued before: what is queued afterwards does not change the result.

        Returns:
            An awaitable of the array, with an `event`.
        """
        shape = tensor.shape if offset == 0 and size is None else (-1,)
        where = Range(offset, tensor.size - offset if size is None else size)
        return self._read(tensor, where, lambda rows: rows.reshape(shape))

    async def tensor_set_2d(self, tensor: Tensor, data: Any, offset: int, stride: int) -> None:
        """Write rows of elements that lie `stride` elements apart, such as a block of a matrix.

        Args:
            tensor: in a buffer of this backend, or a view of such a one.
            data: NumPy array of shape ``(n, size)`` and the tensor's type.
            offset: the first element of the first row.
            stride: elements from the beginning of one row to that of the next; at least `size`.

        Raises:
            TensorError: as `tensor_set`, or `data` does not have two dimensions.
        """
        shape = np.shape(data)
        if len(shape) != 2:
            raise TensorError(f"write of rows of {tensor.describe()} got shape {shape}: expected (n, size)")
        self.check_open()
        where = Range(offset, shape[1], shape[0], stride)
        buffer, root, inner = locate(self, tensor, where, "write")
        if where.count:
            write = Write(self, tensor, data, buffer, root, inner)
            await write.post(await write.capture())

    async def tensor_get_2d(
        self, tensor: Tensor, offset: int, size: int, n: int, stride: int
    ) -> np.ndarray[Any, Any]:
        """Read `n` rows of `size` elements that lie `stride` elements apart.

        Returns:
            An array of the caller's own, of shape ``(n, size)``.

        Raises:
            TensorError: as `tensor_get`.
        """
        return await self._read(tensor, Range(offset, size, n, stride), lambda rows: rows)

    async def tensor_memset(self, tensor: Tensor, byte: int, offset: int = 0, size: int | None = None) -> None:
        """Set every byte of elements of a tensor; booleans become true unless `byte` is 0.

        Args:
            tensor: in a buffer of this backend, or a view of such a one.
            byte: 0 to 255.
            offset: the first element, of the flattened tensor.
            size: how many elements; default: all from `offset` on.

        Raises:
            TensorError: as `tensor_set`, or that is no byte.
        """
        self.check_open()
        where = Range(offset, tensor.size - offset if size is None else size)
        buffer, root, inner = locate(self, tensor, where, "write")
        fill = filled(1, tensor.dtype, byte)
        if where.count:
            write = Write(self, tensor, None, buffer, root, inner)
            await write.post(np.broadcast_to(fill, (where.count,)))

    # Copying --------------------------------------------------------------------------------------

    def tensor_copy_async(self, src: Tensor, dst: Tensor) -> Event:
        """`tensor_copy` without waiting: see the function `tensor_copy_async`, which names both backends."""

        def holder(tensor: Tensor) -> Any:
            buffers = backing(tensor)[0].buffers
            return self if not buffers or any(b.backend is self for b in buffers) else buffers[0].backend

        return tensor_copy_async(holder(src), holder(dst), src, dst)

    async def tensor_copy(self, src: Tensor, dst: Tensor) -> None:
        """Copy a tensor's value to another tensor, of this backend or another, and wait until it is there.

        Raises:
            TensorError: the layouts differ; then as `tensor_get` of `src` and `tensor_set` of `dst`.
        """
        await self.tensor_copy_async(src, dst)

    def _write_of(self, tensor: Tensor, data: Any, offset: int, size: int | None) -> Write | None:
        """A write that has been checked; None where there is nothing to do."""
        self.check_open()
        locate(self, tensor, Range(0, 0), "write")
        where = Range(offset, count_of(tensor, data) if size is None else size)
        buffer, root, inner = locate(self, tensor, where, "write")
        return Write(self, tensor, data, buffer, root, inner) if where.count else None

    def _read(
        self, tensor: Tensor, where: Range, shaped: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
    ) -> Reading:
        self.check_open()
        buffer, root, inner = locate(self, tensor, where, "read")
        if root.dtype.startswith("key<"):
            raise TensorError(
                f"read of {tensor.describe()}: PRNG keys have no NumPy form; "
                "tensor_copy them, or read jax.random.key_data(tensor.buffers[0].value)"
            )
        box: list[np.ndarray[Any, Any]] = []
        if not where.count:
            box.append(shaped(np.empty((where.n, where.size), dtype_of(tensor.dtype))))
            return Reading(happened("get"), box)
        taken: list[Any] = []

        def take_value() -> Sequence[Any]:
            taken.append(value_of(buffer, tensor))
            return taken

        def read() -> None:
            box.append(shaped(self.read_range(taken.pop(), root, inner)))

        return Reading(self.queue.post(take_value, read, name="get"), box)

    @contextmanager
    def asking_for(self, tensor: Tensor) -> Iterator[None]:
        """Around what puts a tensor here. A device that is full says so in words of its own.

        Raises:
            AllocationError: it has said so.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, AllocationError) or not says_no_room(error):
                raise
            raise AllocationError(
                f"no room on {self.name!r} for {tensor.describe()} of {tensor.nbytes} bytes: {error}. Put less "
                "there, or give memory_limit, so that what does not fit is refused before anything is allocated",
                backend=self.name,
                asked_nbytes=tensor.nbytes,
                available_nbytes=self.device.props.memory_nbytes or 0,
            ) from error
