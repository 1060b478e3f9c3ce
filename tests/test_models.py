"""Models as users bring them, unmodified, over two and three devices; the oracle is `jax.jit` on one."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aiopipe as ap
from models import batch, mlp, mlp_params

THREE = ["cpu:0", "cpu:1", "cpu:2"]


def assert_same(got: Any, want: Any, tol: float = 1e-5) -> None:
    """Same tree, types and shapes; close values, and equal ones where they are no fractions."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(a, jax.Array)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        x, y = np.asarray(a), np.asarray(b)
        if jnp.issubdtype(a.dtype, jnp.inexact):
            wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
            np.testing.assert_allclose(x.astype(wide), y.astype(wide), rtol=tol, atol=tol)
        else:
            np.testing.assert_array_equal(x, y)


async def check(fn: Callable[..., Any], params: Any, *inputs: Any, tol: float = 1e-5) -> ap.Plan:
    """Compare with one device on two and three, twice each; the plan for three."""
    want = jax.jit(fn)(params, *inputs)
    for devices in (THREE[:2], THREE):
        async with ap.Pipeline(fn, params, devices=devices, n_copies=2) as pipe:
            first, second = await (await pipe.submit(*inputs)), await pipe(*inputs)
            plan = await pipe.plan(*inputs)
        assert_same(first, want, tol)
        assert_same(second, want, tol)
    return plan


def devices_of(plan: ap.Plan, *ops: str) -> set[int]:
    """Backends of the nodes of those ops, or of all."""
    nodes = plan.graph.nodes
    return {s.backend for s in plan.splits for n in s.nodes if not ops or nodes[n].op in ops}


# Libraries ---------------------------------------------------------------------------------------


async def test_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="this flax does not go with this jax", exc_type=ImportError)

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.inner = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(6)])
            self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
            self.drop = nnx.Dropout(0.5, deterministic=True)

        def __call__(self, x: Any) -> Any:
            for layer in self.inner:
                x = self.drop(jax.nn.gelu(layer(x)))
            return self.norm(x)

    graphdef, state = nnx.split(Net(nnx.Rngs(0)))
    plan = await check(lambda state, x: nnx.merge(graphdef, state)(x), state, batch())
    assert devices_of(plan) == {0, 1, 2}
    assert any("inner/3/kernel" in t.name for t in plan.graph.weights)


async def test_flax_linen() -> None:
    nn = pytest.importorskip("flax.linen", reason="this flax does not go with this jax", exc_type=ImportError)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(4):
                x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=2)(x, x))
            return nn.Dense(3)(x)

    net, x = Net(), np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    plan = await check(net.apply, net.init(jax.random.key(0), x), x)
    assert devices_of(plan) == {0, 1, 2}


async def test_equinox() -> None:
    eqx = pytest.importorskip("equinox", reason="this equinox does not go with this jax", exc_type=ImportError)
    params, static = eqx.partition(eqx.nn.MLP(8, 3, 8, depth=6, key=jax.random.key(0)), eqx.is_array)
    plan = await check(lambda params, x: jax.vmap(eqx.combine(params, static))(x), params, batch())
    assert devices_of(plan) == {0, 1, 2}


# Control flow ------------------------------------------------------------------------------------


async def test_scan_over_layers_is_one_node() -> None:
    stacked = np.stack(mlp_params(6))

    def fn(p: Any, x: Any) -> Any:
        y, seen = lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x @ p["in"], p["layers"])
        return y @ p["out"], seen

    plan = await check(fn, {"in": stacked[0], "layers": stacked, "out": stacked[1]}, batch())
    assert [node.op for node in plan.graph.nodes].count("scan") == 1
    assert len(devices_of(plan)) >= 2


async def test_while_cond_and_switch() -> None:
    def fn(p: Any, x: Any, n: Any) -> Any:
        y = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1] @ p[0])), (0, x))[1]
        y = lax.cond(y.sum() > 0, lambda y: y @ p[1], lambda y: y - p[1][0], y)
        y = lax.switch(n % 3, [lambda y: y @ p[2], jnp.sin, lambda y: -y], y)
        return lax.fori_loop(0, 3, lambda i, y: y + p[3][i], y)

    for n in (0, 4, 5):
        plan = await check(fn, mlp_params(4), batch(), np.int32(n))
    assert {"while", "cond", "scan"} <= {node.op for node in plan.graph.nodes}


