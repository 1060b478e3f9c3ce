"""`Scheduler`: graphs, backends and pins in; evaluations out."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from .._threads import closing_s
from ..backend import Backend
from ..by_hand import ByHand
from ..closing import Closing
from ..counts import statistics_of
from ..devices.base import BufferType
from ..errors import AiopipeError, PlacementError
from ..evaluation import Evaluation
from ..graph import Graph, Tensor
from ..loader import Loader
from ..observe import EvalCallback, Pieces
from ..plans import Plans, copies_of
from ..ready import Ready
from ..recorder import CAPACITY, Recorder
from ..registry import index_of, with_host
from ..runner import Runner
from ..state import State
from ..states import States
from ..statistics import Statistics
from ..streaming import stream_in_order
from ..timeline import Timeline
from ..watcher import seconds_of
from .alloc import choose_buffer_types, memory_limits
from .plan import Plan

__all__ = ["Scheduler"]


class Scheduler:
    """Evaluates graphs over several backends, up to `n_copies` evaluations at the same time.

    Args:
        backends: in order of priority, as backends or as specs (``"cpu:0"``), which the scheduler
            then opens and closes itself. When the last one is no host CPU, ``cpu:0`` is added
            behind it as the fallback; it holds nothing unless needed.
        n_copies: how many evaluations are in flight at most; 1 means no pipelining. ``"auto"``: up to 4,
            and fewer as soon as a graph does not fit otherwise.
        buffer_types: which memory each backend works in, as `BufferType` or as the name of a memory
            kind, in the order of the backends or by their names. Default: the device's default memory.
        memory_limit: bytes that may be used: one number for every backend, or a mapping from
            backend name to bytes. Without it, what the device reports.
        op_offload: have large operations whose weight is on the last backend run on an accelerator
            (`Device.offload_op`; cause ``1.off``). The weight is copied there once, when the graph is planned.
        forbid_replan: plan only when asked to, by `plan`, `reserve` or `alloc_graph`. An evaluation that
            would need a new plan (a graph that is new, or whose pins have changed) raises `ReplanError`.
        deadline: seconds that an evaluation may take, from its submission (a new graph is loaded before that). One
            that is not done then fails with `DeadlineExceeded`. What a device works on cannot be recalled, so its
            slot comes back when the device is done; until then the others go on with the slots that are left.
        timeline: record what runs where and when: `Scheduler.timeline`. A number says of how many spans the
            newest are kept.
        on_progress: called with (compiled, to compile) while a new plan is compiled.

    Use it as an async context manager, on one event loop.

    Raises:
        PlacementError: a spec names no device, a device is given twice, or it lacks the buffer type.
        ValueError, TypeError: `deadline` or `n_copies` makes no sense.
    """

    def __init__(
        self,
        backends: Sequence[Backend | str],
        *,
        n_copies: int | Literal["auto"] = 4,
        buffer_types: Sequence[BufferType | str | None] | Mapping[str, BufferType | str] | None = None,
        memory_limit: int | Mapping[str, int] | None = None,
        op_offload: bool = False,
        forbid_replan: bool = False,
        deadline: float | None = None,
        timeline: bool | int = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        copies = copies_of(n_copies)
        self.backends, self._opened = with_host(backends)
        recorder = Recorder(self.backends, CAPACITY if timeline is True else timeline) if timeline else None
        self._timeline = None if recorder is None else Timeline.of(recorder)
        self.buffer_types = choose_buffer_types([backend.device for backend in self.backends], buffer_types)
        self.memory_limits = memory_limits([backend.device for backend in self.backends], memory_limit)
        self._loader = Loader(on_progress)
        auto = isinstance(n_copies, str)
        self._runner = Runner(copies, Pieces(self._loader.compile), recorder)
        self._in_thread = self._loader.in_thread = self._runner.lanes.in_thread
        self._runner.deadline = seconds_of(deadline)
        self._plans = Plans(
            self.backends,
            self.memory_limits,
            self.buffer_types,
            self._loader,
            self._runner,
            auto=auto,
            op_offload=op_offload,
            forbid_replan=forbid_replan,
        )
        self._states = States(self.backends, self.memory_limits, self._plans, self._runner)
        self._plans.state_nbytes = self._states.nbytes
        self._by_hand = ByHand(self.backends)
        self._ready = Ready(self._plans, self._states)
        self._closing = Closing(self._runner, self._plans, self.backends, self._opened, self._let_go)

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
        return self._ready.n_splits

    @property
    def timeline(self) -> Timeline:
        """What ran where and when; of the newest evaluations. It can be read after the end, too.

        Raises:
            AiopipeError: the scheduler was made without ``timeline=True``.
        """
        if self._timeline is None:
            raise AiopipeError("this scheduler records no timeline: make it with timeline=True")
        return self._timeline

    def buffer_size(self, backend: Backend | str) -> int:
        """Bytes that the loaded plans need on a backend.

        Every weight once; all states; the largest scratch; and `n_copies` times what an evaluation of the
        largest of the plans holds there, for no more are in flight.
        """
        return self._plans.sizes()[index_of(self.backends, backend)].total(self.n_copies)

    def set_tensor_backend(self, graph: Graph, tensor: Tensor, backend: Backend | str) -> None:
        """Pin a tensor of a graph, and so the node that makes it, to a backend (cause ``usr``).

        Drops the graph's plan: the next evaluation plans it again.

        Raises:
            PlacementError: the tensor is not the graph's, or the backend not the scheduler's.
        """
        if not 0 <= tensor.id < len(graph.tensors) or graph.tensors[tensor.id] is not tensor:
            raise PlacementError(f"tensor {tensor.describe()} is not of graph {graph.name!r}: pin one of graph.tensors")
        index, pins = index_of(self.backends, backend), self._plans.pins
        self._plans.drop(graph)
        pins.put(graph, {**(pins.get(graph) or {}), tensor.id: index})

    def get_tensor_backend(self, graph: Graph, tensor: Tensor) -> Backend | None:
        """The backend that a tensor is pinned to, or else planned on; None before either."""
        pinned = (self._plans.pins.get(graph) or {}).get(tensor.id)
        if pinned is not None:
            return self.backends[pinned]
        plan = self._plans.plan_of(graph)
        held = () if plan is None else plan.assignment.backends_of(graph, tensor.id)
        return self.backends[held[0]] if held else None

    def set_cut(self, graph: Graph, node_backend: Sequence[int]) -> None:
        """Place a graph's nodes as `aiopipe.sched.partition.partition` chose. Drops the graph's plan."""
        self._plans.drop(graph)
        self._plans.cuts.put(graph, tuple(node_backend))

    def set_eval_callback(self, callback: EvalCallback | None) -> None:
        """Have a callback see values of the evaluations that are submitted from now on; None: no longer.

        ``callback(tensor, ask)`` is a plain or an async function, called on the event loop. It is first
        asked about the result of every operation, split after split, in the order in which they run:
        ``callback(tensor, True)`` says whether it wants the value. Operations up to one that it wants run
        together, as one program, which is compiled when it is first needed. Then ``callback(tensor, False)``
        gets the tensor with its value, ready, in ``tensor.buffers[0].value`` (and must not keep the loop
        busy); False ends the whole evaluation: nothing more of it is launched, and who awaits it gets
        `EvaluationAborted`. If it raises, who awaits it gets an `EvaluationError` with that as its cause.

        A tensor that several splits compute is asked about once, one that nobody needs never. Values may
        differ in the last bits from those of an evaluation that runs whole splits, and what is shown needs
        memory beyond `buffer_size`. Several evaluations may be under way and call the callback in turns.

        It must not wait for the evaluation that it observes, nor for one that comes round to the slot of that: at most
        ``n_copies - 1`` evaluations, whoever submits them, are admitted before the observed one has ended; the next
        waits for its slot, and would wait for ever. So with one slot a callback evaluates nothing, and with ``"auto"``
        it loads no new graph, which may wait for slots to be given up.

        Raises:
            TypeError: the callback cannot be called.
        """
        if callback is not None and not callable(callback):
            raise TypeError(f"eval callback is {callback!r}: expected a function of a tensor and a bool, or None")
        self._runner.eval_callback = callback

    async def plan(self, graph: Graph) -> Plan:
        """Plan, compile and load a graph without running it; ``print(plan)`` shows it.

        Raises:
            PlacementError: no backend can run some op.
            AllocationError: it does not fit; nothing has been allocated.
        """
        return (await self._ready.load(graph)).plan

    def forget(self, graph: Graph) -> None:
        """Drop a graph's plan; evaluations under way keep what they need of it."""
        self._plans.drop(graph)

    async def reserve(self, graph: Graph) -> dict[str, int]:
        """Plan and compile a graph without running it and without allocating anything.

        Pins stay, evaluations in flight go on, no slot is taken. The graph's first evaluation then has
        nothing left to do but put the weights in place.

        Returns:
            Backend name -> bytes that the graph needs there, with `n_copies` evaluations in flight: its
            weights, `n_copies` times what an evaluation holds, and the compilers' largest scratch.

        Raises:
            PlacementError: no backend can run some op.
            AllocationError: it does not fit beside what is loaded.
        """
        plan = await self._ready.reserve(graph)
        return {b.name: size.total(self.n_copies) for b, size in zip(self.backends, plan.sizes, strict=True)}

    async def alloc_graph(self, graph: Graph, *, state: State | None = None) -> None:
        """Plan, compile and load a graph: whatever has to happen once before it can be evaluated many times.

        With a `state` it is planned around where that is, and the state's arrays are put in place. Doing so
        again is no mistake and does nothing: a plan is tied to no slot, so there is nothing that a second call
        could move from under the first.

        Raises:
            PlacementError: no backend can run some op.
            AllocationError: it does not fit; nothing has been allocated.
            StateError: the state cannot be used for it.
        """
        if state is None:
            await self.plan(graph)
            return
        await self._ready.alloc(graph, state)

    def reset(self) -> None:
        """Forget pins, cuts, plans, and what `tensor_set` has set, of every graph.

        Evaluations that are submitted already go on as they were planned. What a plan holds goes with
        the last evaluation that needs it.
        """
        self._plans.reset()
        self._by_hand.clear()

    async def tensor_set(self, tensor: Tensor, data: Any) -> None:
        """Set an input of a graph, for every evaluation of it that is submitted without inputs from now on.

        Args:
            tensor: one of ``graph.inputs``.
            data: an array of its shape and type, or numbers. NumPy data is copied: the caller may change it.

        Raises:
            TensorError: the tensor is no input, or the data does not fit.
        """
        await self._by_hand.set(tensor, data)

    async def tensor_get(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The value of an output in the newest evaluation that was submitted without inputs, as NumPy.

        Waits for that evaluation. The results of the newest are kept until the next, or `reset`.

        Args:
            tensor: one of ``graph.outputs`` (or an input that was set).

        Raises:
            TensorError: there is no value yet, or the newest evaluation was cancelled.
            EvaluationError: the evaluation failed.
        """
        return await self._by_hand.get(tensor)

    async def check_fit(self, graph: Graph) -> object:
        """Raise `AllocationError` if a graph cannot fit; see `Plans.check_fit`."""
        return await self._plans.check_fit(graph)

    async def graph_compute_async(
        self, graph: Graph, *inputs: Any, state: State | None = None, deadline: float | None = None
    ) -> Evaluation:
        """Submit an evaluation; wait only until a slot is free and the inputs are captured.

        After it returns, the caller may change every NumPy input. The first evaluation of a graph
        also plans, compiles and loads it, off the event loop. Without inputs, it takes those that
        `tensor_set` has set.

        Args:
            graph: from `trace`.
            inputs: what the traced function takes behind the weights (and the state).
            state: what the evaluation reads and replaces, for a graph that was traced with one. Evaluations
                that share a state run in the order in which they are submitted.
            deadline: seconds that it may take from now on, the loading of a new graph excepted; ``math.inf`` for no
                limit. Default: that of the scheduler.

        Raises:
            StateError: the state is marked, freed, another scheduler's, or not of the graph's types.
            AllocationError: there is no room for a new graph or a new state.
            TensorError: an input does not fit, or is not set.
            ReplanError: it would have to be planned, and ``forbid_replan`` is on.
            BackendClosedError: the scheduler is closed.
            WrongLoopError: it belongs to another event loop.
        """
        if inputs or not graph.inputs:
            return await self.submit(graph, graph.flatten_inputs(inputs), state, deadline)
        values = self._by_hand.inputs_of(graph)
        kept: dict[int, Any] = {}
        loaded = await self._ready.for_evaluation(graph, state)
        evaluation = await self._runner.submit(loaded.keeping(kept), values, state, deadline=seconds_of(deadline))
        self._by_hand.ran(graph, evaluation, kept)
        return evaluation

    async def submit(
        self, graph: Graph, values: Sequence[Any], state: State | None = None, deadline: float | None = None
    ) -> Evaluation:
        """`graph_compute_async` for inputs that went through `graph.flatten_inputs` already."""
        loaded = self._plans.get(graph)
        if loaded is None or state is not None or graph.state:
            loaded = await self._ready.for_evaluation(graph, state)
        if deadline is not None:
            deadline = seconds_of(deadline)
        return await self._runner.submit(loaded, values, state, deadline=deadline)

    async def graph_compute(
        self, graph: Graph, *inputs: Any, state: State | None = None, deadline: float | None = None
    ) -> Any:
        """Evaluate a graph and wait for the result."""
        return await (await self.graph_compute_async(graph, *inputs, state=state, deadline=deadline))

    async def synchronize(self) -> None:
        """Wait until everything that was submitted so far has finished on its devices."""
        await self._runner.synchronize()

    def stream(
        self, graph: Graph, batches: Iterable[Any] | AsyncIterable[Any], *, state: State | None = None
    ) -> AsyncGenerator[Any, None]:
        """Evaluate every batch (a tuple is several inputs); yield the results in order.

        With a `state`, every batch goes on from what the one before left.
        """
        return stream_in_order(partial(self.graph_compute_async, graph, state=state), batches, self.n_copies)

    def statistics(self) -> Statistics:
        """What has been done since the scheduler was made."""
        return statistics_of(self._runner, self._plans, self._loader, self._timeline)

    def reset_busy(self) -> None:
        """Count busy time from now on (after warming up, say)."""
        if self._timeline is not None:
            self._timeline.clear()

    async def aclose(self, *, cancel: bool = False, timeout_s: float | None = 30.0) -> None:
        """Finish (or with `cancel` drop) what is in flight, then end every thread. Idempotent.

        Args:
            cancel: do not wait for results, only for the devices to be done.
            timeout_s: after this long, cancel what has not finished; after as long again, leave
                threads alone that a device still holds up, with a `ResourceWarning`.

        What it raises, it raises when all is closed that can be; doing so again closes what is left.

        Raises:
            ValueError: `timeout_s` is negative or not a number; nothing is closed.
            WrongLoopError: its event loop runs elsewhere. Where it has ended, what was in flight is lost.
        """
        await self._closing.close(cancel=cancel, timeout_s=timeout_s)

    def _let_go(self) -> None:
        self.reset()
        self._states.end()

    @property
    def loop(self) -> AbstractEventLoop | None:
        """The event loop that it belongs to; None before its first use."""
        return self._runner.loop

    def enter(self) -> None:
        """Belong to the running event loop, as it does from its first use on.

        Raises:
            BackendClosedError: it is closed.
            WrongLoopError: it belongs to another event loop, or none runs in this thread.
        """
        self._runner.enter()

    async def __aenter__(self) -> Scheduler:
        self.enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await self.aclose(cancel=kind is not None, timeout_s=closing_s(kind))
