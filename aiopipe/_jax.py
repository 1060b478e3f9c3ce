"""What aiopipe needs of JAX beyond its stable interface, and everything that differs by JAX version.

Only this file and its parts (`_jax_*.py`) touch private parts of JAX. Each of them is looked up under a guard and has a
public fallback beside it (`put` and `put_public`), so that a JAX release that moves one of them
costs speed, not correctness. Nothing here touches a device before the first call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

from ._jax_move import (
    ArrayImpl,
    Mover,
    has_fast_put,
    host_view,
    is_ready,
    platform_of,
    put,
    put_one,
    put_public,
    show,
    wide_context,
)
from ._jax_settings import CONFIG_NAMES, config_context, config_snapshot, reader, undisturbed
from ._jax_types import (
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
    "ArrayImpl",
    "Mover",
    "aval_of",
    "canonical_dtype",
    "config_context",
    "config_snapshot",
    "dtype_name",
    "dtype_of",
    "has_fast_put",
    "has_started",
    "host_view",
    "is_ready",
    "nbytes_of",
    "platform_of",
    "put",
    "put_one",
    "put_public",
    "settings_key",
    "sharding_of",
    "show",
    "source_context",
    "spec_of",
    "type_key",
    "undisturbed",
    "wide_context",
]

_source_info: Any
_trace_context: Any
_bridge: Any
try:
    from jax._src import source_info_util as _source_info
except ImportError:  # pragma: no cover - no supported version lacks it
    _source_info = None
try:
    from jax._src.config import trace_context as _trace_context
except ImportError:  # pragma: no cover - no supported version lacks it
    _trace_context = None


try:
    from jax._src import xla_bridge as _bridge
except ImportError:  # pragma: no cover - no supported version lacks it
    _bridge = None


def has_started() -> bool:
    """Whether JAX has opened devices in this process; where that is not known, it may have.

    Takes no lock, which a thread that a fork has left behind might hold.
    """
    return bool(getattr(_bridge, "_backends", True))


# Settings -----------------------------------------------------------------------------------------


_OUTSIDE = tuple(
    map(reader, ("debug_nans", "debug_infs", "default_prng_impl", "enable_custom_prng", "softmax_custom_jvp"))
)
"""What a trace depends on (or what becomes of it) and JAX's own key of a trace does not have."""


def settings_key() -> Hashable:
    """Equal where the JAX settings in force in this thread are; takes a fraction of a microsecond."""
    if _trace_context is None:
        return config_snapshot()
    nans, infs, prng, custom_prng, softmax = _OUTSIDE
    return (_trace_context(), nans.value, infs.value, prng.value, custom_prng.value, softmax.value)


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
