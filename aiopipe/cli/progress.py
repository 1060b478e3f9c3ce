"""How far long work is, on standard error: a bar on a terminal, else a line where something begins and ends."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

__all__ = ["Progress"]


class Progress:
    """In a ``with`` block, tells whoever watches the command what is being done."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bars = Bars(*columns, console=Console(stderr=True), transient=True)

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def step(self, what: str, done: int, total: int) -> None:
        """So much of it is done."""
        if self._bars is not None:
            task = self._tasks.get(what)
            if task is None:
                task = self._tasks[what] = self._bars.add_task(what, total=total)
            self._bars.update(task, completed=done, total=total)
        elif what not in self._tasks or done == total:
            self._tasks[what] = TaskID(0)
            print(f"{what} {done}/{total}", file=sys.stderr, flush=True)
