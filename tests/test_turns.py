"""How much aiopipe does in one turn of the event loop: calls of Python are counted, not seconds.

A turn is what the loop runs before it looks again at what else is ready, so a server's other tasks wait for it. It may
not grow with the graph.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest

import aiopipe as ap
from models import assert_close

RUN = asyncio.Handle._run.__code__


class Turns:
    """How many calls, of Python and of C, each turn of this thread's event loop made; the current one comes last."""

    def __init__(self) -> None:
        self.calls = [0]

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code is RUN:
            self.calls.append(0)
        elif event in ("call", "c_call"):
            self.calls[-1] += 1

    def longest(self) -> int:
        """Since the last time that somebody asked."""
        found = max(self.calls)
        self.calls = [0]
        return found


@contextmanager
def counted() -> Iterator[Turns]:
    turns = Turns()
    before = sys.getprofile()
    sys.setprofile(turns)
    try:
        yield turns
    finally:
        sys.setprofile(before)


Shared = Callable[[Any, Any], Any]


def zigzag(n: int) -> Shared:
    """A chain of `n` layers with one weight, each of which is to go to another device than the one before it."""

    def model(w: Any, x: Any) -> Any:
        for _ in range(n):
            x = x * w + 1
        return x

    return model


def wide(n: int) -> tuple[Callable[[list[Any], Any], Any], list[np.ndarray[Any, Any]]]:
    """`n` weights, and what multiplies by all of them."""

    def model(weights: list[Any], x: Any) -> Any:
        for w in weights:
            x = x * w
        return x

    return model, [np.full(4, 0.5 + i / n, np.float32) for i in range(n)]


X = np.arange(4, dtype=np.float32)
W = np.full(4, 0.75, np.float32)


class Steps:
    """The longest turn of each step that is taken."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    async def take(self, name: str, todo: Awaitable[Any]) -> Any:
        with counted() as turns:
            result = await todo
        self.found[name] = turns.longest()
        return result


async def turns_of_a_scheduler(n: int, *, timeline: bool = False, dispatch: Any = "auto") -> dict[str, int]:
    """A graph of `n` splits."""
    steps = Steps()
    backends = [ap.open_backend(name, dispatch=dispatch) for name in ("cpu:0", "cpu:1")]
    async with backends[0], backends[1], ap.Scheduler(backends, timeline=timeline) as sched:
        w = await ap.place(W, lambda path: backends)
        graph, reserved = [ap.trace(zigzag(n), w, X) for _ in range(2)]
        for g in (graph, reserved):
            for i, node in enumerate(node for node in g.nodes if node.op == "mul"):
                sched.set_tensor_backend(g, g.tensors[node.outputs[0]], f"cpu:{i % 2}")
        await steps.take("reserve", sched.reserve(reserved))
        await steps.take("load what is reserved", sched.alloc_graph(reserved))
        evaluation = await steps.take("load and submit", sched.graph_compute_async(graph, X))
        result = await steps.take("await", evaluation)
        await steps.take("again", sched.graph_compute(graph, X))
        assert_close(result, jax.jit(zigzag(n))(W, X))
        with counted() as turns:
            assert sched.statistics().plans == 2
        steps.found["statistics"] = turns.longest()
        assert (await sched.plan(graph)).n_splits >= n
        await steps.take("close", sched.aclose())
    return steps.found


async def turns_of_a_pipeline(n: int, split: Any) -> dict[str, int]:
    """A chain of `n` layers, cut in two."""
    steps = Steps()
    async with ap.Pipeline(zigzag(n), W, devices=["cpu:0", "cpu:1"], split=split) as pipe:
        assert_close(await steps.take("first", pipe(X)), jax.jit(zigzag(n))(W, X))
        await steps.take("another shape", pipe(X[None]))
    return steps.found


async def turns_of_weights(n: int, *, in_buffers: bool) -> dict[str, int]:
    """One split with `n` weights, by a scheduler and by a pipeline."""
    steps = Steps()
    model, params = wide(n)
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies="auto") as sched:
        weights = await ap.place(params, lambda path: sched.backends[0]) if in_buffers else params
        graph = ap.trace(model, weights, X)
        assert_close(await steps.take("submit", sched.graph_compute(graph, X)), jax.jit(model)(params, X))
    async with ap.Pipeline(model, params, devices=["cpu:0", "cpu:1"]) as pipe:
        await steps.take("pipeline", pipe(X))
        await steps.take("another shape", pipe(X[None]))
    return steps.found


def grown(few: dict[str, int], many: dict[str, int], by: int) -> dict[str, tuple[int, int]]:
    """The steps whose longest turn makes more than so many calls more."""
    return {name: (few[name], calls) for name, calls in many.items() if calls > few[name] + by}


@pytest.mark.parametrize("timeline", [False, True])
async def test_no_turn_grows_with_the_graph(timeline: bool) -> None:
    few, many = [await turns_of_a_scheduler(n, timeline=timeline) for n in (50, 150)]
    assert grown(few, many, by=60) == {}


async def test_segments_are_counted_where_each_split_is_one() -> None:
    """Each backend has a lane of its own: who launches what when is decided anew for each evaluation."""
    few, many = [await turns_of_a_scheduler(n, dispatch="own") for n in (50, 150)]
    per_evaluation = {"load and submit", "again"}
    assert grown(few, {k: v for k, v in many.items() if k not in per_evaluation}, by=60) == {}
    assert grown(few, many, by=5 * 100) == {}


@pytest.mark.parametrize("split", ["auto", {"*": ["cpu:0", "cpu:1"]}])
async def test_no_turn_of_a_pipeline_grows_with_the_graph(split: Any) -> None:
    few, many = [await turns_of_a_pipeline(n, split) for n in (50, 150)]
    assert grown(few, many, by=60) == {}


@pytest.mark.parametrize("in_buffers", [False, True])
async def test_turns_grow_by_a_dozen_calls_for_each_weight(in_buffers: bool) -> None:
    """Whose bytes are added up where it is checked whether a plan fits: a thousand take a millisecond."""
    few, many = [await turns_of_weights(n, in_buffers=in_buffers) for n in (50, 150)]
    assert grown(few, many, by=12 * 100 + 60) == {}
