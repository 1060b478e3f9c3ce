"""Using something from another event loop, from another thread, or where no loop of asyncio runs, is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

import aiopipe as ap
from gates import Gate, eventually, gated_scheduler
from models import assert_close, batch, mlp, mlp_params, oracle

DEVICES = ["cpu:0", "cpu:1"]


async def elsewhere(use: Callable[[], Awaitable[Any]]) -> None:
    """Expect a refusal on another event loop, in another thread, while this one runs on."""

    async def main() -> None:
        with pytest.raises(ap.WrongLoopError):
            await asyncio.wait_for(use(), 10)

    await asyncio.to_thread(asyncio.run, main())


async def without_a_loop(use: Callable[[], object]) -> None:
    """Expect a refusal in another thread, which has no event loop."""

    def main() -> None:
        with pytest.raises(ap.WrongLoopError, match="runs in another thread"):
            use()

    await asyncio.to_thread(main)


# Another loop --------------------------------------------------------------------------------------


async def test_a_scheduler_is_refused_on_another_loop() -> None:
    async with ap.Scheduler(DEVICES) as sched:
        graph, other = (ap.trace(mlp, mlp_params(n), batch()) for n in (2, 3))
        stateful = ap.trace(lambda w, s, x: (x @ w, s + x), mlp_params(1)[0], batch(), state=batch())
        await sched.graph_compute(graph, batch())
        await sched.tensor_set(graph.inputs[0], batch())
        state = ap.State(batch())
        uses: list[Callable[[], Awaitable[Any]]] = [
            lambda: sched.graph_compute(graph, batch()),
            lambda: sched.graph_compute_async(graph),
            lambda: sched.graph_compute(stateful, batch(), state=state),
            lambda: sched.plan(other),
            lambda: sched.reserve(other),
            lambda: sched.alloc_graph(other),
            lambda: sched.stream(graph, [batch()]).__anext__(),
            sched.synchronize,
            sched.aclose,
            sched.__aenter__,
        ]
        for use in uses:
            await elsewhere(use)
        result = await sched.graph_compute(stateful, batch(), state=state)  # it is this loop's, for all that
        assert_close(result, oracle(lambda w, x: x @ w, mlp_params(1)[0], batch()))
        assert_close(await sched.graph_compute(graph), oracle(mlp, mlp_params(2), batch()))


async def test_a_pipeline_is_refused_on_another_loop() -> None:
    async with ap.Pipeline(mlp, mlp_params(2), devices=DEVICES) as pipe:
        await pipe(batch())
        uses: list[Callable[[], Awaitable[Any]]] = [
            lambda: pipe(batch()),
            lambda: pipe(batch(3)),  # a shape that is new
            lambda: pipe.stream([batch()]).__anext__(),
            lambda: pipe.plan(batch(4)),
            pipe.aclose,
        ]
        for use in uses:
            await elsewhere(use)
        assert pipe.statistics().planned == 1
        assert_close(await pipe(batch()), oracle(mlp, mlp_params(2), batch()))


async def test_what_is_under_way_can_be_awaited_on_its_own_loop_alone() -> None:
    async with gated_scheduler() as (sched, graph, gate):
        evaluation = await sched.graph_compute_async(graph, batch())
        await eventually(gate.entered.is_set)
        one_of = evaluation.events[0]

        async def whole() -> None:
            await evaluation

        async def each() -> None:
            await evaluation.event

        async def split() -> None:
            for event in evaluation.events:
                await event

        async def known() -> None:
            await one_of.wait()

        for use in (whole, each, split):
            await elsewhere(use)
        assert one_of.done() or await elsewhere(known) is None
        gate.open.set()
        assert_close(await evaluation, oracle(gate.fn, mlp_params(2), batch()))
        await evaluation.event


async def test_an_event_of_a_queue_cannot_be_waited_for_on_another_loop() -> None:
    gate = threading.Event()
    first, second = ap.open_backends(*DEVICES)
    async with first, second:
        posted = first.queue.post(lambda: gate.wait(30) and None)
        recorded = first.event_new()
        first.event_record(recorded)

        async def other_queue() -> None:
            second.event_wait(recorded)

        for use in (posted.wait, recorded.wait, other_queue, first.synchronize, first.aclose):
            await elsewhere(use)
        gate.set()
        await recorded
        await elsewhere_is_fine(recorded.wait)  # what has happened can be asked anywhere


async def elsewhere_is_fine(use: Callable[[], Awaitable[Any]]) -> None:
    async def main() -> None:
        await use()

    await asyncio.to_thread(asyncio.run, main())


async def test_an_event_that_somebody_waits_for_cannot_be_set_from_another_thread() -> None:
    """Nobody would wake the loop: whoever waits would wait for ever."""
    event = ap.Event("mine")
    waits = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    await without_a_loop(event.set)
    assert not event.done()
    event.set()
    await waits


def test_an_event_that_nobody_waits_for_any_more_may_go_to_the_next_loop() -> None:
    backend, event = ap.open_backend("cpu:0"), ap.Event("mine")

    async def gives_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(event.wait(), 0.001)

    async def records() -> None:
        backend.event_record(event)
        await event
        await backend.aclose()

    asyncio.run(gives_up())
    asyncio.run(records())


def test_what_a_loop_leaves_open_when_it_ends_can_be_closed_on_another() -> None:
    """Whatever was in flight is lost with its loop; threads end, and nothing waits for what cannot come."""
    loop, gate = asyncio.new_event_loop(), Gate()
    sched, backend = ap.Scheduler(DEVICES), ap.open_backend("cpu:2")
    pipe = ap.Pipeline(gate.fn, mlp_params(2), devices=DEVICES)

    async def leave_open() -> list[ap.Evaluation]:
        backend.queue.post(lambda: gate.open.wait(30) and None)
        await pipe.__aenter__()
        runs = [await pipe.submit(batch())]
        weights = await ap.place(mlp_params(2), {"0": sched.backends[0], "1": sched.backends[1]})
        graph = ap.trace(gate.fn, weights, batch())
        runs += [await sched.graph_compute_async(graph, batch()) for _ in range(2)]
        await eventually(gate.entered.is_set)
        return runs

    async def close() -> None:
        with pytest.raises(ap.WrongLoopError, match="an event loop that has ended"):
            await sched.synchronize()
        for closed in (sched, pipe, backend):
            await closed.aclose()

    runs = loop.run_until_complete(leave_open())
    loop.close()
    gate.open.set()
    asyncio.run(close())
    assert not any(run.done() for run in runs)


# Another thread ------------------------------------------------------------------------------------


async def test_calls_that_wait_for_nothing_are_refused_in_another_thread() -> None:
    async with gated_scheduler() as (sched, graph, gate):
        evaluation = await sched.graph_compute_async(graph, batch())
        await eventually(gate.entered.is_set)
        await without_a_loop(evaluation.cancel)
        await without_a_loop(lambda: evaluation.events)
        await without_a_loop(lambda: sched.set_tensor_backend(graph, graph.outputs[0], "cpu:0"))
        await without_a_loop(lambda: sched.forget(graph))
        await without_a_loop(sched.reset)
        assert await asyncio.to_thread(lambda: sched.statistics().in_flight) == 1  # reading is fine
        assert sched.get_tensor_backend(graph, graph.outputs[0]) is sched.backends[1]
        gate.open.set()
        assert_close(await evaluation, oracle(gate.fn, mlp_params(2), batch()))
        assert not await asyncio.to_thread(evaluation.cancel)  # it is done


async def test_an_evaluation_by_hand_is_not_cancelled_from_another_thread() -> None:
    gate = threading.Event()
    async with ap.open_backend("cpu:0") as backend:
        backend.queue.post(lambda: gate.wait(30) and None)
        evaluation = backend.graph_compute_async(ap.trace(mlp, mlp_params(1), batch()), batch())
        await without_a_loop(evaluation.cancel)
        gate.set()
        assert_close(await evaluation, oracle(mlp, mlp_params(1), batch()))


def test_between_two_runs_of_its_loop_it_may_be_used_in_place() -> None:
    """The loop does not run: there is nobody whom it could disturb."""
    with asyncio.Runner() as runner:
        sched = ap.Scheduler(DEVICES)
        graph = ap.trace(mlp, mlp_params(2), batch())
        runner.run(sched.graph_compute(graph, batch()))
        sched.set_tensor_backend(graph, graph.outputs[0], "cpu:0")
        evaluation = runner.run(sched.graph_compute_async(graph, batch()))
        evaluation.cancel()
        assert evaluation.done() and evaluation.event.done()
        runner.run(sched.aclose())


# No loop of asyncio ----------------------------------------------------------------------------------


def awaited_by_nothing(use: Callable[[], Awaitable[Any]]) -> None:
    """Begin to await something where no event loop runs."""
    use().__await__().send(None)


def test_where_no_loop_runs_it_says_so() -> None:
    sched, backend = ap.Scheduler(DEVICES), ap.open_backend("cpu:0")
    pipe = ap.Pipeline(mlp, mlp_params(2), devices=DEVICES)
    graph = ap.trace(mlp, mlp_params(2), batch())
    for use in (
        pipe.__aenter__,
        sched.__aenter__,
        lambda: sched.graph_compute(graph, batch()),
        lambda: ap.place(mlp_params(2), {"*": backend}),
        lambda: backend.graph_plan_create(graph),
        ap.Event().wait,
    ):
        with pytest.raises(ap.WrongLoopError, match=r"no event loop runs in this thread.*aiopipe\.run_sync"):
            awaited_by_nothing(use)
    for refused in (
        lambda: backend.graph_compute_async(graph, batch()),
        lambda: backend.event_record(ap.Event()),
        lambda: backend.queue.post(lambda: None),
    ):
        with pytest.raises(ap.WrongLoopError, match="no event loop runs in this thread"):
            refused()


def test_trio_is_refused() -> None:
    @asynccontextmanager
    async def refused() -> Any:
        with pytest.raises(ap.WrongLoopError, match="this is trio"):
            yield

    async def main() -> None:
        backend = ap.open_backend("cpu:0")
        graph = ap.trace(mlp, mlp_params(2), batch())
        async with refused(), ap.Pipeline(mlp, mlp_params(2), devices=DEVICES) as pipe:
            await pipe(batch())
        async with refused(), ap.Scheduler(DEVICES):
            pass
        async with refused():
            await ap.Scheduler(DEVICES).graph_compute(graph, batch())
        async with refused():
            await ap.place(mlp_params(2), {"*": backend})
        async with refused():
            await backend.graph_compute(graph, batch())
        async with refused():
            await ap.Event()
        async with refused():
            await ap.State(np.zeros(2)).snapshot()
            await ap.Event()

    anyio.run(main, backend="trio")


async def test_without_trio_running_it_does_not_matter_that_it_is_there() -> None:
    import trio  # noqa: F401

    async with ap.Pipeline(mlp, mlp_params(2), devices=DEVICES) as pipe:
        assert_close(await pipe(batch()), oracle(mlp, mlp_params(2), batch()))
