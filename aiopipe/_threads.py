"""Threads that neither outlive the interpreter nor hold it up for nothing.

A thread that is still inside XLA while the interpreter ends takes the process down with "terminate
called" or a segmentation fault. A pool of idle threads that nobody told to stop has it wait for
ever: after an event loop that Ctrl-C broke off, nobody does. So work runs in a thread that ends
with it and that the interpreter waits for, as it would for a call of JAX in the main thread; and
threads that serve a queue are closed at exit, if nobody has closed them before.

The rest of aiopipe makes its threads, and all that one thread leaves for another or waits with, by
the names here (``_threads.Lock()``), so that there is one place to put others in: `tests/schedules.py`
has some that run one thread at a time, in an order of its choice.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Protocol, TypeVar

from ._fork import in_child
from ._loops import running_loop
from .errors import said_by

__all__ = [
    "Event",
    "Lock",
    "SimpleQueue",
    "Thread",
    "close_at_exit",
    "closing_s",
    "deque",
    "in_thread",
]

T = TypeVar("T")

EXIT_S = 10.0
"""How long the interpreter waits at exit for queues that nobody closed."""


class Closable(Protocol):
    """A thread with a queue."""

    def close(self, timeout_s: float | None = None) -> bool: ...


async def in_thread(call: Callable[[], T], name: str) -> T:
    """``call()`` in a new thread, off the event loop; its result, or what it raised.

    Being cancelled does not end the call, which nothing could, but nobody waits for it any more
    except the interpreter before it exits.

    Args:
        call: may block.
        name: of the thread, after ``aiopipe-``.

    Raises:
        RuntimeError: the call raised what would mean something else here: that the caller was cancelled
            (`asyncio.CancelledError`), that the program is to end (`KeyboardInterrupt`, `SystemExit`), or that a
            generator is at its end. That is its cause.
    """
    loop = running_loop()
    done: asyncio.Future[None] = loop.create_future()
    context = contextvars.copy_context()
    # The thread may be slow to end. By the time the result is known, it leads neither to that nor to the call; nor does
    # the future, which the loop keeps until the caller's task next waits for something.
    todo, waiting = [call], [done]
    results: list[T] = []
    del call

    def settle(outcome: list[Any]) -> None:
        done, (result, error) = waiting.pop(), outcome
        outcome.clear()
        if done.done():  # cancelled
            return
        if error is None:
            results.append(result)
            done.set_result(None)
        else:
            done.set_exception(_for_the_caller(error, name))

    def work() -> None:
        outcome: list[Any] = []
        try:
            outcome += (context.run(todo.pop()), None)
        except BaseException as error:
            outcome += (None, error)
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:
            if not loop.is_closed():  # a closed loop has nobody left to tell
                raise

    Thread(target=work, name=f"aiopipe-{name}", daemon=False).start()
    try:
        await done
    finally:
        del done  # its exception leads, by way of the traceback, to this frame
    return results.pop()


def _for_the_caller(error: BaseException, name: str) -> Exception:
    """What to raise where the caller waits, for what a call has raised in its thread."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # which no future takes
        return error
    said = f"{name} raised {type(error).__name__}"
    text = said_by(error)
    failure = RuntimeError(f"{said}: {text}" if text else said)
    failure.__cause__ = error
    return failure


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
in_child(_open.clear)  # they are the parent's, and so is what they hold


def close_at_exit(lane: Closable) -> None:
    """Close it when the interpreter exits, unless it is gone by then."""
    if not _open:
        # Not at import: what is registered last runs first, and JAX's own clean-up must come after this.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.add(lane)


def _close_all() -> None:
    deadline = time.monotonic() + EXIT_S
    for lane in list(_open):
        lane.close(max(0.0, deadline - time.monotonic()))


def closing_s(kind: type[BaseException] | None) -> float:
    """How long closing may take when a block ends with such an exception.

    A `KeyboardInterrupt` that the event loop does not turn into a cancellation may have broken off
    anything, so that there is nothing to wait for.
    """
    return 30.0 if kind is None or issubclass(kind, (Exception, asyncio.CancelledError, GeneratorExit)) else 2.0
