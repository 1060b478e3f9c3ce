"""Defects that a reviewer found once, each shown not to exist."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices import sim
from aiopipe.sched.state import RunState
from aiopipe.sched.stimuli import Cancel, Captured, Submit
from models import assert_close, batch, mlp, mlp_params


async def test_two_lanes_may_read_one_value_in_any_order() -> None:
    """The quick branch overtakes the slow one, which has yet to read what they share."""
    gates = [threading.Event() for _ in range(4)]
    calls = iter(range(4))

    def slow(x: np.ndarray) -> np.ndarray:
        assert gates[next(calls)].wait(30)
        return x

    def model(w: Any, x: Any) -> Any:
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
        h = jnp.sin(x) * w[2]
        return jax.pure_callback(slow, spec, h * w[0]), jax.pure_callback(lambda v: v, spec, h * w[1])

    w = [np.full(8, k, np.float32) for k in (2, 1, 1)]
    async with ap.Scheduler(["cpu:0", "cpu:1", "cpu:2"], n_copies=4) as sched:
        graph = ap.trace(model, await ap.place(w, lambda path: sched.backends[int(path)]), batch(1)[0])
        await sched.plan(graph)
        runs = [await sched.graph_compute_async(graph, np.full(8, k, np.float32)) for k in range(4)]
        for gate in gates:
            gate.set()
        for k, run in enumerate(runs):
            x = np.full(8, k, np.float32)
            assert_close(await run, (np.sin(x) * 2, np.sin(x)))


async def test_two_lanes_may_read_one_input_in_any_order() -> None:
    w = [np.float32(2), np.float32(3)]
    backends = [ap.open_backend(f"cpu:{i}", dispatch="own") for i in range(2)]
    async with ap.Scheduler(backends, n_copies=4) as sched:
        graph = ap.trace(
            lambda w, x: (x * w[0], x * w[1]), await ap.place(w, lambda path: backends[int(path)]), batch()
        )
        for _ in range(10):
            runs = [await sched.graph_compute_async(graph, batch(seed=s)) for s in range(20)]
            for s, run in enumerate(runs):
                assert_close(await run, (batch(seed=s) * 2, batch(seed=s) * 3))
    for backend in backends:
        await backend.aclose()


def callback_model(gate: threading.Event) -> Any:
    def wait(x: np.ndarray) -> np.ndarray:
        assert gate.wait(30)
        return x

    return lambda w, x: jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x * w)


async def test_closing_goes_on_when_its_caller_is_cancelled() -> None:
    gate = threading.Event()
    sched = ap.Scheduler(["cpu:0"], n_copies=2)
    graph = ap.trace(callback_model(gate), np.float32(1), batch())
    await sched.plan(graph)
    await sched.graph_compute_async(graph, batch())
    closing = asyncio.ensure_future(sched.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.sleep(0)
    assert not closing.done()  # the device still has it
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert sched.backends[0].closed
    assert not [t for t in threading.enumerate() if t.name.startswith("aiopipe-cpu")]


async def test_two_callers_may_close_and_both_wait() -> None:
    gate = threading.Event()
    sched = ap.Scheduler(["cpu:0"], n_copies=2)
    graph = ap.trace(callback_model(gate), np.float32(1), batch())
    await sched.plan(graph)
    await sched.graph_compute_async(graph, batch())
    first, second = asyncio.ensure_future(sched.aclose()), asyncio.ensure_future(sched.aclose())
    await asyncio.sleep(0)
    assert not first.done() and not second.done()
    gate.set()
    await asyncio.gather(first, second)
    assert sched.backends[0].closed


async def test_a_backend_closed_under_a_scheduler() -> None:
    backend = ap.open_backend("cpu:0")
    async with ap.Scheduler([backend], n_copies=2) as sched:
        graph = ap.trace(mlp, mlp_params(4, 256), batch(64, 256))
        await sched.plan(graph)
        run = await sched.graph_compute_async(graph, batch(64, 256))
        await backend.aclose()
        await run  # was under way
        with pytest.raises(ap.BackendClosedError, match="cpu:0"):
            await sched.graph_compute(graph, batch(64, 256))
        assert sched.statistics().in_flight == 0


def failing_graph() -> ap.Graph:
    build = ap.GraphBuilder("failing")
    x = build.input("x", (2,), "float32", 8)
    return build.build(build.node("fail", [x], [((2,), "float32", 8)], fn=sim.fail("boom")))


async def test_a_callback_of_an_event_that_raises_harms_nobody() -> None:
    seen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))
    gate = threading.Event()
    async with ap.Scheduler(["cpu:0"], n_copies=1) as sched:
        graph = ap.trace(callback_model(gate), np.float32(3), batch())
        run = await sched.graph_compute_async(graph, batch())
        run.event.add_callback(lambda _: 1 / 0)
        gate.set()
        assert_close(await run, batch() * 3)
    async with ap.Scheduler(sim.Cluster(1).backends, n_copies=1) as sched:
        for _ in range(3):
            run = await sched.graph_compute_async(failing_graph(), np.zeros(2, np.float32))
            run.event.add_callback(lambda _: 1 / 0)
            with pytest.raises(ap.EvaluationError, match="boom"):
                await run
    assert [type(error) for error in seen] == [ZeroDivisionError] * 4


async def test_an_input_that_is_returned_is_ready_when_it_is() -> None:
    heavy = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ x), x))
    x = jax.device_put(np.full((400, 400), 1e-3, np.float32), jax.devices()[1])
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(lambda w, x: (x, w + 1), np.float32(1), x)
        await sched.plan(graph)
        for _ in range(3):
            y, _ = await sched.graph_compute(graph, heavy(x))
            assert y.is_ready()


async def test_a_stream_leaves_its_callers_source_open() -> None:
    send, receive = anyio.create_memory_object_stream[Any](10)
    async with ap.Pipeline(mlp, mlp_params(2), devices=["cpu:0", "cpu:1"]) as pipe:
        for s in range(10):
            send.send_nowait(batch(seed=s))
        stream = pipe.stream(receive)
        async for _ in stream:
            break
        await stream.aclose()
        receive.receive_nowait()  # the caller's own, still open
    send.close()
    receive.close()


async def test_a_weight_that_was_changed_is_read_anew_by_a_new_graph() -> None:
    w = np.full(8, 2, np.float32)
    async with ap.Scheduler(["cpu:0"]) as sched:
        first = ap.trace(lambda w, x: x * w, w, batch())
        assert_close(await sched.graph_compute(first, batch()), batch() * 2)
        w += 1
        second = ap.trace(lambda w, x: x * w, w, batch())
        assert_close(await sched.graph_compute(second, batch()), batch() * 3)


async def test_a_weight_without_a_value() -> None:
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(lambda w, x: x * w, jax.ShapeDtypeStruct((), np.float32), batch())
        with pytest.raises(ap.TensorError, match="has no value"):
            await sched.graph_compute(graph, batch())


def test_cancelled_submitters_are_forgotten_at_once() -> None:
    state = RunState(1)
    state.handle(Submit(0, ((),)))
    state.handle(Captured(0))
    for k in range(1, 1000):
        state.handle(Submit(k, ((),)))
        state.handle(Cancel(k))
        state.validate()
    assert state.waiting == 0 and len(state._waiting) == 0 and len(state._runs) == 1


async def test_evicted_plans_are_gone_at_once() -> None:
    async with ap.Pipeline(mlp, mlp_params(2), devices=["cpu:0", "cpu:1"], max_plans=1) as pipe:
        for rows in range(1, 6):
            await pipe(batch(rows))
        assert pipe.statistics().plans == 1


async def test_large_jax_inputs_are_taken_as_they_are_on_the_loop() -> None:
    x = jax.device_put(np.ones((512, 512), np.float32), jax.devices()[0])
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(lambda w, x: (x * w).sum(), np.float32(1), x)
        loaded = sched._plans.get(graph) if await sched.plan(graph) else None
        assert loaded is not None
        assert loaded.captures_inline([x])
        assert not loaded.captures_inline([np.ones((512, 512), np.float32)])
