"""Buffers: memory on a backend, what it is for, and the tensors in it.

A tensor's value is immutable, whatever holds it: setting a tensor puts another value in its buffer.
So whoever took the old one, a copy under way or an evaluation in flight, keeps it intact.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from . import _threads
from ._jax_types import dtype_name, dtype_of, nbytes_of
from .devices.base import BufferType, BufferUsage, Device
from .errors import AllocationError, TensorError
from .events import Event
from .graph import Kind, Tensor

__all__ = ["Account", "Buffer", "View", "array_id", "backing", "held_value", "tensor_view"]


class Account:
    """The buffers that are alive on a backend. Usable from any thread."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[Buffer]] = {}  # no lock: each operation on it is one of a dict

    def add(self, buffer: Buffer) -> None:
        """Count a buffer until it is removed or nobody has it any more."""
        key = id(buffer)
        self._alive[key] = weakref.ref(buffer, lambda _: self._alive.pop(key, None))

    def remove(self, buffer: Buffer) -> None:
        """Count a buffer no longer."""
        self._alive.pop(id(buffer), None)

    @property
    def nbytes(self) -> int:
        """Their bytes together."""
        return sum(buffer.nbytes for ref in tuple(self._alive.values()) if (buffer := ref()) is not None)


class Owner(Protocol):
    """What a buffer needs of its backend."""

    name: str
    device: Device
    memory: Account

    def borrow(self, array: np.ndarray[Any, Any], tensor: Tensor) -> Any: ...

    def buffer_clear(self, buffer: Buffer, byte: int) -> Event: ...


