"""`Statistics`: counts and busy times, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Statistics"]


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
