"""`Mailbox`: calls that other threads leave for the event loop that they belong to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ._loops import check_own, running_loop
from .errors import WrongLoopError

__all__ = ["Mailbox"]


class Mailbox:
    """Calls for one event loop, made in the order in which they were posted.

    However many come at once, the loop is woken once: waking it writes to a pipe.

    Attributes:
        loop: whose it is: the one that was running when it was first entered.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._messages: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._awake = False

    def enter(self) -> asyncio.AbstractEventLoop:
        """The running loop, whose it is from now on.

        Raises:
            WrongLoopError: it is another loop's, or none runs here.
        """
        loop = running_loop()
        if self.loop is None:
            self.loop = loop
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
        before, self.loop = self.loop, running_loop()
        moved = before is not None and before is not self.loop
        if moved:
            self._awake = False
            self._messages.clear()
        return moved

    def post(self, action: Callable[..., None], *args: Any) -> None:
        """Have the loop call ``action(*args)``; from any thread, once entered."""
        self._messages.append((action, args))
        if not self._awake:
            self._awake = True
            loop = self.loop
            assert loop is not None, "posted before it was entered"
            try:
                loop.call_soon_threadsafe(self._read)
            except RuntimeError:
                if not loop.is_closed():
                    raise
                self._messages.clear()  # a closed loop has nobody left to tell

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
