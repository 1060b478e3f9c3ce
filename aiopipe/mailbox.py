"""`Mailbox`: calls that other threads leave for the event loop that they belong to."""

from __future__ import annotations

import asyncio
import contextvars
import os
import weakref
from collections.abc import Callable
from typing import Any

from . import _threads
from ._fork import Origin
from ._loops import check_own, running_loop
from .errors import WrongLoopError

__all__ = ["Mailbox"]


class Mailbox:
    """Calls for one event loop, made in the order in which they were posted.

    However many come at once, the loop is woken once. Where the system has event counters (Linux), it is woken by one
    of its own, which takes half as long as `call_soon_threadsafe`: no handle is made, none is run beside the one that
    empties the loop's own pipe. A thread that wakes the loop does so on a core that devices want to compute on.

    Attributes:
        loop: whose it is.
        origin: in which process.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.origin = Origin()
        self._messages: _threads.deque[tuple[Callable[..., None], tuple[Any, ...]]] = _threads.deque()
        self._awake = False
        self._bell: _Bell | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver to this loop, which runs."""
        self.loop = loop
        self._bell = _Bell.on(loop, self)

    def enter(self) -> asyncio.AbstractEventLoop:
        """The running loop, whose it is from now on.

        Raises:
            ForkedError: it is of a process that this one was forked from.
            WrongLoopError: it is another loop's, or none runs here.
        """
        self.origin.check("this scheduler")
        loop = running_loop()
        if self.loop is None:
            self.bind(loop)
        elif self.loop is not loop:
            check_own(self.loop, "this scheduler")
            raise WrongLoopError("this scheduler belongs to an event loop that has ended: make one for each loop")
        return loop

    def move(self) -> bool:
        """Belong to the running loop, if its own has ended, and messages with it; whether that is so.

        Raises:
            WrongLoopError: it is another loop's that has not ended, or none runs here.
        """
        check_own(self.loop, "this scheduler")
        loop, before = running_loop(), self.loop
        if before is loop:
            return False
        self._messages.clear()
        self._awake = False
        self.close()
        self.bind(loop)
        return before is not None

    def post(self, action: Callable[..., None], *args: Any) -> None:
        """Have the loop call ``action(*args)``; from any thread, once bound."""
        self._messages.append((action, args))
        if not self._awake:
            self._awake = True
            self._wake()

    def close(self) -> None:
        """On the loop: let go of the system's means to wake it. Messages still arrive."""
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()
            if self._messages:
                self._wake()

    def _wake(self) -> None:
        loop = self.loop
        assert loop is not None, "posted before it was bound"
        if asyncio._get_running_loop() is loop:
            loop.call_soon(self._read)
            return
        bell = self._bell
        if bell is not None and bell.ring():
            return
        try:
            loop.call_soon_threadsafe(self._read)
        except RuntimeError:
            if not loop.is_closed():  # a closed loop has nobody left to tell
                raise

    def _read(self) -> None:
        # Lowered before reading: a message that comes after the last look wakes the loop again.
        self._awake = False
        messages = self._messages
        try:
            while messages:
                action, args = messages.popleft()
                action(*args)
        finally:
            if messages and not self._awake:  # an action raised: the rest must not wait for the next message
                self._awake = True
                assert self.loop is not None
                self.loop.call_soon(self._read)


class _Bell:
    """An event counter that wakes a loop to read a mailbox. It keeps neither alive, and ends with the mailbox."""

    def __init__(self, loop: asyncio.AbstractEventLoop, mailbox: Mailbox) -> None:
        self._loop = loop
        self._fd = fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = False
        self._lock = _threads.Lock()  # the number of a descriptor that is closed may be another's already
        of = weakref.ref(mailbox)

        def heard() -> None:
            os.eventfd_read(fd)
            mailbox = of()
            if mailbox is not None:
                mailbox._read()

        try:
            # In an empty context, as what `call_soon_threadsafe` runs for a thread: not in that of whoever came first.
            contextvars.Context().run(loop.add_reader, fd, heard)
        except BaseException:
            os.close(fd)
            raise
        self._open = True

    @classmethod
    def on(cls, loop: asyncio.AbstractEventLoop, mailbox: Mailbox) -> _Bell | None:
        """A bell, or None where the system has no event counters, or the loop does not watch descriptors."""
        if not hasattr(os, "eventfd"):
            return None
        try:
            return cls(loop, mailbox)
        except (NotImplementedError, OSError):
            return None

    def ring(self) -> bool:
        """Wake the loop; from any thread. False if it is closed."""
        with self._lock:
            if self._open:
                os.eventfd_write(self._fd, 1)
            return self._open

    def close(self) -> None:
        """On the loop's thread, or after the loop was closed."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            os.close(self._fd)

    def __del__(self) -> None:
        if not getattr(self, "_open", False):  # closed, or never was open
            return
        loop = self._loop
        if loop.is_closed():
            self.close()
            return
        # Nobody closed it. This may be any thread, and the descriptor must not be closed before the loop forgets it.
        fd = self._fd

        def forget() -> None:
            loop.remove_reader(fd)
            os.close(fd)

        try:
            loop.call_soon_threadsafe(forget)
        except RuntimeError:
            os.close(fd)