async def test_blocks_that_are_checkpointed_or_have_their_own_derivatives() -> None:
    @jax.custom_vjp
    def clip(x: Any) -> Any:
        return jnp.clip(x, -0.5, 0.5)

    clip.defvjp(lambda x: (clip(x), None), lambda _, g: (g,))

    @jax.custom_jvp
    def swish(x: Any) -> Any:
        return x * jax.nn.sigmoid(x)

    swish.defjvp(lambda primals, tangents: (swish(*primals), tangents[0]))

    @functools.partial(jax.checkpoint, static_argnums=(2,))
    def block(w: Any, x: Any, scale: float) -> Any:
        return clip(swish(x @ w) * scale) + x

    def fn(p: Any, x: Any) -> Any:
        for w in p:
            x = block(w, x, 2.0)
        return x

    plan = await check(fn, mlp_params(6), batch())
    assert devices_of(plan, "dot_general") == {0, 1, 2}  # inlined: each block can go where its weight is
    await check(lambda p, x: jax.grad(lambda p: fn(p, x).sum())(p), mlp_params(3), batch())


# Networks ----------------------------------------------------------------------------------------


async def test_conv_net() -> None:
    rng = np.random.default_rng(0)
    p = [rng.standard_normal((3, 3, c, 8)).astype(np.float32) / 5 for c in (1, 8, 8, 8)]

    def fn(p: Any, x: Any) -> Any:
        for i, w in enumerate(p):
            x = lax.conv_general_dilated(x, w, (1 + i % 2,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = (jax.nn.relu, jax.nn.silu, jax.nn.relu6, jax.nn.elu)[i](x)  # relu and others are custom_jvp
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jax.nn.log_softmax(x.sum((1, 2)))

    plan = await check(fn, p, rng.standard_normal((2, 16, 16, 1)).astype(np.float32), tol=1e-4)
    assert devices_of(plan, "conv_general_dilated") == {0, 1, 2}


async def test_transformer_with_tied_embeddings() -> None:
    """The table is read first and last: on two devices."""
    rng = np.random.default_rng(0)
    p = {
        "table": rng.standard_normal((50, 16)).astype(np.float32),
        "layers": [{k: rng.standard_normal((16, 16)).astype(np.float32) / 4 for k in "qkvo"} for _ in range(4)],
    }

    def fn(p: Any, ids: Any) -> Any:
        x = p["table"][ids]
        causal = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))
        for w in p["layers"]:
            q, k, v = x @ w["q"], x @ w["k"], x @ w["v"]
            scores = jnp.where(causal, q @ k.swapaxes(1, 2) / 4, -jnp.inf)
            x = x + jax.nn.softmax(scores) @ v @ w["o"]
            x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        return x @ p["table"].T

    plan = await check(fn, p, rng.integers(0, 50, (2, 7)).astype(np.int32), tol=1e-4)
    table = next(t.id for t in plan.graph.weights if t.name == "table")
    assert len({s.backend for s in plan.splits if table in s.inputs}) == 2


async def test_experts_chosen_by_top_k() -> None:
    rng = np.random.default_rng(0)
    p = {
        "router": [rng.standard_normal((8, 4)).astype(np.float32) for _ in range(2)],
        "experts": [rng.standard_normal((4, 8, 8)).astype(np.float32) / 3 for _ in range(2)],
    }

    def fn(p: Any, x: Any) -> Any:
        counts = []
        for router, experts in zip(p["router"], p["experts"], strict=True):
            gate, chosen = lax.top_k(x @ router, 2)
            mixed = jnp.einsum("nd,nkde->nke", x, experts[chosen])
            x = jnp.tanh((mixed * jax.nn.softmax(gate)[..., None]).sum(1))
            counts.append(jnp.zeros(4, jnp.int32).at[chosen.ravel()].add(1))
        return {"y": x, "counts": counts, "order": jnp.argsort(x[:, 0])}

    await check(fn, p, batch(5))


# Values ------------------------------------------------------------------------------------------


