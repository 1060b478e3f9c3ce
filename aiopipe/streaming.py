"""Streams: many batches through one graph, results in order, never more in flight than asked."""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from typing import Any

import anyio

from ._loops import running_loop
from .evaluation import Evaluation

__all__ = ["stream_in_order"]

Submit = Callable[..., Awaitable[Evaluation]]

CLOSING_S = 30.0
"""How long leaving a stream waits for its source to end."""


def stream_in_order(
    submit: Submit, batches: Iterable[Any] | AsyncIterable[Any], window: int
) -> AsyncGenerator[Any, None]:
    """Submit every batch, yield the results in order.

    Args:
        submit: starts an evaluation, ``submit(*inputs)``; waits for admission.
        batches: a tuple is the inputs of one evaluation, anything else its only input. An async
            iterable is read ahead by a task of its own, so that a result that is ready does not wait
            for the next batch to arrive.
        window: how many evaluations to keep in flight.

    Leaving the loop early cancels what is in flight, submits nothing more, and closes `batches` if
    it is an async generator; what that raises is raised here. It waits for that, also where it is cancelled, but
    not for ever (`CLOSING_S`).
    """
    if isinstance(batches, AsyncIterable):
        return _read_ahead(submit, batches, window)
    return _in_step(submit, batches, window)


def _inputs(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


async def _in_step(submit: Submit, batches: Iterable[Any], window: int) -> AsyncGenerator[Any, None]:
    pending: deque[Evaluation] = deque()
    try:
        for batch in batches:
            pending.append(await submit(*_inputs(batch)))
            if len(pending) >= window:
                yield await pending.popleft()
        while pending:
            yield await pending.popleft()
    finally:
        for evaluation in pending:
            evaluation.cancel()


async def _read_ahead(submit: Submit, batches: AsyncIterable[Any], window: int) -> AsyncGenerator[Any, None]:
    pending: asyncio.Queue[Evaluation | None] = asyncio.Queue()
    room = asyncio.Semaphore(window)  # bounds results that nobody has taken yet, too

    async def read() -> None:
        iterator = aiter(batches)
        try:
            while True:
                await room.acquire()
                try:
                    batch = await anext(iterator)
                except StopAsyncIteration:
                    return
                pending.put_nowait(await submit(*_inputs(batch)))
        finally:
            pending.put_nowait(None)
            if isinstance(iterator, AsyncGenerator):  # other sources (a memory object stream) are the caller's
                await iterator.aclose()

    reader = running_loop().create_task(read(), name="aiopipe stream")
    try:
        while (evaluation := await pending.get()) is not None:
            result = await evaluation
            room.release()
            yield result
        await reader  # raises what the batches or a submit raised
    finally:
        reading = reader.cancel()
        _cancel_all(pending)
        try:
            with anyio.move_on_after(CLOSING_S, shield=True):  # a scope that is cancelled would not let it wait
                await asyncio.wait([reader])
        finally:  # also when cancelled a second time
            _cancel_all(pending)
        if not reader.done():
            warnings.warn(
                f"the source of a stream, {batches!r}, has not ended within {CLOSING_S} s; left alone",
                ResourceWarning,
                stacklevel=2,
            )
        elif reading and not reader.cancelled():
            reader.result()  # raises what closing the batches raised


def _cancel_all(pending: asyncio.Queue[Evaluation | None]) -> None:
    while not pending.empty():
        evaluation = pending.get_nowait()
        if evaluation is not None:
            evaluation.cancel()
