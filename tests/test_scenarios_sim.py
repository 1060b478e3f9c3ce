"""Scenarios on simulated devices: real schedules on virtual time, exact however fast the machine is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
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
    random_dag,
    results_of,
    step,
    unsplit,
)

import aiopipe as ap
from aiopipe.devices.sim import Cluster, HostOp, fail, sleep
from aiopipe.graph import Graph, GraphBuilder
from aiopipe.loader import Loaded

N_COPIES = [1, 2, 3, 4]
quick = pytest.mark.asyncio_debug(False)
"""Thousands of evaluations: asyncio's debug mode makes them ten times slower and finds nothing new."""


def settled(sched: ap.Scheduler) -> None:
    """Nobody holds a slot, nobody waits, and every evaluation ended exactly once."""
    s = sched.statistics()
    assert (s.in_flight, s.waiting) == (0, 0)
    assert s.succeeded + s.failed + s.cancelled == s.submitted
    sched._runner.state.validate()
    assert not sched._runner._runs


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


@pytest.mark.parametrize("n_copies", N_COPIES[1:])
async def test_a_slot_that_is_reused_too_early_would_be_noticed(  # S4: both detectors see the fault
    n_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = Loaded.capture
    monkeypatch.setattr(Loaded, "capture", lambda self, _, values, slots: capture(self, 0, values, slots))
    cluster, graph, sched = slow_input(n_copies)
    async with sched:
        plan = await sched.plan(graph)
        monkeypatch.setattr(sched._runner.state, "n_copies", n_copies)
        results = await rewriting(sched, graph)
        assert any(not np.array_equal(got[1], want[1]) for got, want in results)
    log = cluster.log
    assert len(log) == 12 * (plan.n_splits + 3)


async def test_the_checker_notices_a_slot_that_is_given_away_too_early() -> None:  # S4, S6
    cluster, graph, sched = slow_input(4)
    async with sched:
        plan = await sched.plan(graph)
        with captures_logged(cluster):
            await rewriting(sched, graph)
        # Had there been fewer slots, these same times would have been wrong.
        with pytest.raises(AssertionError, match="slots go round"):
            check_happens_before(cluster, plan, 3)
        cluster.log[:] = [e._replace(copy_id=i % 3) if (i := counted(e)) is not None else e for e in cluster.log]
        with pytest.raises(AssertionError, match="rewrote a slot in use"):
            check_happens_before(cluster, plan, 3)


async def test_a_split_without_inputs_keeps_its_place() -> None:  # S5
    """A is slow; B, on another device, reads nothing; C needs both. B ends last in every second evaluation."""
    for a_s, b_s in ((5.0, 1.0), (1.0, 5.0)):
        cluster = Cluster(3, compute=True, record=True)
        count = iter(range(1000))
        b = GraphBuilder("no inputs")
        x = b.input("x", *SPEC)
        (slow,) = b.node("slow", [x], [SPEC], fn=HostOp(lambda x: x + 1, cost_s=a_s))
        (alone,) = b.node("alone", [], [SPEC], fn=HostOp(lambda: array(next(count)), cost_s=b_s))
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
            first = [r for r in cluster.log if isinstance(r, tuple) and getattr(r, "kind", "") == "launch"][:3]
            by_name = {r.backend.name: r for r in first}
            assert by_name["sim:0"].start_s == by_name["sim:1"].start_s == 0.0  # side by side
            assert by_name["sim:2"].start_s == 5.0
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


@pytest.mark.parametrize("seed", range(40))
async def test_random_graphs_equal_the_unsplit_run(seed: int) -> None:  # S6
    rng = random.Random(seed)
    n_devices, n_copies = rng.randint(1, 5), rng.choice([1, 2, 3, 4, 8])
    graph = random_dag(rng, rng.randint(1, 60))
    cluster = Cluster(
        n_devices,
        compute=True,
        record=True,
        latency_s=rng.choice([0.0, 0.25, 2.0]),
        link_bytes_per_s=rng.choice([8.0, 64.0, 1e9]),
        host_bytes_per_s=rng.choice([8.0, 64.0, 1e9]),
    )
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, [rng.randrange(n_devices) for _ in graph.nodes])
        plan = await sched.plan(graph)
        cluster.log.clear()
        inputs = [[array(rng.randint(0, 99)) for _ in graph.inputs] for _ in range(2 * n_copies + 1)]
        with captures_logged(cluster):
            results = await results_of(sched, graph, inputs)
        for got, values in zip(results, inputs, strict=True):
            assert_equal(got, unsplit(graph, *values))
        assert check_happens_before(cluster, plan, n_copies) == len(inputs)
        settled(sched)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("n_devices", [2, 4, 8, 16, 32, 64])