async def test_outputs_of_every_kind() -> None:
    def fn(p: Any, x: Any, extra: Any) -> Any:
        y = mlp(p["w"], x)
        return {
            "none": None,
            "b16": y.astype(jnp.bfloat16),
            "f16": y.astype(jnp.float16),
            "int": (y * 10).astype(jnp.int8),
            "bool": y > 0,
            "complex": lax.complex(y, -y),
            "nested": [(y.argmax(), None), {"shape": jnp.int32(y.shape[0])}],
            "input": extra["b"],
            "weight": p["w"][1],
            "literal": 3.5,
            "constant": jnp.arange(3),
            "bits": lax.bitcast_convert_type(y, jnp.uint32) & 0,
            "empty": {},
        }

    inputs = (batch(), {"a": None, "b": np.array([True, False])})
    await check(fn, {"w": mlp_params(3), "unused": None, "also": np.ones(2, np.float32)}, *inputs)


async def test_typed_keys_and_dropout() -> None:
    """A key as an input, one among the parameters, and keys as results."""

    def fn(p: Any, key: Any, x: Any) -> Any:
        for i, w in enumerate(p["w"]):
            key, use = jax.random.split(jax.random.fold_in(key, i))
            x = jnp.where(jax.random.bernoulli(use, 0.8, x.shape), jnp.tanh(x @ w), 0)
        return x + jax.random.normal(p["key"], x.shape), key, jax.random.split(p["key"], 3)

    params = {"w": mlp_params(4), "key": jax.random.key(7)}
    await check(fn, params, jax.random.key(1), batch())
    await check(fn, {**params, "key": jax.random.key(7, impl="rbg")}, jax.random.key(1), batch())


async def test_legacy_keys() -> None:
    def fn(p: Any, key: Any, x: Any) -> Any:
        for w in p["w"]:
            key, use = jax.random.split(key)
            x = jnp.tanh(x @ w) * jax.random.uniform(use, x.shape)
        return x + jax.random.normal(p["key"], x.shape), key

    await check(fn, {"w": mlp_params(4), "key": jax.random.PRNGKey(7)}, jax.random.PRNGKey(1), batch())
    await check(fn, {"w": mlp_params(4), "key": np.array([0, 7], np.uint32)}, np.array([0, 1], np.uint32), batch())


async def test_narrow_parameters() -> None:
    rng = np.random.default_rng(0)
    types = [(jnp.int4, jnp.bfloat16), (jnp.int8, jnp.float16), (jnp.float8_e4m3fn, jnp.bfloat16)]
    p = [{"q": jnp.asarray(rng.integers(-8, 8, (8, 8)), q), "scale": scale(0.125)} for q, scale in types]

    def fn(p: Any, x: Any) -> Any:
        for layer in p:
            x = jnp.tanh(x @ (layer["q"].astype(jnp.float32) * layer["scale"]))
        return x, p[0]["q"], x.astype(jnp.int4)

    await check(fn, p, batch(), tol=1e-2)


async def test_closed_over_arrays() -> None:
    on_host, on_device, key = mlp_params(2, seed=1), jnp.asarray(mlp_params(1, seed=2)[0]), jax.random.key(3)

    def fn(p: Any, x: Any) -> Any:
        x = mlp([*p, *on_host], x)
        x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ on_device), x)
        return x + jax.random.normal(key, x.shape), on_device

    plan = await check(fn, mlp_params(2), batch())
    assert len([t for t in plan.graph.weights if t.name.startswith("closure/")]) == 4


async def test_fft_eigh_sort_and_solve() -> None:
    def fn(p: Any, x: Any) -> Any:
        y = jnp.abs(jnp.fft.ifft(jnp.fft.fft(x @ p[0]) * jnp.fft.fft(p[1][0])))
        y = jnp.sort(y, axis=1)
        values, vectors = jnp.linalg.eigh(y @ y.T + jnp.eye(4))
        z = jnp.linalg.solve(y @ y.T + jnp.eye(4), y) @ p[2]
        return values, jnp.abs(vectors).sum(), z, jnp.linalg.cholesky(z @ z.T + jnp.eye(4)), jnp.fft.rfft(z)

    await check(fn, mlp_params(3), batch(4), tol=1e-3)


async def test_zero_size_arrays_and_scalars() -> None:
    def fn(p: Any, x: Any, n: Any) -> Any:
        return jnp.concatenate([mlp(p["w"], x), p["none"]]), x[:, :0], x.sum() * p["scale"] + n, n + 1

    params = {"w": mlp_params(3), "none": np.zeros((0, 8), np.float32), "scale": 2.5}
    for n in (3, 0.5, np.float32(2), np.array(1), jnp.int32(7), True):
        await check(fn, params, batch(0), n)
    await check(fn, params, batch(3), 1)


