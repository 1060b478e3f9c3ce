"""Timelines as text and as SVG. Pure: spans in, strings out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from html import escape

from .spans import HOST_TRACK, Span, Window, counts, extent, overlap_of, utilization_of

__all__ = [
    "CAPTURE",
    "COLOURS",
    "WAIT",
    "closeup",
    "colour_of",
    "host_is_seen",
    "is_thin",
    "seconds_text",
    "svg_of",
    "text_of",
    "tick_step",
]

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f")
"""Consecutive evaluations, and the backends of a plan, are told apart by these."""

CAPTURE, WAIT = "#7f7f7f", "#c7c7c7"

CLOSEUP = 16
"""So many evaluations can be told apart in one picture."""

WIDTH = 72
"""Columns of a lane of text."""


def seconds_text(seconds: float) -> str:
    """A duration for people: ``"850 ns"``, ``"1.25 ms"``, ``"12.0 s"``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if abs(value) >= 0.9995:
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def colour_of(span: Span) -> str:
    """That of its evaluation, or of what the host does."""
    return {"wait": WAIT, "capture": CAPTURE}.get(span.kind, COLOURS[span.evaluation % len(COLOURS)])


def is_thin(span: Span) -> bool:
    """Whether it is a bar under the blocks of its lane, at the same time as which it may be."""
    return span.kind in ("copy", "wait")


def closeup(spans: Sequence[Span], evaluations: int = CLOSEUP) -> Window:
    """A window with the newest evaluations that computed anything: as many as that, or all."""
    begins: dict[int, float] = {}
    last = 0.0
    for span in spans:
        if span.kind == "compute":
            begins[span.evaluation] = min(begins.get(span.evaluation, span.begin_s), span.begin_s)
            last = max(last, span.end_s)
    if not begins:
        return extent(spans)
    return sorted(begins.values())[-evaluations:][0], last


def host_is_seen(spans: Sequence[Span], window: Window) -> bool:
    """Whether something that no device does takes long enough in a window to be seen in a picture of it."""
    begin, end = window
    parts = (min(end, s.end_s) - max(begin, s.begin_s) for s in spans if s.backend == HOST_TRACK)
    return any(part > (end - begin) / 400 for part in parts)


def text_of(spans: Sequence[Span], backends: Sequence[str], window: Window) -> str:
    """A summary: how busy each backend was, how much they overlapped, and the newest evaluations drawn as lanes."""
    return "\n".join(_lines(spans, backends, window))


def _lines(spans: Sequence[Span], backends: Sequence[str], window: Window) -> Iterator[str]:
    n_evaluations = len({span.evaluation for span in spans})
    if not n_evaluations:
        yield "timeline: nothing has been evaluated yet"
        return
    yield f"timeline: {_many(n_evaluations, 'evaluation')} in {seconds_text(window[1] - window[0])}"
    width = max(map(len, backends), default=0)
    for name, share in utilization_of(spans, backends, window).items():
        yield f"{name:{width}}  busy {share:6.1%}  {_of_backend([s for s in spans if s.backend == name])}"
    found = counts(spans)
    if len(backends) > 1 and "compute" in found:
        yield str(overlap_of(spans, window))
    waits = [span.duration_s for span in spans if span.kind == "wait"]
    if waits:
        yield f"{_many(len(waits), 'evaluation')} waited for a slot, {seconds_text(statistics.median(waits))} (median)"
    unseen = sum(not span.seen for span in spans if span.kind == "compute")
    if unseen:
        yield f"the ends of {unseen} of {found['compute']} splits are inferred, not seen"
    if "compute" in found:
        yield ""
        yield from _lanes(spans, backends, closeup(spans))


