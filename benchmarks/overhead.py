"""What aiopipe itself costs: tiny stages, where the hand-written loop spends its time on calls and transfers.

    python benchmarks/overhead.py [--devices cpu:0,cpu:1] [--evaluations 2000] [--repetitions 7]

Ratios of time per evaluation, streamed with a window of 4; below 1 means faster than the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from typing import Any

import numpy as np
from _common import WINDOW, Check, finish, hand_written, interleaved, make_model, ratio, start_jax, windowed

import aiopipe as ap


async def measure(specs: list[str], devices: list[Any], evaluations: int, repetitions: int) -> dict[str, Any]:
    model, params, x = make_model("tiny", len(specs))
    chain = hand_written("tiny", params, devices)
    async with (
        ap.Pipeline(model, params, devices=specs, n_copies=WINDOW, split=[1] * len(specs)) as pipe,
        ap.Pipeline(model, params, devices=specs, n_copies=1, split=[1] * len(specs)) as lone,
    ):
        np.testing.assert_allclose(np.asarray(await pipe(x)), np.asarray(chain(x)), rtol=1e-5, atol=1e-6)
        plan = await pipe.plan(x)
        assert plan.n_splits == len(specs), plan
        await lone(x)

        async def loop() -> None:
            for _ in windowed(chain, itertools.repeat(x, evaluations)):
                pass

        async def stream() -> None:
            async for _ in pipe.stream(itertools.repeat(x, evaluations)):
                pass

        async def chained() -> None:
            for _ in range(evaluations):
                chain(x).block_until_ready()

        async def one_by_one() -> None:
            for _ in range(evaluations):
                await pipe(x)

        async def one_by_one_alone() -> None:
            for _ in range(evaluations):
                await lone(x)

        runs = {
            "loop": loop,
            "stream": stream,
            "chain": chained,
            "one_by_one": one_by_one,
            "one_by_one_n1": one_by_one_alone,
        }
        times = await interleaved(runs, repetitions, evaluations)
    return {
        "devices": len(specs),
        "stream_over_loop": round(ratio(times, "stream", "loop"), 3),
        "latency_over_chain": round(ratio(times, "one_by_one", "chain"), 3),
        "latency_n4_over_n1": round(ratio(times, "one_by_one", "one_by_one_n1"), 3),
        "us_per_evaluation": {name: round(statistics.median(t) * 1e6, 1) for name, t in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="specs, comma-separated; default: two, then four CPU devices")
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    sets = [args.devices.split(",")] if args.devices else [[f"cpu:{i}" for i in range(n)] for n in (2, 4)]
    by_spec = dict(zip(max(sets, key=len), start_jax(max(sets, key=len)), strict=True))
    results = [
        asyncio.run(measure(specs, [by_spec[s] for s in specs], args.evaluations, args.repetitions)) for specs in sets
    ]
    checks = []
    for r in results:
        on = f"tiny stages on {r['devices']} devices"
        checks += [
            Check(f"{on}: time streamed / the loop's", r["stream_over_loop"], "<=", 0.7),
            Check(f"{on}: latency of one / the chain's", r["latency_over_chain"], "<=", 1.1),
            Check(f"{on}: latency with n_copies=4 / with 1", r["latency_n4_over_n1"], "<=", 1.05),
        ]
    finish({"benchmark": "overhead", "results": results}, checks)


if __name__ == "__main__":
    main()
