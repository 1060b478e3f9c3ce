"""JAX functions that hypothesis draws: a few operations of many kinds, one after the other, of whatever there is.

Operations whose result jumps (conversions to integers, comparisons, branches) look at inputs and weights only,
which are the same to the last bit wherever they are read; so results differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

Value = Any


def mat(a: Value) -> Value:
    """Any array as float32[2,3] of moderate numbers."""
    a = a.astype(jnp.float32).ravel()
    return jnp.zeros((2, 3), jnp.float32) if not a.size else 0.5 * jnp.resize(a, (2, 3))


def _inner_scan(a: Value) -> Value:
    carry, all_of_them = jax.lax.scan(lambda c, x: (c * 0.5 + x, c), jnp.zeros(3, jnp.float32), a)
    return carry + all_of_them


def _conv(a: Value, b: Value) -> Value:
    return jax.lax.conv_general_dilated(a[None, None], b[None, None, :, :2], (1, 1), "SAME")[0, 0]


SMOOTH: dict[str, Callable[[Value, Value], Value]] = {
    "add": lambda a, b: mat(a) + mat(b),
    "mul": lambda a, b: mat(a) * mat(b),
    "tanh": lambda a, b: jnp.tanh(mat(a)),
    "matmul": lambda a, b: mat(a) @ mat(b).T,
    "sum": lambda a, b: mat(a).sum(),
    "max": lambda a, b: mat(a).max(axis=0),
    "sort": lambda a, b: jnp.sort(mat(a).ravel()),
    "scatter": lambda a, b: mat(a).at[jnp.array([1, 0]), jnp.array([2, 2])].add(mat(b)[:, 0]),
    "conv": lambda a, b: _conv(mat(a), mat(b)),
    "fft": lambda a, b: jnp.abs(jnp.fft.fft(mat(a))),
    "scan": lambda a, b: _inner_scan(mat(a)),
    "while": lambda a, b: jax.lax.fori_loop(0, 3, lambda i, v: v * 0.5 + i, mat(a)),
    "transpose": lambda a, b: mat(a).T,
    "reshape": lambda a, b: mat(a).reshape(3, 2),
    "same": lambda a, b: a,
    "bfloat16": lambda a, b: mat(a).astype(jnp.bfloat16),
    "float16": lambda a, b: mat(a).astype(jnp.float16) + jnp.float16(1),
    "empty": lambda a, b: mat(a)[:0],
    "beside": lambda a, b: jnp.concatenate([mat(a), mat(b)[:0], mat(b)]),
    "constant": lambda a, b: jnp.arange(3, dtype=jnp.int32),
    "jit": lambda a, b: jax.jit(lambda v: jnp.sin(v) + 1)(mat(a)),
}
JUMPING: dict[str, Callable[[Value, Value, Value], Value]] = {
    "int32": lambda exact, a, b: mat(exact * 2).astype(jnp.int32),
    "bool": lambda exact, a, b: mat(exact) > 0,
    "cond": lambda exact, a, b: jax.lax.cond(mat(exact)[0, 0] > 0, jnp.sin, jnp.cos, mat(b)),
    "where": lambda exact, a, b: jnp.where(mat(exact) > 0, mat(a), mat(b)),
    "take": lambda exact, a, b: mat(a)[(mat(exact)[0, 0] > 0).astype(jnp.int32)],
    "update": lambda exact, a, b: jax.lax.dynamic_update_slice(
        mat(a), mat(b)[:1], ((mat(exact)[0, 0] > 0).astype(jnp.int32), 0)
    ),
}
COARSE = ("bfloat16", "float16")


class Step(NamedTuple):
    """An operation, and which of the values so far it reads, counted modulo how many there are."""

    op: str
    a: int
    b: int


STEPS = st.builds(Step, st.sampled_from([*SMOOTH, *JUMPING]), st.integers(0, 20), st.integers(0, 20))


def run(steps: Sequence[Step], exact: Sequence[Value], more: Sequence[Value] = ()) -> list[Value]:
    """All values: the exact ones, the others that are given, and the result of each step."""
    values = [*exact, *more]
    for op, a, b in steps:
        first, second = values[a % len(values)], values[b % len(values)]
        if op in SMOOTH:
            values.append(SMOOTH[op](first, second))
        else:
            values.append(JUMPING[op](exact[a % len(exact)], first, second))
    return values


def tolerance(steps: Sequence[Step]) -> float:
    """Relative to the largest numbers: what fusing operations differently may change."""
    return 5e-2 if any(step.op in COARSE for step in steps) else 2e-4


KINDS = ["float32[2,3]", "float32[]", "int32[4]", "bool[3]", "bfloat16[2,2]", "float32[0,3]"]


def array_of(kind: str, seed: int) -> np.ndarray:
    """Numbers that every type holds exactly."""
    dtype, _, shape = kind.rstrip("]").partition("[")
    numbers = np.random.default_rng(seed).integers(-4, 5, [int(n) for n in shape.split(",") if n])
    return np.asarray(numbers > 0) if dtype == "bool" else np.asarray(numbers).astype(jnp.dtype(dtype))


def assert_like(got: Any, want: Any, tol: float) -> None:
    """The same tree and types; values that differ by no more than rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        one, other = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(1.0, float(np.abs(other).max(initial=0.0)))
        np.testing.assert_allclose(one, other, rtol=tol, atol=tol * scale)
