"""How much faster are concurrent requests when a Batcher merges them?

    python benchmarks/batcher.py [--devices cpu:0,cpu:1] [--kinds tiny,wide]

So many clients each ask for one item, all at once. They are served in turn by

- one by one: ``await pipe(x)``, the next request when the last one is answered,
- at once: every request an evaluation of its own, up to `n_copies` in flight,
- the batcher: ``await batcher.single(x)``.

What is timed is the whole round, until the last request is answered. Answers are compared before.

- tiny: next to nothing to compute, so overhead per request is everything,
- wide: a row reads 16 MB of weights and computes little with each, as decoding does; 64 rows read them once.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from _common import Check, finish, interleaved, ratio, start_jax

import aiopipe as ap

KINDS = {"tiny": (2, 8), "wide": (4, 1024)}
"""name -> (layers, width)."""


def make(kind: str) -> tuple[Callable[..., Any], list[Any]]:
    """The model and its parameters."""
    import jax.numpy as jnp

    n_layers, width = KINDS[kind]
    rng = np.random.default_rng(0)
    params = [rng.standard_normal((width, width)).astype(np.float32) / width**0.5 for _ in range(n_layers)]

    def model(params: list[Any], x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    return model, params


async def measure(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    model, params = make(kind)
    specs = args.devices.split(",")
    items = np.random.default_rng(1).standard_normal((args.clients, KINDS[kind][1])).astype(np.float32)
    async with (
        ap.Pipeline(model, params, devices=specs) as pipe,
        ap.Batcher(pipe, max_batch=args.clients, like=(items,)) as batcher,
    ):
        await batcher.prepare()

        async def one_by_one() -> list[Any]:
            return [np.asarray(await pipe(item[None]))[0] for item in items]

        async def alone(item: Any) -> Any:
            return np.asarray(await pipe(item[None]))[0]

        async def at_once() -> list[Any]:
            return await asyncio.gather(*map(alone, items))

        async def merged() -> list[Any]:
            return await asyncio.gather(*map(batcher.single, items))

        want = await one_by_one()
        for other in (at_once, merged):
            np.testing.assert_allclose(await other(), want, rtol=1e-4, atol=1e-4)

        def repeated(work: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[None]]:
            async def run() -> None:
                for _ in range(args.rounds):
                    await work()

            return run

        runs = {name: repeated(work) for name, work in
                (("one by one", one_by_one), ("at once", at_once), ("batcher", merged))}  # fmt: skip
        times = await interleaved(runs, args.repetitions, args.rounds * args.clients)
        statistics = batcher.statistics()
    return {
        "kind": kind,
        "one_by_one_over_batcher": round(ratio(times, "one by one", "batcher"), 2),
        "at_once_over_batcher": round(ratio(times, "at once", "batcher"), 2),
        "us_per_request": {name: round(sorted(values)[len(values) // 2] * 1e6, 1) for name, values in times.items()},
        "rows_per_batch": round(statistics.rows / statistics.batches, 1),
        "padding": round(statistics.padding, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--clients", type=int, default=64, help="requests at once")
    parser.add_argument("--rounds", type=int, default=20, help="how often they ask in one measurement")
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    start_jax(args.devices.split(","))
    results = [asyncio.run(measure(kind, args)) for kind in args.kinds.split(",")]
    checks = [
        Check(f"{r['kind']}: {args.clients} requests one by one over through a batcher, time",
              r["one_by_one_over_batcher"], ">=", 5.0)
        for r in results
        if r["kind"] == "wide"
    ]  # fmt: skip
    finish({"benchmark": "batcher", "results": results}, checks)


if __name__ == "__main__":
    main()
