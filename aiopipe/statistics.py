"""Counts and busy times, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .loader import Loader
from .plans import Plans
from .runner import Runner
from .sched.state import Outcome
from .timeline import Timeline

__all__ = ["Statistics", "statistics_of"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a scheduler has done so far.

    Attributes:
        submitted, admitted, succeeded, failed, cancelled, aborted: evaluations.
        in_flight: evaluations that hold a slot now.
        waiting: evaluations that wait for a slot now.
        n_copies: how many slots there are.
        plans: graphs that are loaded.
        planned: how often a graph was planned.
        replanned: how often that was again, because pins changed, or after `Scheduler.reset`. (Other shapes
            are another graph: they are planned, not planned again.)
        compiled: executables that were compiled.
        copied_weights_nbytes: bytes of weights that were copied to a backend when a plan was made.
        busy: backend name -> share of time busy, from the first launch to the last end that the timeline
            still has (needs ``timeline=True``).
        busy_s: the same in seconds.
    """

    submitted: int
    admitted: int
    succeeded: int
    failed: int
    cancelled: int
    aborted: int
    in_flight: int
    waiting: int
    n_copies: int
    plans: int
    planned: int
    replanned: int
    compiled: int
    copied_weights_nbytes: int
    busy: Mapping[str, float] = field(default_factory=dict)
    busy_s: Mapping[str, float] = field(default_factory=dict)


def statistics_of(runner: Runner, plans: Plans, loader: Loader, timeline: Timeline | None) -> Statistics:
    """What a scheduler's parts have counted."""
    state = runner.state
    return Statistics(
        submitted=runner.n_submitted,
        admitted=state.n_admitted,
        succeeded=state.counts[Outcome.SUCCESS],
        failed=state.counts[Outcome.FAILED],
        cancelled=state.counts[Outcome.CANCELLED],
        aborted=state.counts[Outcome.ABORTED],
        in_flight=state.in_flight,
        waiting=state.waiting,
        n_copies=state.n_copies,
        plans=len(plans.values()),
        planned=plans.n_planned,
        replanned=plans.n_replanned,
        compiled=loader.n_compiled,
        copied_weights_nbytes=loader.copied_weights_nbytes,
        busy=timeline.utilization() if timeline else {},
        busy_s=timeline.busy_s() if timeline else {},
    )
