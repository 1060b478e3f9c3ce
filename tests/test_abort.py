"""Evaluations that a callback ends, or that end while a callback is at work: drained, and the slot comes back once."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.sim import Cluster, HostOp, fail, sleep
from aiopipe.graph_builder import GraphBuilder
from happens_before import HappensBefore
from models import assert_close, batch, mlp, mlp_params, oracle
from simgraphs import SPEC, TOTAL, array, assert_equal, chain, results_of, settled, step, unsplit

N_COPIES = [1, 2, 3, 4]


def stop_at(name: str) -> Callable[[ap.Tensor, bool], bool]:
    return lambda tensor, ask: tensor.name == name if ask else False


async def all_slots_are_there(sched: ap.Scheduler, graph: ap.Graph) -> None:
    """As many evaluations as ever are under way at once, and they are right."""
    sched.set_eval_callback(None)
    await sched.synchronize()
    assert sched.statistics().in_flight == 0
    runs = [await sched.graph_compute_async(graph, array(k)) for k in range(sched.n_copies)]
    assert sorted(run.copy_id for run in runs) == list(range(sched.n_copies))
    for k, run in enumerate(runs):
        assert_equal(await run, unsplit(graph, array(k)))
    await sched.synchronize()
    settled(sched)


# Aborting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_an_abort_ends_the_whole_evaluation(n_copies: int) -> None:  # D6, S25
    cluster = Cluster(4, compute=True, split_cost_s=1.0, record=True)
    graph = chain(4)
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, range(4))
        await sched.plan(graph)
        sched.set_eval_callback(stop_at("step#2"))
        cluster.log.clear()
        run = await sched.graph_compute_async(graph, array(1))
        with pytest.raises(ap.EvaluationAborted) as caught:
            await run
        assert str(caught.value) == (
            "evaluation 0 of 'chain' was aborted: the eval callback returned False for 'step#2' int64[4], "
            "made by 'step' at model.py:12 (stage 2) in split 2 on 'sim:2'"
        )
        assert run.done() and not run.cancelled() and run.event.exception() is caught.value
        await sched.synchronize()
        launched = [record.backend.name for record in cluster.log if record.kind == "launch"]
        assert launched == ["sim:0", "sim:1", "sim:2"]  # no later split
        statistics = sched.statistics()
        assert (statistics.aborted, statistics.failed, statistics.cancelled, statistics.succeeded) == (1, 0, 0, 0)
        await all_slots_are_there(sched, graph)


async def test_an_abort_in_the_middle_of_a_split() -> None:  # D6
    cluster = Cluster(1, compute=True, record=True)
    graph = chain(4)
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_eval_callback(stop_at("step#1"))
        with pytest.raises(ap.EvaluationAborted, match="'step#1'"):
            await sched.graph_compute(graph, array())
        await sched.synchronize()
        assert [[node.index for node in r.program.nodes] for r in cluster.log if r.program] == [[0, 1]]
        await all_slots_are_there(sched, graph)


@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_the_slot_comes_back_when_the_devices_are_done(n_copies: int) -> None:  # D7
    """The first split takes 100 s and nobody wants it; the second, beside it, ends after one second and aborts."""
    b = GraphBuilder("beside")
    x = b.input("x", *SPEC)
    (slow,) = b.node("sleep", [x], [SPEC], fn=sleep(100.0))
    (quick,) = b.node("sleep", [x], [SPEC], fn=sleep(1.0))
    graph = b.build([slow, quick])
    cluster = Cluster(2, compute=True)
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, range(2))
        await sched.plan(graph)
        sched.set_eval_callback(lambda tensor, ask: tensor.id == quick if ask else False)
        run = await sched.graph_compute_async(graph, array())
        with pytest.raises(ap.EvaluationAborted):
            await run
        assert cluster.clock.now == 1.0 and sched.statistics().in_flight == 1
        sched.set_eval_callback(None)
        for _ in range(n_copies - 1):
            await sched.graph_compute_async(graph, array())
        assert cluster.clock.now == 1.0
        again = await sched.graph_compute_async(graph, array())  # takes the slot of the first
        assert again.copy_id == run.copy_id == 0 and cluster.clock.now == 100.0
        assert_equal(await again, (array(), array()))
        settled(sched)


async def test_the_slot_waits_for_copies_that_nothing_will_read(happens_before: HappensBefore) -> None:  # D7
    """Both inputs are brought over before the first piece; the second takes long, and what reads it never runs."""
    b = GraphBuilder("two inputs")
    x, y = b.input("x", *SPEC), b.input("y", *SPEC)
    (first,) = b.node("step", [x], [SPEC], fn=step(1))
    (second,) = b.node("total", [first, y], [SPEC], fn=TOTAL)
    graph = b.build([second])
    cluster = Cluster(1, compute=True, split_cost_s=1.0, host_bytes_per_s=4.0)  # eight seconds for each
    happens_before.watch(*cluster.backends)
    async with ap.Scheduler(cluster.backends, n_copies=1) as sched:
        await sched.plan(graph)
        sched.set_eval_callback(stop_at("step#0"))
        run = await sched.graph_compute_async(graph, array(1), array(2))
        with pytest.raises(ap.EvaluationAborted):
            await run
        assert cluster.clock.now == 9.0 and sched.statistics().in_flight == 1
        sched.set_eval_callback(None)
        assert_equal(await sched.graph_compute(graph, array(3), array(4)), unsplit(graph, array(3), array(4)))
        assert cluster.clock.now == 16.0 + 16.0 + 1.0
        settled(sched)


async def test_a_piece_that_ends_last_is_waited_for(happens_before: HappensBefore) -> None:
    """The first node is seen, so its split runs in two pieces; what reads the first ends before the second."""
    b = GraphBuilder("two pieces")
    x = b.input("x", *SPEC)
    (seen,) = b.node("step", [x], [SPEC], fn=HostOp(lambda x: x + 1, cost_s=1.0))
    (slow,) = b.node("slow", [x, seen], [SPEC], fn=HostOp(lambda x, y: x * y, cost_s=50.0))
    (elsewhere,) = b.node("step", [seen], [SPEC], fn=HostOp(lambda x: x + 2, cost_s=1.0))
    graph = b.build([slow, elsewhere])
    cluster = Cluster(2, compute=True)
    happens_before.watch(*cluster.backends)
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 0, 1])
        plan = await sched.plan(graph)
        assert [split.nodes for split in plan.splits] == [(0, 1), (2,)]
        sched.set_eval_callback(lambda tensor, ask: not ask or tensor.id == seen)
        assert_equal(await sched.graph_compute(graph, array(1)), unsplit(graph, array(1)))
        assert cluster.clock.now == 51.0


@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_others_never_notice(n_copies: int) -> None:  # D7
    cluster = Cluster(3, compute=True, split_cost_s=1.0)
    graph = chain(6)
    wanted = unsplit(chain(3), array(4))  # the value of step#2 in evaluation 4

    def callback(tensor: ap.Tensor, ask: bool) -> bool:
        if ask:
            return tensor.name == "step#2"
        return not np.array_equal(np.asarray(tensor.buffers[0].value), wanted)

    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, [0, 0, 1, 1, 2, 2])
        sched.set_eval_callback(callback)
        runs = [await sched.graph_compute_async(graph, array(k)) for k in range(10)]
        for k, run in enumerate(runs):
            if k == 4:
                with pytest.raises(ap.EvaluationAborted, match="evaluation 4 "):
                    await run
                with pytest.raises(ap.EvaluationAborted):
                    await run  # and again
            else:
                assert_equal(await run, unsplit(graph, array(k)))
        assert (sched.statistics().aborted, sched.statistics().succeeded) == (1, 9)
        await all_slots_are_there(sched, graph)


@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_aborting_on_cpu_devices(n_copies: int) -> None:  # D6, S25
    params = mlp_params(4)
    stops = True

    async def callback(tensor: ap.Tensor, ask: bool) -> bool:
        await asyncio.sleep(0)
        return ask or not (stops and tensor.name == "tanh#5")

    async with ap.Scheduler([f"cpu:{i}" for i in range(4)], n_copies=n_copies) as sched:
        weights = await ap.place(params, {str(i): sched.backends[i] for i in range(4)})
        graph = ap.trace(mlp, weights, batch())
        sched.set_eval_callback(callback)
        for _ in range(3):
            with pytest.raises(ap.EvaluationAborted, match=r"'tanh#5' .* in split 2 on 'cpu:2'"):
                await sched.graph_compute(graph, batch())
        stops = False
        for seed, y in enumerate(await results_of(sched, graph, [(batch(seed=s),) for s in range(8)])):
            assert_close(y, oracle(mlp, params, batch(seed=seed)))
        await sched.synchronize()
        settled(sched)
        assert sched.statistics().aborted == 3


async def test_a_stream_ends_with_the_abort() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2)
    async with ap.Scheduler(cluster.backends, n_copies=3) as sched:
        sched.set_cut(graph, range(2))
        seen = 0

        def callback(tensor: ap.Tensor, ask: bool) -> bool:
            nonlocal seen
            if ask:
                return tensor.name == "step#1"
            seen += 1
            return seen != 3

        sched.set_eval_callback(callback)
        results = []
        with pytest.raises(ap.EvaluationAborted):
            async for y in sched.stream(graph, (array(k) for k in range(10))):
                results.append(y)
        assert len(results) == 2
        await all_slots_are_there(sched, graph)


async def test_an_abort_that_nobody_awaits_reaches_the_loops_handler() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    graph = chain(1)
    async with ap.Scheduler(Cluster(1, compute=True).backends) as sched:
        sched.set_eval_callback(stop_at("step#0"))
        run = await sched.graph_compute_async(graph, array())
        await sched.synchronize()
        assert run.done()
        del run
        gc.collect()
    assert [type(context["exception"]) for context in told] == [ap.EvaluationAborted]


async def broken(tensor: ap.Tensor, ask: bool) -> bool:
    raise ValueError("broken")


@pytest.mark.parametrize("callback", [stop_at("tanh#1"), broken, lambda tensor, ask: True])
async def test_an_observed_evaluation_lets_go_of_its_arrays(callback: Any) -> None:
    """At once, however it ends, and even if its error is kept: no cycle waits for the garbage collector."""
    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = ap.trace(mlp, await ap.place(params, {"*": sched.backends[0]}), batch())
        for _ in range(4):  # every slot has its staging buffers, which are arrays too
            await sched.graph_compute(graph, batch())
        sched.set_eval_callback(callback)
        before = len(jax.live_arrays())
        errors = []
        gc.disable()
        try:
            for _ in range(4):
                (error,) = await asyncio.gather(sched.graph_compute(graph, batch()), return_exceptions=True)
                errors.append(error if isinstance(error, ap.AiopipeError) else None)
                del error
                await sched.synchronize()
            # A thread that has just reported may hold a value for a moment longer.
            await eventually(lambda: len(jax.live_arrays()) <= before + 1)  # a backend keeps its newest marker
        finally:
            gc.enable()
        assert len(errors) == 4


# Cancelling --------------------------------------------------------------------------------------


class Paused:
    """An async callback that stays in one call until the test lets it go on."""

    def __init__(self, name: str, ask: bool) -> None:
        self.at = (name, ask)
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = False

    async def __call__(self, tensor: ap.Tensor, ask: bool) -> bool:
        if (tensor.name, ask) == self.at:
            self.entered.set()
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        return True


@pytest.mark.parametrize("how", ["evaluation", "task"])
@pytest.mark.parametrize("ask", [True, False])
@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_cancelling_while_the_callback_waits(n_copies: int, ask: bool, how: str) -> None:
    cluster = Cluster(3, compute=True, split_cost_s=1.0, record=True)
    graph = chain(3)
    callback = Paused("step#1", ask)
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, range(3))
        await sched.plan(graph)
        cluster.log.clear()
        sched.set_eval_callback(callback)
        run = await sched.graph_compute_async(graph, array())
        task = asyncio.ensure_future(asyncio.wait_for(run, None))
        await callback.entered.wait()
        if how == "evaluation":
            assert run.cancel()
        else:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.cancelled() and not run.cancel()
        await sched.synchronize()
        assert callback.cancelled
        launched = [record.backend.name for record in cluster.log if record.kind == "launch"]
        assert launched == (["sim:0"] if ask else ["sim:0", "sim:1"])
        assert sched.statistics().cancelled == 1
        await all_slots_are_there(sched, graph)


async def test_a_callback_that_does_not_let_itself_be_cancelled() -> None:
    entered = asyncio.Event()
    calls: list[str] = []

    async def callback(tensor: ap.Tensor, ask: bool) -> bool:
        calls.append(tensor.name)
        entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return True

    graph = chain(3)
    async with ap.Scheduler(Cluster(1, compute=True).backends, n_copies=1) as sched:
        sched.set_eval_callback(callback)
        run = await sched.graph_compute_async(graph, array())
        await entered.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await sched.synchronize()
        assert calls == ["step#0"]
        await all_slots_are_there(sched, graph)


@pytest.mark.parametrize("kind", ["cancel", "raise"])
@pytest.mark.parametrize("ask", [True, False])
async def test_a_callback_that_cancels(ask: bool, kind: str) -> None:
    """By the evaluation's own method, or by raising what a cancelled task raises."""
    graph = chain(3)
    calls = 0

    def callback(tensor: ap.Tensor, asked: bool) -> bool:
        nonlocal calls
        calls += 1
        if (tensor.name, asked) == ("step#1", ask):
            if kind == "raise":
                raise asyncio.CancelledError
            assert run.cancel()
        return True

    async with ap.Scheduler(Cluster(1, compute=True).backends) as sched:
        await sched.plan(graph)
        sched.set_eval_callback(callback)
        run = await sched.graph_compute_async(graph, array())
        with pytest.raises(asyncio.CancelledError):
            await run
        await sched.synchronize()
        assert calls == (3 if ask else 4)
        assert sched.statistics().cancelled == 1
        await all_slots_are_there(sched, graph)


