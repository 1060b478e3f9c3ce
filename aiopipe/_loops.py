"""The event loop that runs here: which one, what to say where it is the wrong one, and turns for its other tasks."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from ._fork import hint
from .errors import WrongLoopError

__all__ = ["Turns", "check_inside", "check_own", "running_loop"]

YIELD_S = 5e-4
"""Let other tasks of the loop run after this long of work that never had to wait."""


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop that runs in this thread.

    Raises:
        WrongLoopError: none does, or it is trio's.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        if _is_trio():
            why = "aiopipe works on asyncio, and this is trio: use asyncio.run, or anyio.run with its backend 'asyncio'"
        else:
            why = (
                "no event loop runs in this thread: await this in a coroutine; from synchronous code, run one with "
                "aiopipe.run_sync(coroutine_function), or call into a loop in another thread by a blocking portal "
                "(anyio.from_thread.start_blocking_portal)"
            )
    raise WrongLoopError(why)


def check_own(loop: asyncio.AbstractEventLoop | None, what: str) -> None:
    """Refuse what belongs to another loop than the one that runs here, unless that one has ended.

    Args:
        loop: whose it is; None: nobody's yet.
        what: for the message: ``"this scheduler"``.

    Raises:
        WrongLoopError: it belongs to another loop, or none runs here.
    """
    if loop is not None and running_loop() is not loop and not loop.is_closed():
        raise WrongLoopError(
            f"{what} belongs to another event loop: make one {what.rpartition(' ')[2]} for each loop, or call this one "
            "in its own, by asyncio.run_coroutine_threadsafe or a blocking portal of anyio" + hint()
        )


def check_inside(loop: asyncio.AbstractEventLoop | None, what: str) -> None:
    """Refuse to touch what belongs to a loop while that runs elsewhere.

    Args:
        loop: whose it is; None: nobody's yet.
        what: for the message: what was asked for.

    Raises:
        WrongLoopError: the loop runs, but not in this thread.
    """
    if loop is not None and asyncio._get_running_loop() is not loop and loop.is_running():
        raise WrongLoopError(
            f"{what} belongs to an event loop that runs in another thread: ask for it there, with "
            "loop.call_soon_threadsafe(...), asyncio.run_coroutine_threadsafe(..., loop) or a blocking portal of anyio"
            + hint()
        )


class Turns:
    """Has whoever never waits step back now and then, so that other tasks have their turns."""

    def __init__(self) -> None:
        self._burst_began = -1.0

    async def step_back(self) -> None:
        """Called after each piece of work for which nobody had to wait."""
        now = time.monotonic()
        if self._burst_began < 0:
            self._burst_began = now
            asyncio.get_running_loop().call_soon(self._end_burst)
        elif now - self._burst_began > YIELD_S:
            await asyncio.sleep(0)

    def _end_burst(self) -> None:
        self._burst_began = -1.0


def _is_trio() -> bool:
    trio: Any = sys.modules.get("trio")
    if trio is None:
        return False
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True
