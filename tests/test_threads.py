"""Calls that the event loop leaves for a thread: results, exceptions of every kind, and a loop that does not wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiopipe._threads import in_thread


async def test_a_thread_that_raises_stop_iteration_fails_its_caller() -> None:
    with pytest.raises(RuntimeError, match=r"^count raised StopIteration$") as caught:
        await in_thread(lambda: next(iter(())), "count")
    assert isinstance(caught.value.__cause__, StopIteration)


async def test_a_thread_may_end_with_any_exception() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await in_thread(interrupt, "interrupt")


def test_a_call_that_outlives_its_loop_ends_quietly() -> None:
    go = threading.Event()

    def call() -> None:
        go.wait(60)

    async def main() -> None:
        waiting = asyncio.ensure_future(in_thread(call, "outlives"))
        await asyncio.sleep(0)
        waiting.cancel()

    before = set(threading.enumerate())
    asyncio.run(main())
    (thread,) = set(threading.enumerate()) - before
    go.set()
    thread.join(60)
    assert not thread.is_alive()
