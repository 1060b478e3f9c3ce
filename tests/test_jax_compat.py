"""What differs by JAX version: each private path beside its public fallback."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aiopipe import _jax, _jax_compile, _jax_move
from aiopipe._jax_types import is_ref
from aiopipe.errors import TensorError, TraceError
from aiopipe.graph import Kind, Tensor
from aiopipe.graph_builder import GraphBuilder
from aiopipe.trace import trace
from models import program

X = np.linspace(-1, 1, 8, dtype=np.float32)
W = np.arange(64, dtype=np.float32).reshape(8, 8) / 64


# Types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("float32", 24), ("bfloat16", 12), ("bool", 6), ("int4", 6), ("float8_e4m3fn", 6), ("complex64", 48)],
)
def test_names_of_types_lead_back(name: str, nbytes: int) -> None:
    dtype = _jax.dtype_of(name)
    assert _jax.dtype_name(dtype) == name
    assert _jax.nbytes_of((2, 3), name) == _jax.nbytes_of((2, 3), dtype) == nbytes


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_names_of_key_types_lead_back(impl: str) -> None:
    key = jax.random.key(0, impl=impl)
    assert _jax.dtype_of(str(key.dtype)) == key.dtype
    assert _jax.canonical_dtype(key) == str(key.dtype)
    assert _jax.nbytes_of((2,), key.dtype) == 2 * jax.random.key_data(key).nbytes
    with pytest.raises(TypeError, match="unknown key type"):
        _jax.dtype_of("key<none>")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.ones(2), "float32"),
        (np.int64, "int32"),
        (1, "int32"),
        (1.0, "float32"),
        (True, "bool"),
        (jnp.ones(2, jnp.bfloat16), "bfloat16"),
    ],
)
def test_canonical_types(value: Any, name: str) -> None:
    assert _jax.canonical_dtype(value) == name
    with jax.enable_x64(True):
        assert _jax.canonical_dtype(np.ones(2)) == "float64"


def test_specs_and_keys_of_types_agree() -> None:
    values: list[Any] = [
        X, np.ones(2), np.float64(1), 1.0, 1, True, jnp.ones(2), jnp.asarray(1.0), jax.random.key(0),
        np.ones(2, "int4"), jax.ShapeDtypeStruct((2,), jnp.float32),
    ]  # fmt: skip
    for value in values:
        spec = _jax.spec_of(value)
        assert _jax.type_key(value) == (spec.shape, spec.dtype, bool(spec.weak_type))
        expected = jax.eval_shape(lambda x: x, value)
        assert (spec.shape, spec.dtype, spec.weak_type) == (expected.shape, expected.dtype, expected.weak_type)
    assert _jax.type_key(1.0) != _jax.type_key(np.float32(1))
    assert _jax.type_key(np.ones(2)) == _jax.type_key(jnp.ones(2))
    with pytest.raises(TensorError):
        _jax.type_key("text")
    with pytest.raises(TraceError):
        jax.jit(_jax.type_key)(X)


def test_references_are_told_from_arrays() -> None:
    ref = jax.new_ref(jnp.ones(2))
    assert is_ref(ref)
    assert not is_ref(X)
    assert not is_ref(jnp.ones(2))


# Settings -----------------------------------------------------------------------------------------


def test_settings_are_those_of_the_thread_that_took_them() -> None:
    with jax.enable_x64(True), jax.default_matmul_precision("float32"), jax.numpy_dtype_promotion("strict"):
        snapshot = _jax.config_snapshot()
    assert _jax.config_snapshot() != snapshot
    seen: list[Any] = []

    def work() -> None:
        before = _jax.config_snapshot()
        with _jax.config_context(snapshot):
            seen.append(_jax.config_snapshot() == snapshot)
            seen.append(jnp.ones(1).dtype == np.float64)
        seen.append(_jax.config_snapshot() == before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True, True, True]
    with _jax.config_context(None):
        assert jnp.ones(1).dtype == np.float32


def test_settings_of_the_default_device(device: jax.Device) -> None:
    with jax.default_device(device):
        snapshot = _jax.config_snapshot()
    with _jax.config_context(snapshot):
        assert jnp.ones(1).devices() == {device}


# Moving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_what_a_mover_remembers(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of one executable, then other values of the same type; whatever it has seen, it does what `put` does."""
    if not fast:
        monkeypatch.setattr(_jax_move, "has_fast_put", lambda device: False)
    here, there = jax.devices("cpu")[:2]
    move, call = _jax.Mover(there), jax.jit(jnp.tanh)
    elsewhere = jax.device_put(X, there)
    with jax.enable_x64(True):
        wide = jnp.arange(3, dtype=jnp.int64)
    for x in (*(call(X) for _ in range(3)), elsewhere, jax.device_put(X, here), X, call(elsewhere), wide, wide):
        moved = move(x)
        assert moved.devices() == {there}
        assert moved.dtype == x.dtype
        assert moved.committed
        np.testing.assert_array_equal(np.asarray(moved), np.asarray(x))
    assert move(elsewhere) is elsewhere
    assert len(move._known) == (1 if fast else 0)
    gone = call(X)
    gone.delete()
    with pytest.raises(Exception, match=r"deleted|0 shards"):
        move(gone)


