"""Overlap on simulated devices: how long a chain over many of them takes, against the lower bound.

    python benchmarks/simulated.py [--devices 2,16,128,1024] [--evaluations 1000] [--latency 0]

One split on each device; times are virtual, so the ratio is exact and the same on every machine. Balanced
devices take the same time, unbalanced ones (seeded) between a fifth of it and all of it. No schedule can be
faster than the slowest device's work plus one trip through the others. The wall time is what the
scheduler and the simulation cost this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from _common import Check, finish, progress

import aiopipe as ap
from aiopipe.devices.sim import Cluster, sleep
from aiopipe.graph import Graph
from aiopipe.graph_builder import GraphBuilder

SPEC = ((4,), "float32", 16)
SECOND = 2.0**-10
"""What a full stage takes; sums of it are exact."""


def costs_of(n_devices: int, balanced: bool) -> list[float]:
    """Virtual seconds of each device's stage; the slowest takes `SECOND`."""
    rng = random.Random(n_devices)
    costs = [SECOND if balanced else SECOND * rng.uniform(0.2, 1.0) for _ in range(n_devices)]
    costs[rng.randrange(n_devices)] = SECOND
    return costs


def chain(n_stages: int) -> Graph:
    """A stage for each device."""
    b = GraphBuilder("chain")
    x = b.input("x", *SPEC)
    for _ in range(n_stages):
        (x,) = b.node("stage", [x], [SPEC], fn=sleep(SECOND))
    return b.build([x])


def lower_bound_s(costs: Sequence[float], latency_s: float, evaluations: int) -> float:
    """The slowest device's work, and one trip through all devices and links."""
    return max(costs) * (evaluations - 1) + sum(costs) + latency_s * len(costs)


async def measure(n_devices: int, balanced: bool, evaluations: int, latency_s: float, extra: int) -> dict[str, Any]:
    costs = costs_of(n_devices, balanced)
    cluster = Cluster(n_devices, split_cost_s=lambda program, device: costs[device.index], latency_s=latency_s)
    graph = chain(n_devices)
    # A trip through links takes slots, too.
    n_copies = n_devices + extra + round(n_devices * latency_s / SECOND)
    x = np.zeros(4, np.float32)
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, range(n_devices))
        began = time.perf_counter()
        plan = await sched.plan(graph)
        planned = time.perf_counter()
        assert plan.n_splits == n_devices, plan
        async for _ in sched.stream(graph, itertools.repeat(x, evaluations)):
            pass
        ended = time.perf_counter()
        makespan_s = cluster.clock.now
    return {
        "devices": n_devices,
        "balanced": balanced,
        "n_copies": n_copies,
        "makespan_over_bound": round(makespan_s / lower_bound_s(costs, latency_s, evaluations), 6),
        "wall_s": round(ended - planned, 3),
        "load_s": round(planned - began, 3),
        "us_per_launch": round((ended - planned) / (n_devices * evaluations) * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4,16,64,256,1024", help="numbers of devices, comma-separated")
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--latency", type=float, default=0.0, help="of each link, in stages")
    parser.add_argument("--extra", type=int, default=4, help="how many more slots than devices there are")
    args = parser.parse_args()
    results = []
    for n in map(int, args.devices.split(",")):
        for balanced in (True, False):
            results.append(asyncio.run(measure(n, balanced, args.evaluations, args.latency * SECOND, args.extra)))
            progress(f"{n} devices, balanced={balanced}: {results[-1]['makespan_over_bound']:.4f} of the bound")
    worst = max(r["makespan_over_bound"] for r in results)
    what = f"simulated devices, {args.evaluations} evaluations: makespan / lower bound, the worst of {args.devices}"
    summary = {"benchmark": "simulated", "evaluations": args.evaluations, "results": results}
    finish(summary, [Check(what, worst, "<=", 1.02)])


if __name__ == "__main__":
    main()
