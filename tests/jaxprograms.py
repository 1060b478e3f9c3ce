"""JAX functions that are drawn: a few operations of many kinds, each of whatever there is.

There are three kinds of operations, so that results differ from those of `jax.jit` by rounding alone:

- `EXACT` ones compute with integers, truth values and keys, from nothing but inputs, weights and other exact values,
  which are the same to the last bit wherever they are computed;
- `SMOOTH` ones read anything, and change little when what they read changes little;
- `JUMPING` ones (branches, choices, indices) are decided by an exact value, and compute with anything.

Few shapes are in use, so that many programs have pieces in common, which need compiling once (`compiled_once`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Value = Any

# Whatever there is, as something to compute with --------------------------------------------------


def is_key(a: Value) -> bool:
    return bool(jnp.issubdtype(a.dtype, jax.dtypes.prng_key))


def mat(a: Value) -> Value:
    """Anything as float32[2,3] of moderate numbers."""
    if is_key(a):
        return jax.random.uniform(key_of(a), (2, 3))
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        a = a.real + a.imag
    elif jnp.issubdtype(a.dtype, jnp.integer):
        a = a.astype(jnp.int32) & 7
    a = a.astype(jnp.float32)
    if a.shape == (2, 3):
        return a
    return jnp.resize(a, (2, 3)) if a.size else jnp.zeros((2, 3), jnp.float32)


def cplx(a: Value, b: Value) -> Value:
    return jax.lax.complex(mat(a), mat(b))


def ints(exact: Value) -> Value:
    """An exact value as int32[2,3]."""
    return (3 * mat(exact)).astype(jnp.int32)


def key_of(exact: Value) -> Value:
    return exact.reshape(-1)[0] if is_key(exact) else jax.random.key(ints(exact)[0, 1])


def bounded(a: Value) -> Value:
    return jnp.clip(a, -16, 16)


# Operations ---------------------------------------------------------------------------------------


def _inner_scan(a: Value) -> Value:
    carry, all_of_them = jax.lax.scan(lambda c, x: (c * 0.5 + x, c), jnp.zeros(3, jnp.float32), a)
    return carry + all_of_them


def _scan_with_matrix(a: Value, b: Value) -> Value:
    """The matrix, which the loop closes over, is the same in every round."""
    return jax.lax.scan(lambda c, x: (jnp.tanh(c @ b.T @ b + x), c.sum()), a[0], a)


def _loops_in_loops(a: Value, b: Value) -> Value:
    def round_(i: Value, v: Value) -> Value:
        even = jax.lax.cond(i % 2 == 0, lambda u: u + b, lambda u: u * 0.5, v)
        return jax.lax.fori_loop(0, i, lambda j, u: u * 0.5 + j, even)

    return jax.lax.fori_loop(0, 3, round_, a)


def _conv(a: Value, b: Value) -> Value:
    return jax.lax.conv_general_dilated(a[None, None], b[None, None, :, :2], (1, 1), "SAME")[0, 0]


def _window(a: Value) -> Value:
    return jax.lax.reduce_window(a, -np.inf, jax.lax.max, (1, 2), (1, 1), "SAME")


@jax.custom_vjp
def _custom(a: Value) -> Value:
    return jnp.sin(a) * 2


_custom.defvjp(lambda a: (_custom(a), a), lambda a, g: (g * a,))


def _halve(a: np.ndarray) -> np.ndarray:
    return np.asarray(a) * np.float32(0.5)


def _callback(a: Value) -> Value:
    return jax.pure_callback(_halve, jax.ShapeDtypeStruct((2, 3), jnp.float32), a)


def _positive(a: Value) -> Value:
    return bounded(a @ a.T) + 3 * jnp.eye(2, dtype=jnp.float32)


TABLE = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)

SMOOTH: dict[str, Callable[[Value, Value], Value]] = {
    # element by element
    "add": lambda a, b: 0.5 * (mat(a) + mat(b)),
    "sub": lambda a, b: 0.5 * (mat(a) - mat(b)),
    "mul": lambda a, b: bounded(0.25 * mat(a) * mat(b)),
    "div": lambda a, b: mat(a) / (1 + jnp.abs(mat(b))),
    "tanh": lambda a, b: jnp.tanh(mat(a)),
    "exp": lambda a, b: jnp.exp(jnp.tanh(mat(a))),
    "sqrt": lambda a, b: jnp.sqrt(1 + mat(a) ** 2),
    "erf": lambda a, b: jax.lax.erf(mat(a)),
    "constant": lambda a, b: mat(a) + TABLE,
    "iota": lambda a, b: mat(a) + jnp.arange(3, dtype=jnp.float32),
    "weak": lambda a, b: mat(a) * 0.5 + 1,
    # products, sums, orders
    "matmul": lambda a, b: bounded(0.125 * mat(a) @ mat(b).T),
    "outer": lambda a, b: bounded(0.25 * jnp.einsum("ij,ik->ijk", mat(a), mat(b))),
    "batched": lambda a, b: bounded(0.25 * jnp.einsum("ij,ij->i", mat(a), mat(b))),
    "sum": lambda a, b: 0.25 * mat(a).sum(),
    "mean": lambda a, b: mat(a).mean(axis=1),
    "max": lambda a, b: mat(a).max(axis=0),
    "logsumexp": lambda a, b: jax.nn.logsumexp(mat(a), axis=1),
    "softmax": lambda a, b: jax.nn.softmax(mat(a)),
    "sort": lambda a, b: jnp.sort(mat(a).ravel()),
    "top_k": lambda a, b: jax.lax.top_k(mat(a), 2)[0],
    "cumsum": lambda a, b: 0.5 * jnp.cumsum(mat(a), axis=1),
    "window": lambda a, b: _window(mat(a)),
    "conv": lambda a, b: bounded(0.25 * _conv(mat(a), mat(b))),
    "fft": lambda a, b: 0.25 * jnp.abs(jnp.fft.fft(mat(a))),
    "ifft": lambda a, b: jnp.fft.ifft(cplx(a, b)),
    "complex": cplx,
    "conjugate": lambda a, b: jnp.conj(cplx(a, b)) * (0.5 + 0.5j),
    "cholesky": lambda a, b: jnp.linalg.cholesky(_positive(mat(a))),
    # places
    "transpose": lambda a, b: mat(a).T,
    "reshape": lambda a, b: mat(a).reshape(3, 2),
    "expand": lambda a, b: mat(a)[None, :, None],
    "reverse": lambda a, b: mat(a)[:, ::-1],
    "pad": lambda a, b: jnp.pad(mat(a), ((0, 1), (1, 0)), constant_values=0.5),
    "halves": lambda a, b: jnp.split(mat(a), [1], axis=1)[1],
    "scatter": lambda a, b: mat(a).at[np.array([1, 0]), np.array([2, 2])].add(0.5 * mat(b)[:, 0]),
    "scatter max": lambda a, b: mat(a).at[:, np.array([0, 2, 0])].max(mat(b)),
    "gather": lambda a, b: mat(a)[:, np.array([2, 0, 2, 1])],
    "beside": lambda a, b: jnp.concatenate([mat(a), mat(b)[:0], mat(b)]),
    "empty": lambda a, b: mat(a)[:0],
    "empty product": lambda a, b: mat(a)[:, :0] @ mat(b)[:, :0].T + mat(a)[:0].sum(),
    "same": lambda a, b: a,
    # functions of functions
    "scan": lambda a, b: 0.5 * _inner_scan(mat(a)),
    "scan with matrix": lambda a, b: _scan_with_matrix(mat(a), jnp.tanh(mat(b)))[0],
    "while": lambda a, b: jax.lax.fori_loop(0, 3, lambda i, v: v * 0.5 + i, mat(a)),
    "loops": lambda a, b: _loops_in_loops(mat(a), mat(b)),
    "map": lambda a, b: jax.lax.map(lambda row: jnp.sin(row) + row[::-1], mat(a)),
    "vmap": lambda a, b: jax.vmap(lambda u, v: bounded(0.25 * (u @ v)))(mat(a), mat(b)),
    "jit": lambda a, b: jax.jit(lambda v: jnp.sin(v) + 1)(mat(a)),
    "checkpoint": lambda a, b: jax.checkpoint(lambda v: jnp.cos(v) + 1)(mat(a)),
    "grad": lambda a, b: jax.grad(lambda v: (jnp.tanh(v) * jnp.tanh(mat(b))).sum())(mat(a)),
    "custom": lambda a, b: _custom(mat(a)) + jax.nn.silu(jnp.tanh(mat(b))),
    "custom grad": lambda a, b: bounded(jax.grad(lambda v: _custom(v).sum())(mat(a))),
    "barrier": lambda a, b: jax.lax.optimization_barrier((mat(a), mat(b)))[1] * 0.5,
    "callback": lambda a, b: _callback(mat(a)),
    # half precision
    "bfloat16": lambda a, b: (0.25 * jnp.clip(mat(a), -4, 4)).astype(jnp.bfloat16),
    "float16": lambda a, b: (0.25 * jnp.clip(mat(a), -4, 4)).astype(jnp.float16) + jnp.float16(1),
    "half product": lambda a, b: jnp.tanh(mat(a)).astype(jnp.bfloat16) @ jnp.tanh(mat(b)).astype(jnp.bfloat16).T,
}
EXACT: dict[str, Callable[[Value, Value], Value]] = {
    "int4": lambda e, f: (ints(e) & 7).astype(jnp.int4),
    "int8": lambda e, f: ints(e).astype(jnp.int8) * ints(f).astype(jnp.int8) * jnp.int8(17),
    "int16": lambda e, f: (ints(e).astype(jnp.int16) << 3) ^ ints(f).astype(jnp.int16),
    "int32": lambda e, f: ints(e) * 3 - ints(f),
    "quotient": lambda e, f: ints(e) // (1 + jnp.abs(ints(f))) + ints(f) % 3,
    "uint8": lambda e, f: ints(e).astype(jnp.uint8) // 3,
    "uint16": lambda e, f: jax.lax.population_count(ints(e).astype(jnp.uint16)),
    "uint32": lambda e, f: ~ints(e).astype(jnp.uint32) >> 1,
    "bool": lambda e, f: mat(e) > mat(f),
    "any": lambda e, f: jnp.logical_xor((ints(e) > 2).any(axis=0), (ints(f) > 1).all(axis=0)),
    "bits of floats": lambda e, f: jax.lax.bitcast_convert_type(mat(e), jnp.int32),
    "exact bfloat16": lambda e, f: ints(e).astype(jnp.bfloat16),
    "argmax": lambda e, f: jnp.argmax(mat(e), axis=1),
    "argsort": lambda e, f: jnp.argsort(ints(e).ravel()),
    "int sort": lambda e, f: jnp.sort(ints(e), axis=0),
    "int cumsum": lambda e, f: jnp.cumsum(ints(e), axis=1),
    "int matmul": lambda e, f: ints(e) @ ints(f).T,
    "int gather": lambda e, f: ints(e).ravel()[ints(f).ravel() % 6],
    "int scatter": lambda e, f: jnp.zeros(6, jnp.int32).at[ints(e).ravel() % 6].add(ints(f).ravel()),
    "int scan": lambda e, f: jax.lax.scan(lambda c, x: (c ^ x, c + x), ints(f)[0], ints(e))[1],
    "int while": lambda e, f: jax.lax.while_loop(
        lambda c: c[0] < (ints(e)[0, 0] & 7), lambda c: (c[0] + 1, c[1] * 3 + 1), (jnp.int32(0), ints(f))
    )[1],
    "int cond": lambda e, f: jax.lax.cond(ints(e)[0, 0] > 0, lambda v: v + 1, lambda v: v * 2, ints(f)),
    "int constant": lambda e, f: jnp.arange(3, dtype=jnp.int32),
    "one hot": lambda e, f: jax.nn.one_hot(ints(e)[0] & 3, 4),
    "exact same": lambda e, f: e,
    "exact empty": lambda e, f: e.reshape(-1)[:0] if not is_key(e) else ints(f)[:, :0],
    "exact flat": lambda e, f: e.reshape(-1),
    "fold in": lambda e, f: jax.random.fold_in(key_of(e), ints(f)[0, 0]),
    "split": lambda e, f: jax.random.split(key_of(e)),
    "bits": lambda e, f: jax.random.bits(key_of(e), (3,)),
    "key data": lambda e, f: jax.random.key_data(key_of(e)),
}


def _flag(exact: Value) -> Value:
    return (ints(exact)[0, 0] & 1).astype(jnp.int32)


JUMPING: dict[str, Callable[[Value, Value, Value], Value]] = {
    "cond": lambda e, a, b: jax.lax.cond(mat(e)[0, 0] > 0, jnp.sin, jnp.cos, mat(b)),
    "switch": lambda e, a, b: jax.lax.switch(
        ints(e)[0, 0] & 3, [jnp.tanh, lambda v: v + mat(b), jnp.zeros_like], mat(a)
    ),
    "where": lambda e, a, b: jnp.where(mat(e) > 0, mat(a), mat(b)),
    "take": lambda e, a, b: mat(a)[_flag(e)],
    "take along": lambda e, a, b: jnp.take_along_axis(mat(a), ints(e) & 1, axis=1),
    "slice": lambda e, a, b: jax.lax.dynamic_slice(mat(a), (_flag(e), 0), (1, 2)),
    "update": lambda e, a, b: jax.lax.dynamic_update_slice(mat(a), mat(b)[:1], (_flag(e), 0)),
    "scatter where": lambda e, a, b: mat(a).at[_flag(e)].set(mat(b)[0]),
    "segments": lambda e, a, b: 0.5 * jax.ops.segment_sum(mat(a).ravel(), ints(e).ravel() & 1, num_segments=2),
    "as often": lambda e, a, b: jax.lax.fori_loop(0, ints(e)[0, 0] & 3, lambda i, v: v * 0.5 + i, mat(a)),
    "until": lambda e, a, b: jax.lax.while_loop(
        lambda c: c[0] < ints(e)[0, 0], lambda c: (c[0] + 2, jnp.sin(c[1])), (jnp.int32(0), mat(a))
    )[1],
    "normal": lambda e, a, b: 0.5 * mat(a) + 0.25 * jax.random.normal(key_of(e), (2, 3)),
}
COARSE = ("bfloat16", "float16", "half product")

# Programs -----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """An operation, and which of the values so far it reads, counted modulo how many there are."""

    op: str
    a: int
    b: int
    exact: int


def run(
    steps: Sequence[Step], exact: Sequence[Value], more: Sequence[Value] = (), order: Sequence[int] = ()
) -> list[Value]:
    """All values: the exact ones, the others that are given, and the result of each step.

    `order` has a number for each step, counted round: of those that could come next, the one of the lowest does.
    """
    values: dict[int, Value] = dict(enumerate([*exact, *more]))
    n_given = len(values)
    are_exact = list(range(len(exact)))
    reads: list[list[int]] = []
    for i, step in enumerate(steps, n_given):
        one, other = are_exact[step.exact % len(are_exact)], are_exact[step.a % len(are_exact)]
        if step.op in EXACT:
            reads.append([one, other])
            are_exact.append(i)
        else:
            reads.append([one] * (step.op in JUMPING) + [step.a % i, step.b % i])
    ops: dict[str, Callable[..., Value]] = {**SMOOTH, **EXACT, **JUMPING}
    left = list(range(len(steps)))
    while left:
        ready = [i for i in left if values.keys() >= set(reads[i])]
        i = min(ready, key=lambda i: order[i % len(order)]) if order else ready[0]
        values[n_given + i] = ops[steps[i].op](*(values[r] for r in reads[i]))
        left.remove(i)
    return [values[i] for i in range(n_given + len(steps))]


def tolerance(steps: Sequence[Step]) -> float:
    """Relative to the largest numbers: what fusing operations differently may change."""
    return 5e-2 if any(step.op in COARSE for step in steps) else 2e-4


# Values -------------------------------------------------------------------------------------------

KINDS = [
    "float32[2,3]",
    "float32[2,3]",
    "float32[]",
    "float32[0,3]",
    "float16[3]",
    "bfloat16[2,2]",
    "int4[4]",
    "int8[2,3]",
    "int16[]",
    "int32[4]",
    "uint8[5]",
    "uint32[2]",
    "bool[3]",
    "bool[]",
    "complex64[2,3]",
    "key<fry>[]",
    "key<fry>[2]",
]


def array_of(kind: str, seed: int) -> Any:
    """Numbers that every type holds exactly, as NumPy; keys as JAX's."""
    dtype, _, shape = kind.rstrip("]").partition("[")
    dims = [int(n) for n in shape.split(",") if n]
    rng = np.random.default_rng(seed)
    if dtype.startswith("key"):
        return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 1 << 32, [*dims, 2], np.uint32)))
    numbers = np.asarray(rng.integers(0 if dtype.startswith("u") else -4, 5, dims))
    return np.asarray(numbers > 0) if dtype == "bool" else numbers.astype(jnp.dtype(dtype))


def as_numpy(tree: Any) -> Any:
    """Arrays as NumPy; keys as their bits."""
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), tree)


def assert_like(got: Any, want: Any, tol: float) -> None:
    """The same tree and types; integers, truth values and bits of keys equal, others but for rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        one, other = np.asarray(a, wide), np.asarray(b, wide)
        scale = max(1.0, float(np.abs(other).max(initial=0.0)))
        np.testing.assert_allclose(one, other, rtol=tol, atol=tol * scale)
