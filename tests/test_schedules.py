"""Programs in many orders of their threads, callbacks and completions; each order is one seed, and can be replayed.

`AIOPIPE_SEED=123 pytest tests/test_schedules.py -k 'closing and lanes'` plays one seed only, and
`AIOPIPE_SEEDS=1000:21000 pytest --timeout 0 tests/test_schedules.py -k every_order` many others.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aiopipe import _threads
from aiopipe.lanes import ThreadLane
from processes import run_script
from schedules import Schedule, Stuck, play
from seededprograms import PLAYED, run
from worlds import Kind

ROOT = Path(__file__).resolve().parent.parent
N_SEEDS = {"inline": 30, "lanes": 40, "xla": 12}


def seeds(n: int) -> Iterable[int]:
    one, many = os.environ.get("AIOPIPE_SEED"), os.environ.get("AIOPIPE_SEEDS")
    if one:
        return [int(one)]
    if many:
        begin, _, end = many.partition(":")
        return range(int(begin), int(end))
    return range(n)


@pytest.mark.parametrize(("name", "kind"), PLAYED)
def test_every_order(name: str, kind: Kind) -> None:
    for seed in seeds(N_SEEDS[kind]):
        try:
            run(name, kind, seed)
        except (Exception, asyncio.CancelledError) as error:
            again = f"AIOPIPE_SEED={seed} pytest 'tests/test_schedules.py::test_every_order[{name}-{kind}]'"
            raise AssertionError(f"{name} on {kind} devices under seed {seed}; to replay it: {again}") from error


# The harness itself ------------------------------------------------------------------------------


def digest(name: str, kind: Kind, seed: int) -> str:
    """Of all that happened, in order."""
    schedule = run(name, kind, seed)
    return hashlib.sha256(repr((schedule.steps, schedule.now, schedule.known.names)).encode()).hexdigest()


@contextmanager
def other_threads(n: int) -> Iterator[None]:
    """Threads that have nothing to do with the program, as those of tests before may still be ending."""
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, name=f"other {i}") for i in range(n)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(("name", "kind"), PLAYED)
def test_a_seed_is_one_order(name: str, kind: Kind) -> None:
    first = digest(name, kind, 1)
    with other_threads(7):
        assert digest(name, kind, 1) == first != digest(name, kind, 2)


REPLAYED: list[tuple[str, Kind]] = [("submitting", "inline"), ("closing", "lanes"), ("cancelling", "xla")]


def test_a_seed_is_the_same_order_in_another_process(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import conftest\n"
        "from test_schedules import REPLAYED, digest\n"
        "print(*(digest(name, kind, 3) for name, kind in REPLAYED))\n",
        encoding="utf-8",
    )
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [digest(name, kind, 3) for name, kind in REPLAYED]


def outcomes(program: Callable[[Schedule, list[Any]], Any], n: int = 60) -> set[tuple[Any, ...]]:
    """What a small program notes, under many seeds."""
    found = set()
    for seed in range(n):
        notes: list[Any] = []
        play(lambda schedule, notes=notes: program(schedule, notes), Schedule(seed))  # type: ignore[misc]
        found.add(tuple(notes))
    return found


async def two_lanes(schedule: Schedule, notes: list[Any]) -> None:
    lanes = [ThreadLane(name) for name in "ab"]
    for lane in lanes:
        for i in (1, 2):
            lane.post(lambda note=f"{lane.name}{i}": notes.append(note))  # type: ignore[misc]
    for lane in lanes:
        await _threads.in_thread(lane.close, "close")


def test_threads_run_in_every_order_that_their_queues_allow() -> None:
    assert outcomes(two_lanes, 200) == {
        tuple(order.split())
        for order in ("a1 a2 b1 b2", "a1 b1 a2 b2", "a1 b1 b2 a2", "b1 a1 a2 b2", "b1 a1 b2 a2", "b1 b2 a1 a2")
    }


async def callbacks(schedule: Schedule, notes: list[Any]) -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def work() -> None:
        loop.call_soon_threadsafe(notes.append, "thread 1")
        loop.call_soon_threadsafe(notes.append, "thread 2")

    thread = _threads.Thread(target=work, name="other")
    thread.start()

    def step(i: int) -> None:
        notes.append(i)
        if i < 2:
            loop.call_soon(step, i + 1)
        else:
            done.set_result(None)

    loop.call_soon(step, 0)
    await done
    await _threads.in_thread(thread.join, "join")


def test_callbacks_of_the_loop_keep_their_order_and_those_of_threads_come_between() -> None:
    found = outcomes(callbacks, 120)
    for notes in found:
        assert [n for n in notes if isinstance(n, int)] == [0, 1, 2]
        assert [n for n in notes if isinstance(n, str)] == ["thread 1", "thread 2"]
    assert len(found) > 4  # of ten ways to shuffle three and two


async def timers(schedule: Schedule, notes: list[Any]) -> None:
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        notes.append(seconds)

    async def arrival() -> None:
        await schedule.arrival()
        notes.append("arrival")

    await asyncio.gather(sleep(0.2), sleep(0.1), sleep(9.0), arrival())
    assert schedule.now >= 9.0


def test_timers_keep_their_order_and_arrivals_come_at_any_time() -> None:
    found = outcomes(timers)
    assert {tuple(n for n in notes if n != "arrival") for notes in found} == {(0.1, 0.2, 9.0)}
    assert len(found) > 1


async def arrivals(schedule: Schedule, notes: list[Any]) -> None:
    async def client(k: int) -> None:
        await schedule.arrival()
        notes.append(k)

    await asyncio.gather(*map(client, range(3)))


def test_arrivals_come_in_every_order() -> None:
    assert len(outcomes(arrivals)) == 6


async def waits_for_ever(schedule: Schedule) -> None:
    lane = ThreadLane("lane")
    lane.post(lambda: None)
    try:
        async with asyncio.timeout(60):
            await asyncio.get_running_loop().create_future()
    finally:
        lane.close(0.0)


def test_what_waits_for_nothing_is_stuck_and_says_where() -> None:
    with pytest.raises(Stuck, match=r"loop at idle; aiopipe-lane at get"):
        play(waits_for_ever, Schedule(0))


async def leaves_a_thread(schedule: Schedule) -> None:
    ThreadLane("left").post(lambda: None)


def test_a_thread_that_is_left_is_stuck() -> None:
    with pytest.raises(Stuck, match="aiopipe-left at get"):
        play(leaves_a_thread, Schedule(0))


async def leaves_a_task(schedule: Schedule) -> None:
    asyncio.ensure_future(asyncio.sleep(3600))  # noqa: RUF006
    await asyncio.sleep(0)


def test_a_task_that_is_left_is_found() -> None:
    with pytest.raises(AssertionError, match="tasks are left"):
        play(leaves_a_task, Schedule(0))


async def joins_on_the_loop(schedule: Schedule) -> None:
    lane = ThreadLane("lane")
    lane.post(lambda: None)
    lane.close()


def test_waiting_for_a_thread_on_the_loop_is_found() -> None:
    with pytest.raises(AssertionError, match="joined on the event loop"):
        for seed in range(50):  # where the thread has not ended yet
            play(joins_on_the_loop, Schedule(seed))
