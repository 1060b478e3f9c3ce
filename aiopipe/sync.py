"""`run_sync`: the way in from code that is not asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from .errors import WrongLoopError

__all__ = ["run_sync"]

T = TypeVar("T")


def run_sync(async_fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run ``await async_fn(*args)`` to its end, on an event loop of its own in this thread; return what it returns.

    What the function opens it must also close, as ``async with`` does. To keep a `Pipeline` open over many calls, or
    to call it from several threads, have its loop in another thread: ``anyio.from_thread.start_blocking_portal``.

    Args:
        async_fn: a coroutine function, or anything that returns an awaitable; for arguments by name, a
            `functools.partial` of one.
        args: its arguments.

    Raises:
        WrongLoopError: an event loop runs in this thread already, as it does in a notebook: await it there.
        TypeError: `async_fn` cannot be called.

    Example::

        async def embed(texts):
            async with ap.Pipeline(model, params, devices=["cpu:0", "cpu:1"]) as pipe:
                return [y async for y in pipe.stream(texts)]

        vectors = ap.run_sync(embed, texts)
    """
    given: Any = async_fn
    if not callable(given):
        if asyncio.iscoroutine(given):
            given.close()  # nobody will await it
        raise TypeError(
            f"run_sync got {given!r}, expected a coroutine function and its arguments: run_sync(main, x), not "
            "run_sync(main(x))"
        )
    if asyncio._get_running_loop() is not None:
        name = getattr(async_fn, "__name__", type(async_fn).__name__)
        raise WrongLoopError(
            f"run_sync({name}, ...) would block the event loop that runs in this thread: `await {name}(...)` instead, "
            "which works in a notebook, too"
        )

    async def call() -> T:
        return await async_fn(*args)

    return asyncio.run(call())
