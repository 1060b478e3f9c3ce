"""Drawn graphs on simulated devices, under drawn orders of submitting, cancelling, failing, aborting and state use."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiopipe as ap
from aiopipe.devices.sim import Cluster
from happens_before import HappensBefore
from plays import ACTS
from simgraphs import array, captures_logged, check_happens_before, settled
from simplay import Play, flat
from simprograms import GraphSpec, bad, build, expected, graph_specs, same

pytestmark = pytest.mark.timeout(max(60, settings.default.max_examples))  # type: ignore[union-attr]
LATENCIES = st.sampled_from([0.0, 0.25, 2.0])
RATES = st.sampled_from([8.0, 64.0, 1e9])


@given(
    spec=graph_specs(n_leaves=0, max_nodes=25),
    n_devices=st.integers(1, 4),
    n_copies=st.integers(1, 5),
    latency_s=LATENCIES,
    rates=st.tuples(RATES, RATES),
    extra=st.integers(0, 6),
)
def test_drawn_graphs_equal_the_unsplit_run_and_nothing_happens_too_early(
    spec: GraphSpec, n_devices: int, n_copies: int, latency_s: float, rates: Any, extra: int
) -> None:
    async def main() -> None:
        graph = build(spec)
        cluster = Cluster(
            n_devices,
            compute=True,
            record=True,
            latency_s=latency_s,
            link_bytes_per_s=rates[0],
            host_bytes_per_s=rates[1],
        )
        async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
            sched.set_cut(graph, [c % n_devices for c in spec.cut])
            plan = await sched.plan(graph)
            cluster.log.clear()
            given, running = [], []
            with captures_logged(cluster):
                for k in range(n_copies + extra):
                    inputs = [array(10 * k + i) for i in range(spec.n_inputs)]
                    given.append([x.copy() for x in inputs])
                    running.append(await sched.graph_compute_async(graph, *inputs))
                    for x in inputs:
                        x[:] = -1
                results = [flat(await evaluation) for evaluation in running]
            for got, inputs in zip(results, given, strict=True):
                assert same(got, expected(graph, inputs)[0])
            assert check_happens_before(cluster, plan, n_copies) == len(given)
            settled(sched)

    asyncio.run(main())


# Everything at once ------------------------------------------------------------------------------


@given(
    specs=st.integers(0, 3).flatmap(lambda n: st.lists(graph_specs(n_leaves=n), min_size=1, max_size=3)),
    n_devices=st.integers(1, 4),
    n_copies=st.integers(1, 4),
    n_states=st.integers(1, 3),
    latency_s=LATENCIES,
    planned=st.booleans(),
    acts=ACTS,
)
def test_whatever_is_submitted_cancelled_and_goes_wrong(
    specs: list[GraphSpec], n_devices: int, n_copies: int, n_states: int, latency_s: float, planned: bool, acts: Any
) -> None:
    bad.clear()
    known = HappensBefore()

    async def main() -> None:
        graphs = [build(spec) for spec in specs]
        cluster = Cluster(n_devices, compute=True, latency_s=latency_s)
        async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
            for graph, spec in zip(graphs, specs, strict=True):
                sched.set_cut(graph, [c % n_devices for c in spec.cut])
            play = Play(cluster, sched, graphs, n_states)
            known.watch(*sched.backends)
            for state in play.states if planned else ():
                await sched.alloc_graph(graphs[0], state=state)
            await play.run(acts)
            await sched.synchronize()
            settled(sched)
            play.check()
        known.check()

    with jax.enable_x64(True), known.watching():
        asyncio.run(main())
