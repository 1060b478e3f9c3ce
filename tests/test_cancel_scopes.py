"""Cancellation as it really comes: time limits, task groups, and scopes of anyio, which cancel again and again.

A cancelled scope of anyio cancels at every ``await`` until it is left, so each clean-up meets it several times.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import jax
import numpy as np
import pytest

import aiopipe as ap
from gates import Gate, eventually, gated_scheduler
from loops import KINDS, run
from models import assert_close, batch, mlp, mlp_params, oracle

Parts = tuple[ap.Scheduler, ap.Graph, Gate]
DEVICES = ["cpu:0", "cpu:1"]


@pytest.fixture
async def gated() -> AsyncIterator[Parts]:
    async with gated_scheduler() as parts:
        yield parts


async def is_whole(parts: Parts) -> None:
    """Every slot has come back, and the scheduler goes on."""
    sched, graph, gate = parts
    gate.open.set()
    await sched.synchronize()
    statistics = sched.statistics()
    assert (statistics.in_flight, statistics.waiting) == (0, 0)
    assert_close(await sched.graph_compute(graph, batch()), oracle(gate.fn, mlp_params(2), batch()))


async def fill(parts: Parts) -> list[ap.Evaluation]:
    """As many evaluations as there are slots, the first one in its gate."""
    sched, graph, gate = parts
    runs = [await sched.graph_compute_async(graph, batch()) for _ in range(sched.n_copies)]
    await eventually(gate.entered.is_set)
    return runs


# Time limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["asyncio", "move_on_after", "fail_after", "wait_for"])
@pytest.mark.parametrize("waiting_for", ["admission", "result", "event", "synchronize"])
async def test_time_limits(gated: Parts, limit: str, waiting_for: str) -> None:
    sched, graph, _ = gated
    runs = await fill(gated)

    async def wait() -> None:
        if waiting_for == "admission":
            await sched.graph_compute_async(graph, batch())
        elif waiting_for == "result":
            await runs[0]
        elif waiting_for == "event":
            await runs[0].event
        else:
            await sched.synchronize()

    if limit == "asyncio":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await wait()
    elif limit == "wait_for":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.01)
    elif limit == "fail_after":
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.01):
                await wait()
    else:
        with anyio.move_on_after(0.01) as scope:
            await wait()
        assert scope.cancelled_caught
    assert sched.statistics().waiting == 0
    assert runs[0].cancelled() == (waiting_for == "result")  # the last one who awaited it has gone
    assert not runs[1].done()
    await is_whole(gated)


async def test_a_limit_that_is_over_before_anything_began(gated: Parts) -> None:
    sched, graph, gate = gated
    gate.open.set()
    with anyio.move_on_after(-1) as scope:
        await sched.graph_compute(graph, batch())
        pytest.fail("it should not have come so far")
    assert scope.cancelled_caught
    await is_whole(gated)


async def test_an_expired_limit_while_a_new_shape_is_planned() -> None:
    """Others that want the same plan still get it."""
    async with ap.Pipeline(mlp, mlp_params(4), devices=DEVICES) as pipe:
        async with anyio.create_task_group() as group:
            other: list[Any] = []

            async def wants_the_same() -> None:
                other.append(await pipe(batch(5)))

            with anyio.move_on_after(0) as scope:
                group.start_soon(wants_the_same)
                await pipe(batch(5))
            assert scope.cancelled_caught
        assert_close(other[0], oracle(mlp, mlp_params(4), batch(5)))
        assert pipe.statistics().planned == 1


async def test_shielded_work_is_finished(gated: Parts) -> None:
    sched, graph, gate = gated
    results = []
    with anyio.CancelScope() as scope:
        run = await sched.graph_compute_async(graph, batch())
        await eventually(gate.entered.is_set)
        scope.cancel()
        asyncio.get_running_loop().call_later(0.01, gate.open.set)
        with anyio.CancelScope(shield=True):
            results.append(await run)
        await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert_close(results[0], oracle(gate.fn, mlp_params(2), batch()))
    await is_whole(gated)


# Task groups -----------------------------------------------------------------------------------------


class Wrong(Exception):
    pass


@pytest.mark.parametrize("kind", ["asyncio", "anyio"])
async def test_a_failing_evaluation_cancels_its_siblings(kind: str) -> None:
    """The siblings' slots come back, and the evaluations of other tasks go on."""
    gate = Gate()

    def fails(params: list[Any], x: Any) -> Any:
        def boom(x: np.ndarray) -> np.ndarray:
            raise Wrong

        return mlp(params, jax.pure_callback(boom, jax.ShapeDtypeStruct(x.shape, x.dtype), x))

    async with ap.Scheduler(["cpu:0", "cpu:1", "cpu:2"], n_copies=4) as sched:
        params = mlp_params(2)
        weights = await ap.place(params, {"0": sched.backends[0], "1": sched.backends[1]})
        elsewhere = await ap.place(params, {"*": sched.backends[2]})
        slow, bad = ap.trace(gate.fn, weights, batch()), ap.trace(fails, elsewhere, batch())
        await sched.plan(bad)
        outsider = await sched.graph_compute_async(slow, batch(seed=1))
        inside: list[ap.Evaluation] = []

        async def sibling() -> None:
            run = await sched.graph_compute_async(slow, batch())
            inside.append(run)
            await run

        async def failing() -> None:
            await eventually(lambda: len(inside) == 2)
            await sched.graph_compute(bad, batch())

        with pytest.raises(ExceptionGroup) as caught:
            if kind == "asyncio":
                async with asyncio.TaskGroup() as tasks:
                    for work in (sibling(), sibling(), failing()):
                        tasks.create_task(work)
            else:
                async with anyio.create_task_group() as group:
                    for each in (sibling, sibling, failing):
                        group.start_soon(each)
        (error,) = caught.value.exceptions
        assert isinstance(error, ap.EvaluationError)
        assert all(run.cancelled() for run in inside) and not outsider.done()
        gate.open.set()
        assert_close(await outsider, oracle(gate.fn, params, batch(seed=1)))
        await is_whole((sched, slow, gate))


