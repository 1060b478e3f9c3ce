"""The steps of a model as graphs on a scheduler: weights spread over devices, each step compiled when first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import anyio.to_thread
import jax
import numpy as np

import aiopipe as ap
from aiopipe.sched.partition import partition

from . import steps
from .model import Config, Params
from .sampling import Sampling, single, stack

__all__ = ["Graphs", "Kind", "Split", "buckets"]

Kind = Literal["decode", "decode_one", "prefill", "chunk"]
"""All rows by one token; one row by one token; the end of a prompt; a part of one that another follows."""

Split = Literal["auto", "layers"] | Sequence[float]

SHORTEST = 128


def buckets(n_ctx: int) -> tuple[int, ...]:
    """How many positions attention may read: a few sizes, each compiled once, so that cost follows the length."""
    sizes = []
    size = SHORTEST
    while size < n_ctx:
        sizes.append(size)
        size *= 2
    return (*sizes, n_ctx)


class Graphs:
    """The graphs of one model on one scheduler.

    Args:
        scheduler: what they run on.
        config: shape of the model.
        params: as `llama.weights.load` returns them.
        rows: texts in a state.
        n_ctx: positions of each text.
        chunk: tokens of a prompt that one step reads.
        split: how the model is spread; see `llama.generator.Generator`.
        n_devices: over how many of the scheduler's backends, the first ones.

    Attributes:
        n_made: steps that were traced and compiled so far.
        sizes: the buckets.
        first_state: that of the first group: where its arrays are, those of all groups are.
    """

    def __init__(
        self,
        scheduler: ap.Scheduler,
        config: Config,
        params: Params,
        *,
        rows: int,
        n_ctx: int,
        chunk: int,
        split: Split,
        n_devices: int,
    ) -> None:
        self.scheduler = scheduler
        self.config = config
        self.rows = rows
        self.n_ctx = n_ctx
        self.chunk = chunk
        self.sizes = buckets(n_ctx)
        self.n_made = 0
        self.first_state = self.new_state("group 0")
        self._params: Any = params
        self._split = split
        self._n_devices = n_devices
        self._graphs: dict[tuple[Kind, int], asyncio.Task[ap.Graph]] = {}

    def bucket(self, length: int) -> int:
        """The smallest size that covers so many positions."""
        return next(size for size in self.sizes if size >= length)

    def new_state(self, name: str) -> ap.State:
        """An empty state for `rows` texts."""
        shapes = jax.eval_shape(partial(steps.new_state, self.config, self.rows, self.n_ctx))
        return ap.State({**shapes, "recent": np.full(shapes["recent"].shape, -1, np.int32)}, name=name)

    async def place(self) -> None:
        """Put the weights on the devices, once, before any step."""
        places = await anyio.to_thread.run_sync(self._places)
        self._params = await ap.place(self._params, places)

    def get(self, kind: Kind, n_kv: int) -> asyncio.Task[ap.Graph]:
        """A step, compiled; a task that whoever wants the same one shares: await it in `asyncio.shield`."""
        key = kind, n_kv
        task = self._graphs.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.get_running_loop().create_task(self._make(kind, n_kv), name=f"compile {kind} {n_kv}")
            self._graphs[key] = task
        return task

    async def aclose(self) -> None:
        """End what is being compiled."""
        tasks = list(self._graphs.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:  # nobody may be left who asks
            if not task.cancelled():
                task.exception()

    async def _make(self, kind: Kind, n_kv: int) -> ap.Graph:
        graph = await anyio.to_thread.run_sync(self._trace, kind, n_kv)
        await self.scheduler.alloc_graph(graph, state=self.first_state)  # so that all steps keep it where it is
        self.n_made += 1
        return graph

    def _trace(self, kind: Kind, n_kv: int) -> ap.Graph:
        fn, inputs = self._step(kind, n_kv)
        name = f"{kind}_{n_kv}"
        return ap.trace(fn, self._params, *inputs, state=self.first_state, name=name)

    def _step(self, kind: Kind, n_kv: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function of a step, and inputs of its shapes."""
        static = {"config": self.config, "n_kv": n_kv}
        number = np.zeros((), np.int32)
        if kind in ("prefill", "chunk"):
            inputs: tuple[Any, ...] = (np.zeros(self.chunk, np.int32), number, number, number, single(Sampling()))
            return partial(steps.prefill, **static, last=kind == "prefill"), inputs
        if kind == "decode_one":
            row = np.zeros(1, np.int32)
            return partial(steps.decode_rows, **static), (row, row, row, stack([Sampling()]))
        all_rows = np.zeros(self.rows, np.int32)
        active = np.zeros(self.rows, np.bool_)
        return partial(steps.decode, **static), (all_rows, all_rows, active, stack([Sampling()] * self.rows))

    def _places(self) -> Callable[[str], Any]:
        """For the path of a weight the backends that hold it."""
        backends = list(self.scheduler.backends[: self._n_devices])
        if self._split == "layers":
            return partial(_by_layers, backends, self.config.n_layers, "output" in self._params)
        graph = self._trace("decode", self.sizes[0])
        ratios = None if isinstance(self._split, str) else list(self._split)
        limits = self.scheduler.memory_limits[: self._n_devices]
        found = partition(graph, [backend.device for backend in backends], ratios=ratios, memory=limits)
        held = {
            tensor.name: [backends[b] for b in found.weights.get(tensor.id, (self._n_devices - 1,))]
            for tensor in graph.weights
        }
        return lambda path: held[path]


def _by_layers(backends: Sequence[ap.Backend], n_layers: int, has_output: bool, path: str) -> list[ap.Backend]:
    """The same number of blocks on each; the embedding with the first, what comes after the blocks with the last."""
    part = path.split("/")
    if part[0] == "blocks":
        return [backends[int(part[1]) * len(backends) // n_layers]]
    if part[0] == "embed":
        return list(dict.fromkeys([backends[0]] if has_output else [backends[0], backends[-1]]))
    return [backends[-1]]
