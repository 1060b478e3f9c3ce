"""`Mailbox`: calls that other threads leave for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from . import _threads

__all__ = ["Mailbox"]


class Mailbox:
    """Calls for one event loop, made in the order in which they were posted.

    However many come at once, the loop is woken once: waking it writes to a pipe.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._messages: _threads.deque[tuple[Callable[..., None], tuple[Any, ...]]] = _threads.deque()
        self._awake = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver to this loop."""
        self._loop = loop

    def post(self, action: Callable[..., None], *args: Any) -> None:
        """Have the loop call ``action(*args)``; from any thread, once bound."""
        self._messages.append((action, args))
        if not self._awake:
            self._awake = True
            loop = self._loop
            assert loop is not None, "posted before it was bound"
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
                assert self._loop is not None
                self._loop.call_soon(self._read)
