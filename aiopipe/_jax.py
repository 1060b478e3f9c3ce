"""What aiopipe needs of JAX beyond its stable interface, and everything that differs by JAX version.

The only file that touches private parts of JAX. Each of them is looked up under a guard and has a
public fallback beside it (`put` and `put_public`), so that a JAX release that moves one of them
costs speed, not correctness. Nothing here touches a device before the first call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ._jax_settings import CONFIG_NAMES, config_context, config_snapshot, reader, undisturbed
from ._jax_types import (
    PLAIN_DTYPES,
    aval_of,
    canonical_dtype,
    dtype_name,
    dtype_of,
    nbytes_of,
    sharding_of,
    spec_of,
    type_key,
)

__all__ = [
    "CONFIG_NAMES",
    "WIDE_DTYPES",
    "ArrayImpl",
    "aval_of",
    "canonical_dtype",
    "config_context",
    "config_snapshot",
    "dtype_name",
    "dtype_of",
    "has_fast_put",
    "host_view",
    "is_ready",
    "nbytes_of",
    "platform_of",
    "put",
    "put_public",
    "settings_key",
    "sharding_of",
    "source_context",
    "spec_of",
    "type_key",
    "undisturbed",
    "wide_context",
]

_batched_device_put: Any
ArrayImpl: Any
_source_info: Any
_trace_context: Any
try:
    from jax._src.lib import xla_client as _xla_client  # type: ignore[attr-defined]  # private

    _batched_device_put = _xla_client.batched_device_put
except (ImportError, AttributeError):  # pragma: no cover - no supported version lacks it
    _batched_device_put = None
try:
    from jax._src.array import ArrayImpl
except ImportError:  # pragma: no cover - no supported version lacks it
    ArrayImpl = None
try:
    from jax._src import source_info_util as _source_info
except ImportError:  # pragma: no cover - no supported version lacks it
    _source_info = None
try:
    from jax._src.config import trace_context as _trace_context
except ImportError:  # pragma: no cover - no supported version lacks it
    _trace_context = None


# Settings -----------------------------------------------------------------------------------------


_OUTSIDE = tuple(
    map(reader, ("debug_nans", "debug_infs", "default_prng_impl", "enable_custom_prng", "softmax_custom_jvp"))
)
"""What a trace depends on (or what becomes of it) and JAX's own key of a trace does not have."""


def settings_key() -> Hashable:
    """Equal where the JAX settings in force in this thread are; takes half a microsecond."""
    if _trace_context is None:
        return config_snapshot()
    return (_trace_context(), *[setting.value for setting in _OUTSIDE])


WIDE_DTYPES = frozenset(map(np.dtype, (np.float64, np.int64, np.uint64, np.complex128)))


def wide_context(values: Sequence[Any]) -> AbstractContextManager[Any]:
    """While it is open, JAX takes these values as they are: it narrows 64 bit types in a thread where they are off."""
    is_on = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # not in the stubs
    if is_on or not any(value.dtype in WIDE_DTYPES for value in values):
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = jax.enable_x64(True)
    return context


# Source lines -----------------------------------------------------------------------------------


def source_context(eqn: Any) -> AbstractContextManager[Any]:
    """While it is open, what is traced carries the source line and name scopes of an equation."""
    if _source_info is None:  # pragma: no cover - no supported version lacks it
        return contextlib.nullcontext()
    try:
        info = eqn.source_info
        stack = _source_info.current_name_stack() + info.name_stack
        context: AbstractContextManager[Any] = _source_info.user_context(info.traceback, name_stack=stack)
    except (AttributeError, TypeError):
        return contextlib.nullcontext()
    return context


# Moving -------------------------------------------------------------------------------------------


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
    with undisturbed():
        if not has_fast_put(device):
            return put_public(values, device)
        sharding = sharding_of(device)
        moved = [_put_one(x, sharding, device) for x in values]
        rest = [i for i, x in enumerate(moved) if x is None]
        if rest:
            for i, x in zip(rest, put_public([values[i] for i in rest], device), strict=True):
                moved[i] = x
        return moved


def put_public(values: Sequence[Any], device: jax.Device) -> list[Any]:
    """`put` by public functions alone."""
    with undisturbed():
        moved: list[Any] = jax.device_put(list(values), sharding_of(device))
        return moved


def is_ready(x: Any) -> bool:
    """Whether a value is computed, or failed, or never was a device's. Never blocks, never raises."""
    if not isinstance(x, jax.Array):
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
