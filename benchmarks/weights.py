"""Many weights for each split: what aiopipe adds to the bare compiled call must not grow with their number.

    python benchmarks/weights.py [--devices cpu:0,cpu:1]

For 3, 30 and 300 weights in each split: the time of an evaluation, against the same compiled calls
made by hand with the same arguments. `extra_us` is the difference; `extra_ns_per_weight` is how it
grows from 30 to 300, for each weight of each split.

It grows although aiopipe does nothing for a weight but copy a pointer: a call that touches 600 arrays leaves nothing
else in the core's caches, so that the same Python takes longer after it. `beside_us` tells the two apart: the
compiled calls made by hand, and after each an evaluation of a pipeline that has hardly any weights. That has the same
Python and the same caches, so what an evaluation takes above it is what aiopipe does for each weight
(`own_ns_per_weight`), with the sign that it happens to have.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from typing import Any

import numpy as np
from _common import WINDOW, Check, finish, interleaved, progress, start_jax

import aiopipe as ap

COUNTS = (3, 30, 300)


def make_model(n_weights: int, n_stages: int) -> tuple[Any, Any, Any]:
    """Stages that add up `n_weights` vectors: two numbers each, so that XLA runs few and many in the same way.

    (From 1000 operations on its CPU client computes in another thread, and whoever waits is woken.)
    """
    rng = np.random.default_rng(0)
    params = [[rng.standard_normal(2).astype(np.float32) for _ in range(n_weights)] for _ in range(n_stages)]

    def model(params: Any, x: Any) -> Any:
        for stage in params:
            for w in stage:
                x = x + w
        return x

    return model, params, rng.standard_normal((1, 2)).astype(np.float32)


def make_pipe(n_weights: int, specs: list[str]) -> tuple[ap.Pipeline, Any, Any]:
    model, params, x = make_model(n_weights, len(specs))
    where = {f"{i}/*": spec for i, spec in enumerate(specs)}
    return ap.Pipeline(model, params, devices=specs, n_copies=WINDOW, split=where), x, model(params, x)


async def measure(n_weights: int, specs: list[str], evaluations: int, repetitions: int) -> dict[str, float]:
    (pipe, x, want), (light, light_x, _) = make_pipe(n_weights, specs), make_pipe(1, specs)
    async with pipe, light:
        await light(light_x)
        np.testing.assert_allclose(np.asarray(await pipe(x)), want, rtol=1e-4, atol=1e-4)
        graph = (await pipe.plan(x)).graph
        loaded = pipe.scheduler._plans.get(graph)
        assert loaded is not None and len(loaded.splits) == len(specs)
        ready = [
            [np.zeros(t.shape, t.dtype) if w is None else w for t, w in zip(p.inputs, split.template, strict=True)]
            for p, split in zip(loaded.plan.programs, loaded.splits, strict=True)
        ]

        async def bare() -> None:
            for _ in range(evaluations):
                for split, args in zip(loaded.splits, ready, strict=True):
                    split.call(*args)
            await pipe.scheduler.synchronize()

        async def stream() -> None:
            async for _ in pipe.stream(itertools.repeat(x, evaluations)):
                pass

        async def beside() -> None:
            async for _ in light.stream(itertools.repeat(light_x, evaluations)):
                for split, args in zip(loaded.splits, ready, strict=True):
                    split.call(*args)
            await pipe.scheduler.synchronize()

        times = await interleaved({"bare": bare, "stream": stream, "beside": beside}, repetitions, evaluations)

    def above(other: str) -> float:
        return statistics.median((s - o) * 1e6 for s, o in zip(times["stream"], times[other], strict=True))

    return {
        "weights": n_weights,
        **{f"{name}_us": round(statistics.median(each) * 1e6, 1) for name, each in times.items()},
        "extra_us": round(above("bare"), 1),
        "own_us": round(above("beside"), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0,cpu:1", help="specs, comma-separated")
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=21)
    args = parser.parse_args()
    specs = args.devices.split(",")
    start_jax(specs)
    rows = [asyncio.run(measure(n, specs, args.evaluations, args.repetitions)) for n in COUNTS]
    for row in rows:
        progress(str(row))
    some, many = rows[-2:]

    def growth(what: str) -> float:
        """Nanoseconds for one more weight of one split."""
        return (many[what] - some[what]) * 1e3 / (many["weights"] - some["weights"]) / len(specs)

    # A twentieth of what a bare call itself spends on one more argument, or less, is nothing.
    bare, extra, own = growth("bare_us"), growth("extra_us"), growth("own_us")
    finish(
        {
            "benchmark": "weights",
            "results": rows,
            "bare_ns_per_weight": round(bare, 1),
            "extra_ns_per_weight": round(extra, 1),
            "own_ns_per_weight": round(own, 1),
        },
        [
            Check("what an evaluation takes above the bare call / it, for one more weight", extra / bare, "<=", 0.05),
            Check("the same above the bare call with as much Python after it", own / bare, "<=", 0.05),
        ],
    )


if __name__ == "__main__":
    main()
