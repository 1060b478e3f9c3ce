"""`Timeline`: what ran where and when, to look at, to save, to calculate with."""

from __future__ import annotations

import functools
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from .errors import AiopipeError
from .notes import spans_of
from .recorder import Recorder
from .spans import Overlap, Span, Window, busy_seconds, check_window, overlap_of, utilization_of
from .timeline_draw import closeup, svg_of, text_of
from .timeline_file import from_trace, to_trace

__all__ = ["Timeline"]

RECENT_NOTES = 1500
"""`Timeline.recent` looks at no more: that takes a few milliseconds."""

_DAMAGED = (
    ValueError, LookupError, TypeError, ArithmeticError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error,
)  # fmt: skip
"""What reading a file may end with that is none of `Timeline.save`'s."""


class Timeline:
    """What ran where and when: the newest evaluations of a scheduler, or those that a file has.

    That of a scheduler (`Scheduler.timeline`) goes on: each look at it sees what has been evaluated meanwhile.

    Args:
        spans: what happened.
        backends: names of the backends, in order of priority.
        window: what `utilization` and `overlap` look at by default; all that was computed, where it is None.

    Times are seconds of one clock: `time.perf_counter`, or the virtual clock of simulated devices, whose spans are
    exact. What begin and end of a split mean on a real device is in docs/timeline.md.
    """

    def __init__(self, spans: Iterable[Span], backends: Sequence[str], *, window: Window | None = None) -> None:
        fixed = tuple(spans)
        self.backends = tuple(backends)
        self._window = window
        self._read: Callable[[], Sequence[Span]] = lambda: fixed
        self._recorder: Recorder | None = None

    @classmethod
    def of(cls, recorder: Recorder) -> Timeline:
        """The timeline of what a recorder notes."""
        timeline = cls((), recorder.names)
        timeline._recorder = recorder
        timeline._read = recorder.spans
        return timeline

    @property
    def spans(self) -> tuple[Span, ...]:
        """Everything, ordered by when it began; of a scheduler, of evaluations that have ended."""
        return tuple(self._read())

    def utilization(self, window: Window | None = None) -> dict[str, float]:
        """For each backend the share of a window in which it computed.

        Args:
            window: from when to when, in seconds of the timeline's clock; by default from the first launch to the
                last end.

        Raises:
            AiopipeError: the window ends before it begins.
        """
        spans = self.spans
        return utilization_of(spans, self.backends, self._check(window, spans))

    def busy_s(self, window: Window | None = None) -> dict[str, float]:
        """For each backend the seconds in which it computed; as `utilization`."""
        spans = self.spans
        return busy_seconds(spans, self.backends, self._check(window, spans))

    def overlap(self, window: Window | None = None) -> Overlap:
        """How much of the time two or more backends computed at once, and how many did on average; as `utilization`."""
        spans = self.spans
        return overlap_of(spans, self._check(window, spans))

    def recent(self, seconds: float) -> Timeline:
        """A timeline of what ended within the last `seconds`, which stays as it is. Quick: for looking often.

        It has no more than some hundred evaluations; where there were more, its window is so much shorter.
        """
        if self._recorder is None:
            raise AiopipeError("this timeline has ended: use `utilization(window)`")
        now = self._recorder.clock()
        notes, plans = self._recorder.noted()
        spans = [span for span in spans_of(notes[-RECENT_NOTES:], plans) if span.end_s > now - seconds]
        begin = now - seconds
        if len(notes) > RECENT_NOTES:
            begin = max(begin, min((span.begin_s for span in spans), default=begin))
        return Timeline(spans, self.backends, window=(begin, now))

    def now(self) -> float:
        """The time of its clock, in seconds; of one that has ended, when that was."""
        return self._check(None, self.spans)[1] if self._recorder is None else self._recorder.clock()

    def frozen(self) -> Timeline:
        """This timeline as it is now, which stays so. Quick: what it shows is worked out when somebody looks."""
        if self._recorder is None:
            return self
        timeline = Timeline((), self.backends, window=self._window)
        timeline._read = functools.cache(partial(spans_of, *self._recorder.noted()))
        return timeline

    def clear(self) -> None:
        """Forget what has been (after warming up, say)."""
        if self._recorder is not None:
            self._recorder.clear()
        else:
            self._read = lambda: ()

    def save(self, path: str | Path) -> None:
        """Write a file that https://ui.perfetto.dev and ``chrome://tracing`` open; ``.gz`` at its end compresses it."""
        content = json.dumps(to_trace(self.spans, self.backends)).encode()
        path = Path(path)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """What `save` has written.

        Raises:
            AiopipeError: it is no such file.
            OSError: it cannot be read.
        """
        raw = Path(path).read_bytes()
        try:
            content: Any = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
            spans, backends = from_trace(content)
        except _DAMAGED as error:
            raise AiopipeError(f"{path} is no timeline that Timeline.save has written: {error!r}") from error
        except AiopipeError as error:
            raise AiopipeError(f"{path}: {error}") from None
        return cls(spans, backends)

    def plot(self, path: str | Path, *, window: Window | None = None, evaluations: int = 24) -> None:
        """Draw it into a PNG, SVG or PDF file: a lane for each backend, splits as blocks coloured by evaluation.

        Needs matplotlib: ``pip install 'aiopipe[plot]'``.

        Args:
            path: where to; its ending says in which format.
            window: what to draw, in seconds of the timeline's clock; by default the newest evaluations.
            evaluations: how many of them.

        Raises:
            AiopipeError: matplotlib is missing, the path has another ending, the window ends before it begins, or
                nothing has been evaluated.
        """
        try:
            from .timeline_plot import plot
        except ModuleNotFoundError as error:
            raise AiopipeError(f"Timeline.plot needs matplotlib ({error}): pip install 'aiopipe[plot]'") from error
        path, spans = Path(path), self.spans
        if path.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise AiopipeError(f"got {str(path)!r} to plot into, expected a name that ends with .png, .svg or .pdf")
        if not spans:
            raise AiopipeError("there is nothing to plot: nothing has been evaluated yet")
        shown = closeup(spans, evaluations) if window is None else check_window(window, spans)
        plot(spans, self.backends, shown, self._check(None, spans), path)

    def __str__(self) -> str:
        spans = self.spans
        return text_of(spans, self.backends, self._check(None, spans))

    def __repr__(self) -> str:
        return f"<Timeline of {', '.join(self.backends)}: {len(self.spans)} spans>"

    def _repr_html_(self) -> str:
        """For notebooks: the newest evaluations as a picture, and the summary."""
        spans = self.spans
        whole = self._check(None, spans)
        picture = svg_of(spans, self.backends, closeup(spans), whole) if spans else ""
        summary = text_of(spans, self.backends, whole).partition("\n\n")[0]
        return f'<div>{picture}<pre style="font-size:12px;line-height:1.4">{escape(summary)}</pre></div>'

    def _check(self, window: Window | None, spans: Sequence[Span]) -> Window:
        return check_window(self._window if window is None else window, spans)
