"""Equations: their source lines, their signatures, their costs."""

from __future__ import annotations

import enum
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aiopipe import _jax, _jax_source, _jaxpr
from aiopipe._jax_cost import TRANSCENDENTAL_FLOPS, flops, nbytes_moved
from aiopipe.trace import trace

X = np.linspace(-1, 1, 8, dtype=np.float32)
W = np.arange(64, dtype=np.float32).reshape(8, 8) / 64


def mlp(params: Any, x: Any) -> Any:
    for w in params:
        x = jax.nn.relu(x @ w)
    return x


def equations(fn: Any, *args: Any) -> list[Any]:
    return list(_jaxpr.make_jaxpr(fn, args)[0].eqns)


def cost(fn: Any, *args: Any) -> float:
    return sum(map(flops, equations(fn, *args)))


# Stand-ins for parameters ------------------------------------------------------------------------


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


class Colour(enum.IntEnum):
    RED = 1


LARGE, DELETED = np.zeros(1 << 20), jnp.ones(3)


def equal_parameters() -> list[list[Any]]:
    """Groups of values: those of one group mean the same, those of two never do."""
    same, object_array = Unhashable(), np.array([None], object)
    DELETED.delete()
    return [
        [None],
        [True],
        [1],
        [1.0],
        [np.float32(1)],
        [np.float64(1)],
        [Colour.RED],
        [-0.0],
        [0.0],
        [float("nan"), float("nan")],
        [1j],
        ["1"],
        [b"1"],
        [(1, 2.0)],
        [[1, 2.0]],
        [(1, 2)],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        [{"a": 1, "b": 3}],
        [{1, 2}, {2, 1}],
        [frozenset({1, 2})],
        [np.arange(3), np.arange(3)],
        [np.arange(3, dtype=np.int8)],
        [np.arange(3).reshape(3, 1)],
        [jax.random.key(1), jax.random.key(1)],
        [jax.random.key(2)],
        [jax.random.key(1, impl="rbg")],
        [LARGE, LARGE],
        [LARGE.copy()],
        [DELETED, DELETED],
        [object_array, object_array],
        [same, same],
        [Unhashable()],
        [jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)],
    ]


def test_parameters_are_equal_if_they_mean_the_same() -> None:
    groups = equal_parameters()
    found = [[_jaxpr.freeze(value) for value in group] for group in groups]
    for stand_ins in found:
        assert len(set(stand_ins)) == 1
    assert len({stand_ins[0] for stand_ins in found}) == len(groups)


def test_constants_that_are_inputs_are_equal_by_their_number() -> None:
    one, two = np.arange(3), np.arange(4)
    assert _jaxpr.freeze(one, {id(one): 0}) == _jaxpr.freeze(two, {id(two): 0}) != _jaxpr.freeze(two, {id(two): 1})


def test_signatures_show_briefly() -> None:
    graph = trace(lambda w, x: jnp.sin(x), (), X)
    assert re.fullmatch(r"<signature [0-9a-f]{8}>", repr(graph.nodes[0].fn.signature()))
    assert repr(graph.nodes[0].fn) == "<Equation sin>"


# Source lines and signatures ---------------------------------------------------------------------


def test_every_node_has_the_users_line() -> None:
    graph = trace(mlp, [W, W], X)
    line = mlp.__code__.co_firstlineno + 2
    assert {node.source for node in graph.nodes} == {f"test_equations.py:{line} (mlp)"}


def test_lines_of_jax_functions_are_those_of_their_callers() -> None:
    def fn(w: Any, x: Any) -> Any:
        x = jax.nn.softmax(x)
        x = x + 1
        return jax.nn.softmax(x)  # its trace is cached

    graph = trace(fn, (), X)
    first = fn.__code__.co_firstlineno
    assert [n.source for n in graph.nodes if n.op == "exp"] == [
        f"test_equations.py:{first + 1} (fn)",
        f"test_equations.py:{first + 3} (fn)",
    ]


def test_signatures_tell_computations_apart() -> None:
    def fn(w: Any, x: Any) -> Any:
        def layer(x: Any) -> Any:
            y, _ = jax.lax.scan(lambda c, b: (jax.nn.relu(c) + b, None), x, jnp.ones((3, 8)))
            return y

        a = layer(layer(x))
        b = a * 2.0
        c = b * 2.0
        d = c * 3.0
        e = 2.0 * d
        f = e * e
        g = f * b
        return jnp.sum(g.reshape(2, 4), axis=0), jnp.sum(g.reshape(2, 4), axis=1)

    graph = trace(fn, (), X)
    scans = [n.fn.signature() for n in graph.nodes if n.op == "scan"]
    assert scans[0] == scans[1]
    assert hash(scans[0]) == hash(scans[1])
    b, c, d, e, f, g = (n.fn.signature() for n in graph.nodes if n.op == "mul")
    assert b == c
    assert len({b, d, e, f, g}) == 5
    assert len({n.fn.signature() for n in graph.nodes if n.op == "reduce_sum"}) == 2


def test_signatures_of_loops_with_other_bodies_differ() -> None:
    def signature(body: Any, const: Any = 1.0) -> Any:
        graph = trace(lambda w, x: jax.lax.fori_loop(0, 3, lambda i, a: body(a) * const, x), (), X)
        return graph.nodes[-1].fn.signature()

    assert signature(jnp.sin) == signature(jnp.sin)
    assert signature(jnp.sin) != signature(jnp.cos)
    assert signature(jnp.sin) != signature(jnp.sin, 2.0)
    assert signature(jax.nn.relu) == signature(jax.nn.relu)


