"""What stands in for threads, for what they share, and for the event loop, where a schedule decides who runs.

Each operation by which one thread leaves something for another, or waits for it, is a point of the schedule, and
carries what is known to have happened from the one to the other.
"""

from __future__ import annotations

import asyncio
import collections
import random
import selectors
import threading
from collections.abc import Callable
from typing import Any, Protocol

from happens_before import HappensBefore


class Schedule(Protocol):
    """`schedules.Schedule`."""

    known: HappensBefore
    errors: list[BaseException]
    now: float
    over: bool
    rng: random.Random

    @property
    def on_loop(self) -> bool: ...

    def point(self, at: str) -> None: ...

    def wait(self, at: str, ready: Callable[[], bool], timeout_s: float | None = None) -> bool: ...

    def enlist(self, name: str) -> Any: ...

    def run_as(self, who: Any, work: Callable[[], None], known: int) -> None: ...

    def between_callbacks(self) -> None: ...

    def select(self, timeout: float | None) -> None: ...

    def timer(self, when: float) -> None: ...


class SeededLoop(asyncio.SelectorEventLoop):
    """An event loop whose thread is one of a schedule's."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._polled = _Selector(schedule)
        self._bells = schedule.rng.random() < 0.5
        super().__init__(self._polled)
        self.set_exception_handler(self._report)

    def time(self) -> float:
        return self._schedule.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        assert self._schedule.on_loop, "call_soon from another thread than the loop's"
        return super().call_soon(self._turn, callback, args, 0, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        known = self._schedule.known.sent()
        handle = super().call_soon_threadsafe(self._turn, callback, args, known, context=context)
        self._schedule.point("wake")
        return handle

    def rings(self) -> bool:
        """Whether some descriptor is ready: that of this loop which others wake it by, or a mailbox's."""
        return self._polled.rings()

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
        if not self._bells:
            raise NotImplementedError("as loops that watch no descriptors")
        return super().add_reader(fd, callback, *args)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        self._schedule.timer(when)
        return super().call_at(when, callback, *args, context=context)

    def _turn(self, callback: Any, args: Any, known: int) -> None:
        self._schedule.known.receive(known)
        self._schedule.between_callbacks()
        callback(*args)

    def _report(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._schedule.errors.append(error or RuntimeError(context["message"]))


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def select(self, timeout: float | None = None) -> Any:
        self._schedule.select(timeout)
        return super().select(0)

    def rings(self) -> bool:
        return bool(super().select(0))


class Thread(threading.Thread):
    def __init__(self, schedule: Schedule, **options: Any) -> None:
        super().__init__(**options)
        self._schedule = schedule
        self._seen_as: Any = None
        self._known = 0

    def start(self) -> None:
        if self._seen_as is not None:
            raise RuntimeError("threads can only be started once")
        self._seen_as = self._schedule.enlist(self.name)
        self._known = self._schedule.known.sent()
        super().start()
        self._schedule.point(f"start of {self.name}")

    def run(self) -> None:
        assert self._seen_as is not None
        self._schedule.run_as(self._seen_as, super().run, self._known)

    def join(self, timeout: float | None = None) -> None:
        who = self._seen_as
        assert who is not None
        if not self._schedule.over:
            assert who.done or timeout == 0 or asyncio._get_running_loop() is None, "joined on the event loop"
            if timeout != 0 and self._schedule.wait(f"join of {who.name}", lambda: who.done, timeout):
                self._schedule.known.receive(who.last)
                super().join()
        else:
            super().join(timeout)

    def is_alive(self) -> bool:
        return self._seen_as is not None and not self._seen_as.done


class Lock:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._held = False
        self._left = 0

    def __enter__(self) -> None:
        self._schedule.wait("lock", lambda: not self._held)
        self._held = True
        self._schedule.known.receive(self._left)

    def __exit__(self, *exc: object) -> None:
        self._held = False
        self._left = self._schedule.known.sent()
        self._schedule.point("unlock")


class Event:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._is_set = False
        self._left = 0

    def set(self) -> None:
        self._is_set = True
        self._left |= self._schedule.known.sent()
        self._schedule.point("set")

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        assert self._is_set or timeout == 0 or asyncio._get_running_loop() is None, "waited on the event loop"
        if self._schedule.wait("event", lambda: self._is_set, timeout):
            self._schedule.known.receive(self._left)
        return self._is_set


class Queue:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._items: collections.deque[Any] = collections.deque()

    def put(self, item: Any) -> None:
        self._items.append((item, self._schedule.known.sent()))
        self._schedule.point("put")

    def get(self) -> Any:
        assert self._items or asyncio._get_running_loop() is None, "waited on the event loop"
        self._schedule.wait("get", lambda: bool(self._items))
        item, known = self._items.popleft()
        self._schedule.known.receive(known)
        return item


class Deque(collections.deque[Any]):
    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def append(self, item: Any) -> None:
        super().append((item, self._schedule.known.sent()))
        self._schedule.point("append")

    def popleft(self) -> Any:
        item, known = super().popleft()
        self._schedule.known.receive(known)
        self._schedule.point("popleft")
        return item
