"""Timelines as files that https://ui.perfetto.dev and ``chrome://tracing`` open. Pure: values in, values out.

The format is the Trace Event Format of Chrome: a JSON object with a list of events, times in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from .errors import AiopipeError
from .spans import HOST_TRACK, Kind, Span, extent, in_order

__all__ = ["from_trace", "pack", "to_trace"]

PRODUCER = "aiopipe"
DEVICES, SLOTS = 1, 2
"""Numbers of the two groups of tracks ("processes", to the format)."""

_Event = dict[str, Any]


def to_trace(spans: Sequence[Span], backends: Sequence[str]) -> dict[str, Any]:
    """The content of a file.

    A group of tracks for the devices, one for computing and one for what is copied to it for each backend; and one
    for the slots, with a slice for each evaluation, its capture inside it, and the time that it waited before. An
    arrow leads from an evaluation to each of its splits.
    """
    begin = extent(spans)[0]
    tracks = _Tracks(backends)
    events = [*_events_of(spans, tracks, begin), *_evaluations(spans, tracks, begin)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"producer": PRODUCER, "backends": list(backends), "begin_s": begin},
        "traceEvents": [*tracks.names(), *sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))],
    }


def from_trace(content: Any) -> tuple[list[Span], list[str]]:
    """Spans and names of backends from the content of a file.

    Raises:
        AiopipeError: it is no timeline of aiopipe's.
    """
    about = content.get("otherData") if isinstance(content, Mapping) else None
    if not isinstance(about, Mapping) or about.get("producer") != PRODUCER:
        raise AiopipeError("this is no timeline of aiopipe's: expected a file that Timeline.save has written")
    begin = float(about["begin_s"])
    spans: list[Span] = []
    opened: dict[int, _Event] = {}
    for event in content["traceEvents"]:
        phase, kind = event["ph"], event.get("cat")
        if phase == "X" and kind in ("compute", "copy", "capture"):
            spans.append(_span(event, kind, begin, event["ts"] + event["dur"]))
        elif phase == "b":
            opened[event["id"]] = event
        elif phase == "e":
            spans.append(_span(opened.pop(event["id"]), "wait", begin, event["ts"]))
    return in_order(spans), [str(name) for name in about["backends"]]


def pack(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Rows for spans, so that those of one row do not overlap: (row, span), in order of their begin."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span.begin_s, span.end_s)):
        row = next((i for i, end in enumerate(ends) if end <= span.begin_s), len(ends))
        ends[row:] = [span.end_s, *ends[row + 1 :]]
        yield row, span


class _Tracks:
    """Numbers of the tracks, given out as they are needed."""

    def __init__(self, backends: Sequence[str]) -> None:
        self._rank = {name: i for i, name in enumerate(backends)}
        self._numbers: dict[tuple[int, str, int], int] = {}

    def number(self, group: int, name: str, order: int) -> int:
        return self._numbers.setdefault((group, name, order), len(self._numbers) + 1)

    def of_span(self, span: Span, row: int = 0) -> tuple[int, int]:
        """Group and number of a span's track."""
        if span.backend == HOST_TRACK:
            return SLOTS, self.of_slot(span.slot)
        name = f"{span.backend} copies" if span.kind == "copy" else span.backend
        order = 2 * self._rank.get(span.backend, len(self._rank)) + (span.kind == "copy")
        return DEVICES, self.number(DEVICES, name if not row else f"{name} ({row + 1})", order)

    def of_slot(self, slot: int) -> int:
        return self.number(SLOTS, "no slot" if slot < 0 else f"slot {slot}", slot)

    def names(self) -> Iterator[_Event]:
        """What the format calls metadata."""
        for group, name in ((DEVICES, "devices"), (SLOTS, "evaluations, by slot")):
            yield _meta("process_name", group, 0, name=name)
            yield _meta("process_sort_index", group, 0, sort_index=group)
        for (group, name, order), number in self._numbers.items():
            yield _meta("thread_name", group, number, name=name)
            yield _meta("thread_sort_index", group, number, sort_index=order)


