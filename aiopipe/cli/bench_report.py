"""What ``aiopipe bench`` measured: for people, and for programs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from .outcome import Failure
from .words import number, seconds_text

__all__ = ["NAMES", "Measured", "Run"]

NAMES = {
    "pipeline": "aiopipe",
    "loop": "the loop by hand",
    "jit": "one device, jit",
}
"""What is measured."""


@dataclass(frozen=True, slots=True)
class Run:
    """One of the runs.

    Attributes:
        seconds: of each round.
        alone_s: of an evaluation with nothing else in flight.
    """

    seconds: tuple[float, ...]
    alone_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs, of the same work, in the same rounds.

    Attributes:
        n_copies: how many evaluations were in flight, in each.
        devices: what the pipeline and the loop ran on; the one device is the first of them.
        splits: how many parts there are.
        rounds: how often each was measured.
        evaluations: in each round.
        runs: by name; a run that has no room, or cannot be written for these devices, is missing.
        max_abs_diff: between the pipeline's result and that of one device; None where no number says it.
    """

    n_copies: int
    devices: tuple[str, ...]
    splits: int
    rounds: int
    evaluations: int
    runs: Mapping[str, Run]
    max_abs_diff: float | None
    failure: Failure | None = None

    def per_s(self, name: str) -> float:
        """Median evaluations for each second."""
        return self.evaluations / statistics.median(self.runs[name].seconds)

    def ratios(self) -> dict[str, float]:
        """For each peer the median over the rounds of its time divided by ours: above 1, aiopipe is faster."""
        ours = self.runs["pipeline"].seconds
        return {
            name: statistics.median(peer / own for own, peer in zip(ours, run.seconds, strict=True))
            for name, run in self.runs.items()
            if name != "pipeline"
        }

    def to_json(self) -> dict[str, Any]:
        """The fields that docs/cli.md lists."""
        ratios = self.ratios()
        return {
            "n_copies": self.n_copies,
            "devices": list(self.devices),
            "splits": self.splits,
            "rounds": self.rounds,
            "evaluations": self.evaluations,
            "runs": {
                name: {"per_s": self.per_s(name), "alone_s": run.alone_s, "seconds": list(run.seconds)}
                if (run := self.runs.get(name)) is not None
                else None
                for name in NAMES
            },
            "ratios": {name: ratios.get(name) for name in NAMES if name != "pipeline"},
            "max_abs_diff": self.max_abs_diff,
        }

    def show(self, console: Console) -> None:
        """A table of the runs."""
        ratios = self.ratios()
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("", "results/s", "aiopipe is faster by", "one alone"):
            table.add_column(heading, justify="left" if not heading else "right")
        for name, title in NAMES.items():
            run = self.runs.get(name)
            if run is None:
                table.add_row(title, "no room, or not on these devices", "", "")
            else:
                faster = f"{ratios[name]:.2f} x" if name in ratios else ""
                table.add_row(title, number(self.per_s(name)), faster, seconds_text(run.alone_s))
        console.print(table)
        diff = "?" if self.max_abs_diff is None else f"{self.max_abs_diff:.1e}"
        console.print(
            f"{self.splits} splits on {', '.join(self.devices)}, {self.n_copies} in flight; medians of {self.rounds} "
            f"rounds of {self.evaluations} evaluations, the runs in turn; largest difference to one device: {diff}",
            soft_wrap=True,
        )
