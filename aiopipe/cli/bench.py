"""``aiopipe bench``: a pipeline against the loop that people write today, and against one device."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from ..comparison import array_difference
from ..devices.xla import XlaBackend
from ..errors import says_no_room
from ..pipeline import Pipeline
from .bench_report import Measured, Run
from .loop import hand_written, on_one_device, windowed
from .progress import Progress
from .target import Target

__all__ = ["Bench", "measure"]

ROUND_S = 0.5
"""How long a round of each run takes, where nobody says how many evaluations it has."""

MOST_EVALUATIONS = 20_000
ALONE = 5


@dataclass(frozen=True, slots=True)
class Bench:
    """What is to be measured.

    Attributes:
        target: the user's function.
        weights, inputs: what it gets.
        specs: of the devices.
        split: as for `Pipeline`.
        n_copies: how many evaluations are in flight, in each of the runs.
        memory_limit: bytes for each device.
        rounds: how often each run is measured.
        evaluations: in each round; by default as many as take `ROUND_S`.
    """

    target: Target
    weights: Any
    inputs: Sequence[Any]
    specs: Sequence[str]
    split: Any
    n_copies: Literal["auto"] | int
    memory_limit: Mapping[str, int] | None
    rounds: int
    evaluations: int | None


async def measure(bench: Bench) -> Measured:
    """Open the pipeline, and measure the three in turn.

    Raises:
        EvaluationError: the function failed on a device.
        AllocationError: it does not fit.
    """
    inputs = tuple(bench.inputs)
    with Progress() as progress:
        async with Pipeline(
            bench.target.fn,
            bench.weights,
            devices=bench.specs,
            n_copies=bench.n_copies,
            split=bench.split,
            memory_limit=bench.memory_limit,
            on_progress=lambda done, total: progress.step("compiling", done, total),
        ) as pipe:
            want = await pipe(*inputs)
            plan, backends = await pipe.plan(*inputs), pipe.scheduler.backends
            first = backends[0]
            device = first.jax_device if isinstance(first, XlaBackend) else jax.devices()[0]
            bodies: dict[str, Callable[[], Any] | None] = {
                "loop": hand_written(plan, backends, plan.graph.flatten_inputs(inputs)),
                "jit": on_one_device(bench.target.fn, bench.weights, inputs, device),
            }
            diff = _warmed_up(bodies, want)
            runs = {"pipeline": _stream(pipe, inputs)}
            runs |= {name: _looped(body, pipe.n_copies) for name, body in bodies.items() if body is not None}
            evaluations = bench.evaluations or await _enough(runs)
            seconds = await _interleaved(runs, bench.rounds, evaluations, progress)
            alone = {name: await _alone(run) for name, run in runs.items()}
            return Measured(
                n_copies=pipe.n_copies,
                devices=tuple(bench.specs),
                splits=plan.n_splits,
                rounds=bench.rounds,
                evaluations=evaluations,
                runs={name: Run(tuple(seconds[name]), alone[name]) for name in runs},
                max_abs_diff=diff,
            )


Repeated = Callable[[int], Awaitable[None]]


def _stream(pipe: Pipeline, inputs: tuple[Any, ...]) -> Repeated:
    async def run(evaluations: int) -> None:
        async for _ in pipe.stream(itertools.repeat(inputs, evaluations)):
            pass

    return run


def _looped(body: Callable[[], Any], window: int) -> Repeated:
    async def run(evaluations: int) -> None:
        for _ in windowed(body, evaluations, window):
            pass

    return run


def _warmed_up(bodies: dict[str, Callable[[], Any] | None], want: Any) -> float | None:
    """Compile the peers; leave out what has no room. Returns the largest difference of the one device's result."""
    diff = None
    for name, body in bodies.items():
        if body is None:
            continue
        try:
            (got,) = windowed(body, 1, 1)
        except Exception as error:
            if not says_no_room(error):
                raise
            bodies[name] = None
            continue
        if name == "jit":
            diff = _difference(got, want)
    return diff


def _difference(got: Any, want: Any) -> float | None:
    """The largest difference of two trees of arrays; None where no number says it (keys, or NaN in one of them)."""
    differences = [0.0]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jax.numpy.issubdtype(a.dtype, jax.dtypes.extended):
            return None
        x, y = np.asarray(a), np.asarray(b)
        both = np.result_type(x, y)
        differences.append(array_difference(x.astype(both), y.astype(both))[0])
    largest = max(differences)
    return largest if math.isfinite(largest) else None


async def _enough(runs: Mapping[str, Repeated]) -> int:
    """How many evaluations take about `ROUND_S` in the fastest run."""
    n = 4
    while True:
        fastest = min([await _timed(run, n) for run in runs.values()])
        if fastest >= ROUND_S / 4 or n >= MOST_EVALUATIONS:
            return max(4, min(MOST_EVALUATIONS, round(n * ROUND_S / max(fastest, 1e-9))))
        n = min(MOST_EVALUATIONS, n * 4)


async def _timed(run: Repeated, evaluations: int) -> float:
    await asyncio.sleep(0)  # Ctrl-C comes through here
    began = time.perf_counter()
    await run(evaluations)
    return time.perf_counter() - began


async def _interleaved(
    runs: Mapping[str, Repeated], rounds: int, evaluations: int, progress: Progress
) -> dict[str, list[float]]:
    """Seconds of each round: every run in turn, in another order each time, after a round that does not count."""
    orders = list(itertools.permutations(runs))
    found: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name in orders[round_ % len(orders)]:
            took_s = await _timed(runs[name], evaluations)
            if round_:
                found[name].append(took_s)
        progress.step("measuring", round_, rounds)
    return found


async def _alone(run: Repeated) -> float:
    """Median seconds of an evaluation with nothing else in flight."""
    return statistics.median([await _timed(run, 1) for _ in range(ALONE)])
