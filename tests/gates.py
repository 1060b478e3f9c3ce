"""Evaluations that are under way for as long as a test wants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aiopipe as ap
from models import batch, mlp_params


class Gate:
    """A host callback that waits for the test: a split that is under way for as long as wanted."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.calls = 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.calls += 1
        self.entered.set()
        assert self.open.wait(30)
        return x

    def fn(self, w: list[Any], x: Any) -> Any:
        x = jnp.tanh(x @ w[0])
        x = jax.pure_callback(self, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jnp.tanh(x @ w[1])


async def eventually(condition: Any) -> None:
    """Poll: what is waited for happens on another thread, which cannot set an `asyncio.Event`."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def gated_scheduler(n_copies: int = 2) -> AsyncIterator[tuple[ap.Scheduler, ap.Graph, Gate]]:
    """A scheduler over two devices and a graph, planned, that goes through a gate; opened when the test is over."""
    gate = Gate()
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=n_copies) as sched:
        try:
            weights = await ap.place(mlp_params(2), {"0": sched.backends[0], "1": sched.backends[1]})
            graph = ap.trace(gate.fn, weights, batch())
            await sched.plan(graph)
            yield sched, graph, gate
        finally:
            gate.open.set()
