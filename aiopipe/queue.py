"""A backend's own queue, for work that is posted by hand.

Jobs are launched in order on a lane that may block, never on the event loop's thread (a simulated
backend's cannot block and runs there, in virtual time). While the queue waits for an event of
another backend, what is behind it is kept on the loop: no thread sits waiting, so no number of
queues that wait for each other can use up the threads.

The semantics are those of a CUDA stream (record, wait), except that events are one-shot and errors
travel with them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ._loops import check_own, running_loop
from .errors import BackendClosedError, PlacementError, WrongLoopError, first_error
from .events import Event
from .lanes import InlineLane, Lane

__all__ = ["Queue"]

Job = Callable[[], Sequence[Any] | None]


class Owner(Protocol):
    """What a queue needs of its backend."""

    name: str

    def make_lane(self, *, own: bool) -> Lane: ...

    def notify(self, values: Sequence[Any], callback: Callable[[BaseException | None], None]) -> None: ...


@dataclass(slots=True, eq=False)
class _Entry:
    job: Job
    then: Callable[[], None] | None
    event: Event
    is_mark: bool = False
    reported: bool = False


class Queue:
    """Jobs in order, each with an event; belongs to the event loop on which it was first used.

    Args:
        owner: the backend that it is the queue of.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._lane: Lane | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held: deque[_Entry | Event] = deque()  # begins with an event that has not happened, or is empty
        self._unfinished = 0
        self._blocked_by: BaseException | None = None  # what an event that was waited for failed with
        self._failed: BaseException | None = None  # the first failure since the last `synchronize`
        self._failed_before_mark: BaseException | None = None  # the first failure since the last `record`
        self._closed = False

    @property
    def pending(self) -> int:
        """How many jobs have not finished."""
        return self._unfinished

    def post(
        self, job: Job, then: Callable[[], None] | None = None, *, name: str = "job", reported: bool = False
    ) -> Event:
        """Queue a job behind all others.

        Args:
            job: launches something and does not wait for it; may block its lane. Returns handles of what
                it launched (or None): the job has finished when these are ready.
            then: runs when the handles are ready, before the event happens and before what is queued
                behind it finishes, for instance to read them into host memory. On a lane with a thread it
                is called straight after the job and does the waiting itself (as `Backend.download` does).
            name: for the event.
            reported: somebody else tells the user of its failure: `synchronize` will not raise it.

        Returns:
            An event that happens when the job has finished, after all earlier ones. It has the job's error;
            or that of an event that the queue waited for before, in which case the job did not run.

        Raises:
            BackendClosedError: the backend is closed.
            WrongLoopError: another event loop has work in the queue.
        """
        event = Event(f"{name} on {self._owner.name}", loop=self._bind())
        self._add(_Entry(job, then, event, reported=reported))
        return event

    def record(self, event: Event) -> None:
        """Have an event happen when everything that was queued so far has finished.

        It has the first error since the last `record`.

        Raises:
            PlacementError: it has been recorded, or has happened, before: events are one-shot.
            WrongLoopError: somebody waits for it on another event loop, or one has work in the queue.
        """
        if event.recorded or event.done():
            raise PlacementError(
                f"{event.name!r} cannot be recorded on {self._owner.name}: it was recorded, or happened, before; "
                "events are one-shot, so make another with event_new()"
            )
        event.bind(self._bind())
        self._add(_Entry(_nothing, None, event, is_mark=True))
        event.recorded = True

    def wait(self, event: Event) -> None:
        """Hold back what is queued from now on until an event, of any backend, has happened.

        The caller does not wait. If the event fails, what is queued behind it does not run and fails
        with the same error, until the next `synchronize`.

        Raises:
            BackendClosedError: the backend is closed.
            WrongLoopError: the event is of another event loop, or one has work in the queue.
        """
        loop = self._bind()
        if not event.done():
            event.bind(loop)
        if self._held:
            self._held.append(event)
        elif event.done():
            self._pass(event)
        else:
            self._held.append(event)
            event.add_callback(self._release)

    async def synchronize(self) -> None:
        """Wait until everything that is queued has finished.

        Raises:
            Exception: the first error of a job, or of an event that was waited for, since the last call.
        """
        if self._unfinished or self._held:
            await self.post(_nothing, name="synchronize").wait()
        error = first_error(self._failed, self._blocked_by)
        self._failed = self._blocked_by = self._failed_before_mark = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame

    def check_own(self) -> None:
        """Raise `WrongLoopError` where another event loop, which has not ended, has work in the queue."""
        if self._unfinished or self._held:
            check_own(self._loop, "this backend")

    async def finish(self) -> None:
        """Take nothing more, drop what waits for an event, and wait for the rest. Idempotent."""
        self._closed = True
        held, self._held = self._held, deque()
        error = BackendClosedError(f"backend {self._owner.name!r} was closed before this could run")
        for item in held:
            if isinstance(item, Event):
                item.remove_callback(self._release)
            else:
                self._finish(item, error)
        if self._unfinished and self._loop is running_loop():
            last = Event(f"close of {self._owner.name}")
            self._launch(_Entry(_nothing, None, last))
            self._unfinished += 1
            await last.wait()

    def close_lane(self, timeout_s: float | None = None) -> None:
        """End the thread, after what it has to do. Blocks for as long as that takes, or `timeout_s`. Idempotent."""
        self._closed = True
        if self._lane is not None:
            self._lane.close(timeout_s)

    def _add(self, entry: _Entry) -> None:
        if self._held:
            self._held.append(entry)
        else:
            self._launch(entry)
        self._unfinished += 1

    def _bind(self) -> asyncio.AbstractEventLoop:
        """The running loop, which is the queue's as long as work of it is queued."""
        if self._closed:
            raise BackendClosedError(f"backend {self._owner.name!r} is closed: open it again")
        loop = running_loop()
        if loop is self._loop:
            return loop
        if self._loop is not None and (self._unfinished or self._held):
            if not self._loop.is_closed():
                raise WrongLoopError(
                    f"the queue of {self._owner.name!r} has work of another event loop: "
                    "synchronize there first, or open one backend for each loop"
                )
            self._held.clear()
            self._unfinished = 0
        self._loop = loop
        return loop

    def _launch(self, entry: _Entry) -> None:
        lane = self._lane
        if lane is None:
            lane = self._lane = self._owner.make_lane(own=True)
        assert self._loop is not None
        run, loop, blocked_by = self._run, self._loop, self._blocked_by
        lane.post(lambda: run(entry, loop, blocked_by, isinstance(lane, InlineLane)))

    def _run(
        self, entry: _Entry, loop: asyncio.AbstractEventLoop, error: BaseException | None, inline: bool
    ) -> None:
        """On the lane."""
        values: Sequence[Any] = ()
        if error is None:
            try:
                values = entry.job() or ()
                if entry.then is not None and not inline:
                    entry.then()
            except BaseException as raised:  # to whoever waits for the event
                error = self._uncancelled(raised)

        def tell(failure: BaseException | None) -> None:
            with suppress(RuntimeError):  # a closed loop has nobody left to tell
                loop.call_soon_threadsafe(self._settle, entry, first_error(error, self._uncancelled(failure)), inline)

        try:
            self._owner.notify(values, tell)
        except BaseException as raised:
            tell(raised)

    def _settle(self, entry: _Entry, error: BaseException | None, inline: bool) -> None:
        if entry.then is not None and inline and error is None:
            try:
                entry.then()
            except (KeyboardInterrupt, SystemExit) as raised:  # on the loop's own thread: it ends the program
                self._finish(entry, raised)
                raise
            except BaseException as raised:
                error = self._uncancelled(raised)
        self._finish(entry, error)

    def _uncancelled(self, raised: BaseException | None) -> BaseException | None:
        """What a device or somebody's function raised. Nobody has cancelled the job, whatever they say."""
        if not isinstance(raised, asyncio.CancelledError):
            return raised
        error = RuntimeError(f"something on {self._owner.name!r} raised asyncio.CancelledError: {raised}")
        error.__cause__ = raised
        return error

    def _finish(self, entry: _Entry, error: BaseException | None) -> None:
        self._unfinished -= 1
        if entry.is_mark:
            error, self._failed_before_mark = first_error(error, self._failed_before_mark), None
        elif error is not None:
            self._failed_before_mark = first_error(self._failed_before_mark, error)
        if error is not None and not entry.reported and not entry.is_mark:
            self._failed = first_error(self._failed, error)
        entry.event.set(error)

    def _release(self, _: Event) -> None:
        """The event that holds the queue has happened."""
        while self._held:
            item = self._held[0]
            if isinstance(item, Event):
                if not item.done():
                    item.add_callback(self._release)
                    return
                self._held.popleft()
                self._pass(item)
            else:
                self._held.popleft()
                try:
                    self._launch(item)
                except Exception as error:
                    self._finish(item, error)

    def _pass(self, event: Event) -> None:
        self._blocked_by = first_error(self._blocked_by, event.exception())


def _nothing() -> None:
    """The job of an entry that only marks a place."""
