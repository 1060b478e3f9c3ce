"""`LanePool`: the threads of one scheduler: its lanes, and those that do one thing each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import _threads
from .backend import Backend, InlineLane, Lane, ThreadLane

__all__ = ["LanePool"]

T = TypeVar("T")

MOMENT_S = 0.1
"""How long a thread that is told to end may take to notice, where another one may be inside a device."""

IDLE_S = 5.0
"""The same where none is, so that only a machine that is very busy can hold them up."""


class LanePool:
    """Lanes, each made when it is first needed, and threads for single calls; all closed together.

    Attributes:
        inline: launches in the caller.
        capture: copies large inputs.
    """

    def __init__(self) -> None:
        self.inline = InlineLane()
        self.capture = ThreadLane("capture")
        self._lanes: dict[tuple[Any, ...], Lane] = {}
        self._calls: dict[_threads.Event, str] = {}  # those in threads: set where one has ended

    def lane_for(self, backend: Backend, *, own: bool, inline: bool) -> Lane:
        """The lane for a backend: inline, its own, or the one of its client; each made once."""
        if inline:
            return self.inline
        key = (backend.name,) if own else ("shared", backend.device.props.client)
        if key not in self._lanes:
            self._lanes[key] = backend.make_lane(own=own)
        return self._lanes[key]

    async def in_thread(self, call: Callable[[], T], name: str) -> T:
        """`_threads.in_thread`; and `close` waits for the call, also where nobody else does any more."""
        todo, ended = [call], _threads.Event()
        del call

        def work() -> T:
            try:
                return todo.pop()()
            finally:
                ended.set()

        self._calls = {event: of for event, of in self._calls.items() if not event.is_set()}
        self._calls[ended] = name
        try:
            return await _threads.in_thread(work, name)
        except asyncio.CancelledError:
            raise  # the call goes on
        except BaseException:
            self._calls.pop(ended, None)  # there may have been no thread for it
            raise

    def close(self, timeout_s: float | None = None, *, idle: bool = False) -> list[str]:
        """End every thread. Blocks for as long as a job that is under way, or `timeout_s`.

        Args:
            timeout_s: a thread that has nothing to do gets a moment to end, however little this is.
            idle: no lane has anything to do, so that each of them certainly ends.

        Returns:
            What is to be said of each thread that goes on.
        """
        calls = dict(self._calls)
        lanes = (self.capture, *self._lanes.values())
        for lane in lanes:
            lane.close(0.0)  # all are told before the first is waited for
        began_s = time.monotonic()

        def left_s(least_s: float) -> float | None:
            return None if timeout_s is None else max(0.0, began_s + max(timeout_s, least_s) - time.monotonic())

        held_up = []
        for lane in lanes:
            if not lane.close(left_s(IDLE_S if idle else MOMENT_S)):
                held_up.append(f"the thread of lane {lane.name!r} is held up by its device")
        for ended, name in calls.items():
            if not ended.wait(left_s(0.0)):
                held_up.append(f"the thread 'aiopipe-{name}' is still at work")
        return held_up

    def abandon(self) -> None:
        """Have every thread end after what it has to do; wait for none."""
        for lane in (self.capture, *self._lanes.values()):
            lane.close(0.0)