def _meta(what: str, group: int, track: int, **args: Any) -> _Event:
    return {"ph": "M", "name": what, "pid": group, "tid": track, "ts": 0, "args": args}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 4)


def _args(span: Span) -> dict[str, Any]:
    args: dict[str, Any] = {"backend": span.backend, "evaluation": span.evaluation, "split": span.split}
    args |= {"slot": span.slot, "name": span.name, "queued_us": _micros(span.begin_s - span.asked_s), "seen": span.seen}
    if span.kind == "compute":
        args["module"] = f"jit_{span.name}"
    if span.kind == "copy":
        args |= {"source": span.source, "nbytes": span.nbytes}
    return args


def _span(event: _Event, kind: str, begin_s: float, end_us: float) -> Span:
    args = event["args"]
    start, end = begin_s + event["ts"] * 1e-6, begin_s + end_us * 1e-6
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ValueError(f"a span from {start} to {end} seconds")
    return Span(
        kind=cast(Kind, kind),
        backend=args["backend"],
        evaluation=args["evaluation"],
        split=args["split"],
        slot=args["slot"],
        begin_s=start,
        end_s=end,
        name=args["name"],
        asked_s=start - args["queued_us"] * 1e-6,
        seen=args["seen"],
        source=args.get("source", ""),
        nbytes=args.get("nbytes", 0),
    )


def _slice(span: Span, name: str, track: tuple[int, int], begin: float, args: dict[str, Any]) -> _Event:
    ts = _micros(span.begin_s - begin)
    times = {"ts": ts, "dur": round(max(0.0, _micros(span.end_s - begin) - ts), 4)}
    return {"ph": "X", "name": name, "cat": span.kind, "pid": track[0], "tid": track[1], **times, "args": args}


def _events_of(spans: Sequence[Span], tracks: _Tracks, begin: float) -> Iterator[_Event]:
    """Slices of the devices and captures; pairs of events for waits, which overlap."""
    by_track: dict[tuple[str, bool], list[Span]] = {}
    for span in spans:
        if span.kind == "wait":
            where = dict(zip(("pid", "tid"), tracks.of_span(span), strict=True))
            both = {"name": "wait", "cat": "wait", "id": span.evaluation, **where}
            yield {"ph": "b", "ts": _micros(span.begin_s - begin), "args": _args(span), **both}
            yield {"ph": "e", "ts": _micros(span.end_s - begin), **both}
        elif span.kind == "capture":
            yield _slice(span, "capture", tracks.of_span(span), begin, _args(span))
        else:
            by_track.setdefault((span.backend, span.kind == "copy"), []).append(span)
    for together in by_track.values():
        for row, span in pack(together):
            track = tracks.of_span(span, row)
            yield _slice(span, span.name, track, begin, _args(span))
            if span.kind == "compute":  # the arrow that ends here; _evaluations begins it
                yield _arrow("f", span.evaluation, span.split, track, _micros(span.begin_s - begin))


def _arrow(phase: str, evaluation: int, split: int, track: tuple[int, int], ts: float) -> _Event:
    where = {"pid": track[0], "tid": track[1], "ts": ts}
    return {"ph": phase, "name": "split", "cat": "flow", "id": f"{evaluation}.{split}", "bp": "e", **where}


def _evaluations(spans: Sequence[Span], tracks: _Tracks, begin: float) -> Iterator[_Event]:
    """A slice for each evaluation on its slot's track, where the arrows to its splits begin."""
    whole: dict[int, list[Span]] = {}
    for span in spans:
        if span.kind != "wait":
            whole.setdefault(span.evaluation, []).append(span)
    for evaluation, parts in whole.items():
        track = SLOTS, tracks.of_slot(parts[0].slot)
        first, last = extent(parts)
        ts = _micros(first - begin)
        times = {"ts": ts, "dur": round(_micros(last - begin) - ts, 4)}
        args = {"evaluation": evaluation, "slot": parts[0].slot}
        where = {"pid": track[0], "tid": track[1]}
        yield {"ph": "X", "name": f"evaluation {evaluation}", "cat": "evaluation", **where, **times, "args": args}
        for span in parts:
            if span.kind == "compute":
                yield _arrow("s", evaluation, span.split, track, ts)
