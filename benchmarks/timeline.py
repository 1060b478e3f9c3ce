"""What recording a timeline costs: the same pipeline with and without ``timeline=True``, streamed.

    python benchmarks/timeline.py [--devices cpu:0,cpu:1] [--kinds tiny,medium] [--repetitions 180]

Ratios of time per evaluation, recorded over not recorded; 1.0 means that recording costs nothing. Several pairs of
pipelines are made, as where the memory of one happens to lie matters as much as what is measured. Then how long it
takes to work out what was recorded, and to save it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _common import WINDOW, Check, finish, interleaved, make_model, progress, ratio, start_jax

import aiopipe as ap

EVALUATIONS = {"tiny": 500, "one-core": 40, "medium": 12}
"""In one run: some 40 ms."""

PAIRS = 12


async def measure(kind: str, specs: list[str], repetitions: int) -> dict[str, Any]:
    model, params, x = make_model(kind, len(specs))
    times: dict[str, list[float]] = {"off": [], "on": [], "again": []}
    reading: dict[str, float] = {}
    n = EVALUATIONS[kind]
    for pair in range(PAIRS):
        how = {"devices": specs, "n_copies": WINDOW, "split": [1] * len(specs)}
        async with (
            ap.Pipeline(model, params, **how) as off,
            ap.Pipeline(model, params, **how, timeline=True) as on,
            ap.Pipeline(model, params, **how) as again,
        ):
            pipes = {"off": off, "on": on, "again": again}
            first, *others = [np.asarray(await pipe(x)) for pipe in pipes.values()]
            assert all(np.array_equal(first, other) for other in others)

            def stream(pipe: ap.Pipeline) -> Any:
                async def run() -> None:
                    async for _ in pipe.stream(itertools.repeat(x, n)):
                        pass

                return run

            found = await interleaved(
                {name: stream(pipe) for name, pipe in pipes.items()}, max(1, repetitions // PAIRS), n
            )
            for name, values in found.items():
                times[name] += values
            if pair == PAIRS - 1:
                reading = read(on.timeline)
        progress(f"{kind}: pair {pair + 1} of {PAIRS}")
    return {
        "stages": kind,
        "devices": len(specs),
        "on_over_off": round(ratio(times, "on", "off"), 4),
        "off_over_off": round(ratio(times, "again", "off"), 4),
        "us_per_evaluation": {name: round(statistics.median(t) * 1e6, 1) for name, t in times.items()},
        **reading,
    }


def read(timeline: ap.Timeline) -> dict[str, float]:
    """How long it takes to look at a timeline."""
    began = time.perf_counter()
    spans = timeline.spans
    looked = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        timeline.save(Path(folder) / "run.json")
    saved = time.perf_counter()
    return {"spans": len(spans), "read_s": round(looked - began, 3), "save_s": round(saved - looked, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--kinds", default="tiny,medium", help=f"of {', '.join(EVALUATIONS)} (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=180)
    args = parser.parse_args()
    specs = args.devices.split(",")
    start_jax(specs)
    results = [asyncio.run(measure(kind, specs, args.repetitions)) for kind in args.kinds.split(",")]
    checks = [
        Check(f"{r['stages']} stages: time with a timeline / without", r["on_over_off"], "<=", 1.02)
        for r in results
        if r["stages"] in ("tiny", "medium")
    ]
    finish({"benchmark": "timeline", "results": results}, checks)


if __name__ == "__main__":
    main()