def test_a_mover_forgets_what_is_too_much() -> None:
    move = _jax.Mover(jax.devices("cpu")[1], kept=2)
    results = [jax.jit(jnp.tanh)(np.ones(n, np.float32)) for n in range(1, 4)]
    for x in results * 2:
        assert move(x).shape == x.shape
        assert len(move._known) <= 2


@pytest.mark.parametrize("put", [_jax.put, _jax.put_public])
def test_put_brings_everything_to_the_device(put: Any, device: jax.Device) -> None:
    values = [
        X, X.astype(np.float64), W.T, 3.0, np.float32(2), np.ones(3, jnp.bfloat16), np.ones(3, "int4"),
        np.array([True]), np.zeros((0, 3), np.float32),
        jnp.asarray(X), jax.device_put(X, device), jnp.ones(2, jnp.bfloat16), jax.random.key(1),
    ]  # fmt: skip
    moved = put(values, device)
    for value, got in zip(values, moved, strict=True):
        assert got.devices() == {device}
        assert got.committed
        assert str(got.dtype) == _jax.canonical_dtype(value)
        if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(value, np.float32))


def test_put_has_its_fast_path_on_every_supported_version(device: jax.Device) -> None:
    assert _jax.has_fast_put(device)


def test_put_without_the_fast_path(device: jax.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_move, "has_fast_put", lambda device: False)
    [moved] = _jax.put([X], device)
    assert moved.devices() == {device}
    assert _jax.put_one(X, device).devices() == {device}
    assert _jax.show(aligned(X), device) is None


