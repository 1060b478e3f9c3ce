"""How late the event loop is while a pipeline is saturated, against a bare loop beside the same load.

    python benchmarks/loop_lag.py [--devices cpu:0,cpu:1] [--loads medium,one-core,zero-flop,compiling]

A second process runs the pipeline, with a heartbeat on the same loop; this one runs nothing but the same
heartbeat, at the same time. So both are equally disturbed by the computation, and only the difference is
aiopipe's. Lag is how much later than asked ``asyncio.sleep(0.001)`` returns. Loads take turns; the result is
the median over the repetitions of the difference between the two 99th percentiles.

- medium, one-core: stages that do real work,
- zero-flop: chains of `exp` and gathers, which XLA would run in the thread that calls it,
- compiling: medium stages, while a new input shape after the other is traced and compiled. JAX traces and
  lowers in Python, and a thread that computes in Python gives way only every `sys.getswitchinterval()`, 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
from _common import Check, finish, make_model, progress, start_jax

import aiopipe as ap

TICK_S = 0.001
SETTLE_S = 0.3
"""How long a load runs before anybody measures."""

LOADS = ("medium", "one-core", "zero-flop", "compiling")


async def heartbeat(seconds: float) -> dict[str, float]:
    """Milliseconds by which sleeping took longer than asked."""
    lags: list[float] = []
    end = time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - before - TICK_S)
    lags.sort()
    return {
        "p50": lags[len(lags) // 2] * 1e3,
        "p99": lags[len(lags) * 99 // 100] * 1e3,
        "max": lags[-1] * 1e3,
    }


# The process with the pipeline --------------------------------------------------------------------


def zero_flop_model(n_stages: int) -> tuple[Callable[..., Any], Any, Any]:
    """Stages that only move and transform numbers; some 10 ms each."""
    import jax.numpy as jnp

    size = 1 << 19
    rng = np.random.default_rng(0)
    params = {str(i): rng.permutation(size).astype(np.int32) for i in range(n_stages)}

    def model(params: Any, x: Any) -> Any:
        for order in params.values():
            for _ in range(3):
                x = jnp.exp(-x[order])
        return x

    return model, params, rng.random(size, dtype=np.float32)


async def keep_busy(pipe: ap.Pipeline, x: Any) -> None:
    async for _ in pipe.stream(itertools.repeat(x)):
        pass


def shapes_within(n: int) -> Iterator[tuple[int, ...]]:
    """Hundreds of batch shapes of up to n rows together."""
    sides = range(1, n + 1)
    return ((a, b, c) for a in sides for b in range(1, n // a + 1) for c in range(1, n // (a * b) + 1))


async def keep_compiling(pipe: ap.Pipeline, x: Any, shapes: Iterator[tuple[int, ...]]) -> None:
    for shape in shapes:
        await pipe(x[: math.prod(shape)].reshape(*shape, -1))


@contextlib.asynccontextmanager
async def under_load(pipe: ap.Pipeline, x: Any, shapes: Iterator[tuple[int, ...]] | None) -> AsyncIterator[None]:
    """Inside, evaluations follow each other without a pause, and so do new shapes where some are given."""
    work = [keep_busy(pipe, x)] + ([keep_compiling(pipe, x, shapes)] if shapes is not None else [])
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()  # a load that failed, or ended, was none
                raise RuntimeError("the load ended before the measurement did")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await pipe.scheduler.synchronize()


async def serve(specs: list[str], seconds: float) -> None:
    """Read a load's name from each line of standard input; say when it runs, then print the lag under it."""
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        pipes: dict[str, tuple[ap.Pipeline, Any, Iterator[tuple[int, ...]] | None]] = {}
        while load := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if load not in pipes:
                if load == "zero-flop":
                    model, params, x = zero_flop_model(len(specs))
                    split: Any = {str(i): spec for i, spec in enumerate(specs)}
                else:
                    model, params, x = make_model("medium" if load == "compiling" else load, len(specs))
                    split = [1] * len(specs)
                pipe = await stack.enter_async_context(ap.Pipeline(model, params, devices=specs, split=split))
                assert (await pipe.plan(x)).n_splits == len(specs)
                pipes[load] = pipe, x, shapes_within(len(x)) if load == "compiling" else None
            pipe, x, shapes = pipes[load]
            async with under_load(pipe, x, shapes):
                await asyncio.sleep(SETTLE_S)
                before = pipe.statistics()
                print("go", flush=True)
                lag: dict[str, Any] = dict(await heartbeat(seconds))
            after = pipe.statistics()
            lag["evaluations"] = after.succeeded - before.succeeded
            lag["compiled"] = after.compiled - before.compiled
            print(json.dumps(lag), flush=True)


# The process with the bare loop -------------------------------------------------------------------


async def measure(args: argparse.Namespace, loads: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--serve", "--devices", args.devices, "--seconds", str(args.seconds)]
    other = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    piped: dict[str, list[dict[str, float]]] = {load: [] for load in loads}
    bare: dict[str, list[dict[str, float]]] = {load: [] for load in loads}
    try:
        for round_ in range(args.repetitions + 1):  # the first one warms up
            for load in loads:
                other.stdin.write(f"{load}\n".encode())
                if await other.stdout.readline() != b"go\n":
                    raise RuntimeError(f"the process with the pipeline failed at {load}")
                alone = await heartbeat(args.seconds)
                answer = json.loads(await other.stdout.readline())
                if round_:
                    bare[load].append(alone)
                    piped[load].append(answer)
            progress(f"round {round_} of {args.repetitions}")
    finally:
        other.stdin.close()
        await other.wait()

    def median(runs: list[dict[str, float]], what: str) -> float:
        return round(statistics.median(run[what] for run in runs), 3)

    return [
        {
            "load": load,
            "p99_above_bare_ms": round(
                statistics.median(p["p99"] - b["p99"] for p, b in zip(piped[load], bare[load], strict=True)), 3
            ),
            "pipeline_ms": {what: median(piped[load], what) for what in ("p50", "p99", "max")},
            "bare_ms": {what: median(bare[load], what) for what in ("p50", "p99", "max")},
            "evaluations_per_s": round(median(piped[load], "evaluations") / args.seconds, 1),
            "compiled": round(sum(run["compiled"] for run in piped[load])),
        }
        for load in loads
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one measurement")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        specs = args.devices.split(",")
        start_jax(specs)
        asyncio.run(serve(specs, args.seconds))
        return
    results = asyncio.run(measure(args, args.loads.split(",")))
    checks = [
        Check(f"{r['load']}: ms of event loop lag above a bare loop's, p99", r["p99_above_bare_ms"], "<=", 5.0)
        for r in results
    ]
    finish({"benchmark": "loop_lag", "results": results}, checks)


if __name__ == "__main__":
    main()
