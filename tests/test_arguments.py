"""`Graph.flatten_inputs` and `unflatten_outputs`: what passes, what converts, and what errors say."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aiopipe.errors import TensorError
from aiopipe.graph import Graph
from aiopipe.trace import trace

X = np.linspace(-1, 1, 8, dtype=np.float32)


@pytest.fixture
def graph() -> Graph:
    def fn(w: Any, x: Any, batch: Any) -> Any:
        return x, batch

    return trace(fn, (), X, {"ids": np.arange(3, dtype=np.int32), "none": None, "s": 1.0})


def ids(n: int = 3, dtype: Any = np.int32) -> Any:
    return np.arange(n, dtype=dtype)


def test_values_that_fit_pass_unchanged(graph: Graph) -> None:
    x, s = jnp.asarray(X), np.zeros((), np.float32)
    values = graph.flatten_inputs((x, {"ids": ids(), "none": None, "s": s}))
    assert values[0] is x
    assert values[2] is s


@pytest.mark.parametrize("x", [X.astype(np.float64), list(map(float, X)), [1] * 8, np.ones(8, ">f4"), tuple(X)])
@pytest.mark.parametrize("s", [2, 2.5, np.float64(2)])
def test_numbers_convert(graph: Graph, x: Any, s: Any) -> None:
    values = graph.flatten_inputs((x, {"ids": [0, 1, 2], "none": None, "s": s}))
    assert [np.asarray(v).dtype for v in values] == [np.float32, np.int32, np.float32]
    np.testing.assert_allclose(values[0], np.asarray(x, np.float32))
    assert float(values[2]) == s


@pytest.mark.parametrize(
    ("x", "batch", "message"),
    [
        (X[:5], {}, r"'x' got float32\[5\], expected float32\[8\]: trace again for this shape, or use a Pipeline"),
        (X.astype(np.int32), {}, r"'x' got int32\[8\], expected float32\[8\]: convert it, or trace again"),
        (jnp.ones(8, jnp.bfloat16), {}, r"'x' got bfloat16\[8\], expected float32\[8\]"),
        (True, {}, "'x' got the bool True"),
        (None, {}, "'x' got None, expected float32"),
        (jax.ShapeDtypeStruct((8,), jnp.float32), {}, "'x' got a ShapeDtypeStruct, which has no value"),
        ([[1.0], [1.0, 2.0]], {}, "'x' got a list that is no array"),
        ([1.0], {}, r"'x' got a list of shape \(1,\)"),
        (["a"] * 8, {}, "'x' got a list"),
        (X, {"ids": ids(dtype=np.float32)}, r"'batch/ids' got float32\[3\], expected int32\[3\]"),
        (X, {"ids": [0.5, 1, 2]}, "'batch/ids' got a list"),
        (X, {"s": 1j}, r"'batch/s' got the complex 1j"),
        (X, {"none": X}, "another structure .*got 'batch/none' in place of nothing"),
        (X, {"extra": X}, "another structure .*got 'batch/extra' in place of nothing"),
        ({"x": X}, {}, "'x' got|another structure"),
        (np.array(["2020-01-01"] * 8, "M8[D]"), {}, r"'x' got datetime64\[D\]\[8\], expected float32\[8\]"),
    ],
)
def test_values_that_do_not_fit(graph: Graph, x: Any, batch: Any, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        graph.flatten_inputs((x, {"ids": ids(), "none": None, "s": 1.0} | batch))


def test_the_number_of_arguments_is_checked(graph: Graph) -> None:
    with pytest.raises(TensorError, match=r"got 1 arguments, expected 2 \(x, batch\)"):
        graph.flatten_inputs((X,))


def test_a_value_under_a_transformation_is_refused(graph: Graph) -> None:
    def inside(x: Any) -> Any:
        return graph.flatten_inputs((x, {"ids": ids(), "none": None, "s": 1.0}))[0]

    with pytest.raises(TensorError, match=r"'x' got a tracer of a jax transformation.*evaluate a graph outside"):
        jax.jit(inside)(X)


def test_another_structure_with_the_same_names_says_which() -> None:
    class Pair(NamedTuple):
        a: Any
        b: Any

    graph = trace(lambda w, pair: pair, (), Pair(X, X))
    with pytest.raises(TensorError, match=r"got PyTreeDef\(.*'a'.*\), expected PyTreeDef\(.*Pair"):
        graph.flatten_inputs(({"a": X, "b": X},))


def test_a_callable_that_shows_no_signature_has_numbered_inputs() -> None:
    class Hidden:
        __signature__ = "none of it"

        def __call__(self, w: Any, x: Any, y: Any) -> Any:
            return x + y

    assert [t.name for t in trace(Hidden(), (), X, X).inputs] == ["0", "1"]


def test_a_deleted_array_is_refused() -> None:
    x = jnp.ones(8)
    x.delete()
    with pytest.raises(TensorError, match="deleted"):
        trace(lambda w, x: x, (), X).flatten_inputs((x,))


@pytest.mark.parametrize(
    ("dtype", "x", "message"),
    [
        (np.int8, 300, "'x' got the int 300 .*300 is not between -128 and 127"),
        (np.uint8, -1, "'x' got the int -1 .*-1 is not between 0 and 255"),
        (np.int32, 2**40, "is not between -2147483648 and 2147483647"),
        (np.int32, 2**63, "9223372036854775808 is not between"),
        (jnp.int4, 8, "8 is not between -8 and 7"),
        (np.int32, 2**70, "the int 1180591620717411303424 that is no array of that type"),
    ],
)
def test_an_integer_out_of_range_is_refused(dtype: Any, x: int, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        trace(lambda w, x: x, (), jnp.ones((), dtype)).flatten_inputs((x,))


def test_an_array_in_a_list_is_not_cut_to_the_type_either() -> None:
    with pytest.raises(TensorError, match=r"'x' got a list .*300 is not between -128 and 127"):
        trace(lambda w, x: x, (), np.ones((1, 2), np.int8)).flatten_inputs(([np.array([1, 300])],))


def test_single_results_come_back_as_they_are() -> None:
    single = trace(lambda w, x: x + 1, (), X)
    value = object()
    assert single.unflatten_outputs([value]) is value
    nested = trace(lambda w, x: {"y": x + 1, "none": None}, (), X)
    assert nested.unflatten_outputs([value]) == {"y": value, "none": None}
    assert [t.name for t in nested.outputs] == ["out"]