# Settings and effects ----------------------------------------------------------------------------


async def test_64_bits() -> None:
    """Traced, compiled and run under the settings of the call."""
    rng = np.random.default_rng(0)
    p = [rng.standard_normal((8, 8)) / 3 for _ in range(4)]
    inputs = (rng.standard_normal((2, 8)), np.arange(2), 7)

    def fn(p: Any, x: Any, n: Any, m: Any) -> Any:
        return mlp(p, x), n + jnp.arange(2), jnp.sum(x) / 3, n * m, m

    with jax.enable_x64(True):
        plan = await check(fn, p, *inputs, tol=1e-12)
    assert {t.dtype for t in plan.graph.weights} == {"float64"}
    assert not jax.config.jax_enable_x64
    plan = await check(fn, p, *inputs)
    assert {t.dtype for t in plan.graph.weights} == {"float32"}


async def test_64_bits_in_threads_that_have_them_off() -> None:
    """Weights are uploaded and splits launched by other threads than the one that the setting is for."""
    rng = np.random.default_rng(0)
    p, x = [rng.standard_normal((8, 8)) / 3 for _ in range(4)], rng.standard_normal((2, 8))
    backends = [ap.open_backend(spec, dispatch="own") for spec in THREE]
    try:
        with jax.enable_x64(True):
            want = jax.jit(mlp)(p, x)
            split = {"[01]": backends[:2], "*": backends[2]}
            for given in ("auto", split):
                async with ap.Pipeline(mlp, p, devices=backends, split=given, n_copies=2) as pipe:
                    results = [y async for y in pipe.stream([x] * 5)]
                for y in results:
                    assert_same(y, want, 1e-12)
            graph = ap.trace(mlp, p, x)
        async with ap.Scheduler(backends) as scheduler:  # traced with 64 bits: computed with 64 bits
            assert_same(await scheduler.graph_compute(graph, x), want, 1e-12)
    finally:
        for backend in backends:
            await backend.aclose()


async def test_one_pipeline_with_and_without_64_bits() -> None:
    x = np.random.default_rng(0).standard_normal((2, 8))
    async with ap.Pipeline(mlp, mlp_params(3), devices=THREE) as pipe:
        for wide in (False, True, False):
            with jax.enable_x64(wide):
                assert_same(await pipe(x), want := jax.jit(mlp)(mlp_params(3), x))
                assert want.dtype == (np.float64 if wide else np.float32)


async def test_contexts_around_a_call_stay_what_they_are() -> None:
    first, last = jax.local_devices()[0], jax.local_devices()[-1]
    async with ap.Pipeline(mlp, mlp_params(3), devices=THREE) as pipe:
        for x in (batch(2), batch(3), batch(3)):
            with jax.default_device(last), jax.default_matmul_precision("highest"):
                y = await pipe(x)
                assert jax.config.jax_default_matmul_precision == "highest"
                assert jnp.zeros(1).devices() == {last}
            assert jax.config.jax_default_matmul_precision is None
            assert jnp.zeros(1).devices() == {first}
            assert y.devices() == {jax.local_devices()[2]}  # where its last part ran


async def test_debug_print(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(p: Any, x: Any) -> Any:
        for i, w in enumerate(p):
            x = jnp.tanh(x @ w)
            jax.debug.print("layer {} gave {}", i, x.shape[0])
        return x

    async with ap.Pipeline(fn, mlp_params(3), devices=THREE) as pipe:
        results = [y async for y in pipe.stream([batch()] * 3)]
    for y in results:
        assert_same(y, jax.jit(mlp)(mlp_params(3), batch()))
    printed = re.findall(r"layer \d gave 2", capfd.readouterr().out)
    assert sorted(printed) == [f"layer {i} gave 2" for i in range(3) for _ in range(3)]


async def test_ordered_effects_are_refused() -> None:
    def logged(p: Any, x: Any) -> Any:
        x = mlp(p, x)
        jax.experimental.io_callback(lambda x: None, None, x, ordered=True)
        return x

    async with ap.Pipeline(logged, mlp_params(3), devices=THREE) as pipe:
        with pytest.raises(ap.TraceError, match=r"io_callback at .*test_models\.py:\d+ .*ordered effect"):
            await pipe(batch())
