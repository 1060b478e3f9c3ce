"""Many weights for each split: what aiopipe adds to the bare compiled call must not grow with their number.

    python benchmarks/weights.py [--devices cpu:0,cpu:1]

For 3, 30 and 300 weights in each split: the time of an evaluation, against the same compiled calls
made by hand with the same arguments. `extra_us` is the difference; `extra_ns_per_weight` is how it
grows from 30 to 300, for each weight of each split.
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


async def measure(n_weights: int, specs: list[str], evaluations: int, repetitions: int) -> dict[str, float]:
    model, params, x = make_model(n_weights, len(specs))
    where = {f"{i}/*": spec for i, spec in enumerate(specs)}
    async with ap.Pipeline(model, params, devices=specs, n_copies=WINDOW, split=where) as pipe:
        want = model(params, x)
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

        times = await interleaved({"bare": bare, "stream": stream}, repetitions, evaluations)
    extra = [(s - b) * 1e6 for s, b in zip(times["stream"], times["bare"], strict=True)]
    return {
        "weights": n_weights,
        "bare_us": round(statistics.median(times["bare"]) * 1e6, 1),
        "stream_us": round(statistics.median(times["stream"]) * 1e6, 1),
        "extra_us": round(statistics.median(extra), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0,cpu:1", help="specs, comma-separated")
    parser.add_argument("--evaluations", type=int, default=500)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    specs = args.devices.split(",")
    start_jax(specs)
    rows = [asyncio.run(measure(n, specs, args.evaluations, args.repetitions)) for n in COUNTS]
    for row in rows:
        progress(str(row))
    many, some = rows[-1], rows[-2]
    growth = (many["extra_us"] - some["extra_us"]) * 1e3 / (many["weights"] - some["weights"]) / len(specs)
    # A twentieth of what a bare call itself spends on one more argument, or less, is nothing.
    own = (many["bare_us"] - some["bare_us"]) * 1e3 / (many["weights"] - some["weights"]) / len(specs)
    share = growth / own
    finish(
        {
            "benchmark": "weights",
            "results": rows,
            "extra_ns_per_weight": round(growth, 1),
            "bare_ns_per_weight": round(own, 1),
        },
        [Check("what aiopipe adds for one more weight / what the bare call takes for it", share, "<=", 0.05)],
    )


if __name__ == "__main__":
    main()
