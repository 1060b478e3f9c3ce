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


def zigzag(n: int) -> tuple[Callable[..., Any], list[np.ndarray[Any, Any]]]:
    """A chain of layers, each of which goes to another device than the one before it."""

    def model(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = x * w + 1
        return x

    return model, [np.full(4, 0.5 + i / n, np.float32) for i in range(n)]


async def turns_of(n: int, *, in_buffers: bool, timeline: bool) -> dict[str, int]:
    """The longest turn of each step of a graph of `n` splits."""
    model, params = zigzag(n)
    x = np.arange(4, dtype=np.float32)
    found: dict[str, int] = {}
    async with ap.Scheduler(["cpu:0", "cpu:1"], timeline=timeline) as sched:

        async def step(name: str, todo: Awaitable[Any]) -> Any:
            with counted() as turns:
                result = await todo
            found[name] = turns.longest()
            return result

        weights: Any = params
        if in_buffers:
            weights = await ap.place(params, lambda path: sched.backends[int(path) % 2])
        graph = ap.trace(model, weights, x)
        if not in_buffers:
            for i, node in enumerate(node for node in graph.nodes if node.op == "mul"):
                sched.set_tensor_backend(graph, graph.tensors[node.outputs[0]], f"cpu:{i % 2}")
        await step("reserve", sched.reserve(graph))
        assert sched.n_splits >= n
        await step("load", sched.alloc_graph(graph))
        evaluation = await step("submit", sched.graph_compute_async(graph, x))
        result = await step("await", evaluation)
        await step("again", sched.graph_compute(graph, x))
        assert_close(result, jax.jit(model)(params, x))
        with counted() as turns:
            assert sched.statistics().plans == 1
        found["statistics"] = turns.longest()
        await step("close", sched.aclose())
    return found


@pytest.mark.parametrize("timeline", [False, True])
@pytest.mark.parametrize("in_buffers", [False, True])
async def test_no_turn_grows_with_the_graph(in_buffers: bool, timeline: bool) -> None:
    """But for the weights, whose bytes are added up: five calls for each, so a thousand take half a millisecond."""
    few, many = [await turns_of(n, in_buffers=in_buffers, timeline=timeline) for n in (40, 240)]
    assert {name: calls for name, calls in many.items() if calls > few[name] + 5 * 200} == {}
