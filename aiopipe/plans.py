"""`Plans`: what a scheduler knows of its graphs: pins, sizes, and the plans that can run.

A graph is first planned (in a thread, without devices), then compiled (its sizes are known, nothing
is allocated: `reserve`), then loaded (its weights are in place: it can run).
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import SupportsIndex, TypeVar

from ._loops import check_inside
from .backend import Backend, Lane
from .devices.base import BufferType
from .errors import BackendClosedError, ReplanError
from .graph import Graph, PerGraph
from .loaded import Candidate, Loaded, Prepared, beside, weights_held
from .loader import Loader
from .runner import Runner
from .sched.alloc import BackendSize, check_buffers, check_memory, largest_n_copies
from .sched.plan import Plan, make_plan

__all__ = ["Plans", "copies_of", "shared"]

T = TypeVar("T")

AUTO_COPIES = 4
"""How many slots ``n_copies="auto"`` begins with."""


class Plans:
    """The plans of one scheduler.

    Args:
        backends: in order of priority.
        limits: for each backend the bytes that it may use, or None.
        buffer_types: for each backend the memory that it works in.
        loader: compiles and uploads.
        runner: runs them; it is asked for lanes and for the number of slots.
        auto: where a plan does not fit, have fewer slots rather than refuse it.
        op_offload: see `make_plan`.
        forbid_replan: see `check_allowed`.

    Attributes:
        get: the plan of a graph, if it can run.
        pins: for each graph tensor id -> index of the backend that the user wants it on.
        cuts: for each graph the backends that `partition` chose.
        state_nbytes: asked for the bytes of all states on each backend.
        n_planned: how often a graph was planned.
        n_replanned: how often that was again.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        limits: Sequence[int | None],
        buffer_types: Sequence[BufferType],
        loader: Loader,
        runner: Runner,
        *,
        auto: bool,
        op_offload: bool,
        forbid_replan: bool = False,
    ) -> None:
        self.pins: PerGraph[dict[int, int]] = PerGraph()
        self.cuts: PerGraph[Sequence[int]] = PerGraph()
        self.state_nbytes: Callable[[], Sequence[int] | None] = lambda: None
        self._state_homes: PerGraph[Mapping[int, int]] = PerGraph()
        self.n_planned = 0
        self.n_replanned = 0
        self._backends = backends
        self._names = [backend.name for backend in backends]
        self._limits = limits
        self._max_nbytes = [kind.max_nbytes for kind in buffer_types]
        self._loader = loader
        self._runner = runner
        self._auto = auto
        self._op_offload = op_offload
        self._forbid_replan = forbid_replan
        self._seen: PerGraph[bool] = PerGraph()
        self._reserved: PerGraph[Prepared] = PerGraph()
        self._loaded: PerGraph[Loaded] = PerGraph()
        self._loading: dict[Graph, asyncio.Task[Loaded]] = {}
        self._one_at_a_time: asyncio.Lock | None = None
        self._n_slots = runner.state.n_copies  # that have memory: more than there are, as long as some are given up
        self.get = self._loaded.get

    def values(self) -> list[Loaded]:
        """The plans that can run."""
        return self._loaded.values()

    def is_planned(self, graph: Graph) -> bool:
        """Whether running the graph needs no new plan."""
        return any(graph in known for known in (self._loaded, self._reserved)) or graph in self._loading

    def check_allowed(self, graph: Graph, *, moved: bool = False) -> None:
        """Raise `ReplanError` where an evaluation of the graph would need a new plan, and that is forbidden."""
        if self._forbid_replan and (moved or not self.is_planned(graph)):
            shapes = ", ".join(tensor.describe() for tensor in graph.inputs)
            raise ReplanError(
                f"graph {graph.name!r} for ({shapes}) would have to be planned, which forbid_replan=True does not "
                "allow: call `await scheduler.alloc_graph(graph)` (or `reserve`) first, again after its pins change"
            )

    def plan_of(self, graph: Graph) -> Plan | None:
        """The plan of a graph that is loaded or reserved."""
        known = self._loaded.get(graph) or self._reserved.get(graph)
        return known.plan if known is not None else None

    def keep_state_at(self, graph: Graph, homes: Mapping[int, int]) -> None:
        """Have a graph planned so that the leaves of its state (by tensor id) are on these backends.

        Drops a plan that has any of them elsewhere.
        """
        plan = self.plan_of(graph)
        at = {} if plan is None else {t.id: b for t, b in zip(graph.state, plan.state_homes, strict=True)}
        if plan is not None and all(at[t] == b for t, b in homes.items()):
            return
        self._state_homes.put(graph, homes)
        self.drop(graph)

    def drop(self, graph: Graph) -> None:
        """Forget a graph's plan. Evaluations of it that are under way go on.

        Raises:
            WrongLoopError: the scheduler's event loop runs in another thread.
        """
        check_inside(self._runner.loop, "this scheduler")
        self._loaded.drop(graph)
        self._reserved.drop(graph)

    def reset(self) -> None:
        """Forget pins, cuts and plans of all graphs. Evaluations that are under way go on.

        Raises:
            WrongLoopError: the scheduler's event loop runs in another thread.
        """
        check_inside(self._runner.loop, "this scheduler")
        for kept in (self.pins, self.cuts, self._state_homes, self._loaded, self._reserved):
            kept.clear()

    def cancel(self) -> None:
        """End what is being loaded; what a loop that has ended was loading never will be."""
        for task in list(self._loading.values()):
            if not task.get_loop().is_closed():
                task.cancel()

    async def reserve(self, graph: Graph) -> Plan:
        """Plan and compile a graph, so that its sizes are known; allocates nothing.

        Raises:
            PlacementError: no backend can run some op.
            AllocationError: it would not fit.
        """
        task = self._loading.get(graph)
        if task is not None:
            return (await shared(task, lambda: self._runner.closed)).plan
        known = self.plan_of(graph)
        if known is None:
            self._runner.enter()
            prepared = await self._prepare(graph)
            known = prepared.plan
            self._adopt(self._beside(prepared))
        return known

    async def load(self, graph: Graph) -> Loaded:
        """The plan of a graph, ready to run; whoever else wants the same graph waits for the same.

        Raises:
            PlacementError: no backend can run some op.
            AllocationError: it does not fit; nothing has been allocated.
            BackendClosedError: closed meanwhile.
        """
        loop = self._runner.enter()
        task = self._loading.get(graph)
        if task is None or task.done():  # done: its plan was dropped again before the loop came round
            task = loop.create_task(self._load(graph), name=f"aiopipe load {graph.name}")
            self._loading[graph] = task
            task.add_done_callback(lambda done: self._loading.pop(graph) if self._loading.get(graph) is done else None)
        return await shared(task, lambda: self._runner.closed)

    async def check_fit(self, graph: Graph) -> object:
        """Raise `AllocationError` if a graph cannot fit; compiles it, and uploads nothing.

        Returns:
            Something to hold until the graph (or the same one with its weights in place) is loaded, so that
            nothing is compiled twice.
        """
        return await self._compiled(await self._plan(graph))

    def sizes(self) -> list[BackendSize]:
        """For each backend what the plans that can run need together; see `beside`."""
        loaded = self._loaded.values()
        if not loaded:
            return [BackendSize() for _ in self._backends]
        return beside(loaded[0], loaded, self.state_nbytes())

    async def _load(self, graph: Graph) -> Loaded:
        if self._one_at_a_time is None:
            self._one_at_a_time = asyncio.Lock()
        while True:
            decided = self._decided(graph)
            prepared = self._reserved.get(graph) or await self._prepare(graph)
            async with self._one_at_a_time:  # what is checked must hold until it is in place
                sizes = self._check(prepared)
                self._adopt(sizes)
                if not self._must_wait(sizes):
                    self._loader.slots.trim(self._n_slots)
                    loaded = await self._loader.load(
                        prepared, self._backends, n_copies=self._runner.state.n_copies, lane_for=self._lane_for
                    )
                    if self._decided(graph) == decided:  # nobody changed it meanwhile
                        self._loaded.put(graph, loaded)
                        self._reserved.drop(graph)
                        return loaded
                    continue
            await self._runner.synchronize()  # those that need no memory of these slots are loaded meanwhile

    async def _prepare(self, graph: Graph) -> Prepared:
        while True:
            decided = self._decided(graph)
            self.n_planned += 1
            self.n_replanned += graph in self._seen
            self._seen.put(graph, True)
            prepared = await self._compiled(await self._plan(graph))
            if self._decided(graph) == decided:
                self._reserved.put(graph, prepared)
                return prepared

    async def _compiled(self, candidate: Candidate) -> Prepared:
        # How many copies fit is known only with the compilers' temporaries, and a wrong number would be
        # worse than none. What cannot fit at all need not be compiled.
        self._check(candidate, n_copies=1)
        prepared = await self._loader.prepare(candidate, self._backends)
        self._check(prepared)
        return prepared

    async def _plan(self, graph: Graph) -> Candidate:
        devices = [backend.device for backend in self._backends]
        (pins, cut, state), offload = self._decided(graph), self._op_offload

        def make() -> Candidate:
            held = weights_held(graph, self._backends)
            plan = make_plan(graph, devices, weights=held, pins=pins, state=state, cut=cut, op_offload=offload)
            check_buffers(plan.graph, plan.splits, self._names, self._max_nbytes)
            return Candidate(plan, self._backends)

        return await self._runner.lanes.in_thread(make, "plan")

    def _decided(self, graph: Graph) -> tuple[dict[int, int] | None, Sequence[int] | None, Mapping[int, int] | None]:
        """What a plan must heed: pins, the cut, and where the state is."""
        return self.pins.get(graph), self.cuts.get(graph), self._state_homes.get(graph)

    def _beside(self, candidate: Candidate | Prepared) -> list[BackendSize]:
        """Sizes of a plan together with those that can run."""
        return beside(candidate, self._loaded.values(), self.state_nbytes())

    def _check(self, candidate: Candidate | Prepared, n_copies: int | None = None) -> list[BackendSize]:
        """Sizes of a plan together with those that can run; `AllocationError` where so many copies do not fit."""
        sizes = self._beside(candidate)
        n_copies = n_copies or self._runner.state.n_copies
        if self._auto:
            n_copies = largest_n_copies(sizes, self._limits, n_copies) or n_copies
        check_memory(sizes, self._names, self._limits, n_copies)
        return sizes

    def _adopt(self, sizes: Sequence[BackendSize]) -> None:
        """With ``n_copies="auto"``, have no more slots than fit."""
        if self._auto:
            state = self._runner.state
            state.shrink(max(1, largest_n_copies(sizes, self._limits, state.n_copies)))

    def _must_wait(self, sizes: Sequence[BackendSize]) -> bool:
        """Whether a plan of these sizes needs memory of slots that went away, and that evaluations still hold."""
        state = self._runner.state
        if state.in_flight <= state.n_copies:
            self._n_slots = state.n_copies
            return False
        return largest_n_copies(sizes, self._limits, self._n_slots) < self._n_slots

    def _lane_for(self, backend: Backend, own: bool, inline: bool) -> Lane:
        return self._runner.lanes.lane_for(backend, own=own, inline=inline)


def copies_of(n_copies: object) -> int:
    """How many slots to begin with, for `n_copies` as a caller gives it.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below 1, or some other text than ``"auto"``.
    """
    expected = "expected a whole number of at least 1 (1 means no pipelining), or 'auto'"
    if isinstance(n_copies, str):
        if n_copies != "auto":
            raise ValueError(f"n_copies is {n_copies!r}: {expected}")
        return AUTO_COPIES
    if isinstance(n_copies, bool) or not isinstance(n_copies, SupportsIndex):
        raise TypeError(f"n_copies is {n_copies!r}: {expected}")
    if (copies := operator.index(n_copies)) < 1:
        raise ValueError(f"n_copies is {copies}, {expected}")
    return copies


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
