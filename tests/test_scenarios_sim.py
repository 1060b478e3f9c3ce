"""Scenarios on simulated devices: real schedules on virtual time, exact however fast the machine is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.sim import Cluster, HostOp, Record, fail, sleep
from aiopipe.graph import Graph
from aiopipe.graph_builder import GraphBuilder
from aiopipe.sched.state import RunState
from happens_before import HappensBefore
from simgraphs import (
    SPEC,
    TOTAL,
    array,
    assert_equal,
    by_device,
    captures_logged,
    chain,
    check_happens_before,
    lower_bound_s,
    results_of,
    settled,
    step,
    unsplit,
)

N_COPIES = [1, 2, 3, 4]
quick = pytest.mark.asyncio_debug(False)
"""Thousands of evaluations: asyncio's debug mode makes them ten times slower and finds nothing new."""


# Rotation, capture, ordering ---------------------------------------------------------------------


def slow_input(n_copies: int) -> tuple[Cluster, Graph, ap.Scheduler]:
    """x goes to two devices; to the second on a link so slow that three more evaluations fit in between."""
    cluster = Cluster(2, compute=True, split_cost_s=1.0, record=True)
    cluster.link(None, 1, latency_s=3.5)
    b = GraphBuilder("late reader")
    x = b.input("x", *SPEC)
    (y,) = b.node("step", [x], [SPEC], fn=step(1))
    (z,) = b.node("total", [x, y], [SPEC], fn=TOTAL)
    graph = b.build([y, z])
    sched = ap.Scheduler(cluster.backends, n_copies=n_copies)
    sched.set_cut(graph, [0, 1])
    return cluster, graph, sched


async def rewriting(sched: ap.Scheduler, graph: Graph) -> list[tuple[Any, Any]]:
    """(got, want) of evaluations whose one input array is rewritten as soon as each is submitted."""
    x = array()
    wanted, evaluations = [], []
    for k in range(12):
        x[:] = array(k)
        wanted.append(unsplit(graph, x))
        evaluations.append(await sched.graph_compute_async(graph, x))
        x[:] = -1
    return [(await e, want) for e, want in zip(evaluations, wanted, strict=True)]


@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_a_slow_copy_reads_its_own_evaluation(n_copies: int) -> None:  # S4
    cluster, graph, sched = slow_input(n_copies)
    async with sched:
        plan = await sched.plan(graph)
        with captures_logged(cluster):
            results = await rewriting(sched, graph)
        for got, want in results:
            assert_equal(got, want)
        assert check_happens_before(cluster, plan, n_copies) == len(results)
        settled(sched)


