"""`Pipeline`: a JAX function over several devices, in one line."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from . import _jax, _jax_types
from ._arguments import input_names, parameter_names
from ._jax_settings import Settings
from ._loops import check_own, running_loop
from ._threads import closing_s
from .backend import Backend
from .closing import check_limit
from .errors import AiopipeError, BackendClosedError, PlacementError, TensorError, TraceError
from .evaluation import Evaluation
from .fetch import fetch
from .graph import Graph
from .placement import place_under, upload_weight
from .plans import copies_of, shared
from .sched.partition import Partition, partition
from .sched.plan import Plan
from .sched.scheduler import Scheduler
from .state import State
from .statistics import Statistics
from .streaming import stream_in_order
from .timeline import Timeline
from .trace import trace

__all__ = ["Pipeline"]

Split = Literal["auto"] | Sequence[float] | Mapping[str, Any]


class Pipeline:
    """``model(params, *inputs)``, cut into contiguous parts, one for each device.

    Args:
        model: any JAX function of ``(params, *inputs)``; or of ``(params, state, *inputs)`` that returns
            ``(outputs, new_state)``, to be called with ``state=``.
        params: a pytree of arrays.
        devices: specs (``"cpu:0"``, ``"gpu:1"``) or backends, in the order of the parts.
        n_copies: how many evaluations are in flight at most; ``"auto"``: as many as fit, up to 4.
        split: ``"auto"`` balances the estimated time; numbers, one for each device, are the
            shares of it; a mapping from globs over the weights' paths to devices (or their specs)
            places the weights, and the operations follow them.
        memory_limit: bytes for each device, or a mapping from its name; see `Scheduler`.
        max_plans: how many input shapes are kept ready; the one that was not used for longest goes.
        deadline: seconds that an evaluation may take; see `Scheduler`.
        timeline: record what runs where and when: `Pipeline.timeline`; see `Scheduler`.
        on_progress: called with (compiled, to compile) while a new shape is compiled.

    Raises:
        ValueError, TypeError: `max_plans` or `n_copies` makes no sense.
        PlacementError: `split` makes no sense.

    Each new combination of input shapes, and of JAX's settings, is traced and compiled once, off the
    event loop; known shapes are served meanwhile.

    Example::

        async with ap.Pipeline(model, params, devices=["cpu:0", "cpu:1"]) as pipe:
            y = await pipe(x)
            async for y in pipe.stream(batches):
                ...
    """

    def __init__(
        self,
        model: Callable[..., Any],
        params: Any,
        *,
        devices: Sequence[str | Backend],
        n_copies: int | Literal["auto"] = 4,
        split: Split = "auto",
        memory_limit: int | Mapping[str, int] | None = None,
        max_plans: int = 64,
        deadline: float | None = None,
        timeline: bool | int = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if isinstance(split, str) and split != "auto":
            raise PlacementError(f"split={split!r}: expected 'auto', one number for each device, or a mapping")
        if max_plans < 1:
            raise ValueError(f"max_plans is {max_plans}, expected at least 1")
        copies_of(n_copies)
        self._model = model
        self._weights = params
        self._devices = tuple(devices)
        self._split: Split = split
        self._max_plans = max_plans
        self._n_copies = n_copies
        self._memory_limit = memory_limit
        self._deadline = deadline
        self._timeline = timeline
        self._on_progress = on_progress
        self._scheduler: Scheduler | None = None
        self._ending: Scheduler | None = None  # until all of it is closed: who closes again waits for that, too
        self._recorded: Timeline | None = None
        self._opened = False
        self._remote = False
        self._placed = False
        self._placing = asyncio.Lock()
        self._first: tuple[tuple[str, ...], Sequence[int]] | None = None
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._tracing: dict[Hashable, asyncio.Task[Graph]] = {}

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler underneath.

        Raises:
            BackendClosedError: the pipeline is not open.
        """
        if self._scheduler is None:
            raise BackendClosedError("this pipeline is not open: use it inside 'async with Pipeline(...) as pipe:'")
        return self._scheduler

    @property
    def n_copies(self) -> int:
        """How many evaluations are in flight at most.

        Raises:
            BackendClosedError: the pipeline is not open.
        """
        return self.scheduler.n_copies

    async def __call__(self, *inputs: Any, state: State | None = None) -> Any:
        """``model(params, *inputs)``, its arrays ready; those that a device of another machine made, as NumPy arrays.

        Args:
            inputs: what the model takes behind the parameters (and the state).
            state: what the model reads and replaces; see `State`.

        Raises:
            StateError: the state cannot be used.
            TraceError: the model cannot be traced for these inputs.
            PlacementError, AllocationError: it fits no device.
            EvaluationError: it failed on a device.
        """
        result = await (await self.submit(*inputs, state=state))
        return await fetch(result) if self._remote else result

    async def submit(self, *inputs: Any, state: State | None = None) -> Evaluation:
        """Start an evaluation; wait only for a free slot. Inputs may be changed afterwards."""
        key, leaves = _key(self._model, inputs, state)
        graph = self._graphs.get(key)
        if graph is None:
            graph = await self._graph_for(inputs, state, key)
        else:
            self._graphs.move_to_end(key)
        # Inputs with an equal key need no further check: their leaves are the graph's inputs.
        return await self.scheduler.submit(graph, leaves, state)

    def stream(
        self, batches: Iterable[Any] | AsyncIterable[Any], *, state: State | None = None
    ) -> AsyncGenerator[Any, None]:
        """Evaluate every batch; yield the results in order.

        Args:
            batches: any iterable or async iterable; a tuple is several inputs, anything else one.
                An iterable is advanced on the event loop: give an async one where that takes long.
            state: what the model reads and replaces: every batch goes on from what the one before left.
        """
        results = stream_in_order(partial(self.submit, state=state), batches, self.n_copies)
        return _fetched(results) if self._remote else results

    async def plan(self, *inputs: Any, state: State | None = None) -> Plan:
        """The plan for inputs of these shapes (arrays or `jax.ShapeDtypeStruct`), compiled and loaded."""
        key, _ = _key(self._model, inputs, state)
        return await self.scheduler.plan(self._graphs.get(key) or await self._graph_for(inputs, state, key))

    def statistics(self) -> Statistics:
        """What has been done so far."""
        return self.scheduler.statistics()

    @property
    def timeline(self) -> Timeline:
        """What ran where and when; of the newest evaluations. It can be read after the end, too.

        Raises:
            AiopipeError: the pipeline was made without ``timeline=True``.
            BackendClosedError: it was not opened yet.
        """
        return self._recorded or self.scheduler.timeline

    async def aclose(self, *, cancel: bool = False, timeout_s: float | None = 30.0) -> None:
        """Finish (or with `cancel` drop) what is in flight and end every thread. Idempotent.

        Args:
            cancel: do not wait for results, only for the devices to be done.
            timeout_s: as for `Scheduler.aclose`.

        Raises:
            ValueError, WrongLoopError: as `Scheduler.aclose` does.
        """
        check_limit(timeout_s)
        scheduler = self._scheduler or self._ending
        if scheduler is None:
            return
        check_own(scheduler.loop, "this pipeline")
        self._scheduler, self._ending = None, scheduler
        for task in list(self._tracing.values()):
            if not task.get_loop().is_closed():
                task.cancel()
        try:
            await scheduler.aclose(cancel=cancel, timeout_s=timeout_s)
        finally:
            self._graphs.clear()
        self._ending = None

    async def __aenter__(self) -> Pipeline:
        running_loop()  # nothing is opened where it could not be used
        if self._opened:
            raise BackendClosedError("this pipeline was opened already: make a new one")
        self._opened = True
        self._scheduler = Scheduler(
            self._devices,
            n_copies=self._n_copies,
            memory_limit=self._memory_limit,
            deadline=self._deadline,
            timeline=self._timeline,
            on_progress=self._on_progress,
        )
        self._recorded = self._scheduler.timeline if self._timeline else None
        await self._scheduler.__aenter__()
        self._remote = any(backend.device.props.remote for backend in self._scheduler.backends)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await self.aclose(cancel=kind is not None, timeout_s=closing_s(kind))

    async def _graph_for(self, inputs: tuple[Any, ...], state: State | None, key: Hashable) -> Graph:
        scheduler = self.scheduler
        scheduler.enter()
        task = self._tracing.get(key)
        if task is None:
            # Read now: by the time the task begins, another one may have changed the thread's settings.
            work = self._trace(scheduler, inputs, state, key, _jax.config_snapshot())
            task = running_loop().create_task(work, name="aiopipe trace")
            self._tracing[key] = task
            task.add_done_callback(lambda _: self._tracing.pop(key, None))
        return await shared(task, lambda: self._scheduler is None)

    async def _trace(
        self,
        scheduler: Scheduler,
        inputs: tuple[Any, ...],
        state: State | None,
        key: Hashable,
        config: Settings,
    ) -> Graph:
        """Trace for new shapes, place the weights if nobody has yet, and have the plan compiled."""
        with _jax.config_context(config):
            specs = jax.tree.map(_jax_types.spec_of, inputs)  # the caller may change its arrays meanwhile

        def work() -> tuple[Graph, tuple[str, ...]]:
            with _jax.config_context(config):
                graph = trace(self._model, self._weights, *specs, state=state)
            return graph, tuple(node.op for node in graph.nodes)

        async with self._placing:  # the first shape places the weights for all
            if not self._placed and isinstance(self._split, Mapping):
                self._weights = await place_under(config, self._weights, self._placement(scheduler, self._split))
                self._placed = True
            try:
                graph, ops = await scheduler._in_thread(work, "trace")
            except AiopipeError:
                raise
            except Exception as error:
                shapes = ", ".join(str(leaf) for leaf in jax.tree.leaves(specs))
                raise TraceError(f"the model cannot be traced for inputs {shapes}: {error}") from error
            compiled: object = None
            if not isinstance(self._split, Mapping):
                graph, compiled = await self._cut(scheduler, graph, ops)
        await scheduler.plan(graph)
        del compiled
        self._graphs[key] = graph
        while len(self._graphs) > self._max_plans:
            scheduler.forget(self._graphs.popitem(last=False)[1])
        return graph

    async def _cut(self, scheduler: Scheduler, graph: Graph, ops: tuple[str, ...]) -> tuple[Graph, object]:
        """Give every node its device: balanced for the first shape, the same way for later ones.

        Returns:
            The graph, and something to hold until it is planned.
        """
        compiled = None
        if self._first is None:
            part = await scheduler._in_thread(lambda: self._partition(scheduler, graph), "plan")
            scheduler.set_cut(graph, part.node_backend)
            compiled = await scheduler.check_fit(graph)  # before anything is uploaded
            graph = await self._place_weights(scheduler, graph, part)
            self._first = (ops, part.node_backend)
        if self._first[0] == ops:
            scheduler.set_cut(graph, self._first[1])
        return graph, compiled  # a graph of other operations follows the weights, which stay where they are

    def _partition(self, scheduler: Scheduler, graph: Graph) -> Partition:
        n = len(self._devices)
        devices = [backend.device for backend in scheduler.backends[:n]]
        ratios = None if isinstance(self._split, (str, Mapping)) else list(self._split)
        return partition(graph, devices, ratios=ratios, memory=scheduler.memory_limits[:n])

    async def _place_weights(self, scheduler: Scheduler, graph: Graph, part: Partition) -> Graph:
        """Upload each weight to the devices that read it; from then on the pipeline holds only those."""
        leaves, treedef = jax.tree.flatten(self._weights)
        held: dict[int, tuple[Any, ...]] = {}
        host = (len(scheduler.backends) - 1,)
        params = graph.weights[: len(leaves)]

        def upload() -> tuple[list[Any], Graph]:
            placed = []
            with _jax.config_context(graph.config):
                for tensor, leaf in zip(params, leaves, strict=True):
                    backends = [scheduler.backends[i] for i in part.weights.get(tensor.id, host)]
                    placed.append(upload_weight(tensor.name, leaf, backends))
                    held[tensor.id] = placed[-1].buffers
            return placed, graph.with_buffers(held)

        placed, graph_on_devices = await scheduler._in_thread(upload, "upload")
        self._weights = jax.tree.unflatten(treedef, placed)
        self._placed = True
        return graph_on_devices

    def _placement(self, scheduler: Scheduler, split: Mapping[str, Any]) -> dict[str, Any]:
        def backend(target: Any) -> Any:
            if isinstance(target, (list, tuple)):
                return [backend(t) for t in target]
            return next((b for b in scheduler.backends if target in (b, b.name)), target)

        return {glob: backend(target) for glob, target in split.items()}


async def _fetched(results: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with aclosing(results):
        async for result in results:
            yield await fetch(result)


_ONE_ARRAY = jax.tree.structure((0,))


def _key(model: Callable[..., Any], inputs: tuple[Any, ...], state: State | None) -> tuple[Hashable, list[Any]]:
    """What tells graphs apart (JAX's settings, too: they change what is traced), and the leaves of the inputs.

    Raises:
        TensorError, TraceError: an input is nothing that the model can be traced for.
    """
    if len(inputs) == 1 and type(inputs[0]) is np.ndarray:
        leaves, treedef = [inputs[0]], _ONE_ARRAY  # what most callers give, at a tenth of the cost
    else:
        leaves, treedef = jax.tree.flatten(inputs)
    of_state = () if state is None else (state.structure,)
    try:
        types = [*map(_jax_types.type_key, leaves)]
    except (TensorError, TraceError):
        names = input_names(parameter_names(model, len(inputs), before=1 if state is None else 2), inputs)
        for name, leaf in zip(names, leaves, strict=True):
            _jax_types.spec_of(leaf, name)  # raises the same again, and names it
        raise
    return (_jax.settings_key(), treedef, *types, *of_state), leaves