async def eventually(condition: Callable[[], bool]) -> None:
    """Poll: what is waited for happens on another thread, which cannot set an `asyncio.Event`."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_cancelling_while_a_piece_runs_keeps_the_slot_until_it_has_ended() -> None:  # D7
    cluster = Cluster(1, compute=True, node_cost_s=10.0)
    graph = chain(3)
    async with ap.Scheduler(cluster.backends, n_copies=1) as sched:
        sched.set_eval_callback(lambda tensor, ask: tensor.name == "step#1")
        await sched.graph_compute(graph, array(0))  # from now on every piece is there
        began = cluster.clock.now
        run = await sched.graph_compute_async(graph, array(1))
        await cluster.clock.sleep(1.0)  # the first two nodes are launched, and take 20 s
        assert run.cancel()
        sched.set_eval_callback(None)
        again = await sched.graph_compute_async(graph, array(2))
        assert cluster.clock.now == began + 20.0
        assert_equal(await again, unsplit(graph, array(2)))
        settled(sched)


async def test_cancelling_while_a_device_works_keeps_the_slot_until_it_is_done() -> None:  # D7
    """One evaluation holds up the lane, and another waits for it there: neither launches anything more."""
    entered, go_on = threading.Event(), threading.Event()
    n_held = 0

    def hold(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        nonlocal n_held
        n_held += 1
        entered.set()
        assert go_on.wait(30)
        return np.asarray(x)

    def fn(w: list[Any], x: Any) -> Any:
        x = jnp.tanh(x @ w[0])
        x = jax.pure_callback(hold, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jnp.tanh(x @ w[1])

    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=2) as sched:
        weights = await ap.place(params, {"0": sched.backends[0], "1": sched.backends[1]})
        graph = ap.trace(fn, weights, batch())
        await sched.plan(graph)
        sched.set_eval_callback(lambda tensor, ask: tensor.name.startswith("pure_callback"))
        runs = [await sched.graph_compute_async(graph, batch()) for _ in range(2)]
        try:
            await eventually(entered.is_set)
            for _ in range(20):
                await asyncio.sleep(0.001)
            for run in runs:
                assert run.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await run
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert sched.statistics().in_flight == 2
        finally:
            go_on.set()
        await sched.synchronize()
        assert sched.statistics().in_flight == 0 and n_held == 1
        sched.set_eval_callback(lambda tensor, ask: True)
        assert_close(await sched.graph_compute(graph, batch()), oracle(fn, params, batch()))
        settled(sched)


# Closing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancel", [True, False])
async def test_closing_while_the_callback_waits(cancel: bool) -> None:
    graph = chain(2)
    callback = Paused("step#0", False)
    sched = ap.Scheduler(Cluster(1, compute=True).backends)
    async with sched:
        sched.set_eval_callback(callback)
        run = await sched.graph_compute_async(graph, array())
        await callback.entered.wait()
        closing = asyncio.ensure_future(sched.aclose(cancel=cancel))
        if not cancel:
            await asyncio.sleep(0)
            assert not run.done()
            callback.go_on.set()
        await closing
    assert run.done() and run.cancelled() == cancel == callback.cancelled
    settled(sched)


async def test_closing_gives_up_on_a_callback_that_never_answers() -> None:
    params = mlp_params(2)
    sched = ap.Scheduler(["cpu:0", "cpu:1"])
    async with sched:
        graph = ap.trace(mlp, await ap.place(params, {"*": sched.backends[0]}), batch())
        callback = Paused("tanh#1", False)
        sched.set_eval_callback(callback)
        run = await sched.graph_compute_async(graph, batch())
        await callback.entered.wait()
        await sched.aclose(timeout_s=0.01)
        assert run.cancelled() and callback.cancelled


# All at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_copies", N_COPIES)
@pytest.mark.parametrize("seed", range(6))
async def test_everything_at_random(seed: int, n_copies: int) -> None:  # S26
    """Observed or not, kept, aborted, cancelled, failed: each caller gets its own, and no slot is lost."""
    rng = random.Random(seed)
    cluster = Cluster(3, compute=True, split_cost_s=1.0, latency_s=0.25)
    graph = chain([step(0), step(1), fail("broken", launches=set(range(0, 1000, 7))), step(3), step(4), step(5)])
    # Without the op that fails now and then, which else returns its operand.
    want = chain([step(0), step(1), step(3), step(4), step(5)])
    ends: dict[str, int] = {}

    async def watch(tensor: ap.Tensor, ask: bool) -> bool:
        await cluster.clock.sleep(rng.choice([0.0, 0.0, 0.5]))
        how = rng.random()
        if how < 0.02:
            raise KeyError("the callback's own")
        return how < 0.5 if ask else how < 0.9

    def quick(tensor: ap.Tensor, ask: bool) -> bool:
        return rng.random() < (0.3 if ask else 0.95)

    callbacks: list[Callable[[ap.Tensor, bool], bool | Awaitable[bool]] | None] = [None, watch, quick]
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, [0, 0, 1, 1, 2, 2])

        async def client(k: int) -> str:
            await cluster.clock.sleep(rng.uniform(0.0, 200.0))
            sched.set_eval_callback(rng.choice(callbacks))
            run = await sched.graph_compute_async(graph, array(k))
            if rng.random() < 0.2:
                await cluster.clock.sleep(rng.uniform(0.0, 8.0))
                run.cancel()
            try:
                result = await run
            except asyncio.CancelledError:
                assert run.cancelled()
                return "cancelled"
            except ap.EvaluationAborted:
                return "aborted"
            except ap.EvaluationError as error:
                assert "broken" in str(error) or isinstance(error.__cause__, KeyError)
                return "failed"
            assert_equal(result, unsplit(want, array(k)))
            return "succeeded"

        for end in await asyncio.gather(*(client(k) for k in range(80))):
            ends[end] = ends.get(end, 0) + 1
        await sched.synchronize()
        settled(sched)
        assert len(ends) == 4 and {end: getattr(sched.statistics(), end) for end in ends} == ends
        sched.set_eval_callback(None)
        began = cluster.clock.now
        runs = [await sched.graph_compute_async(graph, array(k)) for k in range(n_copies)]
        assert cluster.clock.now == began and sorted(run.copy_id for run in runs) == list(range(n_copies))
        await asyncio.wait([asyncio.ensure_future(asyncio.wait_for(run, None)) for run in runs])
