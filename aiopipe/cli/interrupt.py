"""Ctrl-C that ends a command soon and without a traceback, whatever the command is at."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, NoReturn, TypeVar

__all__ = ["CtrlC"]

T = TypeVar("T")

GRACE_S = 1.5
"""How long ending in order may take. XLA's compiler, for one, cannot be stopped."""

INTERRUPTED = 130


class CtrlC:
    """In a ``with`` block: the first Ctrl-C cancels what `run` runs, or raises `KeyboardInterrupt` outside of it.

    If the process is still there after `GRACE_S`, or Ctrl-C is pressed again, it ends at once, with the same exit code.
    """

    def __init__(self) -> None:
        self._main: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._before: Any = None
        self._timer: threading.Timer | None = None
        self._said = False

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """`asyncio.run`, such that Ctrl-C cancels it."""

        async def cancellable() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._main = asyncio.get_running_loop(), task
            try:
                return await work
            finally:
                self._main = None

        return asyncio.run(cancellable())

    def say(self) -> None:
        """Tell the user, once, that the command was interrupted."""
        if not self._said:
            self._said = True
            os.write(2, b"interrupted\n")

    def _first(self, signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda *_: self._leave())
        self._timer = threading.Timer(GRACE_S, self._leave)
        self._timer.daemon = True
        self._timer.start()
        if self._main is None:
            raise KeyboardInterrupt
        loop, task = self._main
        loop.call_soon_threadsafe(task.cancel)  # the call also wakes a loop that waits for something else

    def _leave(self) -> NoReturn:
        if sys.stderr.isatty():
            os.write(2, b"\x1b[?25h\n")  # a progress bar may have hidden the cursor
        self.say()
        os._exit(INTERRUPTED)
