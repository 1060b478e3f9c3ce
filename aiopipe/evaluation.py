"""`Evaluation`: one run of a graph, as its caller sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any

from ._fork import hint
from ._loops import check_inside, running_loop
from .errors import WrongLoopError
from .events import Event

__all__ = ["Evaluation"]


class _Unheard:
    """An error that nobody has asked for: when the evaluation is garbage by then, the loop's exception handler is told.

    It is not the evaluation that has a `__del__`, for most have no error, and each would have to be asked.
    """

    __slots__ = ("_loop", "_what", "error")

    def __init__(self, what: str, error: BaseException, loop: asyncio.AbstractEventLoop) -> None:
        self.error: BaseException | None = error
        self._what = what
        self._loop = loop

    def __del__(self) -> None:
        if self.error is not None and not self._loop.is_closed():
            context = {"message": f"{self._what} failed and nobody awaited it", "exception": self.error}
            self._loop.call_exception_handler(context)


class Evaluation:
    """One run of a graph: ``y = await evaluation``.

    Awaiting it twice is fine, also from two tasks. Cancelling the last task that awaits it cancels
    it, as with an `asyncio.Task`; use `asyncio.shield` to keep it. If it fails and nobody awaits
    it, the loop's exception handler is told. It belongs to the event loop on which it was submitted:
    awaiting it on another, before it is done, raises `WrongLoopError`.

    Attributes:
        id: counts up from 0 in each scheduler.
        copy_id: its slot, ``-1`` until it is admitted.
        graph_name: what is evaluated.
    """

    __slots__ = (
        "__weakref__",
        "_cancel",
        "_cancelled",
        "_done",
        "_error",
        "_event",
        "_loop",
        "_n_splits",
        "_result",
        "_split_events",
        "_traceback",
        "_unheard",
        "_waiters",
        "copy_id",
        "graph_name",
        "id",
    )

    _traceback: TracebackType | None  # of the error as it came: each raise begins with it, and keeps no earlier caller

    def __init__(
        self,
        id: int,
        graph_name: str,
        loop: asyncio.AbstractEventLoop,
        cancel: Callable[[int], bool],
        split_events: Callable[[int], Sequence[Event] | None],
        n_splits: int,
    ) -> None:
        self.id = id
        self.copy_id = -1
        self.graph_name = graph_name
        self._loop = loop
        self._cancel = cancel
        self._split_events = split_events
        self._n_splits = n_splits
        self._event: Event | None = None
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they came
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._unheard: _Unheard | None = None

    def done(self) -> bool:
        """Whether the result, error or cancellation is there."""
        return self._done

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled

    @property
    def failed(self) -> bool:
        """Whether it ended with an error; not where it was cancelled."""
        return self._error is not None

    def cancel(self) -> bool:
        """Drop it: what is not launched never will be, what is launched is discarded.

        Returns:
            False when it was done already. Other evaluations never notice.

        Raises:
            WrongLoopError: it is under way on an event loop that runs in another thread.
        """
        if self._done:
            return False
        check_inside(self._loop, f"evaluation {self.id}")
        return self._cancel(self.id)

    def exception(self) -> BaseException | None:
        """Its error, or None.

        Raises:
            asyncio.InvalidStateError: it is not done.
            asyncio.CancelledError: it was cancelled.
        """
        self._check_done()
        self._hear()
        return self._error

    def result(self) -> Any:
        """What the graph returned: the pytree that the traced function returns, its arrays ready.

        Raises:
            asyncio.InvalidStateError: it is not done.
            asyncio.CancelledError: it was cancelled.
            EvaluationError: a split failed.
        """
        if not self._done or self._cancelled:
            self._check_done()
        if self._error is not None:
            self._hear()
            raise self._error.with_traceback(self._traceback)
        return self._result

    @property
    def event(self) -> Event:
        """Happens when the whole evaluation ends."""
        if self._event is None:
            self._event = Event(f"evaluation {self.id} of {self.graph_name!r}", loop=self._loop)
            if self._done:
                self._tell(self._event)
        return self._event

    @property
    def events(self) -> Sequence[Event]:
        """One event for each split, in launch order; each happens when its split has finished on its device.

        Raises:
            WrongLoopError: it belongs to an event loop that runs in another thread.
        """
        check_inside(self._loop, f"evaluation {self.id}")
        events = self._split_events(self.id)
        if events is None:  # everything that was launched has ended
            events = [self._split_event(i) for i in range(self._n_splits)]
            for event in events:
                self._tell(event)
        return events

    def _tell(self, event: Event) -> None:
        """An event that is made when the evaluation has ended."""
        event.set(asyncio.CancelledError() if self._cancelled else self._error)
        if self._error is not None:
            event._traceback = self._traceback

    def _split_event(self, split: int) -> Event:
        return Event(f"split {split} of evaluation {self.id} of {self.graph_name!r}", loop=self._loop)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._done:
            if asyncio._get_running_loop() is not self._loop:
                running_loop()  # which says so where there is none
                why = f"evaluation {self.id} belongs to another event loop: await it where it was submitted"
                raise WrongLoopError(why + hint())
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters[waiter] = None
            try:
                yield from waiter
            except asyncio.CancelledError:
                self._waiters.pop(waiter, None)
                if not self._waiters:
                    self.cancel()
                raise
        return self.result()

    def _check_done(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError(f"evaluation {self.id} of {self.graph_name!r} was cancelled")
        if not self._done:
            raise asyncio.InvalidStateError(f"evaluation {self.id} of {self.graph_name!r} is not done: await it")

    def _settle(
        self,
        *,
        result: Any = None,
        error: BaseException | None = None,
        cancelled: bool = False,
    ) -> None:
        """Called once by the scheduler, on its loop."""
        self._result, self._error, self._cancelled, self._done = result, error, cancelled, True
        waiters = self._waiters
        if error is not None:
            self._traceback = error.__traceback__
            if not waiters:
                self._unheard = _Unheard(f"evaluation {self.id} of {self.graph_name!r}", error, self._loop)
        if waiters:
            self._waiters = {}
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        if self._event is not None:
            self._event.set(asyncio.CancelledError() if cancelled else error)

    def _hear(self) -> None:
        if self._unheard is not None:
            self._unheard.error = None
            self._unheard = None

    def __repr__(self) -> str:
        state = (
            "cancelled" if self._cancelled else "failed" if self.failed else "done" if self._done else "pending"
        )
        return f"<Evaluation {self.id} of {self.graph_name!r} {state} copy={self.copy_id}>"
