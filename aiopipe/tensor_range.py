"""Ranges of tensors: which elements, whether they exist, and moving them between NumPy arrays.

Offsets and sizes count elements of the flattened tensor, for a JAX array has no byte addresses. ggml's
functions count bytes; its order of checks is kept (`ggml-backend.c`, `ggml_backend_tensor_set`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ._arguments import numbers
from ._jax_types import canonical_dtype, dtype_name, dtype_of
from .buffer import Buffer, backing
from .errors import TensorError
from .graph import Tensor

__all__ = [
    "Range",
    "captured",
    "check_handle",
    "check_layout",
    "count_of",
    "filled",
    "flat_bytes",
    "is_small",
    "locate",
    "take",
    "written",
]

Array = np.ndarray[Any, Any]

SMALL_NBYTES = 1 << 19
"""Up to this size, copying takes less time than handing it to a thread does."""


@dataclass(frozen=True, slots=True)
class Range:
    """`n` rows of `size` elements each, the first at `offset`, each `stride` elements after the one before."""

    offset: int
    size: int
    n: int = 1
    stride: int = 0

    @property
    def count(self) -> int:
        """How many elements."""
        return self.n * self.size

    @property
    def end(self) -> int:
        """The element after the last one."""
        return self.offset + (max(self.n, 1) - 1) * self.stride + self.size

    def is_whole(self, tensor: Tensor) -> bool:
        """Whether it is all of a tensor."""
        return self.offset == 0 and self.n == 1 and self.size == tensor.size


def locate(backend: Any, tensor: Tensor, where: Range, verb: str) -> tuple[Buffer, Tensor, Range]:
    """The buffer of a backend that holds a tensor's elements, whose tensor it is, and where in it they are.

    Args:
        backend: who is to read or write.
        tensor: perhaps a view.
        where: elements of `tensor`.
        verb: ``"read"`` or ``"write"``.

    Raises:
        TensorError: the first of: no buffer (or none on that backend), freed, out of bounds.
    """
    root, start = backing(tensor)
    if not root.buffers:
        raise TensorError(
            f"{verb} of {tensor.describe()}: buffer not set; allocate it with Buffer.alloc, or place it on a backend"
        )
    buffer = next((b for b in root.buffers if b.backend is backend), None)
    if buffer is None:
        held = ", ".join(b.backend.name for b in root.buffers)
        raise TensorError(
            f"{verb} of {tensor.describe()}: buffer not set on {backend.name}, it is on {held}; ask that backend, "
            "or tensor_copy it here"
        )
    if buffer.freed:
        raise TensorError(
            f"{verb} of {tensor.describe()}: not allocated, its buffer on {backend.name} has been freed or reset"
        )
    if where.n > 1 and where.stride < where.size:
        raise TensorError(
            f"{verb} of {tensor.describe()}: rows of {where.size} elements every {where.stride} overlap; "
            "the stride cannot be less than a row"
        )
    if where.offset < 0 or where.size < 0 or where.n < 0 or where.end > tensor.size:
        raise TensorError(
            f"{verb} of {tensor.describe()} out of bounds: elements {where.offset} to {where.end}, "
            f"but it has {tensor.size}"
        )
    if where.count and verb == "write" and buffer.borrowed is not None:
        raise TensorError(
            f"{verb} of {tensor.describe()}: it is borrowed memory, which is read only; "
            "allocate a buffer of the backend's own and tensor_copy it there"
        )
    return buffer, root, Range(where.offset + start, where.size, where.n, where.stride)


def check_layout(src: Tensor, dst: Tensor) -> None:
    """Raise `TensorError` unless two tensors have the same element type and dimensions."""
    if src.dtype != dst.dtype or src.shape != dst.shape:
        raise TensorError(
            f"copy of {src.describe()} to {dst.describe()}: the layouts differ; both need the same type and shape, "
            "so copy to a tensor_view of that shape, or convert in a graph"
        )


def count_of(tensor: Tensor, data: Any) -> int:
    """How many elements `data` has for a tensor: it is of the tensor's shape, flat, or one number.

    Raises:
        TensorError: it has another shape.
    """
    try:
        shape = tuple(data.shape) if hasattr(data, "shape") else np.shape(data)
    except ValueError as error:  # lists of unequal lengths
        raise TensorError(f"write of {tensor.describe()}: {error}") from error
    if len(shape) > 1 and shape != tensor.shape:
        raise TensorError(
            f"write of {tensor.describe()} got shape {shape}: give that of the tensor, a flat array, "
            "or rows by tensor_set_2d"
        )
    return int(np.prod(shape, dtype=np.int64))


def check_handle(tensor: Tensor, handle: Any, count: int) -> None:
    """Raise `TensorError` unless a backend's handle has the tensor's element type, and enough elements."""
    dtype = handle.dtype if isinstance(handle.dtype, str) else dtype_name(handle.dtype)
    size = int(np.prod(handle.shape, dtype=np.int64))
    if dtype != tensor.dtype or size < count:
        raise TensorError(
            f"write of {count} elements of {tensor.describe()} got {size} of {dtype}: "
            f"give as many, of type {tensor.dtype}"
        )


def is_small(data: Any) -> bool:
    """Whether the event loop itself may copy it: little, and nothing to wait for."""
    if isinstance(data, np.ndarray):
        return data.nbytes <= SMALL_NBYTES
    return isinstance(data, (bool, int, float, complex, np.generic, list, tuple))


def captured(tensor: Tensor, data: Any, count: int) -> Array:
    """The first `count` elements of `data` as a flat array of the tensor's type that nobody else has.

    Raises:
        TensorError: another element type, or too few elements.
    """
    plain = isinstance(data, (bool, int, float, complex, list, tuple)) and not isinstance(data, np.generic)
    try:
        array = numbers(data, dtype_of(tensor.dtype)) if plain else np.asarray(data)
        if array.dtype != dtype_of(tensor.dtype) and canonical_dtype(array.dtype) != tensor.dtype:
            raise TypeError(f"got {dtype_name(array.dtype)}")
        flat = array.reshape(-1)[:count].astype(dtype_of(tensor.dtype), copy=True)
    except Exception as error:  # whatever the library that made the value raises
        raise TensorError(f"write of {tensor.describe()}: {error}; give an array of type {tensor.dtype}") from error
    if flat.size < count:
        raise TensorError(f"write of {count} elements of {tensor.describe()} got {flat.size}: give as many")
    return flat


def filled(count: int, dtype: str, byte: int) -> Array:
    """A flat array whose every byte is `byte` (of booleans: whose every element is true unless that is 0).

    Raises:
        TensorError: `byte` is not between 0 and 255, or the type has no bytes to set.
    """
    if not 0 <= byte <= 255:
        raise TensorError(f"fill with {byte!r}: expected a byte, 0 to 255")
    if dtype.startswith("key<"):
        raise TensorError(f"fill of {dtype}: PRNG keys have no bytes to set; tensor_set an array of keys")
    kind = dtype_of(dtype)
    if kind == np.bool_:
        return np.full(count, byte != 0)
    return np.full(count * kind.itemsize, byte, np.uint8).view(kind)


def flat_bytes(array: Array) -> Array:
    """The array's own memory as flat bytes, read-only.

    Raises:
        TensorError: it is not contiguous.
    """
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise TensorError("borrowed memory must be a contiguous NumPy array: give np.ascontiguousarray of it")
    flat = array.reshape(-1).view(np.uint8)
    flat.flags.writeable = False
    return flat


def _rows(flat: Array, where: Range) -> Array:
    step = flat.strides[0]
    return np.lib.stride_tricks.as_strided(
        flat[where.offset :], (where.n, where.size), (where.stride * step, step), writeable=flat.flags.writeable
    )


def take(value: Any, tensor: Tensor, where: Range) -> Array:
    """Elements of a tensor's value on the host, copied, of shape ``(where.n, where.size)``."""
    if where.count == 0:
        return np.empty((where.n, where.size), dtype_of(tensor.dtype))
    return np.array(_rows(np.asarray(value).reshape(-1), where))


def written(value: Any, tensor: Tensor, where: Range, data: Array) -> Array:
    """A copy of a tensor's value on the host (zeros, for None) with `data`, ``(where.n, where.size)``, in it."""
    if value is None:
        whole = np.zeros(tensor.shape, dtype_of(tensor.dtype))
    else:
        whole = np.array(value, copy=True)
    _rows(whole.reshape(-1), where)[...] = data.reshape(where.n, where.size)
    return whole