def _many(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _of_backend(spans: Sequence[Span]) -> str:
    computed = [span.duration_s for span in spans if span.kind == "compute"]
    copies = sum(span.kind == "copy" for span in spans)
    parts = [_many(len(computed), "split")]
    if computed:
        parts[0] += f", {seconds_text(statistics.median(computed))} each (median)"
    if copies:
        parts.append(_many(copies, "copy") if copies == 1 else f"{copies} copies")
    return "; ".join(parts)


def _lanes(spans: Sequence[Span], backends: Sequence[str], window: Window) -> Iterator[str]:
    """For each backend a line: the last digit of the evaluation that it worked at."""
    begin, end = window
    step = (end - begin) / WIDTH or 1.0
    width = max(map(len, backends), default=0)
    for name in backends:
        cells = ["·"] * WIDTH
        for span in spans:
            if span.backend == name and span.kind == "compute" and span.end_s > begin:
                first = max(0, round((span.begin_s - begin) / step))
                last = min(WIDTH, max(first + 1, round((span.end_s - begin) / step)))
                cells[first:last] = str(span.evaluation % 10) * max(0, last - first)
        yield f"{name:{width}}  {''.join(cells)}"
    yield f"{'':{width}}  {seconds_text(end - begin)}; digits are evaluations"


# SVG ----------------------------------------------------------------------------------------------

_LEFT, _RIGHT, _LANE, _THIN, _GAP, _AXIS = 96, 64, 26, 7, 9, 26
_SVG_WIDTH = 960


def svg_of(spans: Sequence[Span], backends: Sequence[str], window: Window, busy: Window) -> str:
    """A picture: a lane for each backend, splits as blocks coloured by evaluation, copies as thin bars under them.

    Args:
        spans: what to draw.
        backends: lanes, in order.
        window: what of it to draw.
        busy: what the shares at the right are of.
    """
    begin, end = window
    scale = (_SVG_WIDTH - _LEFT - _RIGHT) / ((end - begin) or 1.0)
    lanes = [*([HOST_TRACK] if host_is_seen(spans, window) else []), *backends]
    pitch = _LANE + _THIN + _GAP
    top = {name: 8 + i * pitch for i, name in enumerate(lanes)}
    bottom = 8 + len(lanes) * pitch
    share = utilization_of(spans, backends, busy)
    body = list(_ticks(end - begin, scale, bottom))
    for name in lanes:
        y = top[name] + _LANE / 2 + 4
        body.append(f'<text x="{_LEFT - 8}" y="{y:g}" text-anchor="end">{escape(name)}</text>')
        if name in share:
            body.append(f'<text x="{_SVG_WIDTH - _RIGHT + 8}" y="{y:g}">{share[name]:.0%}</text>')
    for span in spans:
        if span.end_s >= begin and span.begin_s <= end and span.backend in top:
            body.append(_block(span, begin, end, scale, top[span.backend]))
    size = f'width="{_SVG_WIDTH}" height="{bottom + _AXIS}" viewBox="0 0 {_SVG_WIDTH} {bottom + _AXIS}"'
    style = 'style="max-width:100%;height:auto;font:12px system-ui,sans-serif" fill="currentColor"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {style}>{"".join(body)}</svg>'


def _block(span: Span, begin: float, end: float, scale: float, top: float) -> str:
    left = _LEFT + (max(begin, span.begin_s) - begin) * scale
    width = max(0.6, (min(end, span.end_s) - max(begin, span.begin_s)) * scale)
    thin = is_thin(span)
    y, height = (top + _LANE + 1, _THIN) if thin else (top, _LANE)
    colour = colour_of(span)
    where = f'x="{left:.2f}" y="{y:g}" width="{width:.2f}" height="{height}" rx="2"'
    look = f'fill="{colour}"' if span.seen else f'fill="{colour}" fill-opacity="0.7"'
    label = ""
    if span.kind == "compute" and width >= 8 * len(str(span.evaluation)) + 6:
        at = f'x="{left + width / 2:.2f}" y="{top + _LANE / 2 + 4:g}"'
        label = f'<text {at} text-anchor="middle" fill="#fff">{span.evaluation}</text>'
    return f"<g><title>{escape(title_of(span))}</title><rect {where} {look}/>{label}</g>"


def title_of(span: Span) -> str:
    """What a block shows when one points at it."""
    what = f"evaluation {span.evaluation}"
    if span.split >= 0:
        what += f", split {span.split}: {span.name}"
    else:
        what += f": {span.name}"
    about = f", {span.nbytes} bytes" if span.kind == "copy" else ""
    return f"{what}{about}, {seconds_text(span.duration_s)}{'' if span.seen else ' (its end is inferred)'}"


def tick_step(length: float, most: int = 8) -> float:
    """1, 2 or 5 times a power of ten, so that there are at most so many ticks."""
    step = 1e-12
    while length / step > most:
        for factor in (2.0, 5.0, 10.0):
            if length / (step * factor) <= most:
                return step * factor
        step *= 10.0
    return step


def _ticks(length: float, scale: float, bottom: float) -> Iterator[str]:
    step = tick_step(length)
    for i in range(int(length / step + 1e-9) + 1 if length > 0 else 0):
        x = _LEFT + i * step * scale
        yield f'<path d="M{x:.2f} 4V{bottom}" stroke="currentColor" stroke-opacity="0.15"/>'
        label = "0" if not i else seconds_text(i * step)
        yield f'<text x="{x:.2f}" y="{bottom + 16}" text-anchor="middle" fill-opacity="0.7">{label}</text>'