class Buffer:
    """Memory on a backend: one tensor's, or a region that tensors are allocated in.

    A region is a budget that is kept count of: JAX allocates each array by itself, when it gets a value.

    Args:
        backend: who holds it.
        buffer_type: which of its memories.
        usage: what it is for.
        nbytes: its size.
        value: the backend's own handle of the one tensor in it, e.g. a `jax.Array`; None in a region, and
            in a tensor that has not been set.
        parent: the region that it is part of.
        spec: shape and type of the tensor in it, where it is part of a region.
        borrowed: the user's memory that it shows, as flat bytes.

    Attributes:
        used_nbytes: in a region, what its tensors take, padding included.
    """

    __slots__ = (
        "__weakref__",
        "_freed",
        "_lock",
        "_parts",
        "_value",
        "_watchers",
        "backend",
        "borrowed",
        "buffer_type",
        "nbytes",
        "parent",
        "spec",
        "usage",
        "used_nbytes",
    )

    def __init__(
        self,
        backend: Any,
        buffer_type: BufferType,
        usage: BufferUsage,
        nbytes: int,
        value: Any = None,
        *,
        parent: Buffer | None = None,
        spec: Tensor | None = None,
        borrowed: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self.backend: Any = backend
        self.buffer_type = buffer_type
        self.usage = usage
        self.nbytes = nbytes
        self.parent = parent
        self.spec = spec
        self.borrowed = borrowed
        self.used_nbytes = 0 if value is None else nbytes
        self._value = value
        self._freed = False
        # Weak: a tensor that nobody has any more shall not keep its value alive until the region goes.
        self._parts: list[weakref.ref[Buffer]] = []
        self._watchers: list[weakref.WeakMethod[Callable[[Buffer], None]]] = []
        self._lock = _threads.Lock()
        if parent is None and borrowed is None:
            backend.memory.add(self)

    @property
    def value(self) -> Any:
        """The handle of the tensor's current value, or None. Setting it replaces the value.

        Raises:
            TensorError: the buffer has been freed.
        """
        self.check()
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self.check()
        self._value = value
        for watcher in tuple(self._watchers):
            call = watcher()
            if call is not None:
                call(self)

    def watch(self, changed: Callable[[Buffer], None]) -> None:
        """Call a bound method, for as long as its object lives, with the buffer when its value has been replaced.

        On the thread that replaced it, so on a lane of the backend.
        """
        with self._lock:  # two plans that are loaded at the same time
            living = [watcher for watcher in self._watchers if watcher() is not None]
            self._watchers = [*living, weakref.WeakMethod(changed)]

    @property
    def freed(self) -> bool:
        """Whether it, or the region that it is part of, has been freed."""
        return self._freed or (self.parent is not None and self.parent.freed)

    @property
    def is_host(self) -> bool:
        """Whether the host can read it in place."""
        return self.buffer_type.is_host

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """In a region, the buffers of its tensors that are still in use."""
        return tuple(part for ref in self._parts if (part := ref()) is not None and not part.freed)

    def check(self) -> None:
        """Raise `TensorError` after `free`."""
        if self.freed:
            raise TensorError(
                f"buffer of {self.nbytes} bytes on {self.backend.name!r} has been freed, or its region reset: "
                "allocate another with alloc_buffer"
            )

    def padded_nbytes(self, nbytes: int) -> int:
        """What a tensor of that size takes: a multiple of the buffer type's alignment (in borrowed memory no more)."""
        alignment = 1 if self.borrowed is not None else self.buffer_type.alignment
        return -(-nbytes // alignment) * alignment

    def alloc(self, shape: Sequence[int], dtype: Any, name: str = "", *, at: int | None = None) -> Tensor:
        """Allocate a tensor in this region.

        Args:
            shape: its dimensions.
            dtype: its element type, or the name of one.
            name: for messages.
            at: in borrowed memory, the byte that it begins at; default: behind the last one.

        Returns:
            A tensor outside any graph, whose only buffer is a part of this one. It has no value before it is
            set (in borrowed memory, it has what is there), and can be given to `trace` as a weight.

        Raises:
            AllocationError: the region is full.
            TensorError: the buffer has been freed, or is a tensor's and no region; a bad shape or type.
        """
        self.check()
        if self.parent is not None or self._value is not None:
            raise TensorError("this buffer holds one tensor: allocate in a region, from alloc_buffer")
        try:
            element = dtype_name(dtype_of(dtype) if isinstance(dtype, str) else dtype)
            size = tuple(int(n) for n in shape)
        except TypeError as error:
            raise TensorError(f"tensor {name!r} of {dtype!r}{shape!r}: expected an element type and sizes") from error
        if any(n < 0 for n in size):
            raise TensorError(f"tensor {name!r} has shape {size}: expected sizes of 0 or more")
        kind = Kind.WEIGHT if self.usage is BufferUsage.WEIGHTS else Kind.NODE
        tensor = Tensor(-1, name, size, element, kind, nbytes_of(size, element))
        if at is not None and (self.borrowed is None or at < 0):
            raise TensorError(f"{tensor.describe()} at byte {at}: only borrowed memory has a byte to begin at, from 0")
        begin = self.used_nbytes if at is None else at
        end = begin + self.padded_nbytes(tensor.nbytes)
        if end > self.nbytes:
            raise AllocationError(
                f"no room for {tensor.describe()}: it takes {end - begin} bytes, and {max(0, self.nbytes - begin)} of "
                f"{self.nbytes} are left in the buffer on {self.backend.name!r}; allocate a larger buffer, or reset it",
                backend=self.backend.name,
                asked_nbytes=end - begin,
                available_nbytes=max(0, self.nbytes - begin),
            )
        part = Buffer(
            self.backend,
            self.buffer_type,
            self.usage,
            tensor.nbytes,
            parent=self,
            spec=tensor,
            borrowed=self.borrowed,
        )
        if self.borrowed is not None:
            here = self.borrowed[begin : begin + tensor.nbytes].view(dtype_of(element)).reshape(size)
            part._value = self.backend.borrow(here, tensor)
        self.used_nbytes = max(self.used_nbytes, end)
        self._parts = [ref for ref in self._parts if ref() is not None]
        self._parts.append(weakref.ref(part))
        return replace(tensor, buffers=(part,))

    def reset(self) -> None:
        """Forget every tensor in this region, which is empty then; using one of them raises `TensorError`."""
        self.check()
        self._free_parts()
        if self._value is None:
            self.used_nbytes = 0

    def clear(self, byte: int = 0) -> Event:
        """Set every byte of every tensor that is in here, in the order of the backend's queue.

        Returns:
            An event that happens when it is done.

        Raises:
            TensorError: the buffer has been freed, is borrowed or a tensor's own, or that is no byte.
        """
        event: Event = self.backend.buffer_clear(self, byte)
        return event

    def free(self) -> None:
        """Give the memory back: at once, or when what still reads a value ends. Idempotent."""
        self._free_parts()
        self._freed = True
        self._value = None
        self.borrowed = None
        self.backend.memory.remove(self)

    def _free_parts(self) -> None:
        for ref in self._parts:
            part = ref()
            if part is not None:
                part.free()
        self._parts.clear()

    def __repr__(self) -> str:
        where = f"{self.backend.name}/{self.buffer_type.memory_kind}"
        return f"<Buffer {where} {self.usage.value} {self.nbytes} bytes{' freed' if self.freed else ''}>"


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What a view shows (the `Tensor.source` of one).

    Attributes:
        tensor: the tensor that it is a view of, perhaps a view itself.
        offset: the element of that tensor, flattened, that it begins with.
    """

    tensor: Tensor
    offset: int


def tensor_view(tensor: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """A view of consecutive elements of a tensor; setting it sets them.

    Args:
        tensor: what to look at; a view itself, too.
        offset: the first element, in the flattened tensor.
        shape: the view's own dimensions.

    Returns:
        A tensor without buffers of its own: reading and writing it resolves to its source's.

    Raises:
        TensorError: it does not lie within the tensor.
    """
    size = tuple(int(n) for n in shape)
    view = Tensor(
        -1,
        f"{tensor.name}[{offset}:]",
        size,
        tensor.dtype,
        tensor.kind,
        nbytes_of(size, tensor.dtype),
        view_src=tensor.id if tensor.id >= 0 else None,
        source=View(tensor, offset),
    )
    if offset < 0 or any(n < 0 for n in size) or offset + view.size > tensor.size:
        raise TensorError(
            f"a view of {view.size} elements from {offset} on is out of bounds of {tensor.describe()}, "
            f"which has {tensor.size}"
        )
    return view


def array_id(buffer: Buffer) -> int:
    """Equal for two buffers that hold one array; of the buffer itself where it holds none."""
    value = buffer._value
    return id(buffer if value is None or buffer.freed else value)


def held_value(tensor: Tensor, backend: Any = None) -> Any:
    """The handle of a tensor's value: that of the backend if it has one, else of the first that has.

    Raises:
        TensorError: a view, or no buffer holds a value.
    """
    buffers = [b for b in tensor.buffers if b.backend is backend] or tensor.buffers
    value = buffers[0].value if buffers else None
    if value is not None:
        return value
    if isinstance(tensor.source, View):
        raise TensorError(f"{tensor.describe()} is a view: tensor_copy it to a tensor of its own, and give that")
    where = f"has no value on {buffers[0].backend.name} yet: tensor_set it" if buffers else "has no buffer: place it"
    raise TensorError(f"{tensor.describe()} {where} first")


def backing(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor whose buffers hold a tensor's elements, itself unless it is a view, and the element to begin at."""
    offset = 0
    while isinstance(tensor.source, View):
        offset += tensor.source.offset
        tensor = tensor.source.tensor
    return tensor, offset
