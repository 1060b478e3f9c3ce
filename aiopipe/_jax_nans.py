"""Looking for values that are not a number (or infinite) in what a program returns, and for the node that made them.

What `jax_debug_nans` and `jax_debug_infs` ask of a jitted function: its results are looked at and, where one is
invalid, its operations are run one by one to find the first to blame (JAX's `api._nan_check_posthook`). JAX waits
for the results where the function is called; here that is a lane which may block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax_settings import Settings, config_context, undisturbed
from .devices.base import NodeFailure, Program
from .graph import Tensor

__all__ = ["CHECKS", "InvalidValue", "checking"]

CHECKS = {"debug_nans": ("nan", np.isnan), "debug_infs": ("inf", np.isinf)}
"""Setting -> (what it looks for, the test for each element)."""

Call = Callable[..., Sequence[Any]]


class InvalidValue(NodeFailure, FloatingPointError):
    """A program returned a value that its settings forbid."""

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process it has no position: the nodes there are not those that it is told to.
        return FloatingPointError, self.args


def checking(call: Call, program: Program, device: jax.Device, settings: Settings) -> Call:
    """A program's executable that looks at what it returns, and waits for it; `call` itself where nothing is asked.

    Args:
        call: computes the program; donates nothing.
        program: is run one node after the other, to say which one is to blame.
        device: where.
        settings: of which `CHECKS` say what is looked for; the others are in force while nodes are run.
    """
    looked_for = [CHECKS[name] for name, value in settings if value and name in CHECKS]
    if not looked_for:
        return call

    def checked(*args: Any) -> Sequence[Any]:
        results = call(*args)
        for kind, test in looked_for:
            found = [t for t, value in zip(program.outputs, results, strict=False) if _has(value, test)]
            if found:
                raise _to_blame(program, args, found[0], device, settings, kind, test)
        return results

    return checked


def _has(value: Any, test: Callable[[Any], Any]) -> bool:
    with undisturbed():
        return bool(jnp.issubdtype(value.dtype, jnp.inexact)) and bool(np.any(test(np.asarray(value))))


def _to_blame(
    program: Program,
    args: Sequence[Any],
    found: Tensor,
    device: jax.Device,
    settings: Settings,
    kind: str,
    test: Callable[[Any], Any],
) -> InvalidValue:
    """The error that names the node which made an invalid value out of valid ones, or was the first to be given one."""
    if any(node.has_effect for node in program.nodes):  # which must not happen twice
        return InvalidValue(f"invalid value ({kind}) in {found.describe()}")
    values: dict[int, Any] = dict(zip((t.id for t in program.inputs), args, strict=True))
    maker = {t: position for position, node in enumerate(program.nodes) for t in node.outputs}
    with undisturbed(), config_context(tuple(s for s in settings if s[0] not in CHECKS)), jax.default_device(device):
        for node in program.nodes:
            values.update(zip(node.outputs, node.fn(*[values[t] for t in node.inputs]), strict=True))
    if not _has(values[found.id], test):
        return InvalidValue(
            f"invalid value ({kind}) in {found.describe()}: its operations, run one by one, make none, so it comes of "
            "how the compiler puts them together"
        )
    position, given = maker[found.id], None
    while True:
        node = program.nodes[position]
        invalid = [t for t in node.inputs if _has(values[t], test)]
        before = next((maker[t] for t in invalid if t in maker), None)
        if before is None:
            given = next((t for t in program.inputs if t.id in invalid), None)
            break
        position = before
    where = f"{node.op} at {node.source}" if node.source else node.op
    why = "" if given is None else f", in whose operand {given.describe()} there is one already"
    return InvalidValue(f"invalid value ({kind}) encountered in {where}{why}", position=position)
