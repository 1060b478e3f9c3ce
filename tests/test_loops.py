"""The same work on every kind of event loop, on several loops in turn, and on several at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from gates import eventually, gated_scheduler
from loops import KINDS, run
from models import assert_close, batch, mlp, mlp_params, oracle

DEVICES = ["cpu:0", "cpu:1"]
PARAMS = mlp_params(4)


def decay(params: list[Any], state: Any, x: Any) -> Any:
    state = state * 0.5 + x
    return mlp(params, state), state


def fails(params: list[Any], x: Any) -> Any:
    def boom(x: np.ndarray) -> np.ndarray:
        raise KeyError("mine")

    return mlp(params, jax.pure_callback(boom, jax.ShapeDtypeStruct(x.shape, x.dtype), x))


# What users do; each starts and ends its own backends ------------------------------------------------


async def calls_and_streams() -> None:
    async def arriving(n: int) -> AsyncIterator[np.ndarray]:
        for s in range(n):
            await asyncio.sleep(0)
            yield batch(seed=s)

    async with ap.Pipeline(mlp, PARAMS, devices=DEVICES) as pipe:
        together = await asyncio.gather(*(pipe(batch(seed=s)) for s in range(6)))
        results = [y async for y in pipe.stream(batch(seed=s) for s in range(6))]
        arrived = [y async for y in pipe.stream(arriving(6))]
        for s, each in enumerate(zip(together, results, arrived, strict=True)):
            for y in each:
                assert_close(y, oracle(mlp, PARAMS, batch(seed=s)))


async def large_inputs_and_shapes_that_are_new() -> None:
    """Captured in a thread, launched in others, compiled while known shapes are served."""
    params = mlp_params(4, 512)
    async with ap.Pipeline(mlp, params, devices=DEVICES, n_copies=2) as pipe:
        rows = (600, 2, 601, 2)
        got = await asyncio.gather(*(pipe(batch(n, 512)) for n in rows))
        for n, y in zip(rows, got, strict=True):
            assert_close(y, oracle(mlp, params, batch(n, 512)), 1e-4)


async def keeps_a_state() -> None:
    async with ap.Pipeline(decay, PARAMS, devices=DEVICES) as pipe:
        state = ap.State(np.zeros((2, 8), np.float32))
        runs = [await pipe.submit(batch(seed=s), state=state) for s in range(5)]
        fork = await state.fork()
        want = np.zeros((2, 8), np.float32)
        for s, each in enumerate(runs):
            y, want = oracle(decay, PARAMS, want, batch(seed=s))
            assert_close(await each, y)
        assert_close((await fork.snapshot()).value, want)


async def fails_and_goes_on() -> None:
    async with ap.Scheduler(DEVICES) as sched:
        weights = await ap.place(PARAMS, {"[01]": sched.backends[0], "*": sched.backends[1]})
        bad, good = ap.trace(fails, weights, batch()), ap.trace(mlp, weights, batch())
        lost = await sched.graph_compute_async(bad, batch())
        kept = await sched.graph_compute_async(good, batch())
        with pytest.raises(ap.EvaluationError, match="mine"):
            await lost
        assert_close(await kept, oracle(mlp, PARAMS, batch()))


async def cancels() -> None:
    async with gated_scheduler() as (sched, graph, gate):
        runs = [await sched.graph_compute_async(graph, batch()) for _ in range(2)]
        waits = asyncio.create_task(sched.graph_compute_async(graph, batch()))
        await eventually(gate.entered.is_set)
        await eventually(lambda: sched.statistics().waiting == 1)
        waits.cancel()
        runs[0].cancel()
        for each in (waits, runs[0]):
            with pytest.raises(asyncio.CancelledError):
                await each
        gate.open.set()
        assert_close(await runs[1], oracle(gate.fn, mlp_params(2), batch()))
        await sched.synchronize()
        assert (sched.statistics().in_flight, sched.statistics().waiting) == (0, 0)


async def observes() -> None:
    seen: list[str] = []

    async def callback(tensor: ap.Tensor, ask: bool) -> bool:
        await asyncio.sleep(0)
        if not ask:
            seen.append(tensor.name)
        return True

    async with ap.Scheduler(DEVICES) as sched:
        graph = ap.trace(mlp, PARAMS, batch())
        sched.set_eval_callback(callback)
        assert_close(await sched.graph_compute(graph, batch()), oracle(mlp, PARAMS, batch()))
    assert len(seen) == 8


async def works_by_hand() -> None:
    first, second = ap.open_backends(*DEVICES)
    async with first, second:
        graph = ap.trace(mlp, PARAMS, batch())
        there, back = first.event_new(), second.event_new()
        results = first.graph_compute_async(graph, batch())
        first.event_record(there)
        second.event_wait(there)
        also = second.graph_compute_async(graph, batch())
        second.event_record(back)
        await back
        for each in (results, also):
            assert_close(await each, oracle(mlp, PARAMS, batch()))
        plan = await first.graph_plan_create(graph)
        assert_close(await first.graph_plan_compute(plan, batch()), oracle(mlp, PARAMS, batch()))


async def leaves_with_work_in_flight() -> None:
    with pytest.raises(KeyError):
        async with gated_scheduler() as (sched, graph, gate):
            submitted = await sched.graph_compute_async(graph, batch())
            await eventually(gate.entered.is_set)
            raise KeyError("mine")
    assert submitted.cancelled()


USES = [
    calls_and_streams,
    large_inputs_and_shapes_that_are_new,
    keeps_a_state,
    fails_and_goes_on,
    cancels,
    observes,
    works_by_hand,
    leaves_with_work_in_flight,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_it_works_on_every_kind_of_loop(use: Callable[[], Coroutine[Any, Any, None]], kind: str) -> None:
    run(kind, use())


# Several loops -------------------------------------------------------------------------------------


def test_loops_one_after_the_other_share_specs_and_jitted_functions() -> None:
    traces = []

    @jax.jit
    def model(params: list[Any], x: Any) -> Any:
        traces.append(x.shape)
        return mlp(params, x)

    async def use() -> Any:
        async with ap.Pipeline(model, PARAMS, devices=DEVICES) as pipe:
            return await pipe(batch())

    want = np.asarray(model(PARAMS, batch()))
    for kind in [*KINDS, *KINDS]:
        assert_close(run(kind, use()), want)
    assert_close(model(PARAMS, batch()), want)
    assert len(traces) <= 2, "it was traced before: by jax.jit, and once for tracing"


def test_backends_may_move_from_loop_to_loop_and_graphs_with_them() -> None:
    backends = ap.open_backends(*DEVICES)

    async def place() -> ap.Graph:
        weights = await ap.place(PARAMS, {"[01]": backends[0], "*": backends[1]})
        return ap.trace(mlp, weights, batch())

    async def use(graph: ap.Graph) -> Any:
        event = backends[0].event_new()
        async with ap.Scheduler(backends) as sched:
            result = await sched.graph_compute(graph, batch())
        backends[0].event_record(event)
        await event
        return result

    async def close() -> None:
        for backend in backends:
            await backend.aclose()

    graph = asyncio.run(place())
    for kind in KINDS:
        assert_close(run(kind, use(graph)), oracle(mlp, PARAMS, batch()))
    asyncio.run(close())


@pytest.mark.parametrize("shared", ["specs", "backends"])
def test_two_loops_in_two_threads_at_the_same_time(shared: str) -> None:
    """Each has evaluations in flight while the other has: both meet in the middle of every round."""
    backends: list[Any] = DEVICES if shared == "specs" else ap.open_backends(*DEVICES)
    both, results, wrong = threading.Barrier(2, timeout=30), {}, []
    graph = ap.trace(mlp, PARAMS, batch())

    async def use(name: str) -> None:
        results[name] = []
        async with ap.Scheduler(backends) as sched:
            for round_ in range(20):
                runs = [await sched.graph_compute_async(graph, batch(seed=round_ + s)) for s in range(3)]
                await asyncio.to_thread(both.wait)
                results[name] += [np.asarray(await each) for each in runs]

    def thread(name: str, kind: str) -> None:
        try:
            run(kind, use(name))
        except BaseException as error:
            wrong.append(error)
            both.abort()

    threads = [threading.Thread(target=thread, args=(f"thread {i}", kind)) for i, kind in enumerate([*KINDS][-2:])]
    for each in threads:
        each.start()
    for each in threads:
        each.join(50)
    assert not wrong and not any(each.is_alive() for each in threads)
    for got in results.values():
        for i, y in enumerate(got):
            assert_close(y, oracle(mlp, PARAMS, batch(seed=i // 3 + i % 3)))
    if shared == "backends":
        asyncio.run(_close(backends))


async def _close(backends: list[ap.Backend]) -> None:
    for backend in backends:
        await backend.aclose()


def test_a_thread_without_a_loop_uses_the_one_of_another() -> None:
    """`asyncio.run_coroutine_threadsafe`: every call runs on the loop; the callers' threads wait."""

    async def serve() -> list[Any]:
        loop, results = asyncio.get_running_loop(), {}
        async with ap.Pipeline(mlp, PARAMS, devices=DEVICES) as pipe:

            def client(s: int) -> None:
                results[s] = asyncio.run_coroutine_threadsafe(pipe(batch(seed=s)), loop).result(30)

            await asyncio.gather(*(asyncio.to_thread(client, s) for s in range(5)))
        return [results[s] for s in range(5)]

    for s, y in enumerate(asyncio.run(serve())):
        assert_close(y, oracle(mlp, PARAMS, batch(seed=s)))


def test_results_outlive_their_loop() -> None:
    async def use() -> ap.Evaluation:
        async with ap.Scheduler(DEVICES) as sched:
            evaluation = await sched.graph_compute_async(ap.trace(mlp, PARAMS, batch()), batch())
            await sched.synchronize()
        return evaluation

    evaluation = asyncio.run(use())

    async def again() -> Any:
        return await evaluation

    assert_close(asyncio.run(again()), oracle(mlp, PARAMS, batch()))
    assert_close(jnp.asarray(evaluation.result()), oracle(mlp, PARAMS, batch()))