def test_signatures_of_callbacks_are_those_of_their_functions() -> None:
    def signature(fn: Any) -> Any:
        return trace(lambda w, x: jax.pure_callback(fn, x, x), (), X).nodes[0].fn.signature()

    assert signature(np.sin) != signature(np.cos)


def test_both_ways_to_read_a_traceback_agree() -> None:
    [eqn] = equations(lambda x: jax.lax.sin(x), X)
    traceback = eqn.source_info.traceback
    raw = [(code.co_name, line()) for code, line in _jax_source.stack_frames(traceback)]
    python = [(code.co_name, line()) for code, line in _jax_source.python_frames(traceback)]
    assert [name for name, _ in raw] == [name for name, _ in python]
    assert ("<lambda>", test_both_ways_to_read_a_traceback_agree.__code__.co_firstlineno + 1) in raw
    assert ("<lambda>", test_both_ways_to_read_a_traceback_agree.__code__.co_firstlineno + 1) in python
    assert list(_jax_source.stack_frames(None)) == []
    assert _jax_source.source_line(object()) == ""


def test_equations_run_without_source_information(monkeypatch: pytest.MonkeyPatch) -> None:
    [eqn] = equations(jax.lax.sin, X)
    monkeypatch.setattr(_jax, "_source_info", object())
    np.testing.assert_allclose(_jaxpr.bind(eqn, [X])[0], np.sin(X), rtol=1e-6)


# Costs --------------------------------------------------------------------------------------------


def test_costs() -> None:
    a, b = jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))
    assert cost(jnp.matmul, a, b) == 2 * 3 * 4 * 5 * 6
    assert cost(jax.lax.exp, a) == TRANSCENDENTAL_FLOPS * 60
    assert cost(jax.lax.add, a, a) == 60
    assert cost(lambda x: x.reshape(-1), a) == 0
    assert cost(lambda x: jax.lax.reduce_max(x, (0, 1, 2)), a) == 60
    assert cost(lambda x: jax.lax.cumsum(x), a) == 60
    assert cost(jax.lax.sort, jnp.ones(8)) == 8 * 3
    assert cost(lambda x: jnp.fft.fft(x), jnp.ones(8, jnp.complex64)) == 5 * 8 * 3
    assert cost(lambda x: jax.lax.linalg.cholesky(x, symmetrize_input=False), jnp.ones((6, 6))) >= 6**3 / 3


def test_cost_of_a_convolution() -> None:
    x, kernel = jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
    assert cost(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), x, kernel) == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)
    assert cost(lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (2, 2), "VALID"), jnp.ones((8, 8))) == 64


def test_costs_of_bodies() -> None:
    w = jnp.ones((8, 8))
    once = 2 * 64.0
    assert cost(lambda x: jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0], X) == 5 * once
    assert cost(lambda x: jax.lax.while_loop(lambda c: c[0] > 0, lambda c: c @ w, x), X) >= once
    branchy = cost(lambda x: jax.lax.cond(True, lambda c: c @ w, lambda c: c + 1, x), X)
    assert branchy in (once, once + 1)
    assert cost(jax.jit(lambda x: x @ w), X) == once


def test_cost_of_a_ragged_product() -> None:
    """Each row is multiplied with the matrix of its group."""
    sizes = jnp.array([3, 4], jnp.int32)
    rows, matrices = jnp.ones((7, 5)), jnp.ones((2, 5, 6))
    assert cost(lambda x, w: jax.lax.ragged_dot(x, w, sizes), rows, matrices) == 2 * 7 * 5 * 6


@pytest.mark.parametrize("estimate", [None, 1e6])
def test_cost_of_a_kernel_is_what_its_author_says(estimate: float | None) -> None:
    pallas = pytest.importorskip("jax.experimental.pallas", reason="this platform's JAX has no Pallas")

    def double(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    said = None if estimate is None else pallas.CostEstimate(flops=int(estimate), transcendentals=0, bytes_accessed=0)
    kernel = pallas.pallas_call(double, jax.ShapeDtypeStruct((8,), np.float32), cost_estimate=said, interpret=True)
    assert cost(kernel, jnp.ones(8)) == (estimate or 8.0)


def test_bytes_of_a_lookup_are_those_of_the_rows() -> None:
    """Else an embedding table would count as work, and unbalance whatever is cut by it."""
    table, ids = jnp.zeros((1000, 8)), jnp.zeros((4,), jnp.int32)
    moved = {e.primitive.name: nbytes_moved(e) for e in equations(lambda t, i: t.at[i].get(mode="clip"), table, ids)}
    assert moved["gather"] == 2 * 4 * 8 * 4 + 4 * 4
    put = equations(lambda t, i: t.at[i].add(1.0), table, ids)
    assert max(nbytes_moved(e) for e in put if e.primitive.name.startswith("scatter")) < table.nbytes / 10
    dot = equations(lambda a, b: a @ b, jnp.zeros((4, 8)), jnp.zeros((8, 2)))
    assert nbytes_moved(dot[0]) == 4 * (32 + 16 + 8)
