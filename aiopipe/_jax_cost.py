"""How much work an equation is, estimated from its shapes; for balancing, where only ratios matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ._jaxpr import nested_jaxprs, open_jaxpr

__all__ = ["TRANSCENDENTAL_FLOPS", "flops", "nbytes_moved"]

TRANSCENDENTAL_FLOPS = 4.0
"""Operations charged for each element of an `exp`, `tanh` and the like."""

_FREE = frozenset(
    "reshape transpose squeeze expand_dims broadcast_in_dim copy copy_p bitcast_convert_type slice dynamic_slice "
    "dynamic_update_slice concatenate pad rev iota split stop_gradient optimization_barrier sharding_constraint name "
    "random_wrap random_unwrap create_token device_put layout_constraint reshard".split()
)
_TRANSCENDENTAL = frozenset(
    "exp exp2 expm1 log log1p sin cos tan tanh sinh cosh asin acos atan asinh acosh atanh atan2 erf erfc erf_inv "
    "logistic pow rsqrt sqrt cbrt lgamma digamma igamma igammac bessel_i0e "
    "bessel_i1e regularized_incomplete_beta".split()
)
_RANDOM = frozenset("threefry2x32 random_bits random_split random_fold_in random_seed rng_bit_generator".split())
_RANDOM_FLOPS = 25.0  # twenty rounds of a few operations make two words
_SOLVERS: Mapping[str, float] = {
    "cholesky": 1 / 3,
    "lu": 2 / 3,
    "triangular_solve": 1.0,
    "geqrf": 4 / 3,
    "householder_product": 4 / 3,
    "qr": 4 / 3,
    "eigh": 9.0,
    "eig": 25.0,
    "svd": 20.0,
    "schur": 25.0,
    "tridiagonal": 4 / 3,
    "hessenberg": 10 / 3,
}
"""Operations over n³, from the textbook counts (Golub and Van Loan, Matrix Computations)."""


def _size(var: Any) -> float:
    return float(math.prod(getattr(var.aval, "shape", ())))


def _out_size(eqn: Any) -> float:
    return sum(map(_size, eqn.outvars))


def _in_size(eqn: Any) -> float:
    return sum(map(_size, eqn.invars))


def _dot_general(eqn: Any) -> float:
    (contract, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2.0 * _out_size(eqn) * math.prod(float(shape[d]) for d in contract)


def _ragged_dot(eqn: Any) -> float:
    lhs, rhs = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    return 2.0 * math.prod(map(float, lhs)) * float(rhs[-1])


def _conv(eqn: Any) -> float:
    kernel = eqn.invars[1].aval.shape
    channels: int = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * _out_size(eqn) * math.prod(map(float, kernel)) / max(channels, 1)


def _sort(eqn: Any) -> float:
    n = _size(eqn.invars[0])
    dimension = eqn.params.get("dimension", -1)
    shape = eqn.invars[0].aval.shape
    return n * math.log2(max(shape[dimension] if shape else 1, 2)) * float(len(eqn.invars))


def _fft(eqn: Any) -> float:
    return 5.0 * _out_size(eqn) * math.log2(max(math.prod(eqn.params["fft_lengths"]), 2))


def _window(eqn: Any) -> float:
    return _out_size(eqn) * float(math.prod(eqn.params.get("window_dimensions", (1,))))


def _solver(eqn: Any) -> float:
    matrix = eqn.invars[0]
    return _SOLVERS[eqn.primitive.name] * _size(matrix) * float(matrix.aval.shape[-1])


def _scan(eqn: Any) -> float:
    return float(eqn.params["length"]) * _body(eqn.params["jaxpr"])


def _cond(eqn: Any) -> float:
    return max(map(_body, eqn.params["branches"]), default=0.0)


def _pallas(eqn: Any) -> float:
    estimate = getattr(eqn.params.get("cost_estimate"), "flops", None)
    return float(estimate) if estimate is not None else _out_size(eqn)


def _body(jaxpr: Any) -> float:
    return sum(map(flops, open_jaxpr(jaxpr).eqns))


_RULES: dict[str, Callable[[Any], float]] = {
    "dot_general": _dot_general,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "sort": _sort,
    "top_k": lambda eqn: _in_size(eqn) * math.log2(max(eqn.params.get("k", 2), 2)),
    "fft": _fft,
    "scan": _scan,
    "cond": _cond,
    "pallas_call": _pallas,
    "integer_pow": lambda eqn: _out_size(eqn) * max(1, abs(eqn.params.get("y", 2)).bit_length() - 1),
    "scatter": lambda eqn: _size(eqn.invars[-1]),
    "scatter-add": lambda eqn: _size(eqn.invars[-1]),
    "scatter_add": lambda eqn: _size(eqn.invars[-1]),
}
_RULES |= dict.fromkeys(_FREE, lambda eqn: 0.0)
_RULES |= dict.fromkeys(_TRANSCENDENTAL, lambda eqn: TRANSCENDENTAL_FLOPS * _out_size(eqn))
_RULES |= dict.fromkeys(_RANDOM, lambda eqn: _RANDOM_FLOPS * _out_size(eqn))
_RULES |= dict.fromkeys(_SOLVERS, _solver)


def flops(eqn: Any) -> float:
    """Floating point operations of an equation, estimated.

    Matrix products and convolutions count two for each product; reductions their input;
    elementwise ops their output, transcendental ones `TRANSCENDENTAL_FLOPS` times; views and moves
    nothing. A scan counts its body `length` times; a while loop its condition and body *once*, as
    nobody knows how often it runs; a cond its dearest branch; any other call what it calls.
    """
    name = eqn.primitive.name
    rule = _RULES.get(name)
    if rule is not None:
        return rule(eqn)
    if eqn.params:
        inner = [_body(jaxpr) for jaxpr in nested_jaxprs(eqn.params)]
        if inner and not name.startswith("reduce"):
            return sum(inner)
        if "window_dimensions" in eqn.params:
            return _window(eqn)
    if name.startswith(("reduce", "arg", "cum")):
        return _in_size(eqn)
    return _out_size(eqn)


_PICKS = frozenset({"gather", "dynamic_slice", "slice"})
_PUTS = frozenset({"scatter", "scatter_add", "scatter_mul", "scatter_min", "scatter_max", "dynamic_update_slice"})


def nbytes_moved(eqn: Any) -> float:
    """Bytes that an equation reads and writes, estimated.

    All operands and results; but what picks a part of its first operand (an embedding lookup)
    reads only that part, and what puts a part in place writes only that.
    """
    ins, outs = list(map(_nbytes, eqn.invars)), sum(map(_nbytes, eqn.outvars))
    name = eqn.primitive.name
    if name in _PICKS:
        return 2 * outs + sum(ins[1:])
    if name.replace("-", "_") in _PUTS:
        return 2 * sum(ins[1:])
    return sum(ins) + outs


def _nbytes(var: Any) -> float:
    return _size(var) * float(getattr(getattr(var.aval, "dtype", None), "itemsize", 0))
