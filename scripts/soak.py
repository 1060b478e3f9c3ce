"""Everything at once on CPU devices, for as long as you like; at the end nothing may be wrong, or left.

    PYTHONPATH=. python scripts/soak.py --minutes 30

Many tasks send batches of several shapes through pipelines, streams, batchers and states, cancel some, abort some, have
some fail and some be late. Every result is compared with that of `jax.jit` on one device. At the end no slot, thread,
task, array or file descriptor may be left; meanwhile memory, threads and descriptors must have stayed flat, and the
event loop must not have come back much later than one that has nothing to do, in another process beside it. The exit
code says so.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import sys
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aiopipe as ap
from soak_watch import Watch

WIDTH = 32
ROWS = (1, 3, 8)
SEEDS = range(20)
FLOOD_S = 5.0
PAUSE_S = 0.06


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


def rows_alone(params: list[Any], x: Any) -> Any:
    return [jnp.tanh(x @ params[2]), x.sum(axis=1)]


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


class Soak:
    """The tasks of one run, and what they found.

    What one device makes of the inputs is computed beforehand, or in another thread: the loop is aiopipe's alone.
    """

    def __init__(self, seconds: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.weights = weights()
        self.jitted = {fn: jax.jit(fn) for fn in (layers, branches, steps, rows_alone)}
        self.batches = {(seed, rows): batch(seed, rows) for seed in SEEDS for rows in ROWS}
        self.known = {
            (fn, which): self.compute(fn, x)
            for fn in (layers, branches, rows_alone)
            for which, x in self.batches.items()
        }
        self.until = time.monotonic() + seconds

    def over(self) -> bool:
        return time.monotonic() > self.until or len(self.wrong) > 10

    @property
    def flooded(self) -> bool:
        """Whether everybody sends as fast as they can: half of the time. Then the loop has more to do than it can."""
        return int(time.monotonic() / FLOOD_S) % 2 == 0

    async def pause(self) -> None:
        """What each task does between two things: wait for a while, or give the others their turns."""
        await asyncio.sleep(0.0 if self.flooded else self.rng.expovariate(1 / PAUSE_S))

    def compute(self, fn: Any, *args: Any) -> Any:
        """What one device makes of it, at once: JAX would go on reading an array that changes meanwhile."""
        return jax.tree.map(np.asarray, self.jitted[fn](self.weights, *args))

    def draw(self, fn: Any, rows: int | None = None) -> tuple[np.ndarray, Any]:
        """Some batch, which the caller may overwrite, and what the function makes of it."""
        which = self.rng.choice(SEEDS), rows or self.rng.choice(ROWS)
        return self.batches[which].copy(), self.known[fn, which]

    def compare(self, what: str, got: Any, want: Any) -> None:
        self.counts[what] += 1
        if jax.tree.structure(got) != jax.tree.structure(want):
            self.wrong.append(f"{what}: {jax.tree.structure(got)} and not {jax.tree.structure(want)}")
            return
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a = np.asarray(a)
            if a.dtype != b.dtype or a.shape != b.shape or not np.allclose(a, b, rtol=1e-3, atol=1e-4):
                self.wrong.append(f"{what}: {a} and not {b}")

    async def calls(self, pipe: ap.Pipeline, model: Any) -> None:
        """Batches of several shapes; some cancelled, some timed out."""
        rng = self.rng
        while not self.over():
            await self.pause()
            x, want = self.draw(model)
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
        while not self.over():
            await self.pause()
            rows, leave = rng.choice(ROWS), rng.randrange(20)
            drawn = [self.draw(model, rows) for _ in range(12)]

            def source(drawn: list[Any] = drawn, raises: bool = rng.random() < 0.2) -> Any:
                for i, (x, _) in enumerate(drawn):
                    if raises and i == 7:
                        raise KeyError("the source's own")
                    yield x

            n = 0
            results = pipe.stream(source())
            try:
                async for got in results:
                    self.compare("stream", got, drawn[n][1])
                    n += 1
                    if n == leave:
                        break
            except KeyError:
                self.counts["source raised"] += 1
            finally:
                await results.aclose()

    async def sessions(self, pipe: ap.Pipeline) -> None:
        """States: steps, snapshots, forks, resets; cancellations, after which they begin anew."""
        rng, rows = self.rng, self.rng.choice(ROWS)
        begin = {"sums": [np.zeros((rows, WIDTH), np.float32) for _ in self.weights], "n": np.int32(0)}
        state, want = ap.State(begin), begin
        while not self.over():
            await self.pause()
            x, how = self.batches[rng.choice(SEEDS), rows].copy(), rng.random()
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
                y, want = await asyncio.to_thread(self.compute, steps, want, x.copy())
                self.compare("step", await pipe(x, state=state), y)
        await state.free()

    async def failures(self, pipe: ap.Pipeline) -> None:
        """One in some fails on its device, and no other."""
        while not self.over():
            await self.pause()
            x, _ = self.draw(layers, 3)
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

    async def aborts(self, pipe: ap.Pipeline) -> None:
        """An eval callback that ends some evaluations in the middle."""
        rng = self.rng
        pipe.scheduler.set_eval_callback(lambda tensor, ask: rng.random() < (0.3 if ask else 0.8))
        while not self.over():
            await self.pause()
            x, want = self.draw(layers, 3)
            try:
                self.compare("watched", await pipe(x), want)
            except ap.EvaluationAborted:
                self.counts["aborted"] += 1

    async def hurry(self, pipe: ap.Pipeline) -> None:
        """Some are too late, and are told so."""
        while not self.over():
            await self.pause()
            x, want = self.draw(layers)
            try:
                self.compare("in time", await pipe(x), want)
            except ap.DeadlineExceeded:
                self.counts["late"] += 1

    async def requests(self, batcher: ap.Batcher) -> None:
        """Calls that share evaluations; some are cancelled."""
        rng = self.rng
        while not self.over():
            await self.pause()
            x, want = self.draw(rows_alone)
            try:
                async with asyncio.timeout(rng.choice([1e-3, 2e-3, 5.0, 5.0])):
                    self.compare("batched", await batcher(x), want)
            except TimeoutError:
                self.counts["dropped"] += 1
            except ap.OverloadedError:
                self.counts["refused"] += 1
                await asyncio.sleep(rng.choice([0.0, 0.01]))

    async def pipelines(self, n_devices: int, watch: Watch) -> None:
        devices = [f"cpu:{i}" for i in range(n_devices)]
        kinds = [(layers, 4), (branches, 2), (steps, 3), (failing, 2), (layers, 2), (layers, 1), (rows_alone, 2)]
        pipes = [
            ap.Pipeline(fn, self.weights, devices=devices, n_copies=n, deadline=0.01 if n == 1 else None)
            for fn, n in kinds
        ]
        for pipe in pipes:
            await pipe.__aenter__()
        batcher = ap.Batcher(pipes[-1], max_batch=32, max_wait=0.002, max_queue=40)
        await batcher.__aenter__()
        try:
            (one, two, three, four, five, six, _) = pipes
            work = [self.calls(one, layers) for _ in range(4)] + [self.calls(two, branches) for _ in range(3)]
            work += [self.streams(one, layers), self.streams(two, branches), self.failures(four), self.aborts(five)]
            work += [self.sessions(three) for _ in range(4)] + [self.hurry(six), watch.look(self)]
            work += [self.requests(batcher) for _ in range(8)]
            async with asyncio.TaskGroup() as group:
                for each in work:
                    group.create_task(each)
            await batcher.aclose()
            for pipe in pipes:
                await pipe.scheduler.synchronize()
                s = pipe.statistics()
                if (s.in_flight, s.waiting) != (0, 0):
                    self.wrong.append(f"slots are not free: {s}")
                if s.succeeded + s.failed + s.cancelled + s.aborted != s.submitted:
                    self.wrong.append(f"evaluations do not add up: {s}")
                self.counts["evaluations"] += s.submitted
        finally:
            await batcher.aclose()
            for pipe in pipes:
                await pipe.aclose()


async def soak(seconds: float, n_devices: int, seed: int) -> dict[str, Any]:
    run = Soak(seconds, seed)
    gc.collect()
    tasks = asyncio.all_tasks()
    await asyncio.to_thread(int)  # asyncio's own threads are there before anything is counted
    watch = Watch(seconds)
    await run.pipelines(n_devices, watch)
    await asyncio.sleep(0.05)
    left = asyncio.all_tasks() - tasks
    if left:
        run.wrong.append(f"tasks are left: {left}")
    del left
    return watch.end(run.counts, run.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
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
