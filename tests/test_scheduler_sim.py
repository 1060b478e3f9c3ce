"""The scheduler on simulated devices: what it computes and when, to the last bit and the last second."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

import aiopipe as ap
from aiopipe.backend import Executable
from aiopipe.devices.base import Program
from aiopipe.devices.sim import Cluster, HostOp, fail, sleep
from aiopipe.graph_builder import GraphBuilder
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
    settled,
    step,
    unsplit,
)

# Values ------------------------------------------------------------------------------------------


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


# Times -------------------------------------------------------------------------------------------


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


async def test_an_effect_alone_on_its_device_runs_and_is_waited_for() -> None:
    """Its split returns nothing that anybody reads."""
    seen: list[int] = []
    cluster = Cluster(2, compute=True)
    b = GraphBuilder("effect")
    x = b.input("x", *SPEC)
    (y,) = b.node("step", [x], [SPEC], fn=HostOp(lambda x: x + 1, cost_s=1.0))

    def see(x: Any) -> Any:
        seen.append(int(x[0]))
        return x

    b.node("see", [x], [SPEC], fn=HostOp(see, cost_s=5.0), has_effect=True)
    graph = b.build([y])
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 1])
        assert (await sched.plan(graph)).n_splits == 2
        assert_equal(await sched.graph_compute(graph, array(2)), array(2) + 1)
        assert seen == [2000] and cluster.clock.now == 5.0


async def test_weights_go_where_they_are_read_and_are_shared() -> None:
    cluster = Cluster(3, compute=True)
    b = GraphBuilder("weights")
    x = b.input("x", *SPEC)
    w = [b.weight(f"w{i}", *SPEC, source=array(i)) for i in range(3)]
    for i in range(6):
        (x,) = b.node("total", [x, w[i % 3]], [SPEC], fn=TOTAL)
    graph = b.build([x, w[1]])
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 0, 1, 1, 2, 2])
        got = await sched.graph_compute(graph, array(5))
        assert_equal(got, unsplit(graph, array(5)))
        # Each of the six pairs of a device and a weight that it reads is different.
        assert sched.statistics().copied_weights_nbytes == 6 * SPEC[2]


# Events and statistics ---------------------------------------------------------------------------


async def test_every_split_has_an_event_that_happens_when_it_ends() -> None:
    cluster = Cluster(4, split_cost_s=1.0)
    graph = chain(4)
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, range(4))
        run = await sched.graph_compute_async(graph, array())
        later = await sched.graph_compute_async(graph, array())
        times = []
        for event in run.events:
            assert not event.done()
            await event
            times.append(cluster.clock.now)
        assert times == [1.0, 2.0, 3.0, 4.0]
        assert run.done() and not later.done()
        await later.event
        assert cluster.clock.now == 5.0


async def test_events_that_are_asked_for_late_do_not_queue_behind_others() -> None:
    cluster = Cluster(2, split_cost_s=1.0)
    graph = chain(2)
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, range(2))
        runs = [await sched.graph_compute_async(graph, array()) for _ in range(4)]
        last = runs[3].events
        await cluster.clock.sleep(1.5)
        assert [event.done() for event in runs[0].events] == [True, False]
        assert [event.done() for event in last] == [False, False]
        await last[0]
        assert cluster.clock.now == 4.0


async def test_synchronize_waits_for_what_was_submitted_before() -> None:
    cluster = Cluster(2, split_cost_s=1.0)
    graph = chain(2)
    async with ap.Scheduler(cluster.backends, n_copies=4) as sched:
        sched.set_cut(graph, range(2))
        runs = [await sched.graph_compute_async(graph, array()) for _ in range(3)]
        waiting = asyncio.ensure_future(sched.synchronize())
        await asyncio.sleep(0)
        last = await sched.graph_compute_async(graph, array())
        await waiting
        assert cluster.clock.now == 4.0 and all(run.done() for run in runs) and not last.done()
        await last


async def test_synchronize_notices_evaluations_that_end_at_the_same_moment() -> None:
    """One is released while another one is waited for."""
    cluster = Cluster(4, split_cost_s=1.0)
    graphs = [chain(1) for _ in range(4)]
    async with ap.Scheduler(cluster.backends, n_copies=4) as sched:
        for i, graph in enumerate(graphs):
            sched.set_cut(graph, [i])
            await sched.plan(graph)
        for graph in graphs:
            await sched.graph_compute_async(graph, array())
        await sched.synchronize()
        assert cluster.clock.now == 1.0
        settled(sched)


async def test_one_copy_means_one_at_a_time() -> None:
    for n_copies, turns in ((1, 20), (2, 11), (4, 11)):
        cluster = Cluster(2, split_cost_s=1.0)
        graph = chain(2)
        async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
            sched.set_cut(graph, range(2))
            for run in [await sched.graph_compute_async(graph, array()) for _ in range(10)]:
                await run
        assert cluster.clock.now == turns


# Backends of others ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(3))
async def test_a_backend_that_returns_too_little_fails_the_evaluation(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(3, split_cost_s=1.0)
    graph = chain(3)
    backend = cluster.backends[stage]
    load = backend.load
    monkeypatch.setattr(backend, "load", lambda program: replace(load(program), call=lambda *args: ()))
    async with ap.Scheduler(cluster.backends, n_copies=2) as sched:
        sched.set_cut(graph, range(3))
        for _ in range(5):
            with pytest.raises(ap.EvaluationError, match=f"split {stage} on 'sim:{stage}'"):
                await sched.graph_compute(graph, array())
        await sched.synchronize()  # the splits before it still run
        settled(sched)


async def test_a_split_that_fails_is_noticed_though_another_one_uses_the_copy_that_it_brought() -> None:
    b = GraphBuilder("shared copy")
    x = b.input("x", *SPEC)
    (first,) = b.node("fail", [x], [SPEC], fn=fail("first"))
    (there,) = b.node("step", [x], [SPEC], fn=step(1))
    (second,) = b.node("total", [x, there], [SPEC], fn=TOTAL)
    graph = b.build([first, second])
    cluster = Cluster(2, compute=True)
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 1, 0])
        assert (await sched.plan(graph)).n_splits == 3
        with pytest.raises(ap.EvaluationError, match=r"split 0 on 'sim:0'.*first"):
            await sched.graph_compute(graph, array())
        settled(sched)


# Memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["program", "weight"])
async def test_an_allocation_that_fails_leaves_the_scheduler_usable(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(2, compute=True)
    b = GraphBuilder("weights")
    x = b.input("x", *SPEC)
    for i in range(2):
        (x,) = b.node("total", [x, b.weight(f"w{i}", *SPEC, source=array(i))], [SPEC], fn=TOTAL)
    graph, other = b.build([x]), chain(2)
    async with ap.Scheduler(cluster.backends) as sched:
        for g in (graph, other):
            sched.set_cut(g, range(2))
        running = await sched.graph_compute_async(other, array(1))
        if what == "program":
            cluster.fail_next_allocation(1)
        else:  # everything compiles; then there is no room for the weight
            backend = cluster.backends[1]
            load = backend.load

            def then_fail(program: Program) -> Executable:
                executable = load(program)
                cluster.fail_next_allocation(1)
                return executable

            monkeypatch.setattr(backend, "load", then_fail)
        with pytest.raises(ap.AllocationError, match="sim:1 has no room") as caught:
            await sched.graph_compute_async(graph, array(2))
        assert caught.value.backend == "sim:1"
        monkeypatch.undo()
        assert_equal(await running, unsplit(other, array(1)))
        assert_equal(await sched.graph_compute(graph, array(2)), unsplit(graph, array(2)))
        assert sched.statistics().plans == 2
        settled(sched)


async def test_a_memory_limit_is_checked_before_anything_is_allocated() -> None:  # S17
    """A copy is 32 bytes, as the result takes its memory over; the scratch is known after compiling."""
    cluster = Cluster(2, memory_nbytes=[None, 3 * 32], temp_nbytes=32, compute=True)
    graph = chain(2)
    for n_copies, asked, fits in ((4, 4 * 32 + 32, 2), (3, 3 * 32 + 32, 2)):
        async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
            sched.set_cut(graph, range(2))
            with pytest.raises(ap.AllocationError, match=rf"'sim:1' needs .* n_copies={fits} would fit") as caught:
                await sched.plan(graph)
            assert (caught.value.asked_nbytes, caught.value.available_nbytes) == (asked, 3 * 32)
            assert sched.buffer_size("sim:1") == 0
    async with ap.Scheduler(cluster.backends, n_copies=2) as sched:
        sched.set_cut(graph, range(2))
        assert_equal(await sched.graph_compute(graph, array(3)), unsplit(graph, array(3)))
        assert sched.buffer_size("sim:1") == 2 * 32 + 32


# Size --------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
async def test_a_thousand_devices_and_a_thousand_evaluations() -> None:
    n, cost_s = 1000, 2.0**-10
    cluster = Cluster(n, split_cost_s=cost_s)
    graph = chain([sleep(cost_s)] * n)
    async with ap.Scheduler(cluster.backends, n_copies=n + 4) as sched:
        sched.set_cut(graph, range(n))
        assert (await sched.plan(graph)).n_splits == n
        n_results = 0
        async for _ in sched.stream(graph, (array() for _ in range(n))):
            n_results += 1
        assert n_results == n
        settled(sched)
    assert all(cluster.busy_s(i) == n * cost_s for i in range(n))  # a million launches
    assert cluster.clock.now == lower_bound_s([cost_s] * n, n)


async def test_a_result_that_cannot_be_put_together_fails_its_evaluation_alone() -> None:
    """A user's own container may refuse its leaves."""
    cluster, refuse = Cluster(1, compute=True), [True, False]

    def unflatten(values: Any) -> Any:
        if refuse.pop(0):
            raise TypeError("these are no leaves of mine")
        return {"y": values[0]}

    b = GraphBuilder("own")
    x = b.input("x", *SPEC)
    graph = b.build(b.node("step", [x], [SPEC], fn=step(1)), unflatten_outputs=unflatten)
    async with ap.Scheduler(cluster.backends) as sched:
        with pytest.raises(TypeError, match="no leaves of mine"):
            await sched.graph_compute(graph, array(1))
        assert_equal((await sched.graph_compute(graph, array(1)))["y"], array(1) * 3 + 1)
        settled(sched)


