"""JAX's settings: read where a function is traced or submitted, put in force where it is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

__all__ = ["CONFIG_NAMES", "config_context", "config_snapshot"]

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
)
"""The settings that a snapshot holds: thread-local ones that a public context manager sets and that change results."""


def config_snapshot() -> tuple[tuple[str, Any], ...]:
    """The JAX settings in force in this thread, global and from context managers, as ``(name, value)`` pairs."""
    return tuple(
        (name, getattr(jax.config, f"jax_{name}"))
        for name in CONFIG_NAMES
        if hasattr(jax, name) and hasattr(jax.config, f"jax_{name}")
    )


@contextlib.contextmanager
def config_context(snapshot: tuple[tuple[str, Any], ...] | None) -> Iterator[None]:
    """Put the settings of a snapshot in force in this thread; never keep it open across an ``await``."""
    with contextlib.ExitStack() as stack:
        for name, value in snapshot or ():
            if getattr(jax.config, f"jax_{name}") != value:  # entering a context that changes nothing costs cache hits
                stack.enter_context(getattr(jax, name)(value))
        yield
