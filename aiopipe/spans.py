"""Spans: what ran where, from when to when; how busy the backends were, and whether at the same time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .errors import AiopipeError

__all__ = [
    "HOST_TRACK",
    "Kind",
    "Overlap",
    "Span",
    "Window",
    "busy_seconds",
    "check_window",
    "counts",
    "extent",
    "in_order",
    "overlap_of",
    "utilization_of",
]

Kind = Literal["compute", "copy", "capture", "wait"]

Window = tuple[float, float]
"""From when to when, in seconds of the timeline's clock."""

HOST_TRACK = "host"
"""`Span.backend` of what no device does: waiting for a slot, capturing inputs."""


class Span(NamedTuple):
    """Something that took its time.

    Attributes:
        kind: ``"compute"``: a split (or, under an eval callback, a part of one) on its backend.
            ``"copy"``: bringing values to a backend. ``"capture"``: taking an evaluation's inputs.
            ``"wait"``: an evaluation was submitted and had no slot yet.
        backend: who computed or received; ``"host"`` for captures and waits.
        evaluation: its number in its scheduler.
        split: index of the split in its plan; -1 for captures and waits.
        slot: of the evaluation; -1 where it was given up before it had one.
        begin_s: when it began, in seconds of the timeline's clock.
        end_s: when it ended.
        name: for a compute span the name of its program (XLA's module is called the same behind ``jit_``).
        asked_s: when the host asked for it: what lies between this and the begin is waiting in a queue.
        seen: whether the end was seen; else it is inferred from what else was.
        source: for a copy, who had the values.
        nbytes: for a copy, how many.
    """

    kind: Kind
    backend: str
    evaluation: int
    split: int
    slot: int
    begin_s: float
    end_s: float
    name: str = ""
    asked_s: float = 0.0
    seen: bool = True
    source: str = ""
    nbytes: int = 0

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much the backends worked at the same time.

    Attributes:
        busy_s: seconds in which at least one computed.
        overlap_s: seconds in which at least two did.
        sum_s: what each of them computed, added up: what a single backend of the same speed would take.
    """

    busy_s: float
    overlap_s: float
    sum_s: float

    @property
    def share(self) -> float:
        """`overlap_s` over `busy_s`; 0 where nothing was computed."""
        return self.overlap_s / self.busy_s if self.busy_s > 0 else 0.0

    @property
    def mean_busy(self) -> float:
        """How many computed on average, while any did: 1.0 means one after the other."""
        return self.sum_s / self.busy_s if self.busy_s > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"two or more backends computed for {self.share:.1%} of the time in which any did; "
            f"{self.mean_busy:.2f} did on average"
        )


def in_order(spans: Iterable[Span]) -> list[Span]:
    """By their begin, as timelines have them."""
    return sorted(spans, key=lambda span: (span.begin_s, span.evaluation, span.split, span.end_s))


def extent(spans: Iterable[Span]) -> Window:
    """From the first begin to the last end; (0, 0) without spans."""
    found = list(spans)
    return (min(s.begin_s for s in found), max(s.end_s for s in found)) if found else (0.0, 0.0)


def busy_seconds(spans: Iterable[Span], backends: Iterable[str], window: Window) -> dict[str, float]:
    """Seconds within a window in which each backend computed; parts that overlap count once."""
    pieces = _computing(spans, window)
    names = dict.fromkeys((*backends, *pieces))
    return {name: sum(end - begin for begin, end in _union(pieces.get(name, []))) for name in names}


def utilization_of(spans: Iterable[Span], backends: Iterable[str], window: Window) -> dict[str, float]:
    """Backend -> share of the window in which it computed."""
    length = window[1] - window[0]
    busy = busy_seconds(spans, backends, window)
    return {name: seconds / length if length > 0 else 0.0 for name, seconds in busy.items()}


def overlap_of(spans: Iterable[Span], window: Window) -> Overlap:
    """How much the backends computed at the same time within a window."""
    changes: list[tuple[float, int]] = []
    for pieces in _computing(spans, window).values():
        for begin, end in _union(pieces):
            changes += [(begin, 1), (end, -1)]
    changes.sort()
    at_least = [0.0, 0.0]
    together, total, before = 0, 0.0, 0.0
    for when, change in changes:
        total += (when - before) * together
        for n in range(min(together, 2)):
            at_least[n] += when - before
        together, before = together + change, when
    return Overlap(busy_s=at_least[0], overlap_s=at_least[1], sum_s=total)


def check_window(window: Window | None, spans: Sequence[Span]) -> Window:
    """The window that was asked for; all of the compute spans where none was.

    Raises:
        AiopipeError: it ends before it begins.
    """
    if window is None:
        return extent(s for s in spans if s.kind == "compute")
    begin, end = window
    if not begin <= end:
        raise AiopipeError(f"window={window!r}: expected (begin, end) in seconds, with begin <= end")
    return float(begin), float(end)


def _computing(spans: Iterable[Span], window: Window) -> dict[str, list[Window]]:
    """Backend -> from when to when it computed within a window."""
    low, high = window
    found: dict[str, list[Window]] = {}
    for span in spans:
        if span.kind == "compute" and span.begin_s < high and span.end_s > low:
            found.setdefault(span.backend, []).append((max(low, span.begin_s), min(high, span.end_s)))
    return found


def _union(pieces: list[Window]) -> Iterator[Window]:
    """The pieces in order, those that touch or overlap joined."""
    here: Window | None = None
    for begin, end in sorted(pieces):
        if here is None:
            here = (begin, end)
        elif begin <= here[1]:
            here = (here[0], max(here[1], end))
        else:
            yield here
            here = (begin, end)
    if here is not None:
        yield here


def counts(spans: Iterable[Span]) -> Mapping[str, int]:
    """Kind -> how many."""
    found: dict[str, int] = {}
    for span in spans:
        found[span.kind] = found.get(span.kind, 0) + 1
    return found
