"""Backends: running actors on devices.

A backend's queue is ordered. What goes into it is launched by its *lane*: a thread of its own,
one shared with other backends of the same client, or the caller itself where a launch cannot
block. Results are waited for by `notify`, never by the event loop.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal

import numpy as np

from ._fork import Origin
from ._jax_types import dtype_of
from ._threads import in_thread
from .buffer import Account, Buffer
from .devices.base import Device, Program
from .errors import BackendClosedError, PlacementError
from .evaluation import Evaluation
from .events import Event
from .executable import Executable, Told
from .graph import Graph, Kind, Node, PerGraph, Tensor
from .graph_plan import GraphPlan, compute
from .lanes import InlineLane, Lane, ThreadLane
from .queue import Queue
from .tensor_io import TensorIO

__all__ = [
    "Backend",
    "Buffer",
    "Dispatch",
    "Executable",
    "InlineLane",
    "Lane",
    "ThreadLane",
    "Told",
]

Dispatch = Literal["auto", "shared", "own"]


class Backend(TensorIO):
    """A running actor on a device.

    Args:
        name: e.g. ``"cpu:0"``; unique among the backends of a scheduler.
        device: what it computes on.
        dispatch: which lane launches on it: ``"own"`` thread, one ``"shared"`` with the other
            backends of the client, or ``"auto"``: inline where no launch can block, else shared,
            and its own where its splits can block their dispatcher.

    A kind of backend implements `load`, `upload` and `download`, which may block and are called off
    the event loop. That is enough for a device that computes while its caller waits and whose values
    are NumPy arrays; such a `load` makes executables that say ``blocks=True``. A device that works
    on its own overrides the other methods without ``async``, too; `transfer` and `Executable.call`
    are called on the backend's lane.

    Attributes:
        closed: whether `aclose` has been called.
        newest: by launching thread, a result of what it launched last; see `launched`.
        queue: what is posted by hand, in order.
        memory: the buffers that are alive here.
        tells_times: whether the device says when it did what, in `told`.
        told: where to, while a list is there: what is launched and copied, as soon as it is asked for.
        has_threads: whether closing has to wait for threads, the queue's or others.
    """

    has_threads = True
    tells_times: ClassVar[bool] = False

    def __init__(self, name: str, device: Device, *, dispatch: Dispatch = "auto") -> None:
        if dispatch not in ("auto", "shared", "own"):
            raise PlacementError(f"dispatch={dispatch!r} for {name}: expected 'auto', 'shared' or 'own'")
        self.name = name
        self.device = device
        self.dispatch: Dispatch = dispatch
        self.closed = False
        self.origin = Origin()
        # Order holds for each launching thread alone (XLA's CPU client, `cpu_client.cc`).
        self.newest: dict[int, Any] = {}
        self.queue = Queue(self)
        self.memory = Account()
        self.told: list[Told] | None = None
        self._graph_plans: PerGraph[GraphPlan] = PerGraph()
        self._n_computed = 0

    @abstractmethod
    def load(self, program: Program) -> Executable:
        """Compile a program for this device. Blocks; called from compile threads, several at once."""

    @abstractmethod
    def upload(self, value: Any, tensor: Tensor) -> Any:
        """Put a value (NumPy, or another backend's handle) here to stay; return this backend's handle. Blocks.

        The value is copied: the caller may change a NumPy array afterwards.
        """

    def duplicate(self, value: Any, tensor: Tensor) -> Any:
        """A copy of a value of this backend, in memory of its own. Blocks. Unless overridden, by way of the host."""
        return self.upload(np.array(self.download(value)), tensor)

    def transfer(self, values: Sequence[Any]) -> Sequence[Any]:
        """Bring values of the host or of other backends here, in one go, for this backend's next launch.

        Called on the lane. Does not wait within one client; between clients it may block. Unless
        overridden it uploads what does not live here.
        """
        return [v if self.holds(v) else self.upload(array := np.asarray(v), _spec(array)) for v in values]

    def all_ready(self, values: Sequence[Any]) -> bool:
        """Whether none of the values is still being computed. Never blocks; a failed value is ready.

        Unless overridden they are: the caller of the executable has waited for them.
        """
        return True

    def error_of(self, values: Sequence[Any]) -> BaseException | None:
        """The first error among values that are ready. Never blocks.

        Unless overridden there is none: the executable has raised it.
        """
        return None

    def now(self) -> float:
        """This backend's clock, in seconds."""
        return time.perf_counter()

    def notify(self, values: Sequence[Any], callback: Callable[[BaseException | None], None]) -> None:
        """Call ``callback(error)`` once all values are there (or the first error is). Never blocks.

        The callback runs on any thread, takes little time and does not raise. Calls for one
        backend come back in the order in which they were asked for. Unless overridden it calls back
        at once.
        """
        self.check_open()
        callback(None)

    @abstractmethod
    def download(self, value: Any) -> Any:
        """The value as a NumPy array. Blocks until it is ready."""

    def host_buffer(self, tensor: Tensor) -> Any:
        """A new buffer on the host, to capture a user's input into before it is transferred.

        An empty NumPy array of the tensor's shape and dtype, aligned so that the device can read
        it in place if it can at all; or None when such values cannot be captured by NumPy.
        """
        return None if tensor.dtype.startswith("key<") else np.empty(tensor.shape, dtype_of(tensor.dtype))

    def show(self, buffer: Any) -> Any:
        """What stands for a `host_buffer` wherever it is transferred here, also after it was written again.

        Unless overridden the buffer itself. Whatever is cheaper to transfer will do, as long as it is the same memory.
        """
        return buffer

    def accepts(self, value: Any) -> bool:
        """Whether the value is an immutable handle that `transfer` takes as it is (so capturing it copies nothing)."""
        return False

    def holds(self, value: Any) -> bool:
        """Whether the value lives here already, so that `upload` would copy nothing."""
        return False

    def make_lane(self, *, own: bool) -> Lane:
        """A lane that may block: of its own, or one that every backend of the same client can use."""
        return ThreadLane(self.name)

    def launched(self, value: Any) -> None:
        """Told by whoever launches here, on the launching thread: a result of the launch."""
        self.newest[threading.get_ident()] = value

    def forget_ready(self) -> None:
        """Let go of what this thread, and threads that have ended, launched last, where nobody has to wait for it."""
        living = set(map(attrgetter("ident"), threading.enumerate())) - {threading.get_ident()}
        for thread, value in tuple(self.newest.items()):
            if thread not in living and self.all_ready((value,)):
                del self.newest[thread]

    def supports_op(self, node: Node) -> bool:
        """Whether it can run the node: `Device.supports_op` of its device."""
        return self.device.supports_op(node)

    def check_open(self) -> None:
        """Raise `BackendClosedError` after `aclose`, `ForkedError` in a process forked from the one that opened it."""
        if self.origin.forked:
            self.origin.check(f"backend {self.name!r}")
        if self.closed:
            raise BackendClosedError(f"backend {self.name!r} is closed: open it again, open_backend({self.name!r})")

    # Queue, events, graph plans -------------------------------------------------------------------

    def event_new(self, name: str = "event") -> Event | None:
        """An event to record once, here or on another backend; None where the device has no events.

        The host waits with ``await event``, a backend's queue with `event_wait`. There is nothing to free.
        """
        return Event(name) if self.device.props.events else None

    def event_record(self, event: Event | None) -> None:
        """Have an event happen when everything that was queued here by hand so far has finished.

        It carries the first error since the last one that was recorded here.

        Raises:
            PlacementError: the device has no events, or this one was recorded before: events are one-shot.
            BackendClosedError: the backend is closed.
        """
        if event is None or not self.device.props.events:
            why = "make it with event_new()" if self.device.props.events else "its device has none; await synchronize()"
            raise PlacementError(f"{self.name} cannot record the event {event!r}: {why}")
        self.queue.record(event)

    def event_wait(self, event: Event) -> None:
        """Have what is queued here by hand from now on wait for an event of any backend; the caller goes on.

        If the event fails, what waited does not run and fails with the same error, until `synchronize`.
        Every backend can wait, also one whose device has no events: it is the queue that waits.

        Raises:
            PlacementError: there is no event: its device has none.
            BackendClosedError: the backend is closed.
        """
        if event is None:
            raise PlacementError(
                f"{self.name} cannot wait for None: event_new() gives None where a device has no events; "
                "await that backend's synchronize() instead"
            )
        self.queue.wait(event)

    async def graph_plan_create(self, graph: Graph) -> GraphPlan:
        """Compile a whole graph for this backend and bring over the weights that it does not hold.

        Weights in buffers of this backend are read when the plan is computed, so setting them counts.

        Raises:
            PlacementError: the device lacks one of the ops: names it, the backend and the source line.
            AllocationError: there is no room for the weights.
            BackendClosedError: the backend is closed.
        """
        self.check_open()
        plan = GraphPlan(graph, self)

        def load() -> None:  # asyncio keeps what was awaited until the task awaits again: not the weights
            plan.load()

        await in_thread(load, "compile")
        return plan

    async def graph_plan_compute(self, plan: GraphPlan, *inputs: Any) -> Any:
        """Compute a plan, after all that is queued here by hand; what the graph returns, its arrays ready.

        Args:
            plan: of this backend, not freed.
            inputs: what the traced function takes after the weights; or, with tensors in buffers of this
                backend among them, one value for each of `graph.inputs`. The caller may change NumPy arrays
                as soon as this has begun to wait.

        Raises:
            TensorError: an input does not fit, or the plan was freed.
            PlacementError: the plan is another backend's.
            EvaluationError: computing failed: names backend, first node and source line.
        """
        plan.check(self)
        return await self._compute(plan, inputs, None)

    def graph_plan_free(self, plan: GraphPlan | None) -> None:
        """Let go of a plan, or of nothing; what is queued still runs. Computing it afterwards raises `TensorError`.

        Raises:
            PlacementError: the plan is another backend's.
        """
        if plan is not None and not plan.freed:
            plan.check(self)
            plan.free()

    async def graph_compute(self, graph: Graph, *inputs: Any, outputs: Sequence[Tensor] | None = None) -> Any:
        """`graph_compute_async`, then `synchronize`; what the graph returns, its arrays ready."""
        result = await self.graph_compute_async(graph, *inputs, outputs=outputs)
        await self.synchronize()
        return result

    def graph_compute_async(
        self, graph: Graph, *inputs: Any, outputs: Sequence[Tensor] | None = None
    ) -> Evaluation:
        """Queue a graph, behind all that is queued here by hand; await the evaluation for the result.

        The graph is compiled when it is first computed here, on the queue's lane, and stays compiled for
        as long as it lives. Large NumPy inputs are copied in the caller: give tensors in buffers, or JAX
        arrays, to avoid that.

        Args:
            graph: what to compute.
            inputs: as for `graph_plan_compute`.
            outputs: tensors in buffers of this backend that take the results as well, in the order of the
                queue: one for each of `graph.outputs`.

        Raises:
            PlacementError: the device lacks one of the ops.
            TensorError: an input or output does not fit.
            BackendClosedError: the backend is closed.
        """
        self.check_open()
        plan = self._graph_plans.get(graph)
        if plan is None:
            plan = GraphPlan(graph, self)
            self._graph_plans.put(graph, plan)
        return self._compute(plan, inputs, outputs)

    def _compute(self, plan: GraphPlan, inputs: Sequence[Any], outputs: Sequence[Tensor] | None) -> Evaluation:
        self.check_open()
        evaluation = compute(plan, inputs, self._n_computed, outputs=outputs)
        self._n_computed += 1
        return evaluation

    async def synchronize(self) -> None:
        """Wait until everything that was launched here has finished, by hand or by a scheduler.

        Raises:
            Exception: the first error since the last call of what was queued by hand, evaluations excepted:
                those carry their own.
            BackendClosedError: the backend is closed.
        """
        self.check_open()
        await self.queue.synchronize()

    async def aclose(self) -> None:
        """Finish what is running, then end the threads. What waits for an event is dropped. Idempotent.

        Where it is cancelled it waits for nothing more: the threads end as soon as what they do is done.

        Raises:
            WrongLoopError: another event loop has work in the queue.
        """
        if self.origin.forked:
            return
        self.queue.check_own()
        try:
            await self.queue.finish()
        finally:
            self.closed = True
            self.newest.clear()
            self._graph_plans.clear()
            if self.has_threads:
                await in_thread(self._end, "close")  # which goes on when this is cancelled

    def _end(self) -> None:
        self.queue.close_lane()
        self.end_threads()

    def end_threads(self) -> None:
        """End the threads that this kind of backend has of its own, after what they have to do. May block. Idempotent.

        Called off the event loop, when the queue's own has ended.
        """

    async def __aenter__(self) -> Backend:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{' closed' if self.closed else ''}>"


def _spec(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor of an array's type, outside any graph."""
    return Tensor(-1, "value", array.shape, str(array.dtype), Kind.INPUT, array.nbytes)
