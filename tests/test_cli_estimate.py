"""What `aiopipe plan` estimates is what the scheduler does on simulated devices, to the last digit."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

import aiopipe as ap
from aiopipe.cli.estimate import Links, estimate
from aiopipe.devices.sim import Cluster, HostOp
from aiopipe.graph import Graph
from aiopipe.graph_builder import GraphBuilder
from aiopipe.sched.plan import make_plan

SPEC = ((4,), "float32", 16)
COSTS = (0.0, 1.0, 2.0, 7.0)
OPS = {cost: HostOp(lambda *xs: (np.zeros(4, np.float32),)) for cost in COSTS}
"""Operations that are alike are compiled once, so what costs otherwise is another one."""


def random_graph(rng: random.Random) -> Graph:
    """Inputs, a weight, and nodes of all costs, in any order of dependence. (An input that is returned is uploaded
    when it is captured, which takes no virtual time: there is none.)"""
    b = GraphBuilder("random")
    tensors = [b.input(f"x{i}", *SPEC) for i in range(rng.randint(1, 3))]
    tensors.append(b.weight("w", *SPEC, source=np.zeros(4, np.float32)))
    leaves = len(tensors)
    for _ in range(rng.randint(2, 14)):
        inputs = rng.choices(tensors, k=rng.randint(1, 3))
        cost = rng.choice(COSTS)
        tensors += b.node("mix", inputs, [SPEC], fn=OPS[cost], flops=cost, nbytes=0.0)
    return b.build(rng.sample(tensors[leaves:][-4:], k=2))


@pytest.mark.parametrize("seed", range(40))
async def test_estimate_is_what_simulated_devices_do(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng)
    n, n_copies, evaluations = rng.randint(1, 4), rng.randint(1, 6), rng.randint(2, 20)
    links = Links(rng.choice([8.0, 64.0, 1e12]), rng.choice([8.0, 1e12]), rng.choice([0.0, 0.5, 3.0]))
    cluster = Cluster(
        n,
        flops_per_s=[rng.choice([1.0, 2.0]) for _ in range(n)],
        link_bytes_per_s=links.bytes_per_s,
        host_bytes_per_s=links.host_bytes_per_s,
        latency_s=links.latency_s,
    )
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, [rng.randrange(n) for _ in graph.nodes])
        plan = await sched.plan(graph)
        began = cluster.clock.now
        batch: Any = tuple(np.zeros(4, np.float32) for _ in graph.inputs)
        async for _ in sched.stream(graph, itertools.repeat(batch, evaluations)):
            pass
        took_s = cluster.clock.now - began
    found = estimate(plan, links, n_copies, evaluations)
    assert found.total_s == pytest.approx(took_s, rel=1e-12)
    busy_s = sum(cluster.busy_s(i) for i in range(n))
    assert sum(found.seconds) * evaluations == pytest.approx(busy_s)
    used = len({split.backend for split in plan.splits})
    assert found.bubble == pytest.approx(1 - busy_s / (used * took_s) if took_s else 0, abs=1e-9)


def test_a_full_pipeline_of_equal_stages_has_no_bubble_but_its_ends() -> None:
    b = GraphBuilder("chain")
    x = b.input("x", *SPEC)
    for _ in range(4):
        (x,) = b.node("stage", [x], [SPEC], fn=OPS[1.0], flops=1.0, nbytes=0.0)
    graph = b.build([x])
    devices = [backend.device for backend in Cluster(4, flops_per_s=1.0).backends]
    found = estimate(make_plan(graph, devices, cut=range(4)), Links(), 4, 20)
    assert (found.alone_s, found.interval_s, found.total_s) == (4.0, 1.0, 23.0)
    assert found.steady_bubble == 0 and found.bubble == pytest.approx(1 - 20 / 23)
    assert found.gain == 4.0 and found.per_s == 1.0
