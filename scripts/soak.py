"""Everything at once on CPU devices, for as long as you like; at the end nothing may be wrong, or left.

    PYTHONPATH=. python scripts/soak.py --minutes 60

Many tasks send batches of several shapes through pipelines, streams and states, cancel some, abort some, have some
fail. Every result is compared with `jax.jit` on one device. At the end no slot, thread, task, array or file
descriptor may be left, memory must have stayed flat, and the event loop must never have been held up for long.
The exit code says so.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aiopipe as ap

WIDTH = 32
ROWS = (1, 3, 8)
RSS_SLACK = 48 << 20
LAG_P99_S = 0.25


def layers(params: list[Any], x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return x, x.sum(), x > 0


def branches(params: list[Any], x: Any) -> Any:
    left, right = x @ params[0], jnp.sort(x @ params[1], axis=-1)
    return {"both": left + right, "x": x, "none": None, "w": params[0]}


def steps(params: list[Any], state: dict[str, Any], x: Any) -> Any:
    sums = []
    for w, s in zip(params, state["sums"], strict=True):
        sums.append(s * 0.5 + x @ w)
        x = jnp.tanh(sums[-1])
    return x, {"sums": sums, "n": state["n"] + 1}


def failing(params: list[Any], x: Any) -> Any:
    def check(y: Any) -> Any:
        if y[0, 0] > 1e6:
            raise ValueError("too large")
        return y

    y = jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x * params[0][0, 0])
    return y @ params[1]


def weights() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32) for _ in range(4)]


def batch(seed: int, rows: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)


def rss_nbytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def n_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def own_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("aiopipe-"))


class Soak:
    """The tasks of one run, and what they found."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.until = time.monotonic() + seconds
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lags: list[float] = []
        self.rss: list[int] = []
        self.weights = weights()
        self.jitted = {fn: jax.jit(fn) for fn in (layers, branches, steps, failing)}

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until or len(self.wrong) > 10

    def wanted(self, fn: Any, *args: Any) -> Any:
        """What one device makes of it, at once: JAX would go on reading an array that changes meanwhile."""
        return jax.tree.map(np.asarray, self.jitted[fn](self.weights, *args))

    def compare(self, what: str, got: Any, want: Any) -> None:
        self.counts[what] += 1
        try:
            assert jax.tree.structure(got) == jax.tree.structure(want)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-3, atol=1e-4)
        except AssertionError as error:
            self.wrong.append(f"{what}: {error}")

    async def calls(self, pipe: ap.Pipeline, model: Any) -> None:
        """Batches of several shapes; some cancelled, some timed out."""
        rng = self.rng
        while not self.over:
            x = batch(rng.randrange(20), rng.choice(ROWS))
            want = self.wanted(model, x)
            how = rng.choice(["keep", "keep", "keep", "cancel", "timeout", "task"])
            try:
                if how == "timeout":
                    async with asyncio.timeout(rng.choice([0.0, 1e-4, 1e-3, 1.0])):
                        self.compare("timed", await pipe(x), want)
                    continue
                if how == "task":
                    task = asyncio.ensure_future(pipe(x))
                    await asyncio.sleep(rng.choice([0.0, 1e-3]))
                    task.cancel()
                    self.compare("task", await task, want)
                    continue
                running = await pipe.submit(x)
                x[:] = np.nan
                if how == "cancel":
                    running.cancel()
                self.compare("call", await running, want)
            except (asyncio.CancelledError, TimeoutError):
                self.counts["dropped"] += 1
                if how == "keep":
                    self.wrong.append("an evaluation was cancelled that nobody cancelled")

    async def streams(self, pipe: ap.Pipeline, model: Any) -> None:
        """Streams that end, are left early, or whose source raises."""
        rng = self.rng
        while not self.over:
            rows, seeds, leave = rng.choice(ROWS), [rng.randrange(20) for _ in range(12)], rng.randrange(20)

            def source(rows: int = rows, seeds: list[int] = seeds, raises: bool = rng.random() < 0.2) -> Any:
                for i, seed in enumerate(seeds):
                    if raises and i == 7:
                        raise KeyError("the source's own")
                    yield batch(seed, rows)

            n = 0
            results = pipe.stream(source())
            try:
                async for got in results:
                    self.compare("stream", got, self.wanted(model, batch(seeds[n], rows)))
                    n += 1
                    if n == leave:
                        break
            except KeyError:
                self.counts["source raised"] += 1
            finally:
                await results.aclose()
            await asyncio.sleep(0)

    async def sessions(self, pipe: ap.Pipeline) -> None:
        """States: steps, snapshots, forks, resets; cancellations, after which they begin anew."""
        rng, rows = self.rng, self.rng.choice(ROWS)
        begin = {"sums": [np.zeros((rows, WIDTH), np.float32) for _ in self.weights], "n": np.int32(0)}
        state, want = ap.State(begin), begin
        while not self.over:
            x, how = batch(rng.randrange(20), rows), rng.random()
            if how < 0.05:
                running = await pipe.submit(x, state=state)
                running.cancel()
                await state.reset()
                want = begin
            elif how < 0.1:
                other = await state.fork()
                await state.free()
                state = other
            elif how < 0.15:
                snapshot = await state.snapshot()
                self.compare("snapshot", snapshot.value, want)
                await pipe(x, state=state)
                await state.restore(snapshot)
            else:
                y, want = self.wanted(steps, want, x)
                self.compare("step", await pipe(x, state=state), y)
        await state.free()

    async def failures(self, pipe: ap.Pipeline) -> None:
        """One in some fails on its device, and no other."""
        while not self.over:
            x = batch(self.rng.randrange(20), 3)
            poisoned = self.rng.random() < 0.1
            if poisoned:
                x[0, 0] = np.copysign(1e9, self.weights[0][0, 0])
            try:
                got = await pipe(x)
                self.compare("checked", got, x * self.weights[0][0, 0] @ self.weights[1])
                if poisoned:
                    self.wrong.append("an evaluation that had to fail did not")
            except ap.EvaluationError:
                self.counts["failed"] += 1
                if not poisoned:
                    self.wrong.append("an evaluation failed that had no reason to")
            await asyncio.sleep(0.002)

    async def aborts(self, pipe: ap.Pipeline) -> None:
        """An eval callback that ends some evaluations in the middle."""
        rng = self.rng
        pipe.scheduler.set_eval_callback(lambda tensor, ask: rng.random() < (0.3 if ask else 0.8))
        while not self.over:
            x = batch(rng.randrange(20), 3)
            try:
                self.compare("watched", await pipe(x), self.wanted(layers, x))
            except ap.EvaluationAborted:
                self.counts["aborted"] += 1
            await asyncio.sleep(0.002)

    async def lag(self) -> None:
        """How late the loop comes back, and how much memory there is."""
        while not self.over:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            self.lags.append(time.monotonic() - began - 0.005)
            if len(self.lags) % 100 == 0:
                self.rss.append(rss_nbytes())

    async def pipelines(self, n_devices: int) -> None:
        devices = [f"cpu:{i}" for i in range(n_devices)]
        pipes = {
            (fn, i): ap.Pipeline(fn, self.weights, devices=devices, n_copies=n)
            for i, (fn, n) in enumerate([(layers, 4), (branches, 2), (steps, 3), (failing, 2), (layers, 2)])
        }
        for pipe in pipes.values():
            await pipe.__aenter__()
        try:
            (one, two, three, four, five) = pipes.values()
            work = [self.calls(one, layers) for _ in range(4)] + [self.calls(two, branches) for _ in range(3)]
            work += [self.streams(one, layers), self.streams(two, branches), self.failures(four), self.aborts(five)]
            work += [self.sessions(three) for _ in range(4)] + [self.lag()]
            async with asyncio.TaskGroup() as group:
                for each in work:
                    group.create_task(each)
            for pipe in pipes.values():
                await pipe.scheduler.synchronize()
                s = pipe.statistics()
                if (s.in_flight, s.waiting) != (0, 0):
                    self.wrong.append(f"slots are not free: {s}")
                if s.succeeded + s.failed + s.cancelled + s.aborted != s.submitted:
                    self.wrong.append(f"evaluations do not add up: {s}")
        finally:
            for pipe in pipes.values():
                await pipe.aclose()

    def report(self, before: tuple[int, int]) -> dict[str, Any]:
        """What was found; `wrong` is empty where all is well."""
        gc.collect()
        deadline = time.monotonic() + 5.0
        while own_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        if own_threads():
            self.wrong.append(f"threads are left: {own_threads()}")
        arrays, files = len(jax.live_arrays()), n_files()
        if arrays > before[0]:
            self.wrong.append(f"{arrays - before[0]} arrays are left")
        if files > before[1]:
            self.wrong.append(f"{files - before[1]} file descriptors are left")
        half = self.rss[len(self.rss) // 2 :]  # the first half compiles and fills caches
        grown = max(half[-3:]) - min(half[:3]) if len(half) >= 6 else 0
        if grown > RSS_SLACK:
            self.wrong.append(f"memory grew by {grown >> 20} MiB in the second half")
        lags = sorted(self.lags) or [0.0]
        p99 = lags[int(len(lags) * 0.99)]
        if p99 > LAG_P99_S:
            self.wrong.append(f"the event loop came back {p99 * 1e3:.0f} ms late (p99)")
        return {
            "counts": dict(sorted(self.counts.items())),
            "loop_lag_ms": {"p50": 1e3 * lags[len(lags) // 2], "p99": 1e3 * p99, "max": 1e3 * lags[-1]},
            "rss_mib": [self.rss[0] >> 20, self.rss[-1] >> 20] if self.rss else [],
            "wrong": self.wrong,
        }


async def soak(seconds: float, n_devices: int, seed: int) -> dict[str, Any]:
    run = Soak(seconds, seed)
    for fn in (layers, branches):  # what JAX keeps for good is there before anything is counted
        run.jitted[fn](run.weights, batch(0, 1))
    gc.collect()
    before = len(jax.live_arrays()), n_files()
    tasks = asyncio.all_tasks()
    await run.pipelines(n_devices)
    await asyncio.sleep(0.05)
    left = asyncio.all_tasks() - tasks
    if left:
        run.wrong.append(f"tasks are left: {left}")
    del left
    return run.report(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)  # of failures that are meant to be
    found = asyncio.run(soak(60.0 * args.minutes, args.devices, args.seed))
    print(json.dumps(found, indent=2))
    print("all is well" if not found["wrong"] else f"{len(found['wrong'])} things are wrong")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
