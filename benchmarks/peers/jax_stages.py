"""Stages with JAX alone, and with aiopipe: ``python jax_stages.py loop | jit | jit-window | aiopipe``.

- loop: the hand-written loop, `device_put` and a jitted call for each stage, a few evaluations in flight,
- jit: the whole model in one jit on one device, each evaluation waited for,
- jit-window: the same with a few evaluations in flight,
- aiopipe: `Pipeline.stream` with as many copies.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from _common import hand_written, make_model, start_jax, windowed
from _pipe import PipePeer
from _protocol import Peer, Work, serve

import aiopipe as ap


class Loop(Peer):
    """The yardstick, as `_common` has it."""

    chain: Callable[[Any], Any]
    work: Work

    def setup(self, work: Work) -> dict[str, str]:
        self.work = work
        self.chain = self.make_chain(work)
        np.asarray(self.chain(work.x))
        return {"jax": jax.__version__}

    def make_chain(self, work: Work) -> Callable[[Any], Any]:
        return hand_written(work.kind, work.weights, start_jax([f"cpu:{i}" for i in range(len(work.weights))]))

    def results(self, batches: Iterator[Any]) -> Iterator[Any]:
        return windowed(self.chain, batches, self.work.window)

    def run(self, evaluations: int) -> tuple[int, Any]:
        last = None
        for result in self.results(itertools.repeat(self.work.x, evaluations)):
            last = result
        return evaluations, last


class WindowedJit(Loop):
    """All stages in one jit; NumPy goes straight into it, which is faster than `device_put` first."""

    def make_chain(self, work: Work) -> Callable[[Any], Any]:
        device = start_jax(["cpu:0"])[0]
        model, _, _ = make_model(work.kind, len(work.weights))
        jitted = jax.jit(model)
        params = jax.device_put(work.weights, device)
        return lambda x: jitted(params, x)


class BlockingJit(WindowedJit):
    def results(self, batches: Iterator[Any]) -> Iterator[Any]:
        for x in batches:
            yield self.chain(x).block_until_ready()


class Aiopipe(PipePeer):
    """Equal stages, one on each device."""

    def setup(self, work: Work) -> dict[str, str]:
        self.work = work
        specs = [f"cpu:{i}" for i in range(len(work.weights))]
        start_jax(specs)
        model, _, _ = make_model(work.kind, len(specs))
        self.runner.run(self.open(model, specs))
        return {"aiopipe": ap.__version__, "jax": jax.__version__}

    async def open(self, model: Callable[..., Any], specs: list[str]) -> None:
        split = [1] * len(specs)
        pipe = await self.enter(model, self.work.weights, devices=specs, n_copies=self.work.window, split=split)
        plan = await pipe.plan(self.work.x)
        if plan.n_splits != len(specs):
            raise RuntimeError(f"{plan.n_splits} splits for {len(specs)} stages:\n{plan}")

    async def stream(self, evaluations: int) -> Any:
        assert self.pipe is not None
        last = None
        async for result in self.pipe.stream(itertools.repeat(self.work.x, evaluations)):
            last = result
        return last

    def run(self, evaluations: int) -> tuple[int, Any]:
        return evaluations, self.runner.run(self.stream(evaluations))


PEERS = {"loop": Loop, "jit": BlockingJit, "jit-window": WindowedJit, "aiopipe": Aiopipe}

if __name__ == "__main__":
    serve(PEERS[sys.argv[1]]())
