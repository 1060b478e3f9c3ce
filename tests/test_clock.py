"""The virtual clock of the simulated devices, alone."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from aiopipe.devices.clock import VirtualClock
from aiopipe.errors import WrongLoopError
from loops import KINDS, run

watchdog = pytest.mark.timeout(60)


async def test_clock_runs_events_in_order_of_time_then_of_call() -> None:
    clock, seen = VirtualClock(), []
    for when, name in [(2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")]:
        clock.call_at(when, lambda name=name: seen.append((clock.now, name)))  # type: ignore[misc]
    clock.complete_at(2.0, lambda: seen.append((clock.now, "result")))
    assert clock.now == 0.0 and not seen
    await clock.wait_until(3.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "result"), (2.0, "c"), (2.0, "d")]
    assert clock.now == 3.0 and clock.pending == 0


async def test_clock_advances_only_when_the_loop_is_idle() -> None:
    clock, seen = VirtualClock(), []

    async def chain(n: int) -> None:
        for _ in range(n):
            await asyncio.sleep(0)
        seen.append(clock.now)

    def start() -> None:
        tasks.append(asyncio.ensure_future(chain(50)))

    tasks = [asyncio.ensure_future(chain(50))]
    clock.call_at(1.0, start)
    clock.call_at(2.0, lambda: None)
    await clock.wait_until(3.0)
    assert seen == [0.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_clock_advances_on_loops_of_every_kind(kind: str) -> None:
    """Also on one that hides its queue, as uvloop does."""
    run(kind, test_clock_advances_only_when_the_loop_is_idle())


@watchdog
async def test_moments_that_give_the_host_no_work_leave_timers_their_turns() -> None:
    clock, ticks = VirtualClock(), 0
    done = asyncio.Event()

    def step() -> None:
        if ticks < 3:
            clock.call_at(clock.now + 1.0, step)
        else:
            done.set()

    async def heartbeat() -> None:
        nonlocal ticks
        while not done.is_set():
            await asyncio.sleep(0.001)  # of real time: between two of them the loop is idle
            ticks += 1

    clock.call_at(1.0, step)
    await asyncio.gather(heartbeat(), done.wait())
    assert ticks in (3, 4) and clock.now > 1.0


async def test_an_idle_clock_costs_nothing() -> None:
    clock = VirtualClock()
    await clock.sleep(1.0)
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)
    assert not getattr(loop, "_ready", ())


@watchdog
async def test_a_chain_of_events_without_duration_does_not_starve_the_loop() -> None:
    clock, stop = VirtualClock(), False

    def again() -> None:
        if not stop:
            clock.call_at(clock.now, again)

    again()
    await asyncio.sleep(0.01)
    stop = True
    assert clock.now == 0.0


@watchdog
async def test_two_clocks_on_one_loop_do_not_wait_for_each_other() -> None:
    a, b = VirtualClock(), VirtualClock()
    await asyncio.gather(*(c.sleep(i) for c in (a, b) for i in range(20)))
    assert a.now == b.now == 19.0


@watchdog
async def test_hold_keeps_time_while_a_thread_works() -> None:
    clock, seen = VirtualClock(), []

    def work() -> None:
        with clock.hold():  # nests, from any thread
            seen.append(clock.now)

    clock.call_at(1.0, lambda: seen.append(clock.now))
    with clock.hold():
        await asyncio.to_thread(work)
        await asyncio.sleep(0.01)
        assert seen == [0.0]
    await clock.wait_until(1.0)
    assert seen == [0.0, 1.0]


@watchdog
async def test_a_hold_in_a_thread_lets_time_go_on_when_it_ends() -> None:
    clock = VirtualClock()
    waiting = asyncio.ensure_future(clock.sleep(1.0))

    def work() -> None:
        with clock.hold():
            pass

    await asyncio.to_thread(work)
    await waiting
    assert clock.now == 1.0


@watchdog
async def test_call_at_from_a_thread_goes_to_the_loop() -> None:
    clock, seen = VirtualClock(), asyncio.Event()
    await clock.sleep(1.0)
    await asyncio.to_thread(clock.call_at, 5.0, seen.set)
    await seen.wait()
    assert clock.now == 5.0


async def test_complete_at_from_a_thread_goes_to_the_loop_and_comes_first() -> None:
    clock, seen = VirtualClock(), []
    clock.call_at(1.0, lambda: seen.append("news"))
    await asyncio.to_thread(clock.complete_at, 1.0, lambda: seen.append(threading.current_thread().name))
    await clock.wait_until(2.0)
    assert seen == [threading.main_thread().name, "news"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_in_a_callback_ends_the_loop(interruption: type[BaseException]) -> None:
    clock, seen = VirtualClock(), []

    def interrupt() -> None:
        raise interruption

    async def main() -> None:
        clock.call_at(1.0, interrupt)
        clock.call_at(2.0, lambda: seen.append(clock.now))
        await clock.wait_until(3.0)

    with pytest.raises(interruption):
        asyncio.run(main())
    assert not seen


def test_a_second_loop_drops_the_events_of_a_dead_one() -> None:
    clock, seen = VirtualClock(), []

    async def leave() -> None:
        await clock.sleep(1.0)
        clock.call_at(5.0, lambda: seen.append("dropped"))

    asyncio.run(leave())
    asyncio.run(clock.wait_until(10.0))
    assert clock.now == 10.0 and not seen


def test_events_added_without_a_loop_wait_for_one() -> None:
    clock, seen = VirtualClock(), []
    clock.call_at(1.0, lambda: seen.append(clock.now))
    clock.call_at(3.0, lambda: seen.append(clock.now))
    asyncio.run(clock.wait_until(3.0))
    assert seen == [1.0, 3.0]
    clock.call_at(4.0, lambda: seen.append(clock.now))  # the former loop is closed
    asyncio.run(clock.wait_until(4.0))
    assert seen == [1.0, 3.0, 4.0]


def test_two_loops_at_once_are_refused() -> None:
    clock = VirtualClock()

    async def main() -> None:
        await clock.sleep(1.0)

        def other() -> None:
            asyncio.run(clock.sleep(1.0))

        with pytest.raises(WrongLoopError, match="another event loop"):
            await asyncio.to_thread(other)

    asyncio.run(main())


async def test_a_failing_callback_is_reported_and_the_others_run() -> None:
    clock, seen, reported = VirtualClock(), [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    clock.call_at(1.0, lambda: 1 // 0)
    clock.call_at(1.0, lambda: seen.append(1))
    await clock.sleep(1.0)
    asyncio.get_running_loop().set_exception_handler(None)
    assert seen == [1] and isinstance(reported[0], ZeroDivisionError)


@pytest.mark.parametrize("when", [math.inf, math.nan])
def test_a_time_that_never_comes_is_refused(when: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        VirtualClock().call_at(when, lambda: None)


async def test_a_cancelled_sleeper_harms_nobody() -> None:
    clock = VirtualClock()
    task = asyncio.ensure_future(clock.sleep(1.0))
    other = asyncio.ensure_future(clock.sleep(1.0))
    await asyncio.sleep(0)
    task.cancel()
    await other
    assert task.cancelled() and clock.now == 1.0
