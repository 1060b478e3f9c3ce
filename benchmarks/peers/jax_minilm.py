"""MiniLM with JAX alone, and with aiopipe: ``python jax_minilm.py jit-window | aiopipe``.

- jit-window: the whole model in one jit on one device, a few batches in flight,
- aiopipe: split over two CPU devices, as `examples/embed.py` does by default.

A run goes over all batches; its result are all embeddings, in the order of the batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from _common import start_jax, windowed
from _pipe import PipePeer
from _protocol import Peer, Work, serve
from minilm import model

import aiopipe as ap

Embed = Callable[[Any, Any, Any], Any]


def load(work: Work) -> tuple[Embed, model.Params]:
    config, params = model.load(Path(work.model))

    def embed(params: model.Params, ids: Any, mask: Any) -> Any:
        return model.embed(params, ids, mask, config)

    return embed, params


class WindowedJit(Peer):
    def setup(self, work: Work) -> dict[str, str]:
        self.work = work
        device = start_jax(["cpu:0"])[0]
        embed, params = load(work)
        jitted = jax.jit(embed)
        params = jax.device_put(params, device)
        self.embed: Callable[[Any], Any] = lambda batch: jitted(params, *batch)
        return {"jax": jax.__version__}

    def run(self, evaluations: int) -> tuple[int, Any]:
        passes = max(1, round(evaluations / len(self.work.batches)))
        found: list[Any] = []
        for _ in range(passes):
            found = list(windowed(self.embed, iter(self.work.batches), self.work.window))
        return passes * len(self.work.batches), found


class Aiopipe(PipePeer):
    def setup(self, work: Work) -> dict[str, str]:
        self.work = work
        specs = ["cpu:0", "cpu:1"]
        start_jax(specs)
        self.runner.run(self.enter(*load(work), devices=specs, n_copies=work.window))
        return {"aiopipe": ap.__version__, "jax": jax.__version__}

    async def stream(self, passes: int) -> list[Any]:
        assert self.pipe is not None
        found: list[Any] = []
        for _ in range(passes):
            found = [embeddings async for embeddings in self.pipe.stream(self.work.batches)]
        return found

    def run(self, evaluations: int) -> tuple[int, Any]:
        passes = max(1, round(evaluations / len(self.work.batches)))
        return passes * len(self.work.batches), self.runner.run(self.stream(passes))


PEERS = {"jit-window": WindowedJit, "aiopipe": Aiopipe}

if __name__ == "__main__":
    serve(PEERS[sys.argv[1]]())
