"""Shapes and element types: names of them, sizes, and what a value's are to JAX."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from .errors import TensorError, TraceError
from .graph import Tensor
from .handle import Handle

__all__ = [
    "PLAIN_DTYPES",
    "aval_of",
    "canonical_dtype",
    "dtype_name",
    "dtype_of",
    "is_ref",
    "is_scalar",
    "nbytes_of",
    "sharding_of",
    "spec_of",
    "struct",
    "type_key",
]

PLAIN_DTYPES = frozenset(
    np.dtype(t)
    for t in (
        np.bool_, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32,
        np.float16, jnp.bfloat16, np.float32, np.complex64,
    )
)  # fmt: skip
"""Element types that JAX keeps as they are under every setting, and that NumPy stores as JAX does."""

_extended: dict[str, Any] = {}  # names of key types seen so far: a name alone does not lead back to a custom one
_PRNG_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    """Name of an element type as `Tensor.dtype` holds it, e.g. ``"bfloat16"`` or ``"key<fry>"``.

    Raises:
        TypeError: no element type, or one of several fields, whose name would not lead back to it.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        _extended[str(dtype)] = dtype
        return str(dtype)
    found = np.dtype(dtype)
    if _is_of_fields(found):
        raise TypeError(f"{found} is no element type that JAX computes with")
    return str(found.name)


def _is_of_fields(dtype: Any) -> bool:
    """Whether it is NumPy's type of several fields, or of bare bytes; not the one that JAX has for no gradient."""
    return isinstance(dtype, np.dtype) and issubclass(dtype.type, np.void) and dtype != jax.dtypes.float0


@functools.lru_cache(maxsize=256)
def _is_unknown(dtype: np.dtype[Any]) -> bool:
    """Whether JAX computes with nothing of this type of NumPy's, be it narrowed: ``longdouble``, for one."""
    if dtype == jax.dtypes.float0:
        return False
    try:
        native = dtype.newbyteorder("=")  # JAX has no others, and they are turned round
        jax.dtypes.result_type(jax.dtypes.canonicalize_dtype(native))  # it warns of what is not canonical
    except (TypeError, ValueError):
        return True
    return False


def dtype_of(name: str) -> Any:
    """The element type that `dtype_name` named.

    Raises:
        TypeError: no such element type.
    """
    if not name.startswith("key<"):
        return np.dtype(name)
    if name not in _extended:
        for impl in _PRNG_IMPLS:
            dtype_name(jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype)
    if name not in _extended:
        raise TypeError(f"unknown key type {name!r}: expected one of {sorted(_extended)}")
    return _extended[name]


def canonical_dtype(x: Any) -> str:
    """Name of the element type that JAX gives a value (an array, a dtype, a Python scalar) under the settings in force.

    With 64 bit types off, ``float64`` becomes ``"float32"``.
    """
    dtype = None if isinstance(x, type) else getattr(x, "dtype", None)
    if dtype is None:
        dtype = jax.dtypes.result_type(x) if isinstance(x, (bool, int, float, complex)) else x
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype_name(dtype)
    if isinstance(dtype, np.dtype):  # JAX narrows no 64 bits whose bytes are the other way round
        dtype = dtype.newbyteorder("=")
    return dtype_name(jax.dtypes.canonicalize_dtype(dtype))


