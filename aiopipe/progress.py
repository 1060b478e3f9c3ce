"""`Progress`: says how far long work is, and how busy the devices are with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from . import _threads
from ._loops import running_loop
from .errors import AiopipeError, BackendClosedError
from .progress_text import Look, Pace, line_of
from .statistics import Statistics
from .timeline import Timeline

if TYPE_CHECKING:
    from .progress_table import LiveTable

__all__ = ["Progress"]

TABLE_S = 0.4
"""How often a table is drawn."""

LINES_S = 10.0
"""How often a line is written where there is no terminal."""

BUSY_S = 5.0
"""Over how many of the last seconds the share is taken in which a device computed."""


class Source(Protocol):
    """A pipeline or a scheduler."""

    def statistics(self) -> Statistics: ...

    @property
    def timeline(self) -> Timeline: ...


class Progress:
    """Shows how far long work is, on standard error: a live table in a terminal, elsewhere a line now and then.

    What is being done, how much of it, at which pace; of a pipeline or a scheduler also how many evaluations are in
    flight, and (with ``timeline=True``) for each device the share of the last five seconds in which it computed. The
    table needs rich (``pip install 'aiopipe[live]'``); without it there are lines.

    Use it as an async context manager, and tell it what happens:

        async with ap.Pipeline(model, params, devices=..., timeline=True) as pipe, ap.Progress(pipe) as progress:
            progress.begin("embedding", total=len(batches))
            async for y in pipe.stream(batches):
                progress.advance()

    Args:
        source: whose evaluations are shown; `watch` names one later.
        file: where to, in place of standard error.
    """

    def __init__(self, source: Source | None = None, *, file: TextIO | None = None) -> None:
        self._source = source
        self._file = file or sys.stderr
        self._what = ""
        self._done = 0
        self._total: int | None = None
        self._pace = Pace(time.perf_counter())
        self._since: float | None = None
        self._table: LiveTable | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._gone = False

    def watch(self, source: Source) -> None:
        """From now on show the evaluations of that pipeline or scheduler."""
        self._source = source

    def begin(self, what: str, total: int | None = None) -> None:
        """Something is being done from now on; what was until now is over.

        Args:
            what: for people, such as ``"embedding passages"``.
            total: of how much, if that is known.
        """
        self._finish()
        self._what, self._total, self._done = what, total, 0
        self._pace = Pace(time.perf_counter())
        timeline = self._timeline()
        self._since = None if timeline is None else timeline.now()

    def advance(self, n: int = 1) -> None:
        """So much more is done."""
        self._done += n

    def update(self, done: int, total: int | None = None) -> None:
        """So much is done, of so much (None: of as much as before).

        It fits ``on_progress`` of pipelines, schedulers and batchers.
        """
        self._done = done
        if total is not None:
            self._total = total

    async def __aenter__(self) -> Progress:
        running_loop()
        self._over.clear()
        self._table = _table_on(self._file)
        if self._table is not None:
            self._table.start()
        self._task = asyncio.create_task(self._keep_showing(), name="aiopipe-progress")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        try:
            if self._task is not None:
                await self._task
        finally:
            if kind is None:
                self._finish()
            if self._table is not None:
                self._write(self._table.stop)
                self._table = None

    def look(self) -> Look:
        """How far it is now."""
        return self._with_devices(self._so_far())

    def _so_far(self) -> Look:
        """How far it is, but for the devices. On the loop, where `begin` changes all that it reads."""
        now = time.perf_counter()
        return Look(self._what, self._done, self._total, now - self._pace.began, self._pace.rate(now, self._done))

    def _with_devices(self, look: Look) -> Look:
        """And how busy they are with it, where there is something to ask."""
        if self._source is None:
            return look
        try:
            found = self._source.statistics()
        except BackendClosedError:  # not open yet, or not any more
            return look
        return replace(
            look, in_flight=found.in_flight, n_copies=found.n_copies, waiting=found.waiting, busy=self._busy()
        )

    def _busy(self) -> dict[str, float]:
        """Of the last seconds, or since it began."""
        timeline = self._timeline()
        if timeline is None:
            return {}
        seconds = BUSY_S if self._since is None else min(BUSY_S, timeline.now() - self._since)
        return timeline.recent(seconds).utilization()

    def _timeline(self) -> Timeline | None:
        """That of the source, if it has one."""
        try:
            return None if self._source is None else self._source.timeline
        except AiopipeError:
            return None

    async def _keep_showing(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINES_S if self._table is None else TABLE_S):
                    await self._over.wait()
            if self._what and not self._over.is_set():
                # A terminal may be slow to take what is written, and working it out takes some milliseconds.
                await _threads.in_thread(partial(self._show, self._so_far()), "progress")

    def _show(self, look: Look) -> None:
        look = self._with_devices(look)
        if self._table is None:
            self._write(lambda: print(line_of(look), file=self._file, flush=True))
        else:
            self._write(partial(self._table.show, look))

    def _finish(self) -> None:
        """What was being done is over: say so."""
        if not self._what or self._task is None:
            return
        look = replace(self.look(), in_flight=None)
        if self._table is None:
            self._write(lambda: print(line_of(look, over=True), file=self._file, flush=True))
        else:
            self._write(partial(self._table.say, look))
        self._what = ""

    def _write(self, write: Callable[[], None]) -> None:
        """Whoever looked may have left, or cannot be told in these letters; the work goes on."""
        if not self._gone:
            try:
                write()
            except (OSError, ValueError):  # a file that is closed raises the latter, and so does an encoding
                self._gone = True


def _table_on(file: TextIO) -> LiveTable | None:
    """A table, where the file is a terminal that can show one, and rich is installed."""
    if not file.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from .progress_table import LiveTable
    except ModuleNotFoundError:
        return None
    return LiveTable(file)
