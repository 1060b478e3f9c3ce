"""Small real models that tests share; the oracle is `jax.jit` of the same function on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aiopipe.devices.base import Program
from aiopipe.graph import Graph


def mlp(params: list[Any], x: Any) -> Any:
    """``x`` (batch, d) through one tanh layer for each matrix (d, d)."""
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def mlp_params(n: int, width: int = 8, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((width, width)) / width**0.5).astype(np.float32) for _ in range(n)]


def batch(rows: int = 2, width: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def oracle(fn: Any, *args: Any) -> Any:
    """``fn(*args)`` jitted on one device, as NumPy."""
    return jax.tree.map(np.asarray, jax.jit(fn)(*args))


def assert_close(got: Any, want: Any, tol: float = 1e-5) -> None:
    """Same tree, same dtypes, close values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tol, atol=tol)


def program(graph: Graph, *, donate: tuple[int, ...] = (), name: str = "split 0") -> Program:
    """A graph as one program."""
    return Program(name, graph.nodes, graph.leaves, graph.outputs, donate=donate, config=graph.config)