def nbytes_of(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of a value of that shape; `dtype` is an element type or the name of one."""
    found = dtype_of(dtype) if isinstance(dtype, str) else dtype
    itemsize = found.itemsize if hasattr(found, "itemsize") else np.dtype(found).itemsize
    return math.prod(shape) * int(itemsize)


def sharding_of(device: jax.Device) -> SingleDeviceSharding:
    """The sharding that means: all of it on this device, in its default memory."""
    return _sharding_of(device)


_sharding_of = functools.cache(SingleDeviceSharding)


# Values -------------------------------------------------------------------------------------------


def is_scalar(x: Any) -> bool:
    """Whether it is a Python number, so one whose type gives way to those that it meets."""
    return isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic)


def is_ref(aval_or_value: Any) -> bool:
    """Whether it is a mutable reference (`jax.new_ref`), or the type of one."""
    aval = getattr(aval_or_value, "aval", aval_or_value)
    return type(aval).__name__ == "AbstractRef" or type(aval_or_value).__name__ in ("Ref", "ArrayRef", "MutableArray")


def struct(shape: Sequence[int], dtype: Any, *, weak: bool = False, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """A `jax.ShapeDtypeStruct`, typed."""
    make: Any = jax.ShapeDtypeStruct  # untyped in some versions of JAX
    made: jax.ShapeDtypeStruct = make(tuple(shape), dtype, weak_type=weak, sharding=sharding)
    return made


def aval_of(tensor: Tensor, device: jax.Device | None = None) -> jax.ShapeDtypeStruct:
    """Shape and type of a tensor as JAX takes them, committed to `device` if one is given."""
    return struct(tensor.shape, dtype_of(tensor.dtype), sharding=None if device is None else sharding_of(device))


def spec_of(value: Any, name: str = "value") -> jax.ShapeDtypeStruct:
    """Shape and type, weak or not, that a value has to JAX under the settings in force; for tracing without it.

    Args:
        value: an array, a scalar, a `Handle`, a `jax.ShapeDtypeStruct` or a `Tensor`.
        name: what error messages call it.

    Raises:
        TensorError: nothing that JAX computes with.
        TraceError: a tracer or a mutable reference; or an array of 64 bits on a device, where those are off.
    """
    if isinstance(value, Tensor):
        _check_wide(value.dtype, name)
        return aval_of(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    if is_scalar(value):
        return struct((), dtype_of(canonical_dtype(value)), weak=not isinstance(value, bool))
    if isinstance(value, jax.core.Tracer):
        raise TraceError(
            f"{name!r} is a tracer of a jax transformation, expected an array: call this outside jit and grad"
        )
    if is_ref(value):
        raise TraceError(f"{name!r} is a mutable reference, expected an array: give its value, ref[...]")
    has_type = isinstance(value, (jax.Array, np.ndarray, np.generic, Handle))
    if has_type and getattr(value.dtype, "kind", "V") not in "OSUMm":
        if isinstance(value.dtype, np.dtype) and _is_unknown(value.dtype):
            todo = "each of its fields as an array of its own" if _is_of_fields(value.dtype) else "value.astype(...)"
            raise TensorError(
                f"{name!r} is an array of {value.dtype}, expected one of an element type that JAX computes with: give "
                + todo
            )
        if isinstance(value, (jax.Array, Handle)):
            _check_wide(dtype_name(value.dtype), name)
        weak = bool(getattr(value, "weak_type", False))
        return struct(value.shape, dtype_of(canonical_dtype(value)), weak=weak)
    raise TensorError(
        f"{name!r} is a {type(value).__name__}, expected an array, a scalar, a jax.ShapeDtypeStruct or a Tensor: "
        "close over what is no array, or part the two (equinox.partition, flax.nnx.split)"
    )


def _check_wide(dtype: str, name: str) -> None:
    """Refuse an array on a device that has 64 bits where those are off: NumPy arrays are narrowed, but not these."""
    if not dtype.startswith("key<") and canonical_dtype(dtype_of(dtype)) != dtype:
        raise TraceError(
            f"{name!r} is {dtype} on its device, but 64 bit types are off here: do this under jax.enable_x64(True), as "
            "when it was put there, or put it there again without"
        )


def type_key(value: Any) -> Hashable:
    """Equal for values that a function need be traced for only once; `spec_of`, made cheap.

    Raises:
        TensorError, TraceError: as `spec_of` does.
    """
    kind = type(value)
    if kind is np.ndarray and value.dtype in PLAIN_DTYPES:
        return (value.shape, value.dtype, False)
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return (value.shape, value.dtype, bool(getattr(value, "weak_type", False)))
    spec = spec_of(value)
    return (spec.shape, spec.dtype, bool(getattr(spec, "weak_type", False)))
