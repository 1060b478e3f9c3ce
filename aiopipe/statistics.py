"""`Statistics`: counts and busy times, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from .timeline import Timeline

__all__ = ["Statistics"]


@dataclass(frozen=True)
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
        timeline: what ran where, up to then (needs ``timeline=True``).
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
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    @cached_property
    def busy(self) -> dict[str, float]:
        """Backend -> share of the time in which it computed, from the first launch to the last end.

        Of what the timeline still had; without one, nothing. Worked out when it is first looked at.
        """
        return {} if self.timeline is None else self.timeline.utilization()

    @cached_property
    def busy_s(self) -> dict[str, float]:
        """The same in seconds."""
        return {} if self.timeline is None else self.timeline.busy_s()
