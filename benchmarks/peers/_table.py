"""From seconds to what is printed: ratios, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def ratios(seconds: Mapping[str, Sequence[float]], name: str, yardstick: str) -> list[float]:
    """One for each round that both took part in: seconds for an evaluation over the yardstick's."""
    return [own / other for own, other in zip(seconds[name], seconds[yardstick], strict=False)]


def summary(seconds: Mapping[str, Sequence[float]], yardstick: str) -> dict[str, dict[str, Any]]:
    """Median, lowest and highest ratio, that of the best times, and the median time, of every peer.

    Where other programs disturb the rounds, the best times of a peer and the yardstick are the least disturbed.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, times in seconds.items():
        found[name] = {"ms_per_evaluation": _digits(statistics.median(times) * 1e3)}
        if seconds.get(yardstick):
            of_rounds = sorted(ratios(seconds, name, yardstick))
            found[name] |= {
                "ratio": _digits(statistics.median(of_rounds)),
                "lowest": _digits(of_rounds[0]),
                "highest": _digits(of_rounds[-1]),
                "best": _digits(min(times) / min(seconds[yardstick])),
            }
    return found


def _digits(value: float) -> float:
    """Three digits that count."""
    return float(f"{value:.3g}")


COLUMNS = ("peer", "ratio", "lowest to highest", "best", "ms", "passages/s", "cores", "idle cores", "max error")


def table(peers: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each peer; what failed says why."""

    def cell(value: Any) -> str:
        return "" if value is None else value if isinstance(value, str) else f"{value:g}"

    rows = []
    for name, peer in peers.items():
        span = f"{peer['lowest']:g} to {peer['highest']:g}" if "lowest" in peer else None
        keys = ("best", "ms_per_evaluation", "passages_per_s", "cores", "idle_cores", "max_abs_err")
        rows.append([name, *map(cell, (peer.get("ratio"), span, *map(peer.get, keys)))])
    shown = [i for i in range(len(COLUMNS)) if i == 0 or any(row[i] for row in rows)]
    widths = {i: max(len(COLUMNS[i]), *(len(row[i]) for row in rows)) for i in shown}

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cells[i].rjust(widths[i]) if i else cells[i].ljust(widths[i]) for i in shown).rstrip()

    lines = [line(COLUMNS)]
    for row, peer in zip(rows, peers.values(), strict=True):
        lines.append(f"{row[0].ljust(widths[0])}  failed: {peer['failed']}" if "failed" in peer else line(row))
    return "\n".join(lines)
