"""Calls that the event loop leaves for a thread: results, exceptions of every kind, and a loop that does not wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiopipe._threads import in_thread
from odd_errors import raising


async def test_a_thread_that_raises_stop_iteration_fails_its_caller() -> None:
    with pytest.raises(RuntimeError, match=r"^count raised StopIteration$") as caught:
        await in_thread(lambda: next(iter(())), "count")
    assert isinstance(caught.value.__cause__, StopIteration)


class Ending(BaseException):
    """No `Exception`: whoever handles those does not see it."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, Ending])
async def test_what_would_end_a_program_or_a_task_in_a_thread_ends_neither(error: type[BaseException]) -> None:
    """On the loop's own thread it would: nobody has asked for that here."""

    def call() -> None:
        raise error("by the user")

    with pytest.raises(RuntimeError, match=f"^count raised {error.__name__}: by the user$") as caught:
        await in_thread(call, "count")
    assert type(caught.value.__cause__) is error
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


@pytest.mark.parametrize("error", [ValueError, TimeoutError, StopAsyncIteration])
async def test_other_exceptions_reach_the_caller_as_they_are(error: type[Exception]) -> None:
    raised = error("by the user")

    def call() -> None:
        raise raised

    with pytest.raises(error) as caught:
        await in_thread(call, "count")
    assert caught.value is raised


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


async def test_what_has_no_text_reaches_the_caller_too() -> None:
    class Speechless(BaseException):
        def __str__(self) -> str:
            raise ValueError("no text")

    with pytest.raises(RuntimeError, match=r"count raised Speechless: .*text cannot be had") as caught:
        async with asyncio.timeout(30):
            await in_thread(raising(Speechless()), "count")
    assert type(caught.value.__cause__) is Speechless
