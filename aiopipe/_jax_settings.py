"""JAX's settings: read where a function is traced or submitted, put in force where it is compiled, kept out elsewhere.

JAX keeps its settings for each thread, not for each task: ``with jax.enable_x64(True): await ...`` is in force
for every task that runs on the loop meanwhile. So what aiopipe itself does with JAX, for whatever task, neither
heeds the settings of the moment nor changes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax

__all__ = [
    "CONFIG_NAMES",
    "LEFT_OUT",
    "Settings",
    "config_context",
    "config_snapshot",
    "is_plain",
    "reader",
    "undisturbed",
]

Settings = tuple[tuple[str, Any], ...]
"""``(name, value)`` pairs."""

CONFIG_NAMES = (
    "enable_x64",
    "default_matmul_precision",
    "default_device",
    "default_prng_impl",
    "threefry_partitionable",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "softmax_custom_jvp",
    "enable_custom_prng",
    "legacy_prng_key",
    "debug_nans",
    "debug_infs",
    "debug_key_reuse",
    "allow_f16_reductions",
    "enable_checks",
    "check_tracer_leaks",
    "log_compiles",
    "explain_cache_misses",
)
"""The settings that a snapshot holds: those with a public context manager that say how to trace, compile or check."""

_PLAIN: Mapping[str, Any] = {
    "debug_nans": False,
    "debug_infs": False,
    "disable_jit": False,
    "no_execution": False,
    "transfer_guard_host_to_device": "allow",
    "transfer_guard_device_to_device": "allow",
    "transfer_guard_device_to_host": "allow",
}
"""What is in force where aiopipe launches and moves values, whatever is in force around it.

`debug_nans` and `debug_infs` would wait for results, on the event loop, say; a graph that was traced with them is
looked at by aiopipe (`_jax_nans`). Without `jit` nothing that is compiled can be called. Every transfer of
aiopipe's is meant: its plans show them."""

LEFT_OUT: Mapping[str, str] = {
    "array_garbage_collection_guard": "says what happens when arrays die, to whom they belong",
    "auto_pcast": "of arrays over several devices",
    "disable_jit": "aiopipe compiles whatever it runs: it is off while a function is traced",
    "enable_custom_vjp_by_custom_transpose": "of differentiation, which is over when a function has been traced",
    "jax2tf_associative_scan_reductions": "of exporting to TensorFlow",
    "no_execution": "of what the user's own code runs",
    "no_tracing": "of what the user's own code traces",
    "remove_size_one_mesh_axis_from_type": "of arrays over several devices",
    "thread_guard": "of arrays over several processes",
    "transfer_guard": "of the user's own transfers",
    "transfer_guard_device_to_device": "of the user's own transfers",
    "transfer_guard_device_to_host": "of the user's own transfers",
    "transfer_guard_host_to_device": "of the user's own transfers",
}
"""Settings with a public context manager that a snapshot does not hold, and why."""


def config_snapshot() -> Settings:
    """The JAX settings in force in this thread, global and from context managers, as ``(name, value)`` pairs."""
    return tuple(
        (name, getattr(jax.config, f"jax_{name}"))
        for name in CONFIG_NAMES
        if hasattr(jax, name) and hasattr(jax.config, f"jax_{name}")
    )


@contextlib.contextmanager
def config_context(snapshot: Settings | None) -> Iterator[None]:
    """Put the settings of a snapshot in force in this thread; never keep it open across an ``await``."""
    with contextlib.ExitStack() as stack:
        for name, value in snapshot or ():
            if getattr(jax.config, f"jax_{name}") != value:  # entering a context that changes nothing costs cache hits
                stack.enter_context(getattr(jax, name)(value))
        yield


class _Read:
    """The value of a setting, for a version of JAX whose settings do not show it."""

    def __init__(self, name: str) -> None:
        self._name = f"jax_{name}"

    @property
    def value(self) -> Any:
        return getattr(jax.config, self._name)


def reader(name: str) -> Any:
    """Something whose ``value`` is that of a setting in this thread; reading it takes some 40 ns."""
    setting = getattr(jax, name, None)
    return setting if hasattr(setting, "value") else _Read(name)


# `disable_jit` has no `value` in any version: `is_plain` reads it where it is.
_nans, _infs, _, _no_execution, _to_device, _between, _to_host = map(reader, _PLAIN)
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def undisturbed() -> AbstractContextManager[None]:
    """While it is open, what aiopipe launches and moves is not subject to the settings of the moment.

    Costs a third of a microsecond where no such setting is in force. Never keep it open across an ``await``.
    """
    if is_plain():
        return _NOTHING
    return config_context(tuple(_PLAIN.items()))


def is_plain() -> bool:
    """Whether no setting is in force that `undisturbed` would have to change."""
    return not (
        _nans.value
        or _infs.value
        or jax.config.jax_disable_jit  # type: ignore[attr-defined]  # not in the stubs
        or _no_execution.value
        or _to_device.value not in _ALLOW
        or _between.value not in _ALLOW
        or _to_host.value not in _ALLOW
    )


_ALLOW = (None, "allow")
