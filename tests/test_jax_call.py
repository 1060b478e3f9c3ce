"""How compiled programs are called: the private ways give what the public one gives, and step back where they must."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe import _jax_call, _jax_compile
from aiopipe._jax_types import aval_of, dtype_of
from aiopipe.devices.base import Program
from aiopipe.trace import trace
from models import program

X = np.linspace(-1, 1, 8, dtype=np.float32)
N = _jax_call.MANY
WEIGHTS = [np.full(8, i, np.float32) for i in range(N)]


def total(weights: list[Any], x: Any) -> Any:
    for w in weights:
        x = x * 2 + w
    return x, x.sum()


def compiled_of(
    fn: Callable[..., Any], device: jax.Device, *leaves: Any, donate: tuple[int, ...] = ()
) -> tuple[Program, Any]:
    """A program, whose inputs are `x` and then the weights, and what JAX makes of it."""
    made = program(trace(fn, *leaves), donate=donate)
    given = [aval_of(t, device) for t in made.inputs]
    return made, jax.jit(_jax_compile.function_of(made), donate_argnums=donate).lower(*given).compile()


def many_of(fn: Callable[..., Any], device: jax.Device, *leaves: Any, donate: tuple[int, ...] = ()) -> Any:
    """The call of a program with many inputs."""
    made, compiled = compiled_of(fn, device, *leaves, donate=donate)
    call = _jax_call.taking_arrays(made, compiled, device)
    assert call is not None, "JAX no longer has that call"
    return call


@pytest.mark.parametrize("broken", [lambda params: None, lambda params: 1 / 0])
def test_an_executable_is_called_without_jaxs_frame_where_it_can_be(broken: Any) -> None:
    compiled = jax.jit(lambda x: (x + 1,)).lower(X).compile()
    call = _jax_call.without_its_frame(compiled)
    assert call is not compiled, "JAX no longer has that call"
    np.testing.assert_array_equal(call(X)[0], X + 1)

    class Changed:
        _executable = types.SimpleNamespace(create_cpp_call=broken)
        _params = None

    changed = Changed()
    assert _jax_call.without_its_frame(changed) is changed


@pytest.mark.parametrize("as_numpy", [True, False])
@pytest.mark.parametrize("held", [True, False])
def test_many_inputs_are_taken_as_they_come(as_numpy: bool, held: bool, device: jax.Device) -> None:
    call = many_of(total, device, WEIGHTS, X)
    weights = jax.device_put(WEIGHTS, device) if held else WEIGHTS  # by hand, weights may be NumPy's, too
    out, summed = call(X if as_numpy else jax.device_put(X, device), *weights)
    want, want_sum = total(WEIGHTS, X)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_allclose(summed, want_sum, rtol=1e-5)
    for made in (out, summed):
        assert made.devices() == {device}
        assert made.committed
        assert not made.weak_type


def test_inputs_that_are_not_used_are_left_out(device: jax.Device) -> None:
    call = many_of(lambda w, x: (w[3] - x, w[5]), device, WEIGHTS, X)
    first, second = call(X, *jax.device_put(WEIGHTS, device))
    np.testing.assert_array_equal(first, WEIGHTS[3] - X)
    np.testing.assert_array_equal(second, WEIGHTS[5])


def test_what_is_donated_is_given_up(device: jax.Device) -> None:
    call = many_of(total, device, WEIGHTS, X, donate=(0,))
    weights, x = jax.device_put(WEIGHTS, device), jax.device_put(X, device)
    out, _ = call(x, *weights)
    assert x.is_deleted()
    assert not any(w.is_deleted() for w in weights)
    np.testing.assert_array_equal(out, total(WEIGHTS, X)[0])
    with pytest.raises(RuntimeError, match="deleted"):
        call(x, *weights)


def test_what_is_wrong_with_an_input_is_said_by_jax(device: jax.Device) -> None:
    call = many_of(total, device, WEIGHTS, X)
    weights = jax.device_put(WEIGHTS, device)
    with pytest.raises(TypeError, match=r"float32\[8\]"):
        call(jax.device_put(X[:4], device), *weights)
    with pytest.raises(ValueError, match="device"):
        call(jax.device_put(X, device), *jax.device_put(WEIGHTS, jax.devices("cpu")[0]))


def test_what_the_runtime_says_is_passed_on(device: jax.Device) -> None:
    made, compiled = compiled_of(total, device, WEIGHTS, X)

    def full(given: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    private = types.SimpleNamespace(
        unsafe_call=compiled._executable.unsafe_call, xla_executable=types.SimpleNamespace(execute_sharded=full)
    )
    call = _jax_call.taking_arrays(made, types.SimpleNamespace(_executable=private), device)
    assert call is not None
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        call(X, *jax.device_put(WEIGHTS, device))


def test_other_executables_are_called_as_a_whole(device: jax.Device) -> None:
    def told(weights: list[Any], x: Any) -> Any:
        return jax.pure_callback(lambda x: x + 1, jax.ShapeDtypeStruct((8,), np.float32), sum(weights) + x)

    made, compiled = compiled_of(told, device, WEIGHTS, X)
    assert _jax_call.taking_arrays(made, compiled, device) is None  # it calls back
    assert _jax_call.caller(made, compiled, None, (), device) is compiled
    assert _jax_call.taking_arrays(made, types.SimpleNamespace(), device) is None  # a JAX without all of that

    keys = list(jax.random.split(jax.random.key(0), N))
    made, compiled = compiled_of(lambda w, x: [jax.random.bits(k) + x for k in w], device, keys, np.uint32(1))
    got = _jax_call.caller(made, compiled, None, (), device)(np.uint32(1), *jax.device_put(keys, device))
    assert [int(bits) for bits in got] == [int(jax.random.bits(k) + 1) for k in keys]


@pytest.mark.parametrize("n", [N - 2, N - 1])
def test_what_the_caller_computes_is_called_in_jaxs_way_unless_it_has_many_inputs(n: int, device: jax.Device) -> None:
    made, compiled = compiled_of(total, device, WEIGHTS[:n], X)
    call = _jax_call.caller(made, compiled, None, (), device, in_caller=True)
    assert isinstance(call, types.FunctionType) is (n + 1 >= N)
    np.testing.assert_array_equal(call(X, *jax.device_put(WEIGHTS[:n], device))[0], total(WEIGHTS[:n], X)[0])


@pytest.mark.parametrize("as_numpy", [True, False])
def test_few_inputs_are_given_to_the_runtime_if_they_are_arrays(as_numpy: bool, device: jax.Device) -> None:
    made, compiled = compiled_of(total, device, WEIGHTS[:2], X)
    plain: list[Any] = []
    call = _jax_call.taking_arrays(made, compiled, device, lambda *args: plain.append(args) or compiled(*args))
    assert call is not None
    out, _ = call(X if as_numpy else jax.device_put(X, device), *jax.device_put(WEIGHTS[:2], device))
    np.testing.assert_array_equal(out, total(WEIGHTS[:2], X)[0])
    assert len(plain) == as_numpy


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "float8_e4m3fn", "complex64", "uint8"])
def test_types(dtype: str, device: jax.Device) -> None:
    value = jnp.ones(64, dtype_of(dtype))
    made, compiled = compiled_of(lambda w, x: (x == x, x, x * x), device, (), value)
    call = _jax_call.taking_arrays(made, compiled, device)
    assert call is not None
    for got, want in zip(call(jax.device_put(value, device)), compiled(jax.device_put(value, device)), strict=True):
        assert (got.dtype, got.shape, got.weak_type, got.sharding, got.committed) == (
            want.dtype, want.shape, want.weak_type, want.sharding, want.committed,
        )  # fmt: skip
        np.testing.assert_array_equal(got, want)


def test_nothing_goes_in(device: jax.Device) -> None:
    graph = trace(lambda w: jnp.arange(8) * 2, ())
    compiled = _jax_compile.compile_program(program(graph), device)
    [out] = compiled.call()
    np.testing.assert_array_equal(out, np.arange(8) * 2)
    assert out.devices() == {device}


async def test_many_weights_in_a_pipeline() -> None:
    """The same as with JAX alone."""
    weights = {"a": WEIGHTS, "b": [w / 7 for w in WEIGHTS]}

    def model(params: Any, x: Any) -> Any:
        y, _ = total(params["a"], x)
        z, _ = total(params["b"], jnp.tanh(y))
        return z

    async with ap.Pipeline(model, weights, devices=["cpu:0", "cpu:1"], split={"a/*": "cpu:0", "b/*": "cpu:1"}) as pipe:
        assert len((await pipe.plan(X)).splits) == 2
        results = [result async for result in pipe.stream(X + i for i in range(6))]
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, jax.jit(model)(weights, X + np.float32(i)), rtol=1e-6)
