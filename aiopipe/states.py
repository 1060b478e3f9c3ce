"""`States`: the states of one scheduler: where their arrays go, and how many bytes they are."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from ._jax_settings import undisturbed
from .backend import Backend
from .errors import AllocationError, StateError
from .graph import Graph, Tensor
from .loaded import Loaded
from .plans import Plans
from .runner import Runner
from .state import State
from .trace import trace

__all__ = ["States"]


class States:
    """The states of one scheduler. Each belongs to the scheduler that it was used with first.

    Args:
        backends: in order of priority.
        limits: for each backend the bytes that it may use, or None.
        plans: of the same scheduler.
        runner: runs the evaluations.
    """

    def __init__(self, backends: Sequence[Backend], limits: Sequence[int | None], plans: Plans, runner: Runner) -> None:
        self._backends = backends
        self._limits = limits
        self._plans = plans
        self._runner = runner
        self._live: weakref.WeakSet[State] = weakref.WeakSet()
        self._copiers: weakref.WeakValueDictionary[Hashable, Graph] = weakref.WeakValueDictionary()
        self._lock: asyncio.Lock | None = None

    def nbytes(self) -> list[int]:
        """Bytes of the states' arrays on each backend."""
        total = [0] * len(self._backends)
        for state in self._live:
            if state.is_allocated:
                for b, nbytes in self._needs(state.home_indices, state):
                    total[b] += nbytes
        return total

    def adopt(self, state: State) -> None:
        """Count the bytes of a state that has arrays."""
        self._live.add(state)
        state.copier = self._copiers.get(_kind(state))

    def freed(self, copier: Graph | None) -> None:
        """Drop the plan by which a state that was freed was copied, unless another state may need it."""
        if copier is not None and not any(state.copier is copier for state in self._live):
            self._plans.drop(copier)

    def end(self) -> None:
        """The scheduler is closed: no array of a state shall outlive it."""
        for state in self._live:
            state.end("ended with its scheduler, which was closed")

    def fits(self, state: State, loaded: Loaded) -> bool:
        """Whether an evaluation of a plan can use the state as it is."""
        return state.is_allocated and loaded.plan.state_homes == state.home_indices

    async def settle(self, state: State) -> None:
        """Wait until nothing that uses the state is under way."""
        async with state.turn:
            pass
        await self._runner.settle(state)

    async def wait_turn(self, state: State) -> None:
        """Wait for the snapshots of a state that wait for their plan: what is submitted later comes behind them.

        Raises:
            BackendClosedError: the scheduler is closed.
            WrongLoopError: it belongs to another event loop.
        """
        if state.turn.locked():
            self._runner.enter()
        async with state.turn:
            pass

    async def snapshot(self, state: State) -> list[Any]:
        """Copies of the arrays as they are behind everything that was submitted so far.

        Raises:
            AllocationError: there is no room for them.
        """
        self._runner.enter()
        self._check_room(state, state.home_indices)
        async with state.turn:
            graph = state.copier or self._new_copier(state)
            loaded = self._plans.get(graph)
            if loaded is None or not self.fits(state, loaded):
                loaded = await self.prepare(state, graph)
        # Who waited for the turn goes on when this next waits: then it has its place in the order.
        # An eval callback sees the user's graphs: what it says of a copy must not mark the state.
        return jax.tree.leaves(await (await self._runner.submit(loaded, (), state, observed=False)))

    def _new_copier(self, state: State) -> Graph:
        """A graph that copies states of this kind. They hold it: it goes with the last of them, as its plan does."""
        kind = _kind(state)
        with undisturbed():  # a copy is a copy, whatever is in it
            graph = self._copiers[kind] = trace(_copy, None, state=state.specs, name="snapshot")
        for each in self._live:
            if _kind(each) == kind and not each._gone:
                each.copier = graph
        return graph

    async def prepare(self, state: State, graph: Graph) -> Loaded:
        """A plan that reads the state where it is, and its arrays in place.

        Raises:
            StateError: the state is another scheduler's.
            PlacementError: no backend can run some op, or one that makes the state's next value lacks it.
            AllocationError: the state does not fit beside what is there.
            BackendClosedError: the scheduler is closed, or was meanwhile.
        """
        self._runner.enter()
        if state._owner is not None and state._owned_by() is not self:
            raise StateError(f"{state!r} belongs to another scheduler: make one of its values, State(snapshot.value)")
        state._owner = weakref.ref(self)
        self._live.add(state)  # from now on it ends with this: also while it is being put in place
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            homes = self._known_homes(state)
            self._plans.keep_state_at(graph, {t.id: homes[i] for i, t in enumerate(graph.state) if homes[i] >= 0})
            loaded = self._plans.get(graph) or await self._plans.load(graph)
            while not state.is_allocated:  # again where it was reset or restored meanwhile
                self._runner.enter()
                state.check_usable()
                await self._allocate(state, graph.state, loaded.plan.state_homes)
        return loaded

    def _known_homes(self, state: State) -> Sequence[int]:
        """For each array the backend that it is on, or -1 where the plan decides."""
        if state.home_indices:
            return state.home_indices
        return [
            next((i for i, backend in enumerate(self._backends) if value is not None and backend.holds(value)), -1)
            for value in state._source
        ]

    async def _allocate(self, state: State, tensors: Sequence[Tensor], homes: tuple[int, ...]) -> None:
        self._check_room(state, homes)
        source, backends = state._source, tuple(self._backends[b] for b in homes)

        def upload() -> list[Any]:
            return [_upload(*each) for each in zip(source, tensors, backends, strict=True)]

        arrays = await self._runner.lanes.in_thread(upload, "upload")
        if state._source is source and not state._gone:  # neither replaced nor ended meanwhile
            state.home_indices, state._homes, state._arrays = homes, backends, arrays
            self.adopt(state)

    def _check_room(self, state: State, homes: Sequence[int]) -> None:
        """Raise `AllocationError` where there is no room for another set of the state's arrays."""
        sizes, held, n_copies = self._plans.sizes(), self.nbytes(), self._runner.state.n_copies
        for b, nbytes in self._needs(homes, state):
            limit, backend = self._limits[b], self._backends[b]
            # Where no state has arrays yet, the sizes have room for one: it may be the one that is asked for.
            used = sizes[b].total(n_copies) - sizes[b].state_nbytes + held[b]
            if limit is not None and used + nbytes > limit:
                raise AllocationError(
                    f"{state!r} needs {nbytes} bytes on {backend.name!r}, where {max(0, limit - used)} of {limit} are "
                    f"free: free other states (they have {held[b]} bytes there), or make it smaller",
                    backend=backend.name,
                    asked_nbytes=nbytes,
                    available_nbytes=max(0, limit - used),
                )
            backend.check_room(nbytes)

    @staticmethod
    def _needs(homes: Sequence[int], state: State) -> list[tuple[int, int]]:
        needs: dict[int, int] = {}
        for b, nbytes in zip(homes, state.sizes, strict=True):
            needs[b] = needs.get(b, 0) + nbytes
        return list(needs.items())


def _kind(state: State) -> Hashable:
    """Equal for states that one graph can copy."""
    return state.structure, state.home_indices


def _copy(_: None, state: Any) -> tuple[Any, Any]:
    return state, state


def _upload(source: Any, tensor: Tensor, backend: Backend) -> Any:
    """A copy of a value on a backend that is nobody else's; zeros for None."""
    if source is None:
        if tensor.dtype.startswith("key<"):
            raise StateError(f"state {tensor.describe()} has no value, and a key cannot begin with zeros: give keys")
        source = backend.host_buffer(tensor)
        source[...] = np.zeros((), source.dtype)
    with backend.asking_for(tensor):
        value = backend.upload(source, tensor)
        return backend.duplicate(value, tensor) if value is source else value
