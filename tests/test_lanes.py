"""Calls that threads leave for the event loop; and calls that the loop leaves for a thread."""

from __future__ import annotations

import asyncio
import os

import pytest

from aiopipe.mailbox import Mailbox


async def test_messages_of_many_threads_arrive_once_each_and_in_each_threads_order() -> None:
    box, got = Mailbox(), list[tuple[int, int]]()
    box.bind(asyncio.get_running_loop())

    def post(thread: int) -> None:
        for i in range(200):
            box.post(lambda *message: got.append(message), thread, i)

    await asyncio.gather(*(asyncio.to_thread(post, thread) for thread in range(4)))
    await asyncio.sleep(0)
    assert sorted(got) == [(thread, i) for thread in range(4) for i in range(200)]
    assert all([i for t, i in got if t == thread] == list(range(200)) for thread in range(4))


async def test_an_action_that_raises_does_not_hold_up_those_behind_it() -> None:
    """It reaches the loop's handler; they run though no other message comes."""
    loop, box, got, reported = asyncio.get_running_loop(), Mailbox(), list[int](), list[BaseException]()
    box.bind(loop)
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def broken() -> None:
        raise ValueError("boom")

    for action in (lambda: got.append(1), broken, lambda: got.append(2), broken, lambda: got.append(3)):
        box.post(action)
    for _ in range(4):
        await asyncio.sleep(0)
    loop.set_exception_handler(None)
    assert got == [1, 2, 3]
    assert [str(error) for error in reported] == ["boom", "boom"]


def test_what_is_posted_to_a_closed_loop_is_nobodys() -> None:
    box, loop, got = Mailbox(), asyncio.new_event_loop(), list[int]()
    box.bind(loop)
    loop.close()
    box.post(lambda: got.append(1))
    assert not got


def test_a_loop_that_refuses_for_another_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    box, loop = Mailbox(), asyncio.new_event_loop()
    monkeypatch.delattr(os, "eventfd", raising=False)  # where the loop is woken by that, nobody asks it
    box.bind(loop)

    def refuse(*_: object) -> None:
        raise RuntimeError("not now")

    monkeypatch.setattr(loop, "call_soon_threadsafe", refuse)
    with pytest.raises(RuntimeError, match="not now"):
        box.post(print)
    loop.close()
