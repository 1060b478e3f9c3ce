"""Programs become executables: what is compiled, and how it is called."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ._jax_call import caller
from ._jax_nans import CHECKS, checking
from ._jax_settings import Settings, config_context, undisturbed
from ._jax_types import aval_of, sharding_of
from .devices.base import MemoryStats, Program
from .graph import Node

__all__ = ["Compiled", "calls_back", "compile_program", "function_of"]

CALLBACK_OPS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print", "python_callback"})
LOOP_OPS = frozenset({"scan", "while"})

INLINE_FLOPS = 1000
"""XLA's CPU client runs a computation of fewer flops in the caller (`cpu_client.cc`)."""


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
        waits: a call waits for the results, to look at them.
        donated: positions of the inputs that a call really gives up.
        in_caller: XLA computes it in the thread that calls it, for certain: see `INLINE_FLOPS`.
    """

    call: Callable[..., Sequence[Any]] = field(repr=False)
    flops: float | None
    bytes_accessed: float | None
    memory: MemoryStats
    has_callback: bool
    has_loop: bool
    waits: bool = False
    donated: tuple[int, ...] = ()
    in_caller: bool = False


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
    settings: Settings = program.config or ()
    checked = any(value for name, value in settings if name in CHECKS)
    donated = () if checked else _usable_donations(program)  # to run it again, it needs its inputs
    # A program without inputs follows nothing committed: it is told its place.
    place: dict[str, Any] = {} if program.inputs else {"out_shardings": sharding_of(device)}
    plain = tuple(setting for setting in settings if setting[0] not in CHECKS)
    with undisturbed(), config_context(plain), jax.default_device(device):
        jitted = jax.jit(run, donate_argnums=donated, **place)
        with lowering or contextlib.nullcontext():
            lowered = jitted.lower(*(aval_of(t, device) for t in program.inputs))
        compiled = lowered.compile()
    ops = frozenset().union(*map(_ops_in, program.nodes))
    cost = _cost_analysis(compiled)
    in_caller = device.platform == "cpu" and cost.get("flops", INLINE_FLOPS) < INLINE_FLOPS
    call = caller(program, compiled, jitted, plain, device, in_caller=in_caller)
    return Compiled(
        call=checking(call, program, device, settings),
        flops=cost.get("flops"),
        bytes_accessed=cost.get("bytes accessed"),
        memory=_memory_stats(compiled),
        has_callback=any(map(calls_back, program.nodes)),
        has_loop=bool(ops & LOOP_OPS),
        waits=checked,
        donated=donated,
        in_caller=in_caller,
    )


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
