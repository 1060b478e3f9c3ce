"""``/live``: what the devices do, a few times a second, as events for the page."""

from __future__ import annotations

import time
from asyncio import sleep
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request

import aiopipe as ap

from .answers import Events, event
from .errors import ApiError
from .limits import Limits

__all__ = ["Live", "Source"]

PERIOD_S = 0.2
LOOK_BACK_S = 2.0
"""How long ago an evaluation may have ended to be noticed; longer than the loop is ever held up."""

MOST = 400
"""Splits of one event. Where more ran, the newest are shown: nobody can see thousands a second."""

KEPT = 16
"""Events that are kept for whoever reads slowly."""

WATCH_S = 3600.0
"""After so long a page has to ask again, which browsers do by themselves."""


class Source(NamedTuple):
    """A scheduler that is watched.

    Attributes:
        name: of what it computes.
        recent: what ended within the last so many seconds.
    """

    name: str
    recent: Callable[[float], Iterable[ap.Span]]


class _Seen:
    """Which evaluations have been told of already."""

    def __init__(self) -> None:
        self._ids: dict[int, None] = {}

    def new(self, spans: Iterable[ap.Span]) -> list[ap.Span]:
        """Splits of evaluations that were not among those of the last time."""
        splits = [span for span in spans if span.kind == "compute"]
        found = [span for span in splits if span.evaluation not in self._ids]
        self._ids = dict.fromkeys(span.evaluation for span in splits)
        return found


class Live:
    """The address, and what is sent from it. Whoever watches shares one look at the devices in each period.

    Args:
        sources: who computes.
        backends: names of the devices, in order.
        state: what else there is to tell, such as how much waits.
        limits: how many may watch.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        backends: Sequence[str],
        state: Callable[[], Mapping[str, Any]],
        limits: Limits,
    ) -> None:
        self._sources = sources
        self._backends = list(backends)
        self._state = state
        self._limits = limits
        self._seen = [_Seen() for _ in sources]
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._n = 0
        self._looked_s = 0.0
        self._watchers = 0
        self._closing = False

    async def live(self, request: Request) -> Events:
        """``GET /live``"""
        if self._watchers >= self._limits.watchers or self._closing:
            message = f"{self._watchers} pages watch already."
            raise ApiError(503, message, kind="overloaded_error", code="too_many_watchers", retry_after_s=10)
        return Events(self._events(), WATCH_S)

    def close(self) -> None:
        """End what is sent."""
        self._closing = True

    async def _events(self) -> AsyncGenerator[bytes, None]:
        self._watchers += 1
        try:
            n = self._n
            yield event({"backends": self._backends, "sources": [source.name for source in self._sources]})
            while not self._closing:
                await sleep(PERIOD_S)
                self._look()
                for i, data in list(self._kept):
                    if i > n:
                        n = i
                        yield data
        finally:
            self._watchers -= 1

    def _look(self) -> None:
        """Make an event of what has happened, unless somebody just did."""
        now = time.perf_counter()
        if now - self._looked_s < 0.75 * PERIOD_S:
            return
        self._looked_s = now
        found = []
        for i, (source, seen) in enumerate(zip(self._sources, self._seen, strict=True)):
            for span in seen.new(source.recent(LOOK_BACK_S)):
                begin_s, end_s = round(span.begin_s, 5), round(span.end_s, 5)
                found.append([i, span.evaluation, span.split, span.backend, begin_s, end_s])
        found.sort(key=lambda span: span[5])
        self._n += 1
        self._kept.append((self._n, event({"now": round(now, 5), "spans": found[-MOST:], **self._state()})))
