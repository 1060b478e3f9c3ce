"""The mailbox: every message arrives, in order, on the loop, however the loop is woken."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aiopipe.mailbox import Mailbox

HAS_BELL = hasattr(os, "eventfd")
colour = contextvars.ContextVar("colour", default="none")


@pytest.fixture(params=["bell", "no event counters", "a loop that watches no descriptors"])
def wake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a thread wakes the loop."""
    how: str = request.param
    if how == "no event counters":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif how != "bell":

        def refuse(*args: object) -> None:
            raise NotImplementedError

        monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", refuse)
    elif not HAS_BELL:
        pytest.skip("this system has no event counters, so there is no bell to test")
    return how


def bound() -> Mailbox:
    mailbox = Mailbox()
    mailbox.bind(asyncio.get_running_loop())
    return mailbox


def in_threads(n: int, work: Callable[[int], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    return threads


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # whatever set an event would come by way of what is tested
        await asyncio.sleep(0.001)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


async def test_messages_of_each_thread_arrive_in_order_on_the_loop(wake: str) -> None:
    mailbox = bound()
    assert (mailbox._bell is not None) == (wake == "bell")
    got: list[tuple[int, int, int]] = []

    def work(i: int) -> None:
        for k in range(200):
            mailbox.post(lambda i=i, k=k: got.append((i, k, threading.get_ident())))

    threads = in_threads(4, work)
    await until(lambda: len(got) == 800)
    for i in range(4):
        assert [k for j, k, _ in got if j == i] == list(range(200))
    assert {ident for _, _, ident in got} == {threading.get_ident()}
    for thread in threads:
        await asyncio.to_thread(thread.join)
    mailbox.close()


async def test_messages_around_closing_arrive(wake: str) -> None:
    for _ in range(50):
        mailbox = bound()
        got: list[int] = []

        def work(_: int, mailbox: Mailbox = mailbox, got: list[int] = got) -> None:
            for k in range(20):
                mailbox.post(got.append, k)

        [thread] = in_threads(1, work)
        await asyncio.sleep(0)
        mailbox.close()
        await until(lambda got=got: len(got) == 20)
        assert got == list(range(20))
        await asyncio.to_thread(thread.join)


async def test_a_message_that_raises_does_not_hold_up_the_next(wake: str) -> None:
    mailbox = bound()
    got: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: got.append(type(context["exception"])))

    def work(_: int) -> None:
        mailbox.post(lambda: 1 / 0)
        mailbox.post(got.append, "after")

    [thread] = in_threads(1, work)
    await until(lambda: len(got) == 2)
    assert got == [ZeroDivisionError, "after"]
    await asyncio.to_thread(thread.join)
    mailbox.close()


async def test_a_message_runs_in_no_tasks_context(wake: str) -> None:
    colour.set("of whoever came first")
    mailbox = bound()
    seen: list[str] = []
    [thread] = in_threads(1, lambda _: mailbox.post(lambda: seen.append(colour.get())))
    await until(lambda: bool(seen))
    assert seen == ["none"]
    await asyncio.to_thread(thread.join)
    mailbox.close()


async def test_posting_from_the_loop_itself(wake: str) -> None:
    mailbox = bound()
    got: list[int] = []
    mailbox.post(got.append, 1)
    assert got == []  # never at once
    await asyncio.sleep(0)
    assert got == [1]
    mailbox.close()


async def test_no_descriptor_is_left(wake: str) -> None:
    bound().close()
    before = descriptors()
    for _ in range(20):
        mailbox = bound()
        mailbox.close()
        mailbox.close()  # idempotent
    assert descriptors() == before


async def test_one_that_nobody_closed_leaves_no_descriptor_either(wake: str) -> None:
    bound().close()
    gc.collect()
    await asyncio.sleep(0.01)  # for what earlier tests left to be garbage
    before = descriptors()
    for _ in range(20):
        bound()
    gc.collect()
    await asyncio.sleep(0.01)
    assert descriptors() == before


def test_a_loop_that_is_gone_is_not_told(wake: str) -> None:
    kept: list[Mailbox] = []

    async def main() -> None:
        kept.append(bound())

    before = descriptors()
    asyncio.run(main())
    for thread in in_threads(2, lambda _: kept[0].post(print)):
        thread.join()
    kept.clear()
    gc.collect()
    assert descriptors() == before


def test_a_loop_that_refuses_although_it_is_open_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("not now")

    mailbox, loop = Mailbox(), asyncio.new_event_loop()
    mailbox.loop = loop  # without a bell
    monkeypatch.setattr(loop, "call_soon_threadsafe", refuse)
    with pytest.raises(RuntimeError, match="not now"):
        mailbox.post(print)
    loop.close()
    mailbox._awake = False
    mailbox.post(print)  # closed: nobody is left to tell
