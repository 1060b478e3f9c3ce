"""``aiopipe timeline``: what a saved timeline says, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..sched.plan_text import bytes_text
from ..spans import Span, extent
from ..timeline import Timeline
from .outcome import Failure, UsageError
from .words import number, percent, seconds_text

__all__ = ["Summary", "read_timeline"]


@dataclass(frozen=True, slots=True)
class Summary:
    """A timeline, and what it was looked at for.

    Attributes:
        timeline: from the file.
        path: the file.
        plot: where a picture was written to, if it was asked for.
    """

    timeline: Timeline
    path: Path
    plot: Path | None
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields that docs/cli.md lists."""
        spans = self.timeline.spans
        begin, end = extent([span for span in spans if span.kind == "compute"])
        overlap = self.timeline.overlap()
        evaluations = len({span.evaluation for span in spans if span.kind == "compute"})
        return {
            "file": str(self.path),
            "plot": None if self.plot is None else str(self.plot),
            "seconds": end - begin,
            "evaluations": evaluations,
            "per_s": evaluations / (end - begin) if end > begin else None,
            "wait_s": sum(span.duration_s for span in spans if span.kind == "wait"),
            "capture_s": sum(span.duration_s for span in spans if span.kind == "capture"),
            "overlap": {"share": overlap.share, "mean_busy": overlap.mean_busy, "seconds": overlap.overlap_s},
            "devices": self._devices(spans),
        }

    def _devices(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        utilization, busy_s = self.timeline.utilization(), self.timeline.busy_s()
        rows = []
        for name in self.timeline.backends:
            here = [span for span in spans if span.backend == name]
            splits = [span for span in here if span.kind == "compute"]
            copies = [span for span in here if span.kind == "copy"]
            rows.append(
                {
                    "name": name,
                    "utilization": utilization.get(name, 0.0),
                    "busy_s": busy_s.get(name, 0.0),
                    "splits": len(splits),
                    "mean_split_s": sum(span.duration_s for span in splits) / len(splits) if splits else None,
                    "seen": sum(span.seen for span in splits),
                    "copies": len(copies),
                    "copied_nbytes": sum(span.nbytes for span in copies),
                }
            )
        return rows

    def show(self, console: Console) -> None:
        """A row for each device, then how much they overlapped."""
        found = self.to_json()
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("device", "busy", "", "splits", "each takes", "copies", "copied"):
            table.add_column(heading, justify="left" if heading == "device" else "right")
        for row in found["devices"]:
            table.add_row(
                row["name"],
                percent(row["utilization"]),
                seconds_text(row["busy_s"]),
                str(row["splits"]),
                "" if row["mean_split_s"] is None else seconds_text(row["mean_split_s"]),
                str(row["copies"]),
                bytes_text(row["copied_nbytes"]),
            )
        console.print(table)
        rate = "" if found["per_s"] is None else f", {number(found['per_s'])}/s"
        console.print(
            f"{found['evaluations']} evaluations in {seconds_text(found['seconds'])}{rate}; {self.timeline.overlap()}",
            soft_wrap=True,
        )
        if self.plot is not None:
            console.print(f"picture: {self.plot}", soft_wrap=True)


def read_timeline(path: Path, plot: Path | None) -> Summary:
    """Read a file that `Timeline.save` has written; draw it, if asked to.

    Raises:
        UsageError: there is no such file.
        AiopipeError: it is no timeline; or it cannot be drawn.
        OSError: it cannot be read, or the picture not be written.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}; Timeline.save writes one")
    timeline = Timeline.load(path)
    if plot is not None:
        timeline.plot(plot)
    return Summary(timeline, path, plot)
