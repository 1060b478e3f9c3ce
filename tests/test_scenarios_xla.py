"""What others met on real devices: states that are written elsewhere, and callbacks under load."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from models import assert_close, batch, mlp_params, oracle
from simgraphs import settled


async def test_a_scatter_into_a_view_of_a_state_on_another_backend_lands_in_the_state() -> None:  # S13
    def step(w: Any, s: Any, x: Any) -> tuple[Any, Any]:
        flat = s["cache"].reshape(-1)  # a view
        flat = flat.at[jnp.array([1, 5, 6])].add((x @ w)[0, :3])
        return flat.sum(), {"cache": flat.reshape(s["cache"].shape)}

    w, cache = mlp_params(1)[0], np.zeros((2, 4), np.float32)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        weights = await ap.place(w, {"*": sched.backends[1]})
        state = ap.State({"cache": jax.device_put(cache, jax.devices()[0])})
        graph = ap.trace(step, weights, batch(), state=state)
        scatter = next(node for node in graph.nodes if node.op.startswith("scatter"))
        sched.set_tensor_backend(graph, graph.tensors[scatter.outputs[0]], "cpu:1")
        want = {"cache": cache}
        for seed in range(3):
            got = await sched.graph_compute(graph, batch(seed=seed), state=state)
            total, want = oracle(step, w, want, batch(seed=seed))
            assert_close(got, total)
            assert_close((await state.snapshot()).value, want)
        plan = await sched.plan(graph)
        assert plan.state_homes == (0,) and sched.get_tensor_backend(graph, graph.tensors[scatter.outputs[0]]) is (
            sched.backends[1]
        )


def plain(x: np.ndarray) -> np.ndarray:
    return np.sort(np.asarray(x), axis=0)


def with_jax(x: Any) -> np.ndarray:
    """JAX inside a callback, of which JAX's documentation warns; see docs/reliability.md."""
    return np.asarray(jnp.sort(jnp.asarray(x), axis=0))


@pytest.mark.parametrize("callback", [plain, with_jax])
async def test_callbacks_under_load(callback: Any, capfd: pytest.CaptureFixture[str]) -> None:  # S32
    """Callbacks and prints on two devices, more submitters than slots, with a watchdog."""

    def model(w: list[Any], x: Any) -> Any:
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
        for i, each in enumerate(w):
            x = jax.pure_callback(callback, spec, jnp.tanh(x @ each))
            jax.debug.print("stage {} of {}", i, x.shape[0])
        return x

    def alone(w: list[Any], x: Any) -> Any:
        for each in w:
            x = jnp.sort(jnp.tanh(x @ each), axis=0)
        return x

    params, done = mlp_params(4), 0
    async with asyncio.timeout(50), ap.Pipeline(model, params, devices=["cpu:0", "cpu:1"], n_copies=4) as pipe:

        async def client(number: int) -> None:
            nonlocal done
            for k in range(10):
                x = batch(4, seed=100 * number + k)
                assert_close(await pipe(x), oracle(alone, params, x), 1e-4)
                done += 1

        await asyncio.gather(*(client(number) for number in range(8)))
        await pipe.scheduler.synchronize()
        settled(pipe.scheduler)
    assert done == 80
    printed = capfd.readouterr().out.splitlines()
    assert [printed.count(f"stage {i} of 4") for i in range(4)] == [80] * 4
