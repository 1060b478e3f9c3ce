"""Cheap compiling, for tests that make many small programs."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from aiopipe.backend import Executable
from aiopipe.devices.base import Program
from aiopipe.devices.xla import XlaBackend

LITTLE_OPTIMIZATION = "jax_disable_most_optimizations"
CHEAPER: Mapping[str, Any] = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
"""A third of the time for small programs; not every version of XLA has all of them."""


@functools.cache
def options() -> Mapping[str, Any]:
    """Those of `CHEAPER` that XLA knows; none with AIOPIPE_XLA=full."""
    known = {}
    for name, value in CHEAPER.items() if os.environ.get("AIOPIPE_XLA") != "full" else ():
        try:
            jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
        except RuntimeError:
            continue
        known[name] = value
    return known


def jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` of a function that will be called a few times."""
    return jax.jit(fn, compiler_options=dict(options()))


@contextmanager
def compiled_once(limit: int = 4000) -> Iterator[None]:
    """Have XLA spend little on making programs fast, and a device compile equal programs once, whoever asks.

    Which are equal the programs themselves say (`Program.key`): were it wrong, results would be, too.

    Args:
        limit: how many executables are kept, those that were used last.
    """
    known: OrderedDict[Any, Executable] = OrderedDict()
    load, compile_ = XlaBackend.load, jax.stages.Lowered.compile

    def load_once(self: XlaBackend, program: Program) -> Executable:
        self.check_open()
        key = (program.key, self.name)
        executable = known.pop(key, None) or load(self, program)
        known[key] = executable
        while len(known) > limit:
            known.popitem(last=False)
        return executable

    def compile_cheaply(self: jax.stages.Lowered) -> jax.stages.Compiled:
        return compile_(self, compiler_options=dict(options()))

    before = jax.config.read(LITTLE_OPTIMIZATION)
    jax.config.update(LITTLE_OPTIMIZATION, before or os.environ.get("AIOPIPE_XLA") != "full")
    options()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(XlaBackend, "load", load_once)
            patch.setattr(jax.stages.Lowered, "compile", compile_cheaply)
            yield
    finally:
        jax.config.update(LITTLE_OPTIMIZATION, before)
