"""Programs with an event loop and threads, run in an order that a seed decides; the same seed, the same order.

`play` runs an async function on a loop and with threads of its own, one at a time. Whoever runs goes on to its next
*point*; there the seed says who runs next. What is permuted, and why it is lawful:

- **Threads** (those that aiopipe makes by the names in `aiopipe._threads`, and the loop's). Points are every operation
  by which one thread leaves something for another or waits for it (a lock, a queue, a deque, an event, starting and
  joining a thread, `call_soon_threadsafe`, the loop's wait), and every line of the files in `FILES`: CPython may switch
  threads there, and elsewhere. Nobody runs who waits: for a lock that is held, a queue that is empty, and so on.
- **What comes from outside the loop's thread.** A callback that another thread posts lands in the loop's ready queue
  whenever that thread gets to it: between any two callbacks, as the thread runs at points only. What a program waits
  for by `Schedule.arrival` stands for a socket's data, a client's request or its disconnection: it arrives at any
  moment, and those that wait do so in any order.
- **Time.** `loop.time()` is virtual: it moves when nothing else can happen, and now and then before a timer of the
  next second, for the machine may be that slow. Timers keep their order.
- **Devices.** They say that they are done as late as `worlds` likes; that is in there.

What is *not* permuted: callbacks that the loop's own thread queued. asyncio runs them first in, first out, and says so;
code may rely on it. They come in another order only where what queued them does, and so only by way of the above.

When nothing can happen any more, or not for ten seconds of virtual time, a wake-up was lost: `Stuck`.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import heapq
import random
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from aiopipe import _threads
from handoffs import Deque, Event, Lock, Queue, SeededLoop, Thread
from happens_before import HappensBefore

FILES = frozenset(
    str(Path(_threads.__file__).parent / name)
    for name in (
        "backend.py closing.py completion.py evaluation.py events.py lane_pool.py lanes.py mailbox.py "
        "observe.py queue.py run.py runner.py staging.py statistics.py watcher.py sched/launch.py"
    ).split()
)
"""What runs on several threads, or on the loop while they do."""

SHARED: dict[str, Any] = {"Thread": Thread, "Lock": Lock, "Event": Event, "SimpleQueue": Queue, "deque": Deque}
"""What takes the place of the names in `aiopipe._threads`."""

PATIENCE_S = 10.0
SOON_S = 1.0


class Stuck(AssertionError):
    """Nothing can happen any more."""


class Abandoned(BaseException):
    """Ends a thread whose schedule has failed."""


class Who:
    """A thread, as the schedule knows it."""

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.turn = threading.Lock()
        self.turn.acquire()
        self.waits: Callable[[], bool] | None = None
        self.at = "start"
        self.deadline: float | None = None
        self.timed_out = False
        self.done = False
        self.last = 0  # what it knew when it ended


class Schedule:
    """Who runs when.

    Args:
        seed: decides.

    Attributes:
        now: virtual seconds.
        steps: (point, who went on there), in order; changes of thread only.
        known: what is known to have happened, in which thread.
        errors: of the loop's exception handler.
        thread_errors: what threads have raised.
        rescues: called when nothing can happen any more, before that is a failure; for tests that plant one.
        n_rescued: how often.
        files: every line of these is a point.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.known = HappensBefore()
        self.now = 0.0
        self.steps: list[tuple[str, str]] = []
        self.rescues: list[Callable[[], None]] = []
        self.n_rescued = 0
        self.files = FILES
        self.over = False
        self.errors: list[BaseException] = []
        self.thread_errors: list[BaseException] = []
        self._rate = self.rng.choice((0.5, 0.2, 0.05, 0.02))
        self._arrival_rate = self.rng.choice((0.7, 0.3, 0.1))
        self._left = 1
        self._who: list[Who] = []
        self._n_named: collections.Counter[str] = collections.Counter()
        self._stuck: str | None = None
        self._arrivals: list[asyncio.Future[None]] = []
        self._timers: list[float] = []
        self._loop: SeededLoop | None = None
        self._main = self._me = self.enlist("loop")
        self.known.begin(0)

    # -- points -----------------------------------------------------------------------------------

    def point(self, at: str) -> None:
        """Here somebody else may go on."""
        self._left -= 1
        if self._left <= 0 and not self.over:
            self._left = 1 + int(self.rng.expovariate(self._rate))
            self._me.at = at
            self._switch()

    def wait(self, at: str, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Go on when that is so, or (False) after that long."""
        me = self._me
        if self.over:
            if not ready() and timeout_s is None and me is not self._main:
                raise Abandoned
            return ready()
        me.at, me.waits = at, ready
        me.deadline = None if timeout_s is None else self.now + timeout_s
        self._switch()
        timed_out, me.timed_out = me.timed_out, False
        me.waits = me.deadline = None
        return not timed_out

    def _switch(self) -> None:
        me, chosen = self._me, self._choose()
        if chosen is not me:
            self._hand_over(chosen)
            me.turn.acquire()
            if self.over and me is not self._main:
                raise Abandoned
        if self._stuck is not None and me is self._main:
            raise Stuck(self._stuck)

    def _hand_over(self, chosen: Who) -> None:
        self.steps.append((chosen.at, chosen.name))
        self._me = chosen
        chosen.turn.release()

    def _choose(self) -> Who:
        while True:
            ready = [w for w in self._who if w.waits is None or w.waits()]
            if ready:
                return self.rng.choices(ready, [w.weight for w in ready])[0]
            timed = [w for w in self._who if w.deadline is not None]
            first = min(timed, key=lambda w: w.deadline or 0.0, default=None)
            if first is not None and first.deadline is not None and first.deadline <= self.now + PATIENCE_S:
                self.now, first.timed_out = first.deadline, True
                return first
            if self.rescues:
                self.n_rescued += 1
                for rescue in self.rescues:
                    rescue()
                if any(w.waits is None or w.waits() for w in self._who):
                    continue
            self._stuck = "nothing can happen any more: " + self.report()
            return self._main

    @property
    def on_loop(self) -> bool:
        """Whether the loop's thread is the one that runs."""
        return self._me is self._main or self.over

    def report(self) -> str:
        """Who waits where, and how it came to that."""
        where = "; ".join(f"{w.name} at {w.at}" for w in self._who)
        steps = " | ".join(f"{who}: {at}" for at, who in self.steps[-40:])
        return f"{where}\nlast steps: {steps}"

    # -- threads ----------------------------------------------------------------------------------

    def enlist(self, name: str) -> Who:
        """A new thread takes part; it does not run yet."""
        self._n_named[name] += 1
        n = self._n_named[name]
        who = Who(name if n == 1 else f"{name} ({n})", self.rng.choice((0.02, 1.0, 1.0, 1.0, 5.0)))
        self._who.append(who)
        return who

    def run_as(self, who: Who, work: Callable[[], None], known: int) -> None:
        """In a new thread: wait for its turn, work, hand on."""
        who.turn.acquire()
        try:
            if not self.over:
                self.known.begin(known)
                sys.settrace(self._trace)
                work()
        except Abandoned:
            pass
        except BaseException as error:
            self.thread_errors.append(error)
        finally:
            sys.settrace(None)
            who.last = self.known.sent()
            who.done = True
            if not self.over:
                self._who.remove(who)
                self._hand_over(self._choose())

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self.files else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._left -= 1
            if self._left <= 0:
                self._left = 0
                self.point(f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno}")
        return self._line

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """aiopipe makes threads, and what they share, by this schedule."""
        before, collecting = sys.gettrace(), gc.isenabled()
        with pytest.MonkeyPatch.context() as patch:
            for name, kind in SHARED.items():
                patch.setattr(_threads, name, partial(kind, self))
            gc.disable()  # what a collection ends, it ends at its own time
            sys.settrace(self._trace)
            try:
                yield
            finally:
                sys.settrace(before)
                self.end()
                if collecting:
                    gc.enable()

    def finish(self) -> None:
        """The program has ended: every thread does, too."""
        self.wait("end", lambda: len(self._who) == 1)

    def end(self) -> None:
        """Have what is left of the threads end."""
        self.over = True
        for who in self._who[1:]:
            who.turn.release()

    # -- the loop ---------------------------------------------------------------------------------

    def arrival(self) -> asyncio.Future[None]:
        """Await it: something comes from outside, sooner or later."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals.append(future)
        return future

    async def arrivals(self, n: int) -> None:
        """Wait for that many, one after the other."""
        for _ in range(n):
            await self.arrival()

    def _arrive(self) -> None:
        assert self._loop is not None
        future = self._arrivals.pop(self.rng.randrange(len(self._arrivals)))
        self._loop.call_soon(lambda: None if future.done() else future.set_result(None))

    def between_callbacks(self) -> None:
        """On the loop's thread."""
        if self._arrivals and self.rng.random() < self._arrival_rate:
            self._arrive()
        self.point("callback")

    def select(self, timeout: float | None) -> None:
        """The loop has done what there was, and has more to do (timeout 0), or waits."""
        if self.over:
            return
        while self._timers and self._timers[0] <= self.now:
            heapq.heappop(self._timers)
        soon = bool(self._timers) and self._timers[0] <= self.now + SOON_S
        late = soon and self.rng.random() < (0.02 if timeout == 0 else 0.3)  # so late that a timer is due
        if late:
            self.now = self._timers[0]
        self.point("pass")
        if timeout == 0 or late or not self.wait("idle", lambda: bool(self._arrivals) or self._rings(), timeout):
            return
        if not self._rings():
            self._arrive()

    def _rings(self) -> bool:
        """Whether another thread has woken the loop."""
        return self._loop is not None and self._loop.rings()

    def timer(self, when: float) -> None:
        heapq.heappush(self._timers, when)


def play(program: Callable[[Schedule], Coroutine[Any, Any, None]], schedule: Schedule) -> None:
    """Run a program to its end; nothing may be left of it.

    Raises:
        Stuck: nothing could happen any more.
        AssertionError: a thread or a task is left, or happened-before was broken.
    """
    with schedule.in_force(), schedule.known.watching():
        loop = schedule._loop = SeededLoop(schedule)
        main = loop.create_task(program(schedule))
        try:
            loop.run_until_complete(main)
            left = [task for task in asyncio.all_tasks(loop) if task is not main]
            assert not left, f"tasks are left: {left}"
            loop.run_until_complete(loop.shutdown_asyncgens())
            schedule.finish()
        except BaseException as error:
            _wreckage.append((schedule, loop, asyncio.all_tasks(loop), error))  # collecting it would only add noise
            if schedule.known.violations:
                raise AssertionError(schedule.known.report()) from error
            raise
        loop.close()
    schedule.known.check()
    for error in (*schedule.thread_errors, *schedule.errors):
        raise error


_wreckage: list[Any] = []
