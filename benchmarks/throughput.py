"""Throughput against the hand-written loop and the serial blocking loop, with stages that do real work.

    python benchmarks/throughput.py [--devices cpu:0,cpu:1] [--kinds medium,one-core]

``speedup_over_loop`` is the loop's time divided by aiopipe's (above 1: aiopipe is faster). For stages that keep one
core busy, so that overlapping them matters, likewise ``speedup_over_serial``; ``loop_over_serial`` is what the
hand-written loop gains from it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
from _common import WINDOW, Check, finish, hand_written, interleaved, make_model, ratio, start_jax, windowed

import aiopipe as ap


async def measure(
    kind: str, specs: list[str], devices: list[Any], evaluations: int, repetitions: int
) -> dict[str, Any]:
    model, params, x = make_model(kind, len(specs))
    chain = hand_written(kind, params, devices)
    async with ap.Pipeline(model, params, devices=specs, n_copies=WINDOW, split=[1] * len(specs)) as pipe:
        np.testing.assert_allclose(np.asarray(await pipe(x)), np.asarray(chain(x)), rtol=1e-4, atol=1e-5)

        async def loop() -> None:
            for _ in windowed(chain, itertools.repeat(x, evaluations)):
                pass

        async def serial() -> None:
            for _ in range(evaluations):
                chain(x).block_until_ready()

        async def stream() -> None:
            async for _ in pipe.stream(itertools.repeat(x, evaluations)):
                pass

        runs = {"loop": loop, "stream": stream}
        if kind == "one-core":
            runs["serial"] = serial
        times = await interleaved(runs, repetitions, evaluations)
    result = {
        "stages": kind,
        "devices": len(specs),
        "speedup_over_loop": round(1 / ratio(times, "stream", "loop"), 3),
        "ms_per_evaluation": {name: round(statistics.median(t) * 1e3, 3) for name, t in times.items()},
    }
    if "serial" in runs:
        result["speedup_over_serial"] = round(1 / ratio(times, "stream", "serial"), 3)
        result["loop_over_serial"] = round(1 / ratio(times, "loop", "serial"), 3)
    return result


def in_its_own_process(n_devices: int) -> list[dict[str, Any]]:
    """The results for so many CPU devices: XLA makes as many threads as there are, in use or not, and they compete."""
    specs = ",".join(f"cpu:{i}" for i in range(n_devices))
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--devices", specs], stdout=subprocess.PIPE, text=True, check=True
    )
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["results"]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="specs, comma-separated; default: two CPU devices, then four")
    parser.add_argument("--kinds", default="medium,one-core")
    parser.add_argument("--evaluations", type=int, default=100)
    parser.add_argument("--repetitions", type=int, default=60)
    args = parser.parse_args()
    if args.devices is None:
        results = [r for n in (2, 4) for r in in_its_own_process(n)]
    else:
        specs = args.devices.split(",")
        devices = start_jax(specs)
        results = [
            asyncio.run(measure(kind, specs, devices, args.evaluations, args.repetitions))
            for kind in args.kinds.split(",")
        ]
    checks = []
    for r in results:
        on = f"{r['stages']} stages on {r['devices']} devices"
        checks.append(Check(f"{on}: the loop's time / aiopipe's", r["speedup_over_loop"], ">=", 1.0))
        if r["stages"] == "one-core" and r["devices"] == 2:
            checks.append(Check(f"{on}: the serial loop's time / aiopipe's", r["speedup_over_serial"], ">=", 1.6))
    finish({"benchmark": "throughput", "results": results}, checks)


if __name__ == "__main__":
    main()