@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_giving_a_slot_away_too_early_would_be_noticed(  # S4, S6: the detectors see the fault that they are for
    n_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = RunState._admit

    def hasty(self: RunState, out: list[Any]) -> None:
        self._holders[self.cur_copy] = None
        admit(self, out)

    monkeypatch.setattr(RunState, "_admit", hasty)
    cluster, graph, sched = slow_input(n_copies)
    known = HappensBefore()
    known.watch(*cluster.backends)
    async with sched:
        plan = await sched.plan(graph)
        with captures_logged(cluster), known.watching():
            results = await rewriting(sched, graph)
        assert any(not np.array_equal(got[1], want[1]) for got, want in results)
        with pytest.raises(AssertionError, match="rewrote a slot in use"):
            check_happens_before(cluster, plan, n_copies)
        with pytest.raises(AssertionError, match=r"slot . was rewritten: .*the end of a copy to sim:1"):
            known.check()


def numbered(numbers: Iterator[int]) -> Any:
    return array(next(numbers))


async def test_a_split_without_inputs_keeps_its_place() -> None:  # S5
    """A is slow, or B, which reads nothing and is on another device; C needs both."""
    for a_s, b_s in ((5.0, 1.0), (1.0, 5.0)):
        cluster = Cluster(3, compute=True, record=True)
        b = GraphBuilder("no inputs")
        x = b.input("x", *SPEC)
        (slow,) = b.node("slow", [x], [SPEC], fn=HostOp(lambda x: x + 1, cost_s=a_s))
        (alone,) = b.node("alone", [], [SPEC], fn=HostOp(partial(numbered, count(0)), cost_s=b_s))
        (both,) = b.node("total", [slow, alone], [SPEC], fn=HostOp(lambda x, y: x - y, cost_s=1.0))
        graph = b.build([both, alone])
        async with ap.Scheduler(cluster.backends, n_copies=2) as sched:
            sched.set_cut(graph, [0, 1, 2])
            plan = await sched.plan(graph)
            with captures_logged(cluster):
                results = await results_of(sched, graph, [(array(100 + k),) for k in range(10)])
            for k, (difference, made) in enumerate(results):
                assert_equal(made, array(k))
                assert_equal(difference, array(100 + k) + 1 - array(k))
            assert check_happens_before(cluster, plan, 2) == 10
            launches = [r for r in cluster.log if isinstance(r, Record) and r.kind == "launch"]
            begins = {r.backend.name: r.start_s for r in reversed(launches)}
            assert begins == {"sim:0": 0.0, "sim:1": 0.0, "sim:2": 5.0}  # A and B side by side, C after both
            settled(sched)


async def test_a_split_that_nobody_waits_for_still_ends_before_its_slot_is_free() -> None:  # S5
    cluster = Cluster(2, compute=True)
    b = GraphBuilder("two ends")
    x = b.input("x", *SPEC)
    (short,) = b.node("short", [x], [SPEC], fn=HostOp(lambda x: x, cost_s=1.0))
    (long,) = b.node("long", [], [SPEC], fn=HostOp(lambda: array(7), cost_s=5.0))
    graph = b.build([short, long])
    async with ap.Scheduler(cluster.backends, n_copies=1) as sched:
        sched.set_cut(graph, [0, 1])
        for k in range(3):
            assert_equal(await sched.graph_compute(graph, array(k)), (array(k), array(7)))
            assert cluster.clock.now == 5.0 * (k + 1)


async def test_a_last_batch_of_another_shape_waits_for_nothing() -> None:  # S11
    """Another shape is another graph: it enters the devices behind the others, without a full stop between them."""
    cluster = Cluster(3, compute=True, split_cost_s=1.0)
    graphs = [chain(3, name="512"), chain(3, name="37")]
    async with ap.Scheduler(cluster.backends, n_copies=4) as sched:
        for graph in graphs:
            sched.set_cut(graph, range(3))
            await sched.plan(graph)
        runs = [(g, await sched.graph_compute_async(graphs[g], array(k))) for k, g in enumerate([0, 0, 0, 1, 0, 1, 1])]
        for k, (g, run) in enumerate(runs):
            assert_equal(await run, unsplit(graphs[g], array(k)))
        assert cluster.clock.now == lower_bound_s([1.0] * 3, 7)
        settled(sched)


async def test_an_op_that_accelerators_lack_runs_on_the_host() -> None:  # S35
    """As `eig`, which JAX has on CPUs alone: what comes before and behind it stays where its weights are."""
    cluster = Cluster(3, compute=True, record=True, unsupported_ops={0: {"eig"}, 1: {"eig"}})
    b = GraphBuilder("eig")
    x = b.input("x", *SPEC)
    weights = [b.weight(f"w{i}", *SPEC, source=array(i)) for i in range(2)]
    (x,) = b.node("mul", [x, weights[0]], [SPEC], fn=HostOp(lambda x, w: x * 2 + w, cost_s=1.0))
    (x,) = b.node("eig", [x], [SPEC], fn=HostOp(lambda x: x * 3, cost_s=1.0))
    (x,) = b.node("mul", [x, weights[1]], [SPEC], fn=HostOp(lambda x, w: x * 5 + w, cost_s=1.0))
    graph = b.build([x])
    async with ap.Scheduler(cluster.backends) as sched:
        for i in range(2):
            sched.set_tensor_backend(graph, graph.weights[i], f"sim:{i}")
        for k in range(3):
            assert_equal(await sched.graph_compute(graph, array(k)), ((array(k) * 2 + array(0)) * 3) * 5 + array(1))
        launches = [record.backend.name for record in cluster.log if record.kind == "launch"]
        assert launches == ["sim:0", "sim:2", "sim:1"] * 3
        settled(sched)


# Memory ------------------------------------------------------------------------------------------


@quick
async def test_a_fast_producer_waits() -> None:  # S19
    cluster = Cluster(2, split_cost_s=1.0)
    graph, n_copies, most = chain(2), 4, 0
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, range(2))
        for k in range(10_000):
            await sched.graph_compute_async(graph, array(k))
            most = max(most, len(sched._runner._runs))
            # Evaluation k takes the slot that k - n_copies gave back, two devices and that many turns later.
            assert cluster.clock.now == (0.0 if k < n_copies else k - n_copies + 2.0)
        assert most == n_copies
        await sched.synchronize()
        assert cluster.clock.now == 10_001.0
        settled(sched)


