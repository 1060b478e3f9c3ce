"""How far long work is: its pace, and a line of text for people. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Look", "Pace", "amount_text", "line_of", "span_text"]

PACE_S = 10.0
"""The pace is that of the last so many seconds."""


@dataclass(frozen=True, slots=True)
class Look:
    """How far it is at one moment.

    Attributes:
        what: what is being done.
        done: how much of it.
        total: of how much; None where nobody knows.
        took_s: seconds since it began.
        rate: how much is done in a second, lately; None where nothing can be said yet.
        in_flight, n_copies, waiting: evaluations that have a slot, how many slots there are, evaluations without one;
            None where there is no scheduler to ask.
        busy: device -> the share of the last seconds in which it computed.
    """

    what: str
    done: int
    total: int | None
    took_s: float
    rate: float | None = None
    in_flight: int | None = None
    n_copies: int | None = None
    waiting: int | None = None
    busy: Mapping[str, float] = field(default_factory=dict)

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest takes at this pace; None where that cannot be said."""
        return None if self.total is None or not self.rate else max(0, self.total - self.done) / self.rate


class Pace:
    """How fast something gets on.

    Args:
        began: when it did, in seconds of some clock.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self._known: deque[tuple[float, int]] = deque([(began, 0)])

    def rate(self, now: float, done: int) -> float | None:
        """So much is done in a second, in the last ten or since the step before; None before the first step."""
        known = self._known
        if done < known[-1][1]:  # something else has begun, under the same name: the next shape is compiled
            known = self._known = deque([(known[-1][0], 0)])
        while len(known) > 1 and known[1][0] <= now - PACE_S and known[1][1] != done:
            known.popleft()
        then, before = known[0]
        if done != known[-1][1] and now > known[-1][0]:
            known.append((now, done))
        return (done - before) / (now - then) if now > then and done else None


def amount_text(value: float) -> str:
    """A number for people: ``"12,345"``, ``"56.3"``, ``"0.07"``."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def span_text(seconds: float) -> str:
    """A time for people: ``"0.4 s"``, ``"12 s"``, ``"3:05"``, ``"1:02:00"``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def line_of(look: Look, *, over: bool = False) -> str:
    """One line of text, without its end.

    Args:
        look: what there is to say.
        over: it is over: how long it took is of interest, not what is in flight.
    """
    parts = [_amounts(look)]
    if over:
        parts.append(f"in {span_text(look.took_s)}")
        if look.done and look.took_s > 0:
            parts.append(f"{amount_text(look.done / look.took_s)} a second")
    else:
        if look.rate is not None:
            parts.append(f"{amount_text(look.rate)} a second")
        if look.left_s is not None:
            parts.append(f"{span_text(look.left_s)} left")
        if look.in_flight is not None:
            parts.append(flight_text(look))
    if look.busy:
        parts.append("busy: " + ", ".join(f"{name} {share:.0%}" for name, share in look.busy.items()))
    return f"{look.what}: {'; '.join(parts)}"


def flight_text(look: Look) -> str:
    """``"3 of 4 in flight, 2 waiting"``"""
    waiting = f", {look.waiting} waiting" if look.waiting else ""
    return f"{look.in_flight} of {look.n_copies} in flight{waiting}"


def _amounts(look: Look) -> str:
    if look.total is None:
        return f"{look.done:,} done"
    share = f" ({look.done / look.total:.0%})" if look.total and look.done < look.total else ""
    return f"{look.done:,} of {look.total:,}{share}"
