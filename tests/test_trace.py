"""`trace` against `jax.jit`: the same results, and graphs that planning can rely on."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from aiopipe.errors import TensorError, TraceError
from aiopipe.graph import Graph, Kind, Tensor
from aiopipe.graph_builder import GraphBuilder
from aiopipe.state import State
from aiopipe.trace import trace

X = np.linspace(-1, 1, 8, dtype=np.float32)
W = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
CONST = jnp.arange(8.0)


def evaluate(graph: Graph, *args: Any) -> Any:
    """Run a graph node by node, under `jax.jit` to be quick."""

    def run(leaves: list[Any]) -> list[Any]:
        values = dict(zip((t.id for t in graph.leaves), leaves, strict=True))
        for node in graph.nodes:
            outs = node.fn(*[values[t] for t in node.inputs])
            for tid, out in zip(node.outputs, outs, strict=True):
                tensor = graph.tensors[tid]
                assert (out.shape, str(out.dtype)) == (tensor.shape, tensor.dtype)
                values[tid] = out
        return [values[t.id] for t in graph.outputs]

    leaves = [*graph.flatten_inputs(args), *(t.source for t in graph.weights)]
    return graph.unflatten_outputs(jax.jit(run)(leaves))


def plain(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x, np.float64)


def check(fn: Any, weights: Any, *args: Any) -> Graph:
    """Trace, evaluate, and compare with `jax.jit`."""
    graph = trace(fn, weights, *args)
    got, expected = evaluate(graph, *args), jax.jit(fn)(weights, *args)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.dtype == e.dtype
        np.testing.assert_allclose(plain(g), plain(e), rtol=2e-6, atol=1e-6)
    return graph


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def mlp(params: Any, x: Any) -> Any:
    for layer in params["layers"]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x


PARAMS = {"layers": [{"w": W, "b": X}, {"w": W + 1, "b": X}]}

# Results ------------------------------------------------------------------------------------------


def test_mlp_has_named_weights_inputs_and_output() -> None:
    graph = check(mlp, PARAMS, X)
    assert [t.name for t in graph.weights] == ["layers/0/b", "layers/0/w", "layers/1/b", "layers/1/w"]
    assert [t.name for t in graph.inputs] == ["x"]
    assert [t.name for t in graph.outputs] == ["out"]
    assert graph.name == "mlp"
    assert graph.weights[1].source is W
    assert ops(graph) == ["dot_general", "add", "max"] * 2
    dot = graph.nodes[0]
    assert dot.flops == 2 * 8 * 8
    assert dot.nbytes == 32 + 256 + 32


@pytest.mark.parametrize("fn", [jax.nn.relu, jax.nn.softmax, jax.nn.gelu, jax.nn.silu, jax.scipy.special.logsumexp])
def test_custom_jvp_is_inlined(fn: Any) -> None:
    graph = check(lambda w, x: fn(x @ w), W, X)
    assert not {"custom_jvp_call", "jit", "pjit"} & set(ops(graph))


def test_custom_vjp_is_inlined() -> None:
    @jax.custom_vjp
    def double(x: Any) -> Any:
        return x * 2 * CONST

    double.defvjp(lambda x: (double(x), None), lambda _, g: (g * 2,))
    graph = check(lambda w, x: double(x) @ w, W, X)
    assert ops(graph)[-1] == "dot_general"
    assert all("custom" not in op for op in ops(graph))


def test_checkpoint_and_nested_jit_are_inlined() -> None:
    @jax.jit
    def outer(w: Any, x: Any) -> Any:
        inner = jax.jit(lambda y, k: jnp.sin(y) * k)
        return jax.checkpoint(lambda y: inner(y, 2.0) @ w)(x)

    graph = check(outer, W, X)
    assert [op for op in ops(graph) if op != "convert_element_type"] == ["sin", "mul", "dot_general"]


def test_gradients_trace() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.checkpoint(jnp.tanh)(x @ w) ** 2)

    check(jax.value_and_grad(loss), W, X)


def test_control_flow_is_one_node_each() -> None:
    def fn(w: Any, x: Any) -> Any:
        y, ys = jax.lax.scan(lambda c, b: (c + b @ w, c), x, jnp.ones((3, 8)))
        y = jax.lax.cond(y.sum() > 0, lambda a: a * 2, lambda a: a, y)
        z = jax.lax.while_loop(lambda a: a[0] < 3, lambda a: (a[0] + 1, a[1] * 0.5), (0, y))
        return z, ys

    graph = check(fn, W, X)
    assert [op for op in ops(graph) if op in ("scan", "cond", "while")] == ["scan", "cond", "while"]
    by_op = {node.op: node for node in graph.nodes}
    assert by_op["scan"].flops >= 3 * 2 * 64
    assert by_op["cond"].flops == 8


def test_constants_inside_loops_become_weights() -> None:
    scale = jax.jit(lambda x: jax.nn.relu(x) * CONST)

    def fn(w: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(lambda c, b: ((scale(c[0]) + b @ w, c[1]), None), (x, x), jnp.ones((3, 8)), reverse=True)
        y = jax.lax.cond(y[0].sum() > 0, scale, lambda a: a, y[0])
        step = lambda c: (c[0] + 1, c[1] + jax.lax.cond(c[0] > 1, scale, jnp.sin, c[1]))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < 3, step, (0, y))

    graph = check(fn, W, X)
    assert [t.name for t in graph.weights] == ["weights", "closure/0"]
    assert graph.weights[1].source is CONST
    assert [n.op for n in graph.nodes if graph.weights[1].id in n.inputs] == ["scan", "cond", "while"]
    scan = next(n for n in graph.nodes if n.op == "scan")
    again = next(n for n in trace(fn, W, X).nodes if n.op == "scan")
    assert scan.fn.signature() == again.fn.signature()


def test_trees_with_none_and_many_dtypes() -> None:
    def fn(params: Any, batch: Any) -> Any:
        out = batch["x"] @ params["w"].astype(jnp.bfloat16)
        return {"y": out, "n": batch["ids"].sum(), "none": None, "flag": ~batch["flag"]}

    batch = {
        "x": jnp.ones(8, jnp.bfloat16),
        "ids": np.arange(3, dtype=np.int8),
        "mask": None,
        "flag": np.array([True, False]),
    }
    graph = check(fn, {"w": W, "unused": None}, batch)
    assert [t.name for t in graph.inputs] == ["batch/flag", "batch/ids", "batch/x"]
    assert [t.name for t in graph.outputs] == ["flag", "n", "y"]
    assert [t.dtype for t in graph.inputs] == ["bool", "int8", "bfloat16"]
    assert [t.nbytes for t in graph.inputs] == [2, 3, 16]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_dropout_with_typed_keys(impl: str) -> None:
    def fn(params: Any, key: Any, x: Any) -> Any:
        first, second = jax.random.split(key)
        keep = jax.random.bernoulli(first, 0.5, x.shape)
        return jnp.where(keep, x @ params["w"], 0), second

    graph = check(fn, {"w": W, "key": jax.random.key(3)}, jax.random.key(1, impl=impl), X)
    assert graph.inputs[0].dtype.startswith("key<")
    assert graph.inputs[0].shape == ()
    assert graph.weights[0].dtype == "key<fry>"


def test_raw_keys() -> None:
    check(lambda w, key: jax.random.normal(key, (4,)), (), jax.random.PRNGKey(0))


def test_weak_types_promote_as_under_jit() -> None:
    graph = check(lambda w, x, s: (x * s, w["scale"] * x), {"scale": 2.0}, jnp.ones(3, jnp.bfloat16), 0.5)
    assert [t.dtype for t in graph.outputs] == ["bfloat16", "bfloat16"]
    assert graph.weights[0].dtype == "float32"
    np.testing.assert_array_equal(graph.weights[0].source, np.float32(2))


def test_x64() -> None:
    with jax.enable_x64(True):
        graph = check(lambda w, x: x * w, np.arange(3.0), np.arange(3.0))
    assert graph.inputs[0].dtype == "float64"
    assert dict(graph.config)["enable_x64"] is True


# Leaves -------------------------------------------------------------------------------------------


def test_closed_over_arrays_become_weights_once() -> None:
    inner = jax.jit(lambda x: x * CONST)
    graph = check(lambda w, x: inner(inner(x)) + CONST + w, W, X)
    assert [t.name for t in graph.weights] == ["weights", "closure/0"]
    assert graph.weights[1].source is CONST


def test_closed_over_numpy_is_a_weight_too() -> None:
    table = np.arange(300, dtype=np.float32).reshape(300, 1)
    graph = check(lambda w, i: jnp.asarray(table)[i], (), np.int32(7))
    assert [t.shape for t in graph.weights] == [(300, 1)]


def test_a_weight_that_is_also_closed_over_is_one_tensor() -> None:
    graph = check(lambda w, x: w * CONST * x, CONST, X)
    assert [t.name for t in graph.weights] == ["weights"]


def test_outputs_may_be_inputs_weights_and_literals() -> None:
    graph = check(lambda w, x: (x, w["w"], 3.0, x + 1, True), {"w": W}, X)
    assert [t.kind for t in graph.outputs] == [Kind.INPUT, Kind.WEIGHT, Kind.WEIGHT, Kind.NODE, Kind.WEIGHT]
    assert [t.name for t in graph.outputs] == ["x", "w", "literal/0", "3", "literal/1"]


def test_an_argument_twice_is_one_input_of_the_node() -> None:
    graph = check(lambda w, x: x * x, (), X)
    assert graph.nodes[0].inputs == (0,)
    graph = check(lambda w, x, y: x @ y, (), X, X)  # the same array given twice is two inputs
    assert len(graph.inputs) == 2


def test_tensor_leaves_keep_their_buffers() -> None:
    held = Tensor(-1, "w", (8, 8), "float32", Kind.WEIGHT, 256, buffers=("a buffer",))
    graph = trace(lambda w, x: x @ w, held, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert graph.weights[0].source is held
    assert graph.weights[0].buffers == ("a buffer",)


def test_input_names() -> None:
    def fn(params: Any, x: Any, *rest: Any) -> Any:
        return x, rest

    graph = trace(fn, (), X, {"a": X}, [X])
    assert [t.name for t in graph.inputs] == ["x", "1/a", "2/0"]
    graph = trace(functools.partial(lambda k, w, y: y * k, 3), (), X, name="triple")
    assert (graph.name, graph.inputs[0].name) == ("triple", "y")


def test_dead_operations_are_left_out_but_their_inputs_are_checked() -> None:
    def fn(w: Any, x: Any, unused: Any) -> Any:
        jnp.sin(unused) @ w
        return x + 1

    graph = check(fn, W, X, X)
    assert ops(graph) == ["add"]
    with pytest.raises(TensorError, match="'unused'"):
        graph.flatten_inputs((X, X[:3]))


@pytest.mark.parametrize("leaf", ["text", object(), np.array(["a"]), len])
def test_a_leaf_that_is_no_array(leaf: Any) -> None:
    with pytest.raises(TensorError, match=r"'bad' is a .*expected an array"):
        trace(lambda w, x: x, {"bad": leaf}, X)


def check_refused(leaf: Any, why: str) -> None:
    """By its name and its type, wherever it is given, and not only when it is used."""
    dtype = re.escape(str(leaf.dtype))
    what = f"'bad' is an array of {dtype}, {why}"
    with pytest.raises(TensorError, match=what):
        trace(lambda w, x: x, {"bad": leaf}, X)
    with pytest.raises(TensorError, match=what):
        trace(lambda w, bad: bad, (), leaf)
    with pytest.raises(TensorError, match=what):
        State({"bad": leaf})
    with pytest.raises(TensorError, match=rf"input 'x' got {dtype}\["):
        trace(lambda w, x: x, (), X).flatten_inputs((leaf,))


@pytest.mark.parametrize("leaf", [np.zeros(4, [("a", "f4")]), np.rec.array([(1, 2.0)]), np.void(b"abc")])
def test_an_array_of_several_fields(leaf: Any) -> None:
    check_refused(leaf, "expected one of an element type .* its fields")


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="on this system it is float64, which JAX has")
@pytest.mark.parametrize("leaf", [np.ones(8, np.longdouble), np.clongdouble(1), np.ones((2, 4), np.longdouble)])
def test_an_array_of_a_type_that_jax_lacks(leaf: Any) -> None:
    check_refused(leaf, r"expected one of an element type that JAX .*value\.astype")


def test_tracing_inside_jit_is_refused() -> None:
    with pytest.raises(TraceError, match="tracer"):
        jax.jit(lambda x: trace(lambda w, y: y, (), x))(X)


# Modules ------------------------------------------------------------------------------------------


def test_flax_linen() -> None:
    nn = pytest.importorskip("flax.linen", reason="flax is no dependency of aiopipe", exc_type=ImportError)
    model = nn.Sequential([nn.Dense(16), nn.gelu, nn.LayerNorm(), nn.Dense(4)])
    params = model.init(jax.random.key(0), X)
    graph = check(model.apply, params, X)
    assert "params/layers_0/kernel" in [t.name for t in graph.weights]


def test_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="this flax does not go with this jax", exc_type=ImportError)

    class Block(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.dense = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.LayerNorm(8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + self.norm(jax.nn.relu(self.dense(x)))

    graphdef, state = nnx.split(Block(nnx.Rngs(0)))
    graph = check(lambda state, x: nnx.merge(graphdef, state)(x), state, X)
    assert len(graph.weights) == 4
    assert any("test_trace.py" in node.source and "Block.__call__" in node.source for node in graph.nodes)


def test_equinox() -> None:
    eqx = pytest.importorskip("equinox", reason="equinox is no dependency of aiopipe")
    params, static = eqx.partition(eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0)), eqx.is_array)
    graph = check(lambda params, x: eqx.combine(params, static)(x), params, X)
    assert "layers/0/weight" in [t.name for t in graph.weights]


# Effects ------------------------------------------------------------------------------------------


def test_debug_print_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(w: Any, x: Any) -> Any:
        jax.debug.print("sum {}", x.sum())
        return x @ w

    graph = check(fn, W, X)
    effects = [node for node in graph.nodes if node.has_effect]
    assert len(effects) == 1
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum") == 2


def test_callbacks() -> None:
    def fn(w: Any, x: Any) -> Any:
        y = jax.pure_callback(np.sin, x, x)
        return io_callback(np.cos, y, y) @ w

    graph = check(fn, W, X)
    assert [node.has_effect for node in graph.nodes] == [False, True, False]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: lambda x: jax.lax.map(f, x)])
def test_ordered_effects_are_refused(wrap: Any) -> None:
    def fn(w: Any, x: Any) -> Any:
        return wrap(lambda v: io_callback(np.sin, v, v, ordered=True))(x)

    with pytest.raises(TraceError, match=r"(io_callback|scan) at test_trace.py:\d+ .*ordered effect.*ordered=False"):
        trace(fn, W, X)


def test_ordered_debug_print_is_refused() -> None:
    with pytest.raises(TraceError, match="debug_print at"):
        trace(lambda w, x: jax.debug.print("{}", x, ordered=True), W, X)


def test_references_are_refused() -> None:
    new_ref = jax.new_ref

    def inside(w: Any, x: Any) -> Any:
        ref = new_ref(x)
        ref[0] = 2.0
        return ref[...]

    with pytest.raises(TraceError, match=r"new_ref at test_trace.py:\d+ .*mutable reference.*return the new value"):
        trace(inside, W, X)
    outside = new_ref(jnp.asarray(X))
    with pytest.raises(TraceError, match=r"get at test_trace.py"):
        trace(lambda w, x: outside[...] + x, W, X)
    with pytest.raises(TraceError, match="'weights' is a mutable reference"):
        trace(lambda w, x: w[...] + x, outside, X)


def test_references_within_one_jitted_function_are_fine() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[0] = 2.0
        return ref[...]

    graph = check(lambda w, x: inner(x) @ w, W, X)
    assert ops(graph) == ["jit", "dot_general"]


# Size ---------------------------------------------------------------------------------------------


def test_tracing_is_linear() -> None:
    """The calls that aiopipe makes are counted, not the time that they take."""

    def calls(n: int) -> int:
        def fn(w: Any, x: Any) -> Any:
            for _ in range(n):
                x = jax.lax.sin(x)
            return x

        made = 0

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal made
            made += event in ("call", "c_call") and f"{os.sep}aiopipe{os.sep}" in frame.f_code.co_filename

        sys.setprofile(count)
        try:
            graph = trace(fn, (), X)
            assert all(node.fn.signature() == graph.nodes[0].fn.signature() for node in graph.nodes)
        finally:
            sys.setprofile(None)
        assert len(graph.nodes) == n
        return made

    calls(10)
    few, many = calls(200), calls(1600)
    assert 0 < few and many < 8.5 * few


def test_graphs_can_be_built_by_hand_with_traced_operations() -> None:
    sin = trace(lambda w, x: jnp.sin(x), (), X).nodes[0].fn
    builder = GraphBuilder()
    x = builder.input("x", (8,), "float32", 32)
    hand = builder.build(builder.node("sin", [x], [((8,), "float32", 32)], fn=sin))
    np.testing.assert_allclose(evaluate(hand, X), np.sin(X), rtol=1e-6)
