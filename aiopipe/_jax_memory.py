"""Arrays in the memories of a device: putting them there, and reading or replacing a part of one in place."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import SingleDeviceSharding

from ._jax_settings import undisturbed
from ._jax_types import PLAIN_DTYPES, dtype_of, sharding_of
from .graph import Tensor
from .tensor_range import Range

__all__ = ["in_default_memory", "put_in", "ranges_on_device", "read_on_device", "write_on_device"]

INDEX_LIMIT = 1 << 31
"""JAX counts elements by 32 bits unless 64 bit types are on."""


def put_in(value: Any, device: jax.Device, memory_kind: str | None) -> Any:
    """`jax.device_put` into one of a device's memories, or (None) the one that it computes in.

    64 bit types stay so, whatever the settings. It may read a NumPy array later, or in place: give one that
    nobody changes. Does not wait.
    """
    sharding = (
        sharding_of(device)
        if memory_kind is None or memory_kind == device.default_memory().kind
        else SingleDeviceSharding(device, memory_kind=memory_kind)
    )
    with undisturbed(), _keeping(value.dtype):
        return jax.device_put(value, sharding)


def _keeping(dtype: Any) -> AbstractContextManager[Any]:
    wide = dtype in _WIDE if isinstance(dtype, np.dtype) else False
    if not wide or not hasattr(jax, "enable_x64"):
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = jax.enable_x64(True)
    return context


_WIDE = frozenset(np.dtype(t) for t in (np.int64, np.uint64, np.float64, np.complex128))


def duplicate(value: jax.Array, device: jax.Device) -> jax.Array:
    """A copy of an array of a device, in memory of its own there. Waits."""
    with undisturbed(), _keeping(value.dtype):
        made: jax.Array = jax.device_put(jnp.array(value, copy=True), sharding_of(device))
        return made.block_until_ready()


def in_default_memory(value: jax.Array, device: jax.Device) -> bool:
    """Whether an array is in the memory that a device computes in."""
    kind = getattr(value.sharding, "memory_kind", None)
    return kind is None or kind == device.default_memory().kind


def ranges_on_device(tensor: Tensor) -> bool:
    """Whether `read_on_device` and `write_on_device` can do it: a common type, and not too many elements."""
    return tensor.size < INDEX_LIMIT and not tensor.dtype.startswith("key<") and dtype_of(tensor.dtype) in PLAIN_DTYPES


def _indices(offset: Any, stride: Any, n: int, size: int) -> Any:
    return offset + stride * jnp.arange(n, dtype=jnp.int32)[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]


@functools.partial(jax.jit, static_argnames=("n", "size"))
def _read(value: Any, offset: Any, stride: Any, n: int, size: int) -> Any:
    flat = value.reshape(-1)
    if n == 1:
        return lax.dynamic_slice(flat, (offset,), (size,)).reshape(1, size)
    return flat[_indices(offset, stride, n, size)]


@jax.jit
def _write(value: Any, offset: Any, stride: Any, data: Any) -> Any:
    flat = value.reshape(-1)
    n, size = data.shape
    if n == 1:
        flat = lax.dynamic_update_slice(flat, data.reshape(-1), (offset,))
    else:
        flat = flat.at[_indices(offset, stride, n, size)].set(data, unique_indices=True)
    return flat.reshape(value.shape)


def read_on_device(value: jax.Array, where: Range) -> np.ndarray[Any, Any]:
    """Elements of an array, of shape ``(where.n, where.size)``; only they travel to the host. Waits."""
    with undisturbed():
        return np.array(_read(value, np.int32(where.offset), np.int32(where.stride), where.n, where.size))


def write_on_device(value: jax.Array, where: Range, data: np.ndarray[Any, Any]) -> jax.Array:
    """A new array with `data`, ``(where.n, where.size)``, in it; only that travels to the device. Does not wait.

    The old one is left as it is, so for a moment there are both.
    """
    with undisturbed():
        made: jax.Array = _write(value, np.int32(where.offset), np.int32(where.stride), data)
        return made
