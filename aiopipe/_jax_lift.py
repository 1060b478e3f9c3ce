"""Constants inside loops and branches, made inputs.

JAX makes operands of what a loop's body closes over, but not of what a jitted function called in
that body does. Such arrays would become part of the executable: slow to compile, and in no
backend's care.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ._jax import source_context
from ._jaxpr import INLINED, Equation, FlatJaxpr, bind, inner_jaxpr, nested_jaxprs, open_jaxpr

__all__ = ["Lifted", "nested_consts"]


def nested_consts(eqn: Any) -> list[Any]:
    """The arrays, other than scalars, that functions inside a scan, while or cond closed over; each once.

    Those of other primitives with bodies (shard_map, pallas_call, custom_linear_solve and the like)
    cannot be replaced from outside and stay where they are.
    """
    found: dict[int, Any] = {}
    if eqn.primitive.name in _REBUILT:
        _collect_consts(eqn, found)
    return list(found.values())


def _collect_consts(eqn: Any, found: dict[int, Any]) -> None:
    name = eqn.primitive.name
    if name not in _REBUILT and name not in INLINED:
        return
    for inner in nested_jaxprs(eqn.params):
        flat = open_jaxpr(inner)
        for const in flat.consts:
            if np.ndim(const) > 0 and not isinstance(const, jax.core.Tracer):
                found.setdefault(id(const), const)
        for each in flat.eqns:
            if each.params:
                _collect_consts(each, found)


class Lifted(Equation):
    """A scan, while or cond whose nested constants are inputs.

    Its last slots are those of `nested_consts`. It is built anew from public functions of JAX, with
    the functions that it calls inlined, since no equation says how to replace the constants in it.
    """

    __slots__ = ("consts",)

    def __init__(self, eqn: Any, slots: tuple[int | None, ...], literals: tuple[Any, ...], consts: Sequence[Any]):
        super().__init__(eqn, slots, literals)
        self.consts = tuple(consts)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        literals = iter(self.literals)
        values = [next(literals) if slot is None else inputs[slot] for slot in self.slots]
        n_operands = len(self.eqn.invars)
        replaced = {id(c): v for c, v in zip(self.consts, values[n_operands:], strict=True)}
        return _rebuild(self.eqn, values[:n_operands], replaced)

    @property
    def _lifted(self) -> Sequence[Any]:
        return self.consts


def _evaluate(jaxpr: Any, args: Sequence[Any], replaced: Mapping[int, Any]) -> list[Any]:
    flat = jaxpr if isinstance(jaxpr, FlatJaxpr) else open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip(flat.invars, args, strict=True))
    env.update(zip(flat.constvars, [replaced.get(id(c), c) for c in flat.consts], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else env[atom]

    for eqn in flat.eqns:
        found: dict[int, Any] = {}
        _collect_consts(eqn, found)
        operands = [read(v) for v in eqn.invars]
        env.update(zip(eqn.outvars, _rebuild(eqn, operands, replaced) if found else bind(eqn, operands), strict=True))
    return [read(v) for v in flat.outvars]


def _rebuild(eqn: Any, operands: Sequence[Any], replaced: Mapping[int, Any]) -> Sequence[Any]:
    inner = inner_jaxpr(eqn)
    if inner is not None:
        return _evaluate(inner, operands, replaced)
    with source_context(eqn), eqn.ctx.manager:
        return _REBUILT[eqn.primitive.name](eqn.params, operands, replaced)


def _scan_split(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried."""
    if "num_consts" in params:  # pragma: no cover - up to JAX 0.10
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # pragma: no cover - from JAX 0.11 on
    return len(consts), len(carry)  # pragma: no cover - from JAX 0.11 on


def _rebuild_scan(params: Mapping[str, Any], operands: Sequence[Any], replaced: Mapping[int, Any]) -> Sequence[Any]:
    body = params["jaxpr"]
    n_consts, n_carry = _scan_split(params)
    consts, init, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]

    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs = _evaluate(body, [*consts, *carry, *x], replaced)
        return outs[:n_carry], outs[n_carry:]

    carry, ys = jax.lax.scan(
        step, list(init), list(xs), params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys]


def _rebuild_while(params: Mapping[str, Any], operands: Sequence[Any], replaced: Mapping[int, Any]) -> Sequence[Any]:
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
    result: list[Any] = jax.lax.while_loop(
        lambda carry: _evaluate(params["cond_jaxpr"], [*cond_consts, *carry], replaced)[0],
        lambda carry: _evaluate(params["body_jaxpr"], [*body_consts, *carry], replaced),
        list(operands[n_cond + n_body :]),
    )
    return result


def _rebuild_cond(params: Mapping[str, Any], operands: Sequence[Any], replaced: Mapping[int, Any]) -> Sequence[Any]:
    index, *rest = operands
    branches = [lambda *args, b=branch: _evaluate(b, args, replaced) for branch in params["branches"]]
    result: list[Any] = jax.lax.switch(index, branches, *rest)
    return result


_REBUILT: Mapping[str, Callable[[Mapping[str, Any], Sequence[Any], Mapping[int, Any]], Sequence[Any]]] = {
    "scan": _rebuild_scan,
    "while": _rebuild_while,
    "cond": _rebuild_cond,
}
