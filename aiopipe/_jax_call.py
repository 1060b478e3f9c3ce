"""How a compiled program is called: by the cheapest way that this version of JAX and the program's types allow.

What is private to JAX is an attribute of the executable, looked up under a guard; calling the executable itself is the
public fallback, and what a faster way does not take is left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._jax_move import WIDE_DTYPES, ArrayImpl, put_one, wide_context
from ._jax_settings import Settings, config_context
from ._jax_types import dtype_of
from .devices.base import Program
from .graph import Kind

__all__ = ["MANY", "caller", "taking_arrays", "without_its_frame"]

Call = Callable[..., Sequence[Any]]

MANY = 16
"""From so many inputs on, it pays to make arrays of those that are not; see `taking_arrays`."""

# An executable of JAX 0.10 refuses committed arrays of these ("input layouts that disagree"); the
# jitted function takes them, and finds the compiled executable in JAX's own cache.
_SUB_BYTE_DTYPES = frozenset({"int2", "int4", "uint2", "uint4", "float4_e2m1fn"})


def caller(
    program: Program, compiled: Any, jitted: Any, settings: Settings, device: jax.Device, *, in_caller: bool = False
) -> Call:
    """What calls a compiled program. It is called with `undisturbed` settings.

    Args:
        program: what was compiled.
        compiled: the executable, a `jax.stages.Compiled`.
        jitted: the function that it was compiled from.
        settings: that it was compiled under.
        device: that it was compiled for.
        in_caller: a call computes it. So do those that it gets its inputs from, as a rule: their results are ready
            and come as views, so NumPy's.
    """
    if any(t.dtype in _SUB_BYTE_DTYPES for t in program.inputs):

        def with_settings(*args: Any) -> Sequence[Any]:
            with config_context(settings), jax.default_device(device):
                outs: Sequence[Any] = jitted(*args)
            return outs

        return with_settings

    if any(dtype_of(t.dtype) in WIDE_DTYPES for t in program.inputs):

        def as_they_are(*args: Any) -> Sequence[Any]:
            with wide_context(args):
                return compiled(*args)  # type: ignore[no-any-return]

        return as_they_are

    plain = without_its_frame(compiled)
    few = len(program.inputs) < MANY
    if plain is compiled or (few and in_caller) or any(t.dtype.startswith("key<") for t in program.inputs):
        return plain
    return taking_arrays(program, compiled, device, plain if few else None) or plain


def without_its_frame(compiled: Any) -> Call:
    """What calling an executable calls: one frame of Python less, which is dear where caches are cold."""
    try:
        call = compiled._executable.create_cpp_call(compiled._params)
    except Exception:  # private: it may fail in any way when it changes
        call = None
    return compiled if call is None else call  # type: ignore[no-any-return]  # None: it has callbacks


def taking_arrays(program: Program, compiled: Any, device: jax.Device, plain: Call | None = None) -> Call | None:
    """A call that does half as much for each input; None where this version of JAX does not have it.

    JAX finds out anew in every call whether it knows the types and places of all inputs. Here they were checked where
    they came in, and the weights are the same in each call, so the runtime is given the arrays at once. (That is what
    JAX's own slower way ends in: `ExecuteReplicated.__call__`.) It looks at places and sizes itself.

    Args:
        program: what was compiled.
        compiled: the executable.
        device: that it was compiled for.
        plain: takes the call where an input is NumPy's; without it, such an input is made an array.
    """
    try:
        below = compiled._executable.unsafe_call
        execute, handlers = compiled._executable.xla_executable.execute_sharded, below.out_handler.handlers
        kept = sorted(below.kept_var_idx)
        if below.ordered_effects or below.has_unordered_effects or below.has_host_callbacks or below.mut is not None:
            return None
        if any(layout is not None for layout in below.in_handler.in_layouts):
            return None
    except Exception:  # private: it may fail in any way when it changes
        return None
    held = {Kind.WEIGHT, Kind.STATE}  # arrays, put there once; anything else may come as NumPy's
    looked_at = [at for at, i in enumerate(kept) if program.inputs[i].kind not in held]
    dropped = len(kept) < len(program.inputs)

    def call(*args: Any) -> Sequence[Any]:
        given = [args[i] for i in kept] if dropped else list(args)
        for at in looked_at:
            if type(given[at]) is not ArrayImpl:
                if plain is not None:
                    return plain(*args)
                given[at] = put_one(given[at], device)
        try:
            return execute(given).consume_with_handlers(handlers)  # type: ignore[no-any-return]
        except TypeError:  # not an array after all; nothing has run
            return compiled(*args)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if "INVALID_ARGUMENT" not in str(error):  # the runtime refuses an input, so nothing has run
                raise
            return compiled(*args)  # type: ignore[no-any-return]  # takes it, or says what is wrong with it

    return call