# Failing, cancelling, closing --------------------------------------------------------------------


@pytest.fixture
async def lazy_and_broken() -> AsyncIterator[tuple[Cluster, ap.Scheduler, Graph]]:
    """A graph that sleeps for three virtual seconds, then fails in its second run."""
    cluster = Cluster(2, compute=True, node_cost_s=0.5)
    graph = chain([sleep(3.0), fail("broken", OSError, launches={1})])
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, range(2))
        yield cluster, sched, graph


async def test_ops_that_sleep_and_fail(lazy_and_broken: tuple[Cluster, ap.Scheduler, Graph]) -> None:  # S8
    cluster, sched, graph = lazy_and_broken
    assert_equal(await sched.graph_compute(graph, array(1)), array(1))
    assert cluster.clock.now == 3.5
    with pytest.raises(ap.EvaluationError, match="broken"):
        await sched.graph_compute(graph, array(2))
    assert cluster.clock.now == 7.0
    assert_equal(await sched.graph_compute(graph, array(3)), array(3))


@pytest.mark.parametrize("compute", [True, False])
@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_a_failing_stage_fails_its_evaluation_alone(n_copies: int, compute: bool) -> None:  # S23, S24
    cluster = Cluster(4, compute=compute, split_cost_s=1.0)
    graph = chain([step(0), step(1), fail("out of paper", OSError, launches={3, 4}), step(3)])
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, range(4))
        runs = [await sched.graph_compute_async(graph, array(k)) for k in range(10)]
        for k, run in enumerate(runs):
            if k in (3, 4):
                with pytest.raises(ap.EvaluationError, match=f"evaluation {k} .* split 2 .*out of paper") as e:
                    await run
                assert (e.value.split, e.value.backend) == (2, "sim:2")
                assert (e.value.node, e.value.source) == ("step#2", "model.py:12 (stage 2)")
                assert type(e.value.__cause__) is OSError and str(e.value.__cause__) == "out of paper"
                assert run.event.exception() is e.value
            else:
                result = np.asarray(await run)
                if compute:
                    want = step(3)(step(1)(step(0)(array(k))[0])[0])[0]
                    assert_equal(result, want)
        assert cluster.clock.now == lower_bound_s([1.0] * 4, 10) or n_copies < 4  # no time is lost, either
        assert (sched.statistics().failed, sched.statistics().succeeded) == (2, 8)
        settled(sched)


async def test_the_first_failure_is_named_and_not_the_last() -> None:  # S24
    """Stages 1 and 2 both fail in every run: stage 2 only inherits."""
    cluster = Cluster(4, compute=True, split_cost_s=1.0)
    graph = chain([step(0), fail("cause"), fail("secondary"), step(3)])
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, range(4))
        for run in [await sched.graph_compute_async(graph, array(k)) for k in range(6)]:
            with pytest.raises(ap.EvaluationError, match="cause") as caught:
                await run
            assert caught.value.split == 1 and "stage 1" in caught.value.source


