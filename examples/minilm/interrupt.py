"""Ctrl-C that ends a command soon, with exit code 130 and no traceback.

Standard library only, so that it is in force before anything slow is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

__all__ = ["EXIT_CODE", "CtrlC"]

EXIT_CODE = 130
"""What shells report for a command that SIGINT ended."""

GRACE_S = 1.2
"""How long closing may take. A compilation in progress takes as long as it likes, and cannot be stopped."""


class CtrlC:
    """Handles SIGINT from `install` on: cancels the attached task, or raises `KeyboardInterrupt` where there is none.

    If the process is still there after `GRACE_S`, or Ctrl-C is pressed again, it ends at once.
    """

    def __init__(self) -> None:
        self._target: tuple[asyncio.AbstractEventLoop, asyncio.Task[object]] | None = None
        self._said = False

    def install(self) -> None:
        """Takes over SIGINT; `asyncio.run` then leaves it alone."""
        signal.signal(signal.SIGINT, self._first)

    @contextlib.contextmanager
    def cancels_this_task(self) -> Iterator[None]:
        """While the block runs, Ctrl-C cancels the task that it runs in."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("cancels_this_task() was entered outside a task; enter it inside a coroutine")
        self._target = asyncio.get_running_loop(), task
        try:
            yield
        finally:
            self._target = None

    def say(self) -> None:
        """Tells the user, once, that the command was interrupted."""
        if self._said:
            return
        self._said = True
        os.write(2, b"interrupted\n")

    def _first(self, signum: int, frame: object) -> None:
        signal.signal(signal.SIGINT, lambda *_: self._leave())
        timer = threading.Timer(GRACE_S, self._leave)
        timer.daemon = True
        timer.start()
        if self._target is None:
            raise KeyboardInterrupt
        loop, task = self._target
        loop.call_soon_threadsafe(task.cancel)  # the call also wakes a loop that waits for something else

    def _leave(self) -> NoReturn:
        if sys.stderr.isatty():
            os.write(2, b"\x1b[?25h\n")  # a progress bar may have hidden the cursor
        self.say()
        os._exit(EXIT_CODE)
