"""What the benchmarks share: stages, the hand-written loop, interleaved timing, one JSON line."""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

WINDOW = 4
"""Evaluations in flight, for the hand-written loop and for aiopipe alike."""

STAGES: dict[str, tuple[int, tuple[int, int]]] = {
    "tiny": (1, (1, 8)),
    "one-core": (32, (16, 256)),
    "medium": (8, (64, 512)),
}
"""name -> (how often a stage repeats ``x = tanh(x @ w)``, shape of x)."""


def start_jax(specs: Sequence[str]) -> list[jax.Device]:
    """Configure JAX for the devices that specs such as ``cpu:1`` name; return them."""
    cpus = [int(spec.partition(":")[2] or 0) for spec in specs if spec.startswith("cpu")]
    jax.config.update("jax_num_cpu_devices", max(cpus, default=0) + 1)
    return [jax.local_devices(backend=spec.partition(":")[0])[int(spec.partition(":")[2] or 0)] for spec in specs]


def repeat(x: Any, w: Any, times: int) -> Any:
    """One stage."""
    for _ in range(times):
        x = jax.numpy.tanh(x @ w)
    return x


def make_model(kind: str, n_stages: int, seed: int = 0) -> tuple[Callable[..., Any], list[Any], Any]:
    """``(model(params, x), params, x)`` of `n_stages` equal stages."""
    times, shape = STAGES[kind]
    rng = np.random.default_rng(seed)
    width = shape[1]
    params = [rng.standard_normal((width, width)).astype(np.float32) / width**0.5 for _ in range(n_stages)]
    x = rng.standard_normal(shape).astype(np.float32)

    def model(params: list[Any], x: Any) -> Any:
        for w in params:
            x = repeat(x, w, times)
        return x

    return model, params, x


def hand_written(kind: str, params: Sequence[Any], devices: Sequence[jax.Device]) -> Callable[[Any], Any]:
    """The chain that people write today: `device_put` and a jitted call for each stage."""
    times, _ = STAGES[kind]
    stage = jax.jit(lambda w, x: repeat(x, w, times))
    weights = [jax.device_put(w, device) for w, device in zip(params, devices, strict=True)]

    def chain(x: Any) -> Any:
        for w, device in zip(weights, devices, strict=True):
            x = stage(w, jax.device_put(x, device))
        return x

    return chain


def windowed(chain: Callable[[Any], Any], batches: Iterator[Any], window: int = WINDOW) -> Iterator[Any]:
    """Run the chain over batches with a few outputs in flight; yield ready results in order."""
    pending: deque[Any] = deque()
    for batch in batches:
        pending.append(chain(batch))
        if len(pending) >= window:
            yield pending.popleft().block_until_ready()
    while pending:
        yield pending.popleft().block_until_ready()


async def interleaved(
    runs: dict[str, Callable[[], Awaitable[None]]], repetitions: int, per_run: int
) -> dict[str, list[float]]:
    """Time each run in turn, `repetitions` times after one warm-up; seconds for each of its `per_run` evaluations.

    Every round has another order: what a run finds (clock frequency, caches, which cores the threads are on)
    depends on the run before it, and after one that used a single core the first ten milliseconds are slow.
    """
    orders = list(itertools.permutations(runs.items())) if len(runs) <= 4 else [tuple(runs.items())]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(repetitions + 1):
        for name, run in orders[round_ % len(orders)]:
            began = time.perf_counter()
            await run()
            if round_:
                times[name].append((time.perf_counter() - began) / per_run)
        progress(f"round {round_} of {repetitions}")
    return times


def ratio(times: dict[str, list[float]], name: str, peer: str) -> float:
    """Median over the rounds of one run's time divided by its peer's."""
    return statistics.median(a / b for a, b in zip(times[name], times[peer], strict=True))


def progress(message: str) -> None:
    """Tell whoever watches; standard output is for results."""
    print(message, file=sys.stderr, flush=True)


class Check(NamedTuple):
    """A figure and the bar that it is held to."""

    what: str
    value: float
    relation: Literal["<=", ">="]
    bar: float

    @property
    def holds(self) -> bool:
        """Whether the bar is reached."""
        return self.value <= self.bar if self.relation == "<=" else self.value >= self.bar


def finish(result: dict[str, Any], checks: Sequence[Check] = ()) -> None:
    """Print the result as the last line, with its checks and what it was measured on."""
    where = {"jax": jax.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    held = [{**check._asdict(), "value": round(check.value, 4), "holds": check.holds} for check in checks]
    print(json.dumps({**result, "checks": held, **where}), flush=True)
