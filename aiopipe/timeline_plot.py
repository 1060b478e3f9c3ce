"""Timelines as pictures in files, by matplotlib (extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .spans import HOST_TRACK, Span, Window, overlap_of, utilization_of
from .timeline_draw import CAPTURE, COLOURS, WAIT, colour_of, host_is_seen, is_thin, seconds_text, tick_step

__all__ = ["plot"]

LANE, THIN, PITCH = 0.62, 0.13, 1.0
"""Heights: of a lane's blocks, of the bars under them, from lane to lane."""


def plot(spans: Sequence[Span], backends: Sequence[str], window: Window, busy: Window, path: Path) -> None:
    """Draw what is in a window; `Timeline.plot` documents it.

    Args:
        spans: of the whole timeline.
        backends: lanes, from the top.
        window: what to draw.
        busy: what the shares at the right are of.
        path: where to.
    """
    begin, end = window
    shown = [s for s in spans if s.end_s >= begin and s.begin_s <= end]
    lanes = [*backends, *([HOST_TRACK] if host_is_seen(shown, window) else [])]
    figure = Figure(figsize=(13, 1.5 + 0.62 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    scale, unit = _unit(end - begin)
    width = (end - begin) * scale or 1.0
    for span in shown:
        if span.backend in lanes:
            _draw(axes, span, lanes.index(span.backend), begin, scale, width)
    _dress(axes, lanes, width, unit)
    for name, share in utilization_of(spans, backends, busy).items():
        axes.text(width * 1.008, lanes.index(name) + LANE / 2, f"{share:.0%}", va="center", fontsize=11)
    overlap = overlap_of(spans, busy)
    n = len({s.evaluation for s in shown})
    title = f"{n} evaluations, {seconds_text(end - begin)}"
    if len(backends) > 1:
        title += f"; two or more at once for {overlap.share:.0%} of the busy time, {overlap.mean_busy:.2f} on average"
    axes.set_title(title, loc="left", fontsize=11)
    kinds = {span.kind for span in shown if span.backend in lanes}
    legend = [Patch(facecolor=COLOURS[0], label="split, coloured and numbered by evaluation")]
    if not all(span.seen for span in shown):
        inferred = Patch(facecolor=COLOURS[0], alpha=0.65, hatch="////", edgecolor="white", label="its end is inferred")
        legend.append(inferred)
    legend += [Patch(facecolor=COLOURS[0], alpha=0.55, label="copies to the device (thin)")] * ("copy" in kinds)
    legend += [Patch(facecolor=CAPTURE, label="capture of inputs")] * ("capture" in kinds)
    legend += [Patch(facecolor=WAIT, label="waits for a slot (thin)")] * ("wait" in kinds)
    figure.legend(handles=legend, loc="outside lower left", ncols=len(legend), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _unit(length: float) -> tuple[float, str]:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if length * factor >= 2.0:
            return factor, unit
    return 1e9, "ns"


def _draw(axes: Axes, span: Span, lane: int, begin: float, scale: float, width: float) -> None:
    thin = is_thin(span)
    left = max(0.0, (span.begin_s - begin) * scale)
    right = min(width, (span.end_s - begin) * scale)
    where = (left, lane + LANE + 0.03) if thin else (left, lane)
    look: dict[str, object] = {"facecolor": colour_of(span), "edgecolor": "white", "linewidth": 0.6}
    if thin:
        look |= {"alpha": 0.75, "linewidth": 0.0}
    elif not span.seen:
        look |= {"alpha": 0.65, "hatch": "////"}
    size = max(right - left, width / 1500)
    axes.broken_barh([(left, size)], (where[1], THIN if thin else LANE), **look)  # type: ignore[arg-type]
    label = str(span.evaluation)
    if span.kind == "compute" and size > width * (0.006 + 0.007 * len(label)):
        middle = (left + size / 2, lane + LANE / 2)
        axes.text(*middle, label, ha="center", va="center", color="white", fontsize=9.5, fontweight="bold")


def _dress(axes: Axes, lanes: Sequence[str], width: float, unit: str) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(len(lanes) * PITCH - 0.1, -0.12)
    axes.set_yticks([i + LANE / 2 for i in range(len(lanes))], lanes, fontsize=11)
    step = tick_step(width, 12)
    axes.set_xticks([i * step for i in range(int(width / step + 1e-9) + 1)])
    axes.set_xlabel(unit, loc="right")
    axes.tick_params(length=0)
    axes.grid(axis="x", color="#000000", alpha=0.12)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