async def test_devices_work_at_the_same_time(n_devices: int, balanced: bool) -> None:  # S7
    rng = random.Random(n_devices)
    costs = [1.0 if balanced else rng.uniform(0.2, 1.0) for _ in range(n_devices)]
    cluster = Cluster(n_devices, **by_device(costs))
    graph = chain(n_devices)
    async with ap.Scheduler(cluster.backends, n_copies=n_devices + 2, timeline=True) as sched:
        sched.set_cut(graph, range(n_devices))
        results = [y async for y in sched.stream(graph, (array() for _ in range(100)))]
        assert len(results) == 100
        assert cluster.clock.now <= 1.02 * lower_bound_s(costs, 100)
        busy = sched.statistics().busy_s
        for backend, cost in zip(cluster.backends, costs, strict=True):
            assert busy[backend.name] == pytest.approx(100 * cost)


async def test_copies_overlap_with_work() -> None:  # S7
    """Two devices of 1 s and links that take 0.9 s: they are under way while the devices work."""
    cluster = Cluster(2, split_cost_s=1.0, latency_s=0.9, host_bytes_per_s=1e9)
    graph = chain(2)
    async with ap.Scheduler(cluster.backends, n_copies=6) as sched:
        sched.set_cut(graph, range(2))
        async for _ in sched.stream(graph, (array() for _ in range(100))):
            pass
    fill = 2 * 0.9
    assert cluster.clock.now <= 1.02 * (lower_bound_s([1.0, 1.0], 100) + fill)


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


# Shapes and splits -------------------------------------------------------------------------------


async def test_many_inputs_of_one_split_and_of_the_graph() -> None:  # S9
    cluster = Cluster(9, compute=True, node_cost_s=1.0)
    b = GraphBuilder("wide")
    inputs = [b.input(f"x{i}", *SPEC) for i in range(40)]
    made = [b.node("step", [inputs[i % 40]], [SPEC], fn=step(i))[0] for i in range(64)]
    (total,) = b.node("total", made, [SPEC], fn=TOTAL)
    graph = b.build([total])
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [i % 8 for i in range(64)] + [8])
        plan = await sched.plan(graph)
        assert len(plan.splits[-1].copies) == 64 and len(plan.used_inputs) == 40
        values = [[array(100 * k + i) for i in range(40)] for k in range(6)]
        for got, given in zip(await results_of(sched, graph, values), values, strict=True):
            assert_equal(got, unsplit(graph, *given))


async def test_six_hundred_splits() -> None:  # S10
    cluster = Cluster(2, compute=True, node_cost_s=1.0)
    graph = chain(600)
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [i % 2 for i in range(600)])
        assert (await sched.plan(graph)).n_splits == 600
        values = [(array(k),) for k in range(5)]
        for got, given in zip(await results_of(sched, graph, values), values, strict=True):
            assert_equal(got, unsplit(graph, *given))


async def test_one_graph_and_two_schedulers_at_once() -> None:  # S14
    graph = random_dag(random.Random(14), 80)
    before = (graph.nodes, graph.tensors, [t.buffers for t in graph.tensors])
    clusters = [Cluster(n, compute=True, latency_s=0.5) for n in (2, 5)]
    rng = random.Random(1)
    async with ap.Scheduler(clusters[0].backends) as a, ap.Scheduler(clusters[1].backends) as b:
        for sched in (a, b):
            sched.set_cut(graph, [rng.randrange(len(sched.backends)) for _ in graph.nodes])
        values = [[array(k + i) for i in range(len(graph.inputs))] for k in range(20)]
        both = await asyncio.gather(*(results_of(s, graph, values) for s in (a, b)))
        assert (await a.plan(graph)).n_splits != (await b.plan(graph)).n_splits
    for results in both:
        for got, given in zip(results, values, strict=True):
            assert_equal(got, unsplit(graph, *given))
    assert before == (graph.nodes, graph.tensors, [t.buffers for t in graph.tensors])


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
                with pytest.raises(ap.EvaluationError, match=f"evaluation {k} .* split 2 on 'sim:2'.*out of paper") as e:
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
                assert run.cancel() != run.cancelled() or run.cancelled()
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
