"""Many weights for each split: what aiopipe adds to the bare compiled call must not grow with their number.

    python benchmarks/weights.py [--devices cpu:0,cpu:1]

For 3, 30 and 300 weights in each split: the time of an evaluation, against the same programs compiled and called by
hand, one after the other, with the same arguments. `extra_us` is the difference; `extra_ns_per_weight` is how it grows
from 30 to 300, for each weight of each split.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from typing import Any

import jax
import numpy as np
from _common import WINDOW, Check, finish, interleaved, progress, start_jax

import aiopipe as ap
from aiopipe._jax_compile import function_of

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
    pipe, x, want = make_pipe(n_weights, specs)
    async with pipe:
        np.testing.assert_allclose(np.asarray(await pipe(x)), want, rtol=1e-4, atol=1e-4)
        graph = (await pipe.plan(x)).graph
        loaded = pipe.scheduler._plans.get(graph)
        assert loaded is not None and len(loaded.splits) == len(specs)
        calls = []
        for program, split in zip(loaded.plan.programs, loaded.splits, strict=True):
            given = zip(program.inputs, split.template, strict=True)
            args = [np.zeros(t.shape, t.dtype) if w is None else w for t, w in given]
            calls.append((jax.jit(function_of(program)).lower(*args).compile(), args))

        async def bare() -> None:
            for _ in range(evaluations):
                for compiled, args in calls:
                    results = compiled(*args)
            jax.block_until_ready(results)

        async def stream() -> None:
            async for _ in pipe.stream(itertools.repeat(x, evaluations)):
                pass

        times = await interleaved({"bare": bare, "stream": stream}, repetitions, evaluations)

    extra = statistics.median((s - b) * 1e6 for s, b in zip(times["stream"], times["bare"], strict=True))
    medians = {f"{name}_us": round(statistics.median(each) * 1e6, 1) for name, each in times.items()}
    return {"weights": n_weights, **medians, "extra_us": round(extra, 1)}


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
    bare, extra = growth("bare_us"), growth("extra_us")
    finish(
        {
            "benchmark": "weights",
            "results": rows,
            "bare_ns_per_weight": round(bare, 1),
            "extra_ns_per_weight": round(extra, 1),
        },
        [Check("what an evaluation takes above the bare call / it, for one more weight", extra / bare, "<=", 0.05)],
    )


if __name__ == "__main__":
    main()
