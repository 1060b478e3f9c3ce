"""Moving values to devices, and looking at them: the part of `_jax` that every launch goes through.

Private parts of JAX are looked up under a guard and have a public fallback beside them (`put` and `put_public`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ._jax_settings import undisturbed
from ._jax_types import PLAIN_DTYPES, sharding_of

__all__ = [
    "WIDE_DTYPES",
    "ArrayImpl",
    "Mover",
    "has_fast_put",
    "host_view",
    "is_ready",
    "platform_of",
    "put",
    "put_one",
    "put_public",
    "show",
    "wide_context",
]

_batched_device_put: Any
ArrayImpl: Any
try:
    from jax._src.lib import xla_client as _xla_client  # type: ignore[attr-defined]  # private

    _batched_device_put = _xla_client.batched_device_put
except (ImportError, AttributeError):  # pragma: no cover - no supported version lacks it
    _batched_device_put = None
try:
    from jax._src.array import ArrayImpl
except ImportError:  # pragma: no cover - no supported version lacks it
    ArrayImpl = None


WIDE_DTYPES = frozenset(map(np.dtype, (np.float64, np.int64, np.uint64, np.complex128)))


_AS_IT_IS = contextlib.nullcontext()


def wide_context(values: Sequence[Any]) -> AbstractContextManager[Any]:
    """While it is open, JAX takes these values as they are: it narrows 64 bit types in a thread where they are off."""
    for value in values:
        if value.dtype in WIDE_DTYPES:
            break
    else:
        return _AS_IT_IS
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # not in the stubs
        return _AS_IT_IS
    context: AbstractContextManager[Any] = jax.enable_x64(True)
    return context


@functools.lru_cache(maxsize=4096)
def _shaped(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.core.ShapedArray(shape, dtype)


@functools.cache
def has_fast_put(device: jax.Device) -> bool:
    """Whether `put` has its fast path on this version of JAX and this device: tried out once, with real values."""
    if _batched_device_put is None or ArrayImpl is None:
        return False
    try:
        sample = np.arange(3, dtype=np.float32)
        for value in (sample, jax.device_put(sample, sharding_of(device))):
            moved = _put_one(value, sharding_of(device), device)
            if moved.sharding != sharding_of(device) or not np.array_equal(np.asarray(moved), sample):
                return False
    except Exception:  # a private function may fail in any way when it changes
        return False
    return True


def _put_one(x: Any, sharding: SingleDeviceSharding, device: jax.Device) -> Any:
    """Move one value by the private path; None when it is not fit for it."""
    kind = type(x)
    if kind is np.ndarray:
        if x.dtype not in PLAIN_DTYPES or not x.dtype.isnative:
            return None
        aval = _shaped(x.shape, x.dtype)
    elif kind is ArrayImpl:
        source = x.sharding
        if type(source) is not SingleDeviceSharding or source.memory_kind != sharding.memory_kind:
            return None
        if source == sharding and x.committed:
            return x
        if platform_of(x) != device.platform:
            return None  # between clients JAX goes by way of the host, and knows how
        aval = x.aval
    else:
        return None
    return _batched_device_put(aval, sharding, [x], [device], True)


def put(values: Sequence[Any], device: jax.Device) -> list[Any]:
    """Bring `jax.Array`s, NumPy arrays and scalars to a device, without waiting where JAX does not.

    What `jax.device_put` of the list does, at a fraction of its cost for plain arrays. Values that
    are there already are returned as they are. A NumPy array may be aliased: it must not change.
    """
    if not has_fast_put(device):
        return put_public(values, device)
    sharding = sharding_of(device)
    moved = [_put_one(x, sharding, device) for x in values]
    rest = [i for i, x in enumerate(moved) if x is None]
    if rest:
        for i, x in zip(rest, put_public([values[i] for i in rest], device), strict=True):
            moved[i] = x
    return moved


def put_one(x: Any, device: jax.Device) -> Any:
    """`put` of one value."""
    moved = _put_quickly(x, device)
    return put_public([x], device)[0] if moved is None else moved


def _put_quickly(x: Any, device: jax.Device) -> Any:
    """`_put_one`, where the device has it."""
    return _put_one(x, sharding_of(device), device) if has_fast_put(device) else None


class Mover:
    """`put_one` to one device, which remembers what it has found out about a value's type.

    All results that one executable gives for one of its outputs have the same type and place, the very same objects:
    so what holds for one of them holds for the next, and two comparisons take the place of a dozen calls.

    Args:
        device: where to.
        kept: how many types it remembers; then it forgets them all, as whoever compiles that many does not come back.
    """

    __slots__ = ("_device", "_devices", "_kept", "_known", "_sharding")

    def __init__(self, device: jax.Device, kept: int = 256) -> None:
        self._kept = kept
        self._device = device
        self._devices = [device]
        self._sharding = sharding_of(device)
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, x: Any) -> Any:
        """`put_one` of a value, which may be of 64 bits."""
        if type(x) is not ArrayImpl:
            with wide_context((x,)):
                return put_one(x, self._device)
        aval, source = x.aval, x.sharding
        known = self._known.get(id(aval))
        if known is not None and known[0] is aval and known[1] is source:
            return _batched_device_put(aval, self._sharding, [x], self._devices, True)
        with wide_context((x,)):
            moved = _put_quickly(x, self._device)
            if moved is None:
                return put_public([x], self._device)[0]
        if source != self._sharding and x.dtype not in WIDE_DTYPES:
            if len(self._known) >= self._kept:
                self._known.clear()
            self._known[id(aval)] = (aval, source)
        return moved


def show(array: np.ndarray[Any, Any], device: jax.Device) -> Any:
    """A `jax.Array` that is the memory of a NumPy array, so that it changes with it; None where JAX would copy.

    A launch takes such an array as it is, where it has to look at a NumPy array and to wrap it each time. Whoever
    holds one must keep it from everybody who expects an array of JAX not to change.

    Args:
        array: aligned to 64 bytes.
        device: a CPU device.
    """
    if not array.nbytes or not has_fast_put(device):
        return None
    with undisturbed():
        shown = _put_one(array, sharding_of(device), device)
    try:
        return shown if shown.unsafe_buffer_pointer() == array.ctypes.data else None
    except Exception:  # None, or a version of JAX that does not say where an array is
        return None


def put_public(values: Sequence[Any], device: jax.Device) -> list[Any]:
    """`put` by public functions alone."""
    with undisturbed():
        moved: list[Any] = jax.device_put(list(values), sharding_of(device))
        return moved


def is_ready(x: Any) -> bool:
    """Whether a value is computed, or failed, or never was a device's. Never blocks, never raises."""
    if type(x) is not ArrayImpl and not isinstance(x, jax.Array):  # the second asks an abstract class: slow
        return True
    try:
        # Up to JAX 0.10, is_ready() of an array after delete() is a segmentation fault.
        return x.is_deleted() or bool(x.is_ready())  # type: ignore[attr-defined]  # not in the stubs
    except AttributeError:
        pass
    except Exception:  # failed: there is nothing to wait for
        return True
    base = getattr(x, "_base_array", None)  # a typed key has no is_ready(): ask the bits that it wraps
    return base is not None and is_ready(base)


def platform_of(x: Any) -> str | None:
    """The platform of an array, or None for a deleted one (asking which ends the process up to JAX 0.10)."""
    return None if x.is_deleted() else x.platform()


def host_view(x: Any) -> np.ndarray[Any, Any]:
    """A ready value as NumPy: without a copy on a CPU, read-only. Typed keys show their bits. Waits if it must."""
    with undisturbed():
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x)