async def test_a_task_group_around_many_evaluations_of_which_one_gives_up(gated: Parts) -> None:
    """Whoever waits for admission, too, is gone when the group has been left."""
    sched, graph, _ = gated

    async def work() -> None:
        await sched.graph_compute(graph, batch())

    with pytest.raises(ExceptionGroup):
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(work)
            await eventually(lambda: sched.statistics().waiting == 8)
            raise Wrong
    statistics = sched.statistics()
    assert (statistics.waiting, statistics.cancelled) == (0, 10)
    await is_whole(gated)


# Closing ---------------------------------------------------------------------------------------------


async def opened() -> Parts:
    gate, sched = Gate(), ap.Scheduler(DEVICES, n_copies=2)
    weights = await ap.place(mlp_params(2), {"0": sched.backends[0], "1": sched.backends[1]})
    return sched, ap.trace(gate.fn, weights, batch()), gate


def ours() -> list[str]:
    """The threads that serve a queue; not those that end with what they were begun for."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("aiopipe-") and name != "aiopipe-close"]


async def open_later(gate: Gate, n_passes: int) -> None:
    """Open a gate when the loop has come round so many times, however fast it spins."""
    for _ in range(n_passes):
        await asyncio.sleep(0)
    gate.open.set()


@pytest.mark.parametrize("how", ["the block is left", "aclose is awaited"])
@pytest.mark.parametrize("kind", KINDS)
def test_closing_in_a_cancelled_scope_ends_everything(kind: str, how: str) -> None:
    async def main() -> None:
        parts = sched, _, gate = await opened()
        with anyio.CancelScope() as scope:
            if how == "the block is left":
                async with sched:
                    runs = await fill(parts)
                    opener = asyncio.create_task(open_later(gate, 50))
                    scope.cancel()
                    await anyio.sleep_forever()
            else:
                runs = await fill(parts)
                opener = asyncio.create_task(open_later(gate, 50))
                scope.cancel()
                await sched.aclose()
        assert scope.cancelled_caught
        assert all(run.cancelled() for run in runs)
        assert not ours(), "the threads have ended when the scope has been left"
        await opener

    run(kind, main())


async def test_a_scope_that_cancels_again_and_again_is_heard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the loop would spin for as long as closing takes."""
    parts = sched, _, gate = await opened()
    runs = await fill(parts)
    heard = []
    cancel_all = sched._runner.cancel_all
    monkeypatch.setattr(sched._runner, "cancel_all", lambda: (heard.append(1), cancel_all()))
    opener = asyncio.create_task(open_later(gate, 500))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await sched.aclose()
    await opener
    assert all(run.cancelled() for run in runs)
    assert len(heard) == 2  # and once by closing itself