@pytest.mark.parametrize("n_copies", N_COPIES)
@pytest.mark.parametrize("seed", range(5))
async def test_cancelling_at_random(seed: int, n_copies: int) -> None:  # S26
    rng = random.Random(seed)
    cluster = Cluster(3, compute=True, split_cost_s=1.0, latency_s=0.25)
    graph = chain(3)
    n_cancelled = 0
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, range(3))

        async def client(k: int) -> None:
            nonlocal n_cancelled
            await cluster.clock.sleep(rng.uniform(0.0, 100.0))
            how = rng.choice(["keep", "keep", "evaluation", "task", "submit"])
            if how == "submit":
                submit = asyncio.ensure_future(sched.graph_compute(graph, array(k)))
                await cluster.clock.sleep(rng.uniform(0.0, 3.0))
                submit.cancel()
                await asyncio.wait([submit])
                if not submit.cancelled():
                    assert_equal(submit.result(), unsplit(graph, array(k)))
                return
            run = await sched.graph_compute_async(graph, array(k))
            if how == "evaluation":
                await cluster.clock.sleep(rng.uniform(0.0, 5.0))
                assert run.cancel() == run.cancelled()
            elif how == "task":
                waiting = asyncio.ensure_future(asyncio.wait_for(run, None))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
            if run.cancelled():
                n_cancelled += 1
                with pytest.raises(asyncio.CancelledError):
                    await run
            else:
                assert_equal(await run, unsplit(graph, array(k)))

        await asyncio.gather(*(client(k) for k in range(100)))
        await sched.synchronize()
        settled(sched)
        assert n_cancelled > 5
        # All slots are there: that many evaluations are admitted at once, and no more.
        began = cluster.clock.now
        runs = [await sched.graph_compute_async(graph, array(k)) for k in range(n_copies)]
        assert cluster.clock.now == began and sorted(run.copy_id for run in runs) == list(range(n_copies))
        for k, run in enumerate(runs):
            assert_equal(await run, unsplit(graph, array(k)))


@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_cancelling_right_after_submitting(n_copies: int) -> None:  # S27
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2)
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, range(2))
        for k in range(50):
            run = await sched.graph_compute_async(graph, array(k))
            assert run.cancel() and run.cancelled() and not run.cancel()
            assert sched.statistics().in_flight >= 1  # what was launched runs to its end
        await sched.synchronize()
        assert sched.statistics().cancelled == 50
        settled(sched)
        assert_equal(await sched.graph_compute(graph, array(1)), unsplit(graph, array(1)))


@pytest.mark.parametrize("steps", range(6))
async def test_cancelling_the_submitter_at_every_step(steps: int) -> None:  # S27
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2)
    async with ap.Scheduler(cluster.backends, n_copies=2) as sched:
        sched.set_cut(graph, range(2))
        await sched.plan(graph)
        tasks = [asyncio.ensure_future(sched.graph_compute(graph, array(k))) for k in range(8)]
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.wait(tasks)
        for k, task in enumerate(tasks):
            assert task.cancelled() == (k % 2 == 0)
            if not task.cancelled():
                assert_equal(task.result(), unsplit(graph, array(k)))
        await sched.synchronize()
        settled(sched)


@quick
@pytest.mark.parametrize("n_copies", [1, 4])
async def test_a_slow_last_stage_and_fast_submits(n_copies: int) -> None:  # S30
    cluster = Cluster(3, **by_device([0.001, 0.001, 1.0]))
    graph = chain(3)
    done = 0

    async def client(k: int) -> None:
        nonlocal done
        await (await sched.graph_compute_async(graph, array(k)))
        done += 1

    async with asyncio.timeout(50), ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, range(3))
        await asyncio.gather(*(client(k) for k in range(10_000)))
        settled(sched)
    assert done == 10_000


@pytest.mark.parametrize("same_graph", [True, False])
async def test_two_streams_interleaved(same_graph: bool) -> None:  # S31
    cluster = Cluster(3, compute=True, split_cost_s=1.0)
    graphs = [chain(3), chain(5)]
    if same_graph:
        graphs[1] = graphs[0]

    async def consume(which: int) -> int:
        def batches() -> Iterator[Any]:
            for k in range(200):
                yield array(1000 * which + k)

        n = 0
        async for y in sched.stream(graphs[which], batches()):
            assert_equal(y, unsplit(graphs[which], array(1000 * which + n)))
            n += 1
            if n % 7 == which:
                await asyncio.sleep(0)
        return n

    async with asyncio.timeout(50), ap.Scheduler(cluster.backends, n_copies=3) as sched:
        for graph in graphs:
            sched.set_cut(graph, [i % 3 for i in range(len(graph.nodes))])
        assert await asyncio.gather(consume(0), consume(1)) == [200, 200]
        settled(sched)
