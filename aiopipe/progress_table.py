"""How far long work is, as a table that stays in its place in a terminal, by rich (extra ``live``)."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .progress_text import Look, amount_text, flight_text, line_of, span_text

__all__ = ["LiveTable", "table_of"]

BAR = 28
"""Columns of a bar."""


def table_of(look: Look) -> Group:
    """What is shown: how far it is; a bar for each device with the share of the time in which it computed."""
    head = Table.grid(padding=(0, 2))
    total = None if look.total is None else float(look.total)
    amount = f"{look.done:,}" if look.total is None else f"{look.done:,}/{look.total:,}"
    row: list[Text | ProgressBar] = [
        Text(look.what, style="bold"),
        ProgressBar(total=total, completed=look.done, width=BAR, pulse=total is None),
        Text(amount),
    ]
    if look.rate is not None:
        row.append(Text(f"{amount_text(look.rate)}/s"))
    if look.left_s is not None:
        row.append(Text(f"{span_text(look.left_s)} left", style="dim"))
    head.add_row(*row)
    devices = Table.grid(padding=(0, 2))
    for name, share in look.busy.items():
        bar = ProgressBar(total=1.0, completed=min(1.0, share), width=BAR, complete_style="cyan", finished_style="cyan")
        devices.add_row(Text(f"  {name}"), bar, Text(f"busy {share:.0%}"))
    if look.in_flight is not None:
        devices.add_row(Text("  evaluations"), Text(flight_text(look)))
    return Group(head, devices)


class LiveTable:
    """The table on a terminal. What is printed meanwhile goes above it.

    Args:
        file: the terminal.
    """

    def __init__(self, file: TextIO) -> None:
        self.console = Console(file=file)
        # Standard output may go elsewhere, and is to stay there.
        self._live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=file is sys.stderr,
        )

    def start(self) -> None:
        """From now on the terminal is its own."""
        self._live.start()

    def show(self, look: Look) -> None:
        """Show how far it is."""
        self._live.update(table_of(look), refresh=True)

    def say(self, look: Look) -> None:
        """Leave a line above the table for something that is over."""
        self.console.print(Text(line_of(look, over=True)))

    def stop(self) -> None:
        """Take it away."""
        self._live.stop()
