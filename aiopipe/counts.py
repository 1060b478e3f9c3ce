"""`statistics_of`: what a scheduler has done so far, as one value."""

from __future__ import annotations

from .loader import Loader
from .plans import Plans
from .runner import Runner
from .sched.stimuli import Outcome
from .statistics import Statistics
from .timeline import Timeline

__all__ = ["statistics_of"]


def statistics_of(runner: Runner, plans: Plans, loader: Loader, timeline: Timeline | None) -> Statistics:
    """The counts of a scheduler's parts.

    Args:
        runner: knows its evaluations.
        plans: knows its graphs.
        loader: knows what was compiled and copied.
        timeline: knows how long its splits ran, where somebody wants to know.
    """
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
        timeline=timeline.frozen() if timeline else None,
    )
