"""What aiopipe needs of JAX beyond its stable interface, and everything that differs by JAX version.

The only file that touches private parts of JAX. Each of them is looked up under a guard and has a
public fallback beside it (`put` and `put_public`), so that a JAX release that moves one of them
costs speed, not correctness. Nothing here touches a device before the first call.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ._jax_settings import CONFIG_NAMES, config_context, config_snapshot
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
from .devices.base import MemoryStats, Program
from .graph import Node

__all__ = [
    "CONFIG_NAMES",
    "ArrayImpl",
    "Compiled",
    "aval_of",
    "calls_back",
    "canonical_dtype",
    "compile_program",
    "config_context",
    "config_snapshot",
    "dtype_name",
    "dtype_of",
    "function_of",
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


def settings_key() -> Hashable:
    """Equal where the JAX settings in force in this thread are; takes a fraction of a microsecond."""
    return config_snapshot() if _trace_context is None else _trace_context()


_WIDE_DTYPES = frozenset(map(np.dtype, (np.float64, np.int64, np.uint64, np.complex128)))


def wide_context(values: Sequence[Any]) -> AbstractContextManager[Any]:
    """While it is open, JAX takes these values as they are: it narrows 64 bit types in a thread where they are off."""
    is_on = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # not in the stubs
    if is_on or not any(value.dtype in _WIDE_DTYPES for value in values):
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


# Compiling ----------------------------------------------------------------------------------------

CALLBACK_OPS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print", "python_callback"})
LOOP_OPS = frozenset({"scan", "while"})


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A program, compiled by XLA for one device.

    Attributes:
        call: takes the program's inputs as positional arguments, returns a sequence of its outputs.
        flops: floating point operations as XLA counts them, where loops count once; or None.
        bytes_accessed: bytes read and written as XLA counts them, or None.
        memory: what it needs.
        has_callback: it calls back into Python, or has other effects: such a call costs more, and may run inline.
        has_loop: a loop in it makes `flops` an underestimate.
        donated: positions of the inputs that a call really gives up.
    """

    call: Callable[..., Sequence[Any]] = field(repr=False)
    flops: float | None
    bytes_accessed: float | None
    memory: MemoryStats
    has_callback: bool
    has_loop: bool
    donated: tuple[int, ...] = ()


def function_of(program: Program) -> Callable[..., tuple[Any, ...]]:
    """A program as one function of JAX values: takes its inputs, returns its outputs."""
    nodes, outputs = program.nodes, [t.id for t in program.outputs]
    ids = [t.id for t in program.inputs]

    def run(*args: Any) -> tuple[Any, ...]:
        env = dict(zip(ids, args, strict=True))
        for node in nodes:
            time.sleep(0)  # tracing holds the GIL for long: let the event loop's thread have a turn
            env.update(zip(node.outputs, node.fn(*[env[t] for t in node.inputs]), strict=True))
        # A program that only has effects returns a token: something to wait for.
        return tuple(env[t] for t in outputs) or (jnp.zeros((), jnp.bool_),)

    run.__name__ = run.__qualname__ = re.sub(r"\W", "_", program.name) or "program"
    return run


def calls_back(node: Node) -> bool:
    """Whether a node calls back into Python, or has other effects."""
    return node.has_effect or bool(_ops_in(node) & CALLBACK_OPS)


def _ops_in(node: Node) -> frozenset[str]:
    return frozenset({node.op, *getattr(node.fn, "primitives", ())})


def compile_program(
    program: Program, device: jax.Device, *, lowering: AbstractContextManager[Any] | None = None
) -> Compiled:
    """Compile a run of nodes into one executable for `device`. Blocks; several threads may do it at once.

    Args:
        program: what to compile.
        device: what for.
        lowering: held while JAX traces and lowers, which it does in Python; XLA's own part goes on without.

    Inputs must be on `device` when it is called, or be NumPy arrays. Donated inputs for which no
    output has the same shape and type are kept, for XLA could not reuse their memory anyway.

    Raises:
        Exception: what JAX or XLA raise when the program cannot be compiled.
    """
    run = function_of(program)
    donated = _usable_donations(program)
    # A program without inputs follows nothing committed: it is told its place.
    place: dict[str, Any] = {} if program.inputs else {"out_shardings": sharding_of(device)}
    with config_context(program.config), jax.default_device(device):
        jitted = jax.jit(run, donate_argnums=donated, **place)
        with lowering or contextlib.nullcontext():
            lowered = jitted.lower(*(aval_of(t, device) for t in program.inputs))
        compiled = lowered.compile()
    call: Callable[..., Sequence[Any]] = compiled
    if any(t.dtype in _SUB_BYTE_DTYPES for t in program.inputs):

        def call(*args: Any) -> Sequence[Any]:
            with config_context(program.config), jax.default_device(device):
                outs: Sequence[Any] = jitted(*args)
            return outs

    elif any(dtype_of(t.dtype) in _WIDE_DTYPES for t in program.inputs):

        def call(*args: Any) -> Sequence[Any]:
            with wide_context(args):
                return compiled(*args)  # type: ignore[no-any-return]

    ops = frozenset().union(*map(_ops_in, program.nodes))
    cost = _cost_analysis(compiled)
    return Compiled(
        call=call,
        flops=cost.get("flops"),
        bytes_accessed=cost.get("bytes accessed"),
        memory=_memory_stats(compiled),
        has_callback=any(map(calls_back, program.nodes)),
        has_loop=bool(ops & LOOP_OPS),
        donated=donated,
    )


# An executable of JAX 0.10 refuses committed arrays of these ("input layouts that disagree"); the
# jitted function takes them, and finds the compiled executable in JAX's own cache.
_SUB_BYTE_DTYPES = frozenset({"int2", "int4", "uint2", "uint4", "float4_e2m1fn"})


def _usable_donations(program: Program) -> tuple[int, ...]:
    """The donations that JAX can match with an output; it warns about all others, and warnings are process-wide."""
    free = Counter((t.shape, t.dtype) for t in program.outputs)
    usable = []
    for position in program.donate:
        tensor = program.inputs[position]
        if free[tensor.shape, tensor.dtype] > 0:
            free[tensor.shape, tensor.dtype] -= 1
            usable.append(position)
    return tuple(usable)


def _cost_analysis(compiled: Any) -> dict[str, float]:
    """XLA's cost counters; {} where a platform has none. JAX calls their structure unstable."""
    try:
        cost = compiled.cost_analysis()
    except Exception:  # platforms without it raise errors of several kinds
        return {}
    if isinstance(cost, (list, tuple)):
        cost = cost[0] if cost else None
    return {k: float(v) for k, v in cost.items() if isinstance(v, (int, float))} if isinstance(cost, dict) else {}


def _memory_stats(compiled: Any) -> MemoryStats:
    """XLA's memory needs; zeros where a platform reports none."""
    try:
        stats = compiled.memory_analysis()
    except Exception:  # platforms without it raise errors of several kinds
        stats = None

    def read(name: str) -> int:
        return int(getattr(stats, name, 0) or 0)

    return MemoryStats(
        temp_nbytes=read("temp_size_in_bytes"),
        output_nbytes=read("output_size_in_bytes"),
        argument_nbytes=read("argument_size_in_bytes"),
        code_nbytes=read("generated_code_size_in_bytes"),
    )


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
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
