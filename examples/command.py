"""How a command runs: Ctrl-C ends it soon, and what goes wrong for a reason is said in one line."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from minilm.interrupt import EXIT_CODE, CtrlC

__all__ = ["run"]

T = TypeVar("T")


def run(work: Callable[[], Awaitable[T]], show: Callable[[T], None], *, expected: tuple[type[Exception], ...]) -> int:
    """Do the work, then show what came of it.

    Args:
        work: called on an event loop of its own.
        show: prints the result.
        expected: errors, besides aiopipe's own, whose message is enough.

    Returns:
        The exit code: 2 for devices or a split that make no sense, as argparse has it for wrong usage.
    """
    ctrl_c = CtrlC()
    ctrl_c.install()

    async def cancellable() -> T:
        with ctrl_c.cancels_this_task():
            return await work()

    try:
        show(asyncio.run(cancellable()))
        return 0
    except (KeyboardInterrupt, asyncio.CancelledError):
        ctrl_c.say()
        return EXIT_CODE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read it has left, and Python flushes once more
        return 1
    except ModuleNotFoundError as error:
        print(f"error: {error}; install what is needed: pip install 'aiopipe[examples,serve]'", file=sys.stderr)
    except Exception as error:
        from aiopipe import AiopipeError, PlacementError

        if not isinstance(error, (AiopipeError, *expected)):
            raise
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, PlacementError):
            return 2
    return 1
