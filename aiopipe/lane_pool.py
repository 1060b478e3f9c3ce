"""`LanePool`: the lanes of one scheduler."""

from __future__ import annotations

import time
import warnings
from typing import Any

from .backend import Backend, InlineLane, Lane, ThreadLane

__all__ = ["LanePool"]


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

    def close(self, timeout_s: float | None = None) -> None:
        """End every thread. Blocks for as long as a job that is under way, or `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for lane in (self.capture, *self._lanes.values()):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not lane.close(left):
                warnings.warn(
                    f"the thread of lane {lane.name!r} is held up by its device; left alone after {timeout_s} s",
                    ResourceWarning,
                    stacklevel=2,
                )

    def abandon(self) -> None:
        """Have every thread end after what it has to do; wait for none."""
        for lane in (self.capture, *self._lanes.values()):
            lane.close(0.0)
