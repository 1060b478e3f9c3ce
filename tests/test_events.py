"""Events happen once, with or without an error."""

from __future__ import annotations

import asyncio
import gc
import traceback
import weakref
from typing import Any

import numpy as np
import pytest

import aiopipe as ap
from aiopipe import Event
from hanging import Later
from simgraphs import array, chain


async def test_waiters_wake_when_it_happens() -> None:
    event = Event("mine")
    waiting = [asyncio.ensure_future(event.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not event.done() and not any(w.done() for w in waiting)
    event.set()
    await asyncio.gather(*waiting)
    await event
    assert event.done() and event.exception() is None


async def test_it_carries_its_producers_error() -> None:
    event = Event()
    boom = ValueError("boom")
    event.set(boom)
    assert event.exception() is boom
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            await event
    await event.wait()  # waiting alone does not raise


async def test_one_error_awaited_many_times_keeps_no_earlier_caller() -> None:
    """Its traceback is what it was, and leads to the one who asked last, as with asyncio's futures."""
    backend, graph = Later(), chain(1)
    async with ap.Scheduler([backend, "cpu:0"]) as sched:
        await sched.plan(graph)
        backend.fails = ValueError("boom")
        evaluation = await sched.graph_compute_async(graph, array())
        lengths: dict[str, set[int]] = {}
        arrays: list[weakref.ref[Any]] = []

        async def ask(name: str, waitable: Any) -> None:
            mine = np.ones(4)
            arrays.append(weakref.ref(mine))
            with pytest.raises(ap.EvaluationError, match="boom"):
                await waitable
            lengths.setdefault(name, set()).add(len(list(traceback.walk_tb(evaluation.exception().__traceback__))))

        for _ in range(5):
            await ask("evaluation", evaluation)
            await ask("event", evaluation.event)  # made when there was a caller already
            await ask("split", evaluation.events[0])
        gc.collect()
        assert [len(of_one) for of_one in lengths.values()] == [1, 1, 1], lengths
        assert [ref() for ref in arrays[:-1]] == [None] * 14


async def test_only_the_first_time_counts() -> None:
    event = Event()
    event.set()
    event.set(ValueError())
    assert event.exception() is None


async def test_asking_too_early() -> None:
    with pytest.raises(asyncio.InvalidStateError, match="mine has not happened yet"):
        Event("mine").exception()


async def test_it_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match=r"use done\(\)"):
        bool(Event())


def test_a_callback_that_raises_where_no_loop_runs_raises_there() -> None:
    def broken(_: Event) -> None:
        raise ValueError("boom")

    event = Event()
    event.add_callback(broken)
    with pytest.raises(ValueError, match="boom"):
        event.set()
    assert event.done()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_callback_may_end_the_program(error: type[BaseException]) -> None:
    def end(_: Event) -> None:
        raise error("by the user")

    async def main() -> None:
        event = Event()
        event.add_callback(end)
        try:
            event.set()
        finally:
            assert event.done()

    with pytest.raises(error, match="by the user"):
        asyncio.run(main())


async def test_callbacks_run_once_also_when_added_late() -> None:
    event = Event()
    seen: list[str] = []

    def early(_: Event) -> None:
        seen.append("early")

    def removed(_: Event) -> None:
        seen.append("removed")

    event.add_callback(early)
    event.add_callback(removed)
    event.remove_callback(removed)
    event.remove_callback(removed)
    event.set()
    event.set()
    event.add_callback(lambda _: seen.append("late"))
    assert seen == ["early", "late"]


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    event = Event()
    waiter = asyncio.ensure_future(event.wait())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter])
    assert event._callbacks == []
    event.set()


def test_repr_tells_the_state() -> None:
    event = Event("split 3")
    assert repr(event) == "<Event split 3 pending>"
    event.set(ValueError())
    assert repr(event) == "<Event split 3 failed>"
