"""`Event`: a one-shot awaitable that marks a point in a backend's queue.

Taken from trio's view that an event happens once (trio `_sync.py`), and MLX's that it carries
its producer's error (`mlx/event.h`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from types import TracebackType

from ._fork import hint
from ._loops import check_inside, running_loop
from .errors import WrongLoopError

__all__ = ["Event"]


class Event:
    """Happens once, perhaps with an error; then stays happened.

    ``await event`` makes the *host* wait and raises the producer's error, if any. Set and awaited
    on one event loop: the first on which somebody waits for it, or which records it. There is no way to
    clear it: make a new one.

    Args:
        name: for error messages.
        loop: which loop, if that is known already.

    Attributes:
        name: for error messages.
        recorded: a backend's queue will set it (`Backend.event_record`).
    """

    __slots__ = ("_callbacks", "_error", "_happened", "_loop", "_traceback", "name", "recorded")

    _traceback: TracebackType | None  # of the error as it came: each raise begins with it, and keeps no earlier caller

    def __init__(self, name: str = "event", *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.name = name
        self.recorded = False
        self._loop = loop
        self._happened = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Event], None]] = []

    def set(self, error: BaseException | None = None) -> None:
        """Happen, with the producer's `error` if it failed. Only the first call counts.

        Raises:
            WrongLoopError: called from another thread than that of the loop on which somebody waits for it.
        """
        if self._happened:
            return
        check_inside(self._loop, f"the event {self.name!r}")
        self._happened = True
        self._error = error
        if error is not None:
            self._traceback = error.__traceback__
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # somebody's callback must not stop whoever tells the event
                _report(self, error)

    def done(self) -> bool:
        """Whether it has happened."""
        return self._happened

    def exception(self) -> BaseException | None:
        """The producer's error.

        Raises:
            asyncio.InvalidStateError: it has not happened yet.
        """
        if not self._happened:
            raise asyncio.InvalidStateError(f"{self.name} has not happened yet: await it, or ask done() first")
        return self._error

    def add_callback(self, callback: Callable[[Event], None]) -> None:
        """Call ``callback(event)`` when it happens; at once if it has."""
        if self._happened:
            callback(self)
        else:
            self._callbacks.append(callback)

    def remove_callback(self, callback: Callable[[Event], None]) -> None:
        """Forget a callback; nothing happens if it is not known."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """It will happen on this loop.

        Raises:
            WrongLoopError: it belongs to another one.
        """
        if self._loop is not None and self._loop is not loop:
            if self.recorded or not self._loop.is_closed():
                raise WrongLoopError(
                    f"the event {self.name!r} belongs to another event loop: wait for it there, or record one in this"
                    + hint()
                )
            self._callbacks.clear()  # of those who waited there
        self._loop = loop

    async def wait(self) -> None:
        """Wait until it has happened, whatever its error.

        Raises:
            WrongLoopError: it belongs to another event loop, and has not happened yet.
        """
        if self._happened:
            return
        loop = running_loop()
        self.bind(loop)
        future: asyncio.Future[None] = loop.create_future()

        def wake(_: Event) -> None:
            if not future.done():
                future.set_result(None)

        self._callbacks.append(wake)
        try:
            await future
        finally:
            self.remove_callback(wake)

    def __await__(self) -> Generator[object, None, None]:
        yield from self.wait().__await__()
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)

    def __bool__(self) -> bool:
        raise TypeError("an Event has no truth value: use done() to ask, or await it")

    def __repr__(self) -> str:
        state = "pending" if not self._happened else "done" if self._error is None else "failed"
        return f"<Event {self.name} {state}>"


def _report(event: Event, error: BaseException) -> None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise error from None
    loop.call_exception_handler({"message": f"a callback of {event!r} raised", "exception": error})
