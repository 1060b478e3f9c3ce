"""`Scheduler`: graphs, backends and pins in; evaluations out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import anyio

from .._threads import in_thread
from ..backend import Backend, Lane, check_distinct, open_backend
from ..errors import BackendClosedError, PlacementError
from ..evaluation import Evaluation
from ..graph import Graph, PerGraph, Tensor
from ..loader import Loaded, Loader, beside, weights_held
from ..runner import Runner
from ..statistics import BusyClock, Statistics
from ..streaming import stream_in_order
from .alloc import check_memory
from .plan import Plan, make_plan
from .state import Outcome

__all__ = ["Scheduler", "shared"]

T = TypeVar("T")


class Scheduler:
    """Evaluates graphs over several backends, up to `n_copies` evaluations at the same time.

    Args:
        backends: in order of priority, as backends or as specs (``"cpu:0"``), which the scheduler
            then opens and closes itself. When the last one is no host CPU, ``cpu:0`` is added
            behind it as the fallback; it holds nothing unless needed.
        n_copies: how many evaluations are in flight at most; 1 means no pipelining.
        memory_limit: bytes that may be used: one number for every backend, or a mapping from
            backend name to bytes. Without it, what the device reports.
        timeline: record how long every split ran, for `statistics().busy`.
        on_progress: called with (compiled, to compile) while a new plan is compiled.

    Use it as an async context manager, on one event loop.

    Raises:
        PlacementError: a spec names no device, or a device is given twice.
    """

    def __init__(
        self,
        backends: Sequence[Backend | str],
        *,
        n_copies: int = 4,
        memory_limit: int | Mapping[str, int] | None = None,
        timeline: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.backends, self._opened = _open(backends)
        self._busy = BusyClock([b.name for b in self.backends]) if timeline else None
        self._runner = Runner(n_copies, self._busy)
        self._loader = Loader(on_progress)
        self.memory_limits = [_limit(backend, memory_limit) for backend in self.backends]
        self._plans: PerGraph[Loaded] = PerGraph()
        self._loading: dict[Graph, asyncio.Task[Loaded]] = {}
        self._pins: PerGraph[dict[int, int]] = PerGraph()
        self._cuts: PerGraph[Sequence[int]] = PerGraph()
        self._last_n_splits = 0
        self._closing: asyncio.Task[None] | None = None

    @property
    def n_copies(self) -> int:
        """How many evaluations are in flight at most."""
        return self._runner.state.n_copies

    @property
    def cur_copy(self) -> int:
        """The slot that the next evaluation will take."""
        return self._runner.state.cur_copy

    @property
    def n_splits(self) -> int:
        """How many splits the graph that was planned last has; 0 before the first."""
        return self._last_n_splits

    def buffer_size(self, backend: Backend | str) -> int:
        """Bytes that the loaded plans need on a backend.

        Every weight once; the largest scratch; and `n_copies` times what an evaluation of the
        largest of the plans holds there, for no more are in flight.
        """
        index = self._index(backend)
        loaded = self._plans.values()
        if not loaded:
            return 0
        return beside(loaded[0].plan.sizes, loaded[0].plan, self.backends, loaded)[index].total(self.n_copies)

    def set_tensor_backend(self, graph: Graph, tensor: Tensor, backend: Backend | str) -> None:
        """Pin a tensor of a graph, and so the node that makes it, to a backend (cause ``usr``).

        Drops the graph's plan: the next evaluation plans it again.

        Raises:
            PlacementError: the tensor is not the graph's, or the backend not the scheduler's.
        """
        if not 0 <= tensor.id < len(graph.tensors) or graph.tensors[tensor.id] is not tensor:
            raise PlacementError(f"tensor {tensor.describe()} is not of graph {graph.name!r}: pin one of graph.tensors")
        self._pins.put(graph, {**(self._pins.get(graph) or {}), tensor.id: self._index(backend)})
        self._plans.drop(graph)

    def get_tensor_backend(self, graph: Graph, tensor: Tensor) -> Backend | None:
        """The backend that a tensor is pinned to, or else planned on; None before either."""
        pinned = (self._pins.get(graph) or {}).get(tensor.id)
        if pinned is not None:
            return self.backends[pinned]
        loaded = self._plans.get(graph)
        if loaded is None:
            return None
        assignment = loaded.plan.assignment
        made_by = graph.producers()[tensor.id]
        held = assignment.leaf_backends[tensor.id] if made_by < 0 else (assignment.node_backend[made_by],)
        return self.backends[held[0]] if held else None

    def set_cut(self, graph: Graph, node_backend: Sequence[int]) -> None:
        """Place a graph's nodes as `aiopipe.sched.partition.partition` chose. Drops the graph's plan."""
        self._cuts.put(graph, tuple(node_backend))
        self._plans.drop(graph)

    async def plan(self, graph: Graph) -> Plan:
        """Plan, compile and load a graph without running it; ``print(plan)`` shows it.

        Raises:
            PlacementError: no backend can run some op.
            AllocationError: it does not fit; nothing has been allocated.
        """
        return (self._plans.get(graph) or await self._load(graph)).plan

    def forget(self, graph: Graph) -> None:
        """Drop a graph's plan; evaluations under way keep what they need of it."""
        self._plans.drop(graph)

    async def check_fit(self, graph: Graph) -> None:
        """Raise `AllocationError` if a graph cannot fit; compiles and uploads nothing."""
        plan = await self._plan_now(graph)
        names = [backend.name for backend in self.backends]
        sizes = beside(plan.sizes, plan, self.backends, self._plans.values())
        check_memory(sizes, names, self.memory_limits, self.n_copies)

    async def graph_compute_async(self, graph: Graph, *inputs: Any) -> Evaluation:
        """Submit an evaluation; wait only until a slot is free and the inputs are captured.

        After it returns, the caller may change every NumPy input. The first evaluation of a graph
        also plans, compiles and loads it, off the event loop.

        Raises:
            TensorError: an input does not fit.
            BackendClosedError: the scheduler is closed.
            WrongLoopError: it belongs to another event loop.
        """
        return await self.submit(graph, graph.flatten_inputs(inputs))

    async def submit(self, graph: Graph, values: Sequence[Any]) -> Evaluation:
        """`graph_compute_async` for inputs that went through `graph.flatten_inputs` already."""
        loaded = self._plans.get(graph)
        if loaded is None:
            loaded = await self._load(graph)
        return await self._runner.submit(loaded, values)

    async def graph_compute(self, graph: Graph, *inputs: Any) -> Any:
        """Evaluate a graph and wait for the result."""
        return await (await self.graph_compute_async(graph, *inputs))

    async def synchronize(self) -> None:
        """Wait until everything that was submitted so far has finished on its devices."""
        await self._runner.synchronize()

    def stream(self, graph: Graph, batches: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
        """Evaluate every batch (a tuple is several inputs); yield the results in order."""
        return stream_in_order(lambda inputs: self.graph_compute_async(graph, *inputs), batches, self.n_copies)

    def statistics(self) -> Statistics:
        """What has been done since the scheduler was made."""
        state = self._runner.state
        return Statistics(
            submitted=self._runner.n_submitted,
            admitted=state.n_admitted,
            succeeded=state.counts[Outcome.SUCCESS],
            failed=state.counts[Outcome.FAILED],
            cancelled=state.counts[Outcome.CANCELLED],
            in_flight=state.in_flight,
            waiting=state.waiting,
            n_copies=state.n_copies,
            plans=len(self._plans.values()),
            compiled=self._loader.n_compiled,
            copied_weights_nbytes=self._loader.copied_weights_nbytes,
            busy=self._busy.shares() if self._busy else {},
            busy_s=self._busy.seconds() if self._busy else {},
        )

    def reset_busy(self) -> None:
        """Count busy time from now on (after warming up, say)."""
        if self._busy is not None:
            self._busy.reset()

    async def aclose(self, *, cancel: bool = False, timeout_s: float | None = 30.0) -> None:
        """Finish (or with `cancel` drop) what is in flight, then end every thread. Idempotent.

        Args:
            cancel: do not wait for results, only for the devices to be done.
            timeout_s: after this long, cancel what has not finished; after as long again, leave
                threads alone that a device still holds up, with a `ResourceWarning`.
        """
        self._runner.closed = True
        if self._closing is None:
            for task in list(self._loading.values()):
                task.cancel()
            self._closing = asyncio.get_running_loop().create_task(self._close(timeout_s), name="aiopipe close")
        if cancel:
            self._runner.cancel_all()
        cancelled: asyncio.CancelledError | None = None
        while not self._closing.done():  # threads and arrays must not outlive a cancelled caller
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError as error:
                cancelled = error
                self._runner.cancel_all()
        if cancelled is not None:
            raise cancelled
        self._closing.result()

    async def _close(self, timeout_s: float | None) -> None:
        """In a task of its own: cancelling whoever waits for it does not break it off."""
        with anyio.move_on_after(timeout_s):
            await self.synchronize()
        self._runner.cancel_all()
        await in_thread(lambda: self._runner.close_lanes(timeout_s), "close")
        with anyio.move_on_after(timeout_s):
            for backend in self._opened:
                await backend.aclose()
        self._plans.clear()

    async def __aenter__(self) -> Scheduler:
        self._runner.enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await self.aclose(cancel=kind is not None, timeout_s=closing_s(kind))

    def _index(self, backend: Backend | str) -> int:
        for i, known in enumerate(self.backends):
            if known is backend or known.name == backend:
                return i
        name = backend if isinstance(backend, str) else backend.name
        raise PlacementError(f"{name!r} is not one of this scheduler's backends: {[b.name for b in self.backends]}")

    async def _load(self, graph: Graph) -> Loaded:
        loop = self._runner.enter()
        task = self._loading.get(graph)
        if task is None or task.done():  # done: its plan was dropped again before the loop came round
            task = loop.create_task(self._load_now(graph), name=f"aiopipe load {graph.name}")
            self._loading[graph] = task
            task.add_done_callback(lambda done: self._loading.pop(graph) if self._loading.get(graph) is done else None)
        return await shared(task, lambda: self._runner.closed)

    async def _load_now(self, graph: Graph) -> Loaded:
        while True:
            pins, cut = self._pins.get(graph), self._cuts.get(graph)
            loaded = await self._loader.load(
                await self._plan_now(graph),
                self.backends,
                limits=self.memory_limits,
                n_copies=self.n_copies,
                lane_for=self._lane_for,
                others=self._plans.values(),
            )
            if self._pins.get(graph) is pins and self._cuts.get(graph) is cut:
                break  # nobody changed them meanwhile
        self._plans.put(graph, loaded)
        self._last_n_splits = loaded.plan.n_splits
        return loaded

    async def _plan_now(self, graph: Graph) -> Plan:
        devices = [backend.device for backend in self.backends]
        held = weights_held(graph, self.backends)
        pins, cut = self._pins.get(graph), self._cuts.get(graph)
        return await in_thread(lambda: make_plan(graph, devices, weights=held, pins=pins, cut=cut), "plan")

    def _lane_for(self, backend: Backend, own: bool, inline: bool) -> Lane:
        return self._runner.lane_for(backend, own=own, inline=inline)


def closing_s(kind: type[BaseException] | None) -> float:
    """How long closing may take when a block ends with such an exception.

    A `KeyboardInterrupt` that the event loop does not turn into a cancellation may have broken off
    anything, so that there is nothing to wait for.
    """
    return 30.0 if kind is None or issubclass(kind, (Exception, asyncio.CancelledError, GeneratorExit)) else 2.0


async def shared(task: asyncio.Task[T], is_closed: Callable[[], bool]) -> T:
    """Await a task that others wait for, too: being cancelled does not cancel it.

    Raises:
        BackendClosedError: it was cancelled because its owner closes.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        me = asyncio.current_task()
        if is_closed() and me is not None and not me.cancelling():
            raise BackendClosedError("closed while this was being planned and compiled") from None
        raise


def _open(given: Sequence[Backend | str]) -> tuple[tuple[Backend, ...], list[Backend]]:
    """The backends, and those of them that were opened here."""
    backends: list[Backend] = []
    opened: list[Backend] = []
    for item in given:
        if isinstance(item, str):
            item = open_backend(item)
            opened.append(item)
        item.check_open()
        backends.append(item)
    check_distinct(backends)
    if not backends[-1].device.is_host_cpu:
        host = next((b.name for b in backends if b.device.is_host_cpu), None)
        if host is not None:
            raise PlacementError(
                f"{host!r} comes before {backends[-1].name!r}: give the host CPU last, its priority is the lowest"
            )
        backends.append(open_backend("cpu:0"))
        opened.append(backends[-1])
    return tuple(backends), opened


def _limit(backend: Backend, given: int | Mapping[str, int] | None) -> int | None:
    if isinstance(given, Mapping):
        return given.get(backend.name, backend.device.props.memory_nbytes)
    return given if given is not None else backend.device.props.memory_nbytes
