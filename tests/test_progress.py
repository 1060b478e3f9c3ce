"""How far long work is: the pace, lines where there is no terminal, a table where there is one."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import aiopipe as ap
from aiopipe import progress as module
from aiopipe.devices.sim import Cluster
from aiopipe.progress_text import Look, Pace, amount_text, line_of, span_text
from simgraphs import array, by_device, chain

LOOK = Look("embedding", 640, 1234, 6.1, 105.3, 3, 4, 2, {"cpu:0": 0.974, "cpu:1": 0.5})


class Screen(io.StringIO):
    """A file, or a terminal, on which one can wait for something to appear."""

    def __init__(self, *, terminal: bool = False) -> None:
        super().__init__()
        self._terminal = terminal
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        self._loop.call_soon_threadsafe(self._changed.set)
        return super().write(text)

    async def until(self, text: str) -> None:
        while text not in self.getvalue():
            self._changed.clear()
            await self._changed.wait()


class Gone(io.StringIO):
    """Whoever read it has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


# Lines ----------------------------------------------------------------------------------------------


def test_a_line_says_what_there_is_to_say() -> None:
    assert line_of(LOOK) == (
        "embedding: 640 of 1,234 (52%); 105 a second; 5.6 s left; 3 of 4 in flight, 2 waiting; "
        "busy: cpu:0 97%, cpu:1 50%"
    )
    assert line_of(replace(LOOK, waiting=0, busy={}, rate=None)) == "embedding: 640 of 1,234 (52%); 3 of 4 in flight"
    assert line_of(Look("reading", 12, None, 3.0)) == "reading: 12 done"


def test_a_line_at_the_end() -> None:
    assert line_of(replace(LOOK, done=1234, took_s=12.34, busy={}), over=True) == (
        "embedding: 1,234 of 1,234; in 12 s; 100 a second"
    )
    assert line_of(Look("reading", 0, 0, 0.0), over=True) == "reading: 0 of 0; in 0.0 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1:00"), (185, "3:05"), (3720, "1:02:00")],
)
def test_times(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0.0712, "0.0712"), (3, "3"), (56.31, "56.3"), (12345.6, "12,346")])
def test_amounts(value: float, text: str) -> None:
    assert amount_text(value) == text


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pace = Pace(100.0)
    assert pace.rate(100.0, 0) is None
    assert pace.rate(102.0, 10) == 5.0  # since it began
    for k in range(1, 40):
        pace.rate(102.0 + k, 10 + 20 * k)
    assert pace.rate(142.0, 810) == 20.0
    assert pace.rate(200.0, 810) == pytest.approx(20 / 59)  # nothing has happened for long: it falls
    assert replace(LOOK, rate=0.0).left_s is None and replace(LOOK, done=2000).left_s == 0


def test_the_pace_of_what_begins_anew() -> None:
    """One shape after the other is compiled: never a pace below nothing, nor a time left that is over."""
    pace = Pace(0.0)
    assert pace.rate(20.0, 2) == 0.1
    assert pace.rate(25.0, 0) is None
    assert pace.rate(30.0, 1) == 0.1
    assert pace.rate(35.0, 2) == pytest.approx(2 / 15)


def test_the_pace_of_steps_that_take_longer_than_that() -> None:
    pace = Pace(0.0)
    assert pace.rate(15.0, 0) is None
    for minute in range(5):
        for second in range(0, 60, 5):
            rate = pace.rate(60.0 * minute + second, minute)
            assert minute == 0 or 1 / 120 < rate <= 1 / 60  # type: ignore[operator]
    assert len(pace._known) < 5  # and what is known of it does not grow while it takes its time


# A pipeline -----------------------------------------------------------------------------------------


async def embed(progress: ap.Progress, sched: ap.Scheduler, n: int = 5) -> None:
    graph = chain(2)
    sched.set_cut(graph, range(2))
    async with progress:
        progress.begin("warming up")
        await (await sched.graph_compute_async(graph, array(0)))
        progress.advance()
        progress.begin("embedding", total=n)
        async for _ in sched.stream(graph, (array(k) for k in range(n))):
            progress.advance()