async def test_closing_cancelled_twice_by_hand_still_ends_everything() -> None:
    parts = sched, _, gate = await opened()
    runs = await fill(parts)
    closing = asyncio.create_task(sched.aclose())
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
    await asyncio.sleep(0)
    assert not closing.done() and all(run.cancelled() for run in runs)
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not ours()


async def test_a_backend_closed_in_a_cancelled_scope_ends_its_threads() -> None:
    gate = threading.Event()
    with anyio.CancelScope() as scope:
        async with ap.open_backend("cpu:0") as backend:
            posted = backend.queue.post(lambda: gate.wait(30) and None)
            scope.cancel()
            await posted
    assert scope.cancelled_caught and backend.closed
    assert ours()
    gate.set()  # what runs cannot be interrupted; the threads end when it has
    await eventually(lambda: not ours())


# Streams ---------------------------------------------------------------------------------------------


class Source:
    """An async generator that tells how it ended."""

    def __init__(self) -> None:
        self.n_given = 0
        self.closed = False

    async def batches(self) -> AsyncIterator[np.ndarray]:
        try:
            while True:
                yield batch(seed=self.n_given)
                self.n_given += 1
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0.01)  # takes its time
            self.closed = True


@pytest.mark.parametrize("limit", ["asyncio", "anyio"])
@pytest.mark.parametrize("inside", ["stream", "consumer"])
async def test_a_stream_in_a_scope_that_is_cancelled_is_taken_down(gated: Parts, limit: str, inside: str) -> None:
    """When the scope has been left: the source is closed, nothing is submitted any more, the slots come back."""
    sched, graph, gate = gated
    source, n_results = Source(), 0
    if inside == "consumer":
        gate.open.set()

    async def consume() -> None:
        nonlocal n_results
        async for _ in sched.stream(graph, source.batches()):
            n_results += 1
            await anyio.sleep_forever()

    async def time_is_up(end: Any) -> None:
        await eventually(lambda: n_results if inside == "consumer" else gate.entered.is_set())
        end()

    if limit == "asyncio":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as time, asyncio.TaskGroup() as tasks:
                tasks.create_task(time_is_up(lambda: time.reschedule(0)))
                await consume()
    else:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(time_is_up, scope.cancel)
                await consume()
        assert scope.cancelled_caught
    if inside == "consumer":  # nobody holds the generator any more: asyncio closes it
        await eventually(lambda: source.closed)
    assert source.closed
    assert sched.statistics().waiting == 0
    given = source.n_given
    await is_whole(gated)
    assert source.n_given == given


async def test_a_source_that_cannot_end_holds_up_nobody_for_ever(
    gated: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiopipe.streaming.CLOSING_S", 0.01)
    sched, graph, _ = gated
    stuck = asyncio.Event()

    async def batches() -> AsyncIterator[np.ndarray]:
        try:
            while True:
                yield batch()
        finally:
            await stuck.wait()

    with pytest.warns(ResourceWarning, match="the source of a stream.*has not ended within 0.01 s"):
        with anyio.move_on_after(0.01) as scope:
            async for _ in sched.stream(graph, batches()):
                pass
    assert scope.cancelled_caught
    stuck.set()
    await is_whole(gated)


async def test_a_memory_stream_of_anyio_feeds_a_pipeline() -> None:
    send, receive = anyio.create_memory_object_stream[np.ndarray](2)
    async with ap.Pipeline(mlp, mlp_params(2), devices=DEVICES) as pipe, anyio.create_task_group() as group:

        async def produce() -> None:
            async with send:
                for s in range(8):
                    await send.send(batch(seed=s))

        group.start_soon(produce)
        async with receive:
            results = [y async for y in pipe.stream(receive)]
    for s, y in enumerate(results):
        assert_close(y, oracle(mlp, mlp_params(2), batch(seed=s)))
    assert len(results) == 8
