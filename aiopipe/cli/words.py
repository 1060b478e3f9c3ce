"""Numbers for people."""

from __future__ import annotations

import math

__all__ = ["number", "percent", "seconds_text"]


def seconds_text(seconds: float) -> str:
    """A duration in three digits: ``"12.3 ms"``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{_three(seconds / factor)} {unit}"
    return f"{_three(seconds * 1e9)} ns" if seconds else "0 s"


def number(value: float) -> str:
    """A rate, in at least three digits: ``"1234"``, ``"0.125"``."""
    return "?" if math.isinf(value) else _three(value)


def percent(share: float) -> str:
    """``"3.4 %"``."""
    return f"{share * 100:.1f} %"


def _three(value: float) -> str:
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
