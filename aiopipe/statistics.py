"""Counts and busy times, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _threads
from .backend import Backend
from .sched.split import Split

__all__ = ["BusyClock", "Statistics"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a scheduler has done so far.

    Attributes:
        submitted, admitted, succeeded, failed, cancelled, aborted: evaluations.
        in_flight: evaluations that hold a slot now.
        waiting: evaluations that wait for a slot now.
        n_copies: how many slots there are.
        plans: graphs that are loaded.
        planned: how often a graph was planned.
        replanned: how often that was again, because pins changed, or after `Scheduler.reset`. (Other shapes
            are another graph: they are planned, not planned again.)
        compiled: executables that were compiled.
        copied_weights_nbytes: bytes of weights that were copied to a backend when a plan was made.
        busy: backend name -> share of time busy, from the first launch to the last end (needs ``timeline=True``).
        busy_s: the same in seconds.
    """

    submitted: int
    admitted: int
    succeeded: int
    failed: int
    cancelled: int
    aborted: int
    in_flight: int
    waiting: int
    n_copies: int
    plans: int
    planned: int
    replanned: int
    compiled: int
    copied_weights_nbytes: int
    busy: Mapping[str, float] = field(default_factory=dict)
    busy_s: Mapping[str, float] = field(default_factory=dict)


class BusyClock:
    """Adds up how long each backend computed.

    A split is taken to run from its launch to its end, but not before the splits that it depends on
    have ended, nor the split before it on its backend: devices work in order. Times are those at
    which a completion thread noticed an end, so they are upper bounds by some microseconds.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._lock = _threads.Lock()  # completion threads and the loop report at the same time
        self._busy = dict.fromkeys(names, 0.0)
        self._last_end = dict.fromkeys(names, float("-inf"))
        self._began = float("inf")
        self._ended = float("-inf")

    def watch(
        self, backend: Backend, split: Split, marker: Any, began: float, ends: dict[int, float]
    ) -> None:
        """Count a split that was launched at `began`, once its marker is ready.

        Args:
            backend: what it runs on.
            split: which one.
            marker: one of its results.
            began: when it was launched, by the backend's clock.
            ends: when the splits of its evaluation ended; its own end is added.
        """

        def ended(_: BaseException | None) -> None:
            now = ends[split.index] = backend.now()
            start = max([began, *(ends[d] for d in split.depends if d in ends)])
            self._ran(backend.name, start, now)

        if backend.all_ready((marker,)):
            ended(None)
        else:
            backend.notify((marker,), ended)

    def _ran(self, name: str, began: float, ended: float) -> None:
        with self._lock:
            start = max(began, self._last_end[name])
            self._last_end[name] = max(ended, self._last_end[name])
            self._busy[name] += max(0.0, ended - start)
            self._began = min(self._began, began)
            self._ended = max(self._ended, ended)

    def reset(self) -> None:
        """Count from now on."""
        with self._lock:
            self._busy = dict.fromkeys(self._busy, 0.0)
            self._began, self._ended = float("inf"), float("-inf")

    def seconds(self) -> dict[str, float]:
        """Busy seconds of each backend."""
        with self._lock:
            return dict(self._busy)

    def shares(self) -> dict[str, float]:
        """Busy share of each backend over the whole time."""
        with self._lock:
            span = self._ended - self._began
            return {name: busy / span if span > 0 else 0.0 for name, busy in self._busy.items()}