def aligned(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy whose memory XLA reads in place."""
    raw = np.empty(x.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def test_what_is_shown_changes_with_its_memory(device: jax.Device) -> None:
    memory = aligned(X)
    shown = _jax.show(memory, device)
    assert shown is not None, "JAX no longer reads aligned memory of the host in place"
    double = jax.jit(lambda x: x * 2)
    np.testing.assert_array_equal(double(shown), X * 2)
    memory[...] = X + 1
    np.testing.assert_array_equal(double(shown), (X + 1) * 2)


def test_what_jax_would_copy_is_not_shown(device: jax.Device) -> None:
    assert _jax.show(aligned(np.append(X.ravel(), X.ravel()))[1:], device) is None
    assert _jax.show(np.zeros((0, 3), np.float32), device) is None


@pytest.mark.parametrize("broken", [None, lambda *args: X, lambda *args: 1 / 0])
def test_a_fast_path_that_changed_is_not_used(broken: Any, device: jax.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_move, "_batched_device_put", broken)
    assert not _jax.has_fast_put.__wrapped__(device)


def test_put_leaves_alone_what_is_there(device: jax.Device) -> None:
    there = jax.device_put(X, device)
    assert _jax.put([there], device)[0] is there


def test_put_of_a_deleted_array_raises(device: jax.Device) -> None:
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(Exception, match=r"deleted|device_put|shard"):
        _jax.put([x], device)


def test_is_ready() -> None:
    x = jax.block_until_ready(jnp.asarray(X) + 1)
    assert _jax.is_ready(x)
    assert _jax.is_ready(X)
    assert _jax.is_ready(3.0)
    key = jax.block_until_ready(jax.random.key(0))
    assert _jax.is_ready(key)
    x.delete()
    assert _jax.is_ready(x)


def test_is_ready_of_what_is_computed_and_of_what_failed() -> None:
    release = threading.Event()

    def wait(x: Any) -> Any:
        release.wait(10)
        if x[0] > 0:
            raise ValueError("no")
        return x

    def launch(x: Any) -> Any:
        return jax.jit(lambda x: jax.pure_callback(wait, x, x) + 1)(x)

    with ThreadPoolExecutor(1) as pool:  # a callback holds up its dispatcher
        blocker = pool.submit(launch, -jnp.ones(2))
        release.set()
        assert _jax.is_ready(jax.block_until_ready(blocker.result()))
        try:
            failed = pool.submit(launch, jnp.ones(2)).result()
        except Exception:  # some versions report at the launch what they run at the launch
            return
        with pytest.raises(Exception, match="no"):
            failed.block_until_ready()
        assert _jax.is_ready(failed)


def test_host_view() -> None:
    x = jax.block_until_ready(jnp.arange(1024.0))
    view = _jax.host_view(x)
    assert view.ctypes.data == x.unsafe_buffer_pointer()
    assert not view.flags.writeable
    assert _jax.host_view(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    assert _jax.host_view(jax.random.key(0)).dtype == np.uint32
    assert _jax.host_view(X) is X


# Compiling ----------------------------------------------------------------------------------------


def loop(w: Any, x: Any) -> Any:
    y, _ = jax.lax.scan(lambda c, b: (jnp.tanh(c @ w), None), x, None, length=3)
    return {"y": y, "n": y.astype(jnp.bfloat16), "max": y.max()}


def test_a_program_computes_what_jit_does(device: jax.Device) -> None:
    graph = trace(loop, W, X)
    compiled = _jax_compile.compile_program(program(graph), device)
    outs = compiled.call(*_jax.put([X, W], device))
    got, expected = graph.unflatten_outputs(outs), jax.jit(loop)(W, X)
    for name, value in expected.items():
        assert got[name].devices() == {device}
        assert got[name].dtype == value.dtype
        np.testing.assert_allclose(np.asarray(got[name], np.float32), np.asarray(value, np.float32), rtol=1e-6)
    assert compiled.has_loop
    assert not compiled.has_callback
    assert compiled.flops is None or compiled.flops > 0
    assert compiled.memory.argument_nbytes == 32 + 256
    assert compiled.memory.output_nbytes >= 32 + 16 + 4


def test_programs_take_numpy(device: jax.Device) -> None:
    graph = trace(lambda w, x: x @ w, W, X)
    compiled = _jax_compile.compile_program(program(graph), device)
    [out] = compiled.call(X, jax.device_put(W, device))
    np.testing.assert_allclose(out, X @ W, rtol=1e-5)
    assert out.devices() == {device}


def test_donation_never_warns_and_keeps_what_it_cannot_use(device: jax.Device) -> None:
    graph = trace(lambda w, x, y, z: (x + 1, (x * y).sum(), z.astype(jnp.bfloat16)), (), X, X, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = _jax_compile.compile_program(program(graph, donate=(0, 1, 2)), device)
        assert compiled.donated == (0,)
        x, y, z = (jax.device_put(X + i, device) for i in range(3))
        first, total, _ = compiled.call(x, y, z)
    assert x.is_deleted()
    assert not y.is_deleted()
    assert not z.is_deleted()
    np.testing.assert_allclose(first, X + 1)
    np.testing.assert_allclose(total, (X * (X + 1)).sum(), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "bool", "float8_e4m3fn", "key<fry>", "key<rbg>"])
def test_programs_of_every_type(dtype: str, device: jax.Device) -> None:
    if dtype.startswith("key"):
        impl = {"key<fry>": "threefry2x32", "key<rbg>": "rbg"}[dtype]
        value: Any = jax.random.key(3, impl=impl)
        fn: Any = lambda w, k: jax.random.fold_in(k, 1)  # noqa: E731
    else:
        value = jnp.ones(64, _jax.dtype_of(dtype))
        fn = lambda w, x: x | x if dtype == "bool" else x + x  # noqa: E731
    graph = trace(fn, (), value)
    compiled = _jax_compile.compile_program(program(graph, donate=(0,)), device)
    given = jax.device_put(value, device)
    [out] = compiled.call(given)
    [twice] = compiled.call(out)
    assert given.is_deleted()
    assert str(twice.dtype) == dtype
    assert twice.devices() == {device}
    assert graph.outputs[0].nbytes == _jax.nbytes_of(value.shape, value.dtype)


def test_weakly_typed_carries_compile(device: jax.Device) -> None:
    def fn(w: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2.0), (0, x))

    graph = trace(fn, (), 1.5)
    [n, y] = _jax_compile.compile_program(program(graph), device).call(np.float32(1.5))
    assert (int(n), float(y)) == (3, 12.0)


def test_a_program_without_inputs_is_on_its_device(device: jax.Device) -> None:
    graph = trace(lambda w: jnp.arange(4.0), ())
    [out] = _jax_compile.compile_program(program(graph), device).call()
    assert out.devices() == {device}
    assert out.committed


def test_programs_compile_under_the_settings_of_their_graph(device: jax.Device) -> None:
    with jax.enable_x64(True):
        graph = trace(lambda w, x: x * 2 + jnp.arange(3), (), np.arange(3.0))
    compiled = _jax_compile.compile_program(program(graph), device)
    with jax.enable_x64(True):
        [out] = compiled.call(jax.device_put(np.arange(3.0), device))
    assert out.dtype == np.float64


def test_callbacks_and_effects_are_seen(device: jax.Device) -> None:
    def noisy(w: Any, x: Any) -> Any:
        jax.debug.print("{}", x[0])
        return x + 1

    def nested(w: Any, x: Any) -> Any:
        return jax.lax.map(lambda v: jax.pure_callback(np.sin, v, v), x)

    for fn in (noisy, nested):
        compiled = _jax_compile.compile_program(program(trace(fn, (), X)), device)
        assert compiled.has_callback
        jax.block_until_ready(compiled.call(X))
    jax.effects_barrier()


def test_several_threads_compile_at_once(device: jax.Device) -> None:
    graphs = [trace(lambda w, x, i=i: jnp.sin(x) * i, (), X) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        compiled = list(pool.map(lambda g: _jax_compile.compile_program(program(g), device), graphs))
    for i, each in enumerate(compiled):
        np.testing.assert_allclose(each.call(X)[0], np.sin(X) * i, rtol=1e-6)


def test_programs_of_operations_that_are_no_equations(device: jax.Device) -> None:
    class Double:
        def __call__(self, x: Any) -> tuple[Any]:
            return (x * 2,)

        def signature(self) -> str:
            return "double"

    builder = GraphBuilder()
    x = builder.input("x", (8,), "float32", 32)
    graph = builder.build(builder.node("double", [x], [((8,), "float32", 32)], fn=Double()))
    compiled = _jax_compile.compile_program(program(graph, name="a name: with/strange (parts)"), device)
    np.testing.assert_allclose(compiled.call(X)[0], X * 2)


def test_missing_analyses_are_tolerated() -> None:
    class Nothing:
        def cost_analysis(self) -> Any:
            raise NotImplementedError

        def memory_analysis(self) -> Any:
            return None

    class Others:
        """What other platforms and versions of JAX have said."""

        def __init__(self, cost: Any) -> None:
            self.cost = cost

        def cost_analysis(self) -> Any:
            return self.cost

        def memory_analysis(self) -> Any:
            raise NotImplementedError

    assert _jax_compile._cost_analysis(Nothing()) == {}
    assert _jax_compile._memory_stats(Nothing()).temp_nbytes == 0
    assert _jax_compile._memory_stats(Others(None)).temp_nbytes == 0
    for cost in (None, [], [None], "unknown", {"flops": "many"}):
        assert _jax_compile._cost_analysis(Others(cost)) == {}
    for cost in ({"flops": 3}, [{"flops": 3, "properties": ()}]):
        assert _jax_compile._cost_analysis(Others(cost)) == {"flops": 3.0}


def test_avals_of_tensors(device: jax.Device) -> None:
    tensor = Tensor(-1, "x", (2,), "bfloat16", Kind.INPUT, 4)
    aval = _jax.aval_of(tensor, device)
    assert (aval.shape, aval.dtype) == ((2,), jnp.bfloat16)
    assert aval.sharding == _jax.sharding_of(device)
    assert _jax.aval_of(tensor).sharding is None