# What an evaluation says of itself ----------------------------------------------------------------


async def test_an_evaluation_says_what_became_of_it() -> None:
    cluster = Cluster(1, compute=True, split_cost_s=1.0)
    graph = chain(1)
    broken = chain([fail("broken", ZeroDivisionError)], name="broken")
    async with ap.Scheduler(cluster.backends, n_copies=3) as sched:
        await sched.plan(graph)
        with cluster.clock.hold():
            good = await sched.graph_compute_async(graph, array(1))
            bad = await sched.graph_compute_async(broken, array(1))
            dropped = await sched.graph_compute_async(graph, array(2))
            assert repr(good) == f"<Evaluation {good.id} of 'chain' pending copy=0>"
            for ask in (good.result, good.exception):
                with pytest.raises(asyncio.InvalidStateError, match=f"evaluation {good.id} of 'chain' is not done"):
                    ask()
            dropped.cancel()
        await good
        with pytest.raises(ap.EvaluationError):
            await bad
        assert repr(good) == f"<Evaluation {good.id} of 'chain' done copy=0>"
        assert repr(bad) == f"<Evaluation {bad.id} of 'broken' failed copy=1>"
        assert repr(dropped) == f"<Evaluation {dropped.id} of 'chain' cancelled copy=2>"
        with pytest.raises(asyncio.CancelledError, match=f"evaluation {dropped.id} of 'chain' was cancelled"):
            dropped.result()
        assert isinstance(bad.exception(), ap.EvaluationError) and good.result() is await good

        async def elsewhere() -> None:
            with pytest.raises(ap.WrongLoopError, match=f"evaluation {pending.id} belongs to another event loop"):
                await pending

        with cluster.clock.hold():
            pending = await sched.graph_compute_async(graph, array(3))
            await asyncio.to_thread(asyncio.run, elsewhere())
        await pending
