"""What has to hold on any devices: those of AIOPIPE_TEST_DEVICES, such as ``gpu:0,cpu:0``, else CPU devices.

The oracle is `jax.jit` on the first of them. Tolerances allow for another platform's arithmetic.
"""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from models import assert_close, batch, mlp, mlp_params

pytestmark = pytest.mark.device


def reference(spec: str, fn: Any, *args: Any) -> Any:
    """``fn(*args)`` jitted on one device, as NumPy, in full precision."""
    platform, _, index = spec.partition(":")
    device = jax.local_devices(backend=platform)[int(index or 0)]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, jax.jit(fn)(*args))


@pytest.fixture(autouse=True)
def full_precision() -> Any:
    """Accelerators multiply in lower precision by default, and each in its own."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("n_copies", [1, 4])
async def test_a_stream_equals_one_device(device_specs: list[str], n_copies: int) -> None:
    params = mlp_params(6, 256)
    batches = [batch(64, 256, seed=s) for s in range(12)]
    async with ap.Pipeline(mlp, params, devices=device_specs, n_copies=n_copies, split=[1] * len(device_specs)) as pipe:
        plan = await pipe.plan(batches[0])
        assert [plan.devices[split.backend].name for split in plan.splits] == device_specs
        got = [y async for y in pipe.stream(batches)]
    for y, x in zip(got, batches, strict=True):
        assert_close(y, reference(device_specs[0], mlp, params, x), 1e-4)


async def test_bit_equal_for_every_n_copies(device_specs: list[str]) -> None:
    params = mlp_params(4, 128)
    results = set()
    for n_copies in (1, 2, 4, 8):
        even = [1] * len(device_specs)
        async with ap.Pipeline(mlp, params, devices=device_specs, n_copies=n_copies, split=even) as pipe:
            ys = [np.asarray(y).tobytes() async for y in pipe.stream([batch(32, 128, seed=s) for s in range(9)])]
        results.add(b"".join(ys))
    assert len(results) == 1


@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 20, 1 << 24])
async def test_inputs_may_be_overwritten_at_once(device_specs: list[str], nbytes: int) -> None:
    x = np.zeros((4, nbytes // 16), np.float32)

    def fn(w: Any, x: Any) -> Any:
        return (x * w["a"]).sum(axis=1) * w["b"]

    weights = {"a": np.float32(2), "b": np.float32(3)}
    split = {"a": device_specs[0], "b": device_specs[-1]}
    async with ap.Pipeline(fn, weights, devices=device_specs, split=split) as pipe:
        await pipe.plan(x)
        runs = []
        for k in range(1, 7):
            x[:] = k
            runs.append(await pipe.submit(x))
            x[:] = np.nan
        for k, run in enumerate(runs, 1):
            assert_close(await run, np.full(4, 6.0 * k * x.shape[1], np.float32), 1e-5)


async def test_large_values_between_devices(device_specs: list[str]) -> None:
    params = mlp_params(4, 1024)
    async with ap.Pipeline(mlp, params, devices=device_specs, split=[1] * len(device_specs)) as pipe:
        runs = [await pipe.submit(batch(512, 1024, seed=s)) for s in range(6)]
        for s, run in enumerate(runs):
            assert_close(await run, reference(device_specs[0], mlp, params, batch(512, 1024, seed=s)), 1e-3)


async def test_every_kind_of_input(device_specs: list[str]) -> None:
    def fn(w: Any, *xs: Any) -> Any:
        return sum(x * w[i % 2] for i, x in enumerate(xs))

    x = batch()
    inputs: list[Any] = [x, jnp.asarray(x)]
    for spec in device_specs:
        platform, _, index = spec.partition(":")
        inputs.append(jax.device_put(x, jax.local_devices(backend=platform)[int(index or 0)]))
    inputs.append(2.0)
    w = [np.float32(2), np.float32(3)]
    async with ap.Pipeline(fn, w, devices=device_specs, split={"0": device_specs[0], "*": device_specs[-1]}) as pipe:
        want = reference(device_specs[0], fn, w, *[np.asarray(i) if isinstance(i, jax.Array) else i for i in inputs])
        for _ in range(3):
            assert_close(await pipe(*inputs), want)


async def test_a_failing_callback_fails_its_evaluation_alone(device_specs: list[str]) -> None:
    def picky(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if np.isnan(x).any():
            raise ValueError("a NaN came in")
        return np.asarray(x)

    def fn(w: Any, x: Any) -> Any:
        x = jnp.tanh(x @ w[0])
        x = jax.pure_callback(picky, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jnp.tanh(x @ w[1])

    params = mlp_params(2)
    bad = batch()
    bad[0, 0] = np.nan
    split = {"0": device_specs[0], "*": device_specs[-1]}
    async with ap.Pipeline(fn, params, devices=device_specs, split=split) as pipe:
        good = [await pipe(batch()), None, await pipe(batch())]
        with pytest.raises(ap.EvaluationError, match="split"):
            await pipe(bad)
        for y in (good[0], good[2], await pipe(batch())):
            assert_close(y, reference(device_specs[0], mlp, params, batch()), 1e-5)


async def test_cancelling_at_random(device_specs: list[str]) -> None:
    params = mlp_params(4, 256)
    async with ap.Pipeline(mlp, params, devices=device_specs, n_copies=3, split=[1] * len(device_specs)) as pipe:
        await pipe.plan(batch(64, 256))
        tasks = [asyncio.ensure_future(pipe(batch(64, 256, seed=s))) for s in range(40)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await pipe.scheduler.synchronize()
        assert pipe.statistics().in_flight == pipe.statistics().waiting == 0
    for s, y in enumerate(results):
        if not isinstance(y, asyncio.CancelledError):
            assert_close(y, reference(device_specs[0], mlp, params, batch(64, 256, seed=s)), 1e-4)
