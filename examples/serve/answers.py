"""Answers that end when the client leaves: one piece of JSON, or a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

__all__ = ["Events", "event", "while_there"]

T = TypeVar("T")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # what proxies in front would gather
]


def event(value: Any) -> bytes:
    """One event, with some JSON as its data."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


@asynccontextmanager
async def while_there(receive: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Cancels the block when the client leaves. The body of its request must have been read.

    Raises:
        ClientDisconnect: it has left.
    """
    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="is the client there")
    try:
        yield
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])
    if left:  # just when it was done
        task.uncancel()
        raise ClientDisconnect


class Events:
    """An answer that is a stream of events, sent as they come.

    Nothing is sent before the first event is there: what is raised before it can still be answered with an error.

    Args:
        events: as `event` makes them.
        limit_s: after so long the connection is cut, whatever the client still has to read.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], limit_s: float | None) -> None:
        self._events = events
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect, TimeoutError):  # the answer stays incomplete, which closes the connection
            async with asyncio.timeout(self._limit_s), aclosing(self._events) as events, while_there(receive):
                first = await anext(events)
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                if scope["method"] != "HEAD":  # whose answer has ended with its headers
                    await send({"type": "http.response.body", "body": first, "more_body": True})
                    async for more in events:
                        await send({"type": "http.response.body", "body": more, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
