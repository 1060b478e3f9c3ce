"""Virtual time on an asyncio loop: it moves when the loop has nothing else to do."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

from .. import _threads
from ..errors import WrongLoopError

__all__ = ["VirtualClock"]

_SPINS = 128
"""Passes of the loop that count as idleness on a loop which does not show its ready queue."""

_MOMENTS = 100
"""How many moments may follow each other within one pass of the loop."""

_queued_ticks: WeakKeyDictionary[asyncio.AbstractEventLoop, list[int]] = WeakKeyDictionary()
"""For each loop, how many clocks have a tick in its ready queue: several clocks on one loop must not take
each other's ticks for work."""

Callback = Callable[[], object]


class VirtualClock:
    """A clock that jumps from event to event, whenever the running loop is idle.

    Work of the host therefore takes no virtual time, however long it really takes; a task that polls with
    `asyncio.sleep(0)` stops time for as long as it polls. Threads are invisible to the loop: hold the clock
    while they work on something that events should wait for.

    The clock belongs to the loop that ran when an event was last added. When another loop adds one and the
    former no longer runs, the former's events are dropped; `now` never goes back.

    Attributes:
        now: virtual seconds since the clock was made. Read only.
    """

    __slots__ = (
        "_early",
        "_held",
        "_late",
        "_lock",
        "_loop",
        "_peers",
        "_ready",
        "_spins",
        "_ticking",
        "_times",
        "now",
    )

    def __init__(self) -> None:
        self.now = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Sized | None = None
        self._peers = [0]
        # One entry for each distinct time: devices of equal speed finish together, and a push on a list
        # costs a tenth of a push on a heap.
        self._times: list[float] = []
        self._early: dict[float, list[Callback]] = {}
        self._late: dict[float, list[Callback]] = {}
        self._ticking = False
        self._spins = 0
        self._held = 0
        self._lock = _threads.Lock()

    def call_at(self, when: float, callback: Callback) -> None:
        """Run ``callback()`` at a virtual time (at once when idle, if that is past), on the loop's thread.

        Callbacks of one time run in the order of the calls. From a thread without a loop the call goes
        to the clock's loop; without any, it is kept for the loop that next adds an event.

        Raises:
            ValueError: `when` is infinite or not a number.
            WrongLoopError: another loop that still runs uses the clock.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if self._hand_over(self.call_at, when, callback):
                return
        else:
            if loop is not self._loop:
                self._bind(loop)
        self._add(when, callback, self._late)

    def complete_at(self, when: float, callback: Callback) -> None:
        """Like `call_at`, but before every `call_at` callback of that time: results come before news of them."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if self._hand_over(self.complete_at, when, callback):
                return
        else:
            if loop is not self._loop:
                self._bind(loop)
        self._add(when, callback, self._early)

    async def sleep(self, seconds: float) -> None:
        """Wait for that many virtual seconds."""
        await self.wait_until(self.now + seconds)

    async def wait_until(self, when: float) -> None:
        """Wait until that virtual time, and until everything that completes at it has."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self.call_at(when, wake)
        await future

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep time from moving, from any thread; holds nest.

        Around an ``await`` of a thread's work, hold in the task and not in the thread: the thread ends a
        moment before the loop learns of it.
        """
        with self._lock:
            self._held += 1
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                free = self._held == 0
            loop = self._loop
            if free and loop is not None:
                with suppress(RuntimeError):  # a closed loop: its events are lost anyway
                    loop.call_soon_threadsafe(self._start)

    @property
    def running(self) -> bool:
        """Whether the clock's loop runs."""
        return self._loop is not None and self._loop.is_running()

    @property
    def in_loop(self) -> bool:
        """Whether the caller runs on the clock's loop, where waiting in place would stop time."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    @property
    def pending(self) -> int:
        """How many distinct times have events to come."""
        return len(self._times)

    def _hand_over(self, call: Callable[[float, Callback], None], when: float, callback: Callback) -> bool:
        """Without a loop in this thread: whether the clock's loop took the call."""
        loop = self._loop
        if loop is not None and loop.is_running():
            loop.call_soon_threadsafe(call, when, callback)
            return True
        if loop is not None and loop.is_closed():
            self._drop()
        return False

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None:
            if self._loop.is_running():
                raise WrongLoopError(
                    "this virtual clock is used by another event loop that still runs: "
                    "use one loop, or a cluster of simulated devices for each"
                )
            self._drop()
        self._loop = loop
        self._ready = getattr(loop, "_ready", None)
        self._peers = _queued_ticks.setdefault(loop, [0])
        self._start()

    def _drop(self) -> None:
        self._loop = None
        self._ticking = False
        self._times.clear()
        self._early.clear()
        self._late.clear()

    def _add(self, when: float, callback: Callback, queue: dict[float, list[Callback]]) -> None:
        if when < self.now:
            when = self.now
        callbacks = queue.get(when)
        if callbacks is not None:
            callbacks.append(callback)
            return
        if not when < math.inf:
            raise ValueError(f"virtual time {when}: expected finite seconds (a cost or a bandwidth is wrong)")
        if when not in (self._early if queue is self._late else self._late):
            heapq.heappush(self._times, when)
        queue[when] = [callback]
        if not self._ticking:
            self._start()

    def _start(self) -> None:
        if self._loop is not None and self._times and not self._ticking and not self._held:
            self._ticking = True
            self._spins = _SPINS
            self._queue_tick()

    def _queue_tick(self) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._tick, self._peers)
        self._peers[0] += 1

    def _tick(self, peers: list[int]) -> None:
        peers[0] -= 1
        if peers is not self._peers:
            return  # left over on a loop that the clock has left
        if self._held or not self._times:
            self._ticking = False  # the last hold, or the next event, starts it again
            return
        # What shares this pass of the loop with the tick is still in the ready queue, behind it.
        if self._ready is not None:
            idle = len(self._ready) <= self._peers[0]
        else:
            self._spins -= 1
            idle = self._spins <= 0
        if not idle:
            self._queue_tick()
            return
        self._spins = _SPINS
        try:
            self._advance()
            if self._ready is not None:
                # Events that give the host nothing to do follow each other without a pass of the loop,
                # which costs more than most of them; but sockets and timers want a pass now and then.
                for _ in range(_MOMENTS):
                    if len(self._ready) > self._peers[0] or self._held or not self._times:
                        break
                    self._advance()
        finally:
            if self._times:
                self._queue_tick()
            else:
                self._ticking = False

    def _advance(self) -> None:
        # What a callback adds for this very time gets a moment of its own, after the host's turn: a chain
        # of events that takes no virtual time cannot starve the loop.
        self.now = when = heapq.heappop(self._times)
        due = [*self._early.pop(when, ()), *self._late.pop(when, ())]
        for callback in due:
            try:
                callback()
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                assert self._loop is not None
                self._loop.call_exception_handler(
                    {"message": f"callback of a virtual clock failed at {when} s", "exception": error}
                )
        # An error that a callback stored leads, by way of its traceback's frames, to this one: it must
        # not keep alive what the callbacks referred to.
        del due[:], callback