def scheduler(**how: Any) -> ap.Scheduler:
    return ap.Scheduler(Cluster(2, **by_device([1.0, 0.5])).backends, n_copies=2, **how)


async def test_lines_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    async with scheduler(timeline=True) as sched:
        await embed(ap.Progress(sched, file=file), sched)
    first, second = file.getvalue().splitlines()
    assert first.startswith("warming up: 1 done; in ") and "busy: sim:0 " in first
    assert second.startswith("embedding: 5 of 5; in ") and "a second; busy: sim:0 90%, sim:1 50%" in second


async def test_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINES_S", 0.001)
    file = Screen()
    progress = ap.Progress(file=file)
    async with scheduler() as sched, progress:
        await asyncio.sleep(0.01)
        assert not file.getvalue()  # nothing has begun
        progress.watch(sched)
        progress.begin("waiting", total=4)
        progress.update(1, 4)
        await file.until("0 of 2 in flight")
    assert file.getvalue().splitlines()[0].startswith("waiting: 1 of 4 (25%); ")
    assert "busy" not in file.getvalue()  # without a timeline


async def test_a_table_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_S", 0.001)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    terminal = Screen(terminal=True)
    async with scheduler(timeline=True) as sched:
        progress = ap.Progress(sched, file=terminal)
        await embed(progress, sched)
        shown = terminal.getvalue()
        assert "warming up: 1 done" in shown and "embedding: 5 of 5" in shown  # what is over stays
        async with progress:
            progress.begin("thinking", total=8)
            progress.update(2)
            await terminal.until("2/8")
    for part in ("thinking", "0 of 2 in flight", "busy: sim:0 90%, sim:1 50%", "busy 0%", "\x1b[?25l", "\x1b[?25h"):
        assert part in terminal.getvalue(), part


@pytest.mark.parametrize(("term", "installed"), [("dumb", True), ("xterm", False)])
async def test_lines_where_a_terminal_can_show_no_table(
    monkeypatch: pytest.MonkeyPatch, term: str, installed: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    if not installed:
        monkeypatch.delitem(sys.modules, "aiopipe.progress_table", raising=False)
        monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Screen(terminal=True)
    async with ap.Progress(file=terminal) as progress:
        progress.begin("counting", total=1)
        progress.advance()
    assert terminal.getvalue().startswith("counting: 1 of 1; in ") and "\x1b" not in terminal.getvalue()


async def test_what_fails_is_not_said_to_be_over() -> None:
    file = io.StringIO()
    with pytest.raises(ValueError, match="enough"):
        async with ap.Progress(file=file) as progress:
            progress.begin("counting", total=2)
            raise ValueError("enough")
    assert not file.getvalue()


async def test_work_goes_on_where_nobody_looks_any_more() -> None:
    file = Gone()
    async with ap.Progress(file=file) as progress:
        progress.begin("counting", total=1)
        progress.advance()
        progress.begin("more")


@pytest.mark.parametrize("how", ["closed", "ascii"])
async def test_work_goes_on_where_nothing_can_be_written(how: str) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    async with ap.Progress(file=file) as progress:
        if how == "closed":
            file.close()
        progress.begin("计数" if how == "ascii" else "counting", total=1)
        progress.advance()


async def test_how_far_it_is_is_read_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    rate = Pace.rate

    def noted(self: Pace, now: float, done: int) -> float | None:
        threads.add(threading.current_thread())
        return rate(self, now, done)

    monkeypatch.setattr(Pace, "rate", noted)  # `begin` makes a new one, and what it is of, at any time
    monkeypatch.setattr(module, "LINES_S", 0.001)
    file = Screen()
    async with ap.Progress(file=file) as progress:
        progress.begin("waiting", total=4)
        await file.until("0 of 4")
    assert threads == {threading.main_thread()}


async def test_a_pipeline_that_is_not_open_yet() -> None:
    pipe = ap.Pipeline(lambda params, x: x + params, np.float32(1), devices=["cpu:0"])
    look = ap.Progress(pipe).look()
    assert look.in_flight is None and look.busy == {}


def test_without_a_loop() -> None:
    with pytest.raises(ap.WrongLoopError):
        ap.Progress().__aenter__().send(None)
