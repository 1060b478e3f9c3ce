"""`LanePool`: the lanes of one scheduler."""

from __future__ import annotations

import time
from typing import Any

from .backend import Backend, InlineLane, Lane, ThreadLane

__all__ = ["LanePool"]

MOMENT_S = 0.1
"""How long a thread that is told to end may take to notice, where another one may be inside a device."""

IDLE_S = 5.0
"""The same where none is, so that only a machine that is very busy can hold them up."""


class LanePool:
    """Lanes, each made when it is first needed, all closed together.

    Attributes:
        inline: launches in the caller.
        capture: copies large inputs.
    """

    def __init__(self) -> None:
        self.inline = InlineLane()
        self.capture = ThreadLane("capture")
        self._lanes: dict[tuple[Any, ...], Lane] = {}

    def lane_for(self, backend: Backend, *, own: bool, inline: bool) -> Lane:
        """The lane for a backend: inline, its own, or the one of its client; each made once."""
        if inline:
            return self.inline
        key = (backend.name,) if own else ("shared", backend.device.props.client)
        if key not in self._lanes:
            self._lanes[key] = backend.make_lane(own=own)
        return self._lanes[key]

    def close(self, timeout_s: float | None = None, *, idle: bool = False) -> list[str]:
        """End every thread. Blocks for as long as a job that is under way, or `timeout_s`.

        Args:
            timeout_s: a thread that has nothing to do gets a moment to end, however little this is.
            idle: no lane has anything to do, so that each of them certainly ends.

        Returns:
            The names of the lanes whose threads go on, held up by their devices.
        """
        lanes = (self.capture, *self._lanes.values())
        for lane in lanes:
            lane.close(0.0)  # all are told before the first is waited for
        least_s = IDLE_S if idle else MOMENT_S
        deadline = None if timeout_s is None else time.monotonic() + max(timeout_s, least_s)
        held_up = []
        for lane in lanes:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not lane.close(left):
                held_up.append(lane.name)
        return held_up

    def abandon(self) -> None:
        """Have every thread end after what it has to do; wait for none."""
        for lane in (self.capture, *self._lanes.values()):
            lane.close(0.0)
