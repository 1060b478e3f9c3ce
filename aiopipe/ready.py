"""`Ready`: the plan that an evaluation needs, made now if there is none, where that is allowed."""

from __future__ import annotations

from .graph import Graph
from .loaded import Loaded
from .plans import Plans
from .sched.plan import Plan
from .state import State, check_state
from .states import States

__all__ = ["Ready"]


class Ready:
    """Has one scheduler's graphs ready to run.

    Args:
        plans: of the scheduler.
        states: of the scheduler.

    Attributes:
        n_splits: of the graph that was planned last; 0 before the first.
    """

    def __init__(self, plans: Plans, states: States) -> None:
        self._plans = plans
        self._states = states
        self.n_splits = 0

    async def load(self, graph: Graph) -> Loaded:
        """A graph's plan, which may be made."""
        return self._plans.get(graph) or self._noted(await self._plans.load(graph))

    async def reserve(self, graph: Graph) -> Plan:
        """A graph's plan with its sizes, which may be made; nothing is allocated."""
        plan = await self._plans.reserve(graph)
        self.n_splits = plan.n_splits
        return plan

    async def alloc(self, graph: Graph, state: State) -> None:
        """Have a graph's plan and a state in place; the plan may be made."""
        check_state(graph, state)
        self._noted(await self._states.prepare(state, graph))

    async def for_evaluation(self, graph: Graph, state: State | None) -> Loaded:
        """A graph's plan for an evaluation, and the state where the plan wants it.

        Raises:
            StateError: the state cannot be used for it.
            ReplanError: the plan would have to be made, and that is forbidden.
        """
        if state is not None:
            await self._states.wait_turn(state)
        check_state(graph, state)
        loaded = self._plans.get(graph)
        if state is None:
            if loaded is None:
                self._plans.check_allowed(graph)
                loaded = await self.load(graph)
        elif loaded is None or not self._states.fits(state, loaded):
            self._plans.check_allowed(graph, moved=loaded is not None and state.is_allocated)
            loaded = self._noted(await self._states.prepare(state, graph))
        return loaded

    def _noted(self, loaded: Loaded) -> Loaded:
        self.n_splits = loaded.plan.n_splits
        return loaded
