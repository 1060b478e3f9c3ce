"""What `soak.py` looks at while it runs and at the end: memory, threads, descriptors, how late the event loop comes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import jax

RSS_SLACK = 48 << 20
FLOOR_SLACK = 4
"""The threads of a pipeline that is being closed and opened again just then; a leak leaves as many each time."""

LAG_P99_S = 0.05
"""More than that of a bare loop: some twenty tasks have their turns in between, some hundred microseconds each."""

TICK_S = 0.005
BARE = f"""
import asyncio, json, time
async def main():
    lags, until = [], time.monotonic() + float(input())
    while time.monotonic() < until:
        began = time.monotonic()
        await asyncio.sleep({TICK_S})
        lags.append(time.monotonic() - began - {TICK_S})
    print(json.dumps(lags))
asyncio.run(main())
"""


class Sample(NamedTuple):
    """What there is at some moment."""

    rss_nbytes: int
    threads: int
    files: int


def rss_nbytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def n_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def own_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("aiopipe-"))


def late(lags: Iterable[float]) -> dict[str, float]:
    """How late a loop came back, in milliseconds."""
    ordered = sorted(lags) or [0.0]
    return {
        name: round(1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }


def _floor(counts: Iterable[int]) -> int:
    """What nine of ten samples reach."""
    ordered = sorted(counts)
    return ordered[len(ordered) // 10]


class Load(Protocol):
    """Who keeps the loop at work."""

    @property
    def flooded(self) -> bool: ...

    def over(self) -> bool: ...


class Watch:
    """Looks from before anything is made until all of it should be gone.

    Args:
        seconds: how long that will take.
    """

    def __init__(self, seconds: float) -> None:
        self._lags = array("d"), array("d")  # while there is time, and while everybody sends
        self._n = 0
        self._samples: list[Sample] = []
        self._arrays, self._files = len(jax.live_arrays()), n_files()
        self._bare = subprocess.Popen(
            [sys.executable, "-c", BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._bare.stdin is not None
        self._bare.stdin.write(f"{seconds}\n")
        self._bare.stdin.flush()

    async def look(self, load: Load) -> None:
        """How late the loop comes back, and what there is by then."""
        while not load.over():
            flooded, began = load.flooded, time.monotonic()
            await asyncio.sleep(TICK_S)
            self._lags[flooded or load.flooded].append(time.monotonic() - began - TICK_S)
            self._n += 1
            if self._n % 100 == 0:
                self._samples.append(Sample(rss_nbytes(), len(own_threads()), n_files()))

    def end(self, counts: dict[str, int], wrong: list[str]) -> dict[str, Any]:
        """What was found; `wrong` gets what should not be, and is empty where all is well."""
        bare = json.loads(self._bare.communicate()[0])
        gc.collect()
        deadline = time.monotonic() + 5.0
        while own_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        if own_threads():
            wrong.append(f"threads are left: {own_threads()}")
        arrays, files = len(jax.live_arrays()) - self._arrays, n_files() - self._files
        if arrays > 0:
            wrong.append(f"{arrays} arrays are left")
        if files > 0:
            wrong.append(f"{files} file descriptors are left")
        ours, theirs = late(self._lags[False]), late(bare)
        if ours["p99"] > theirs["p99"] + 1e3 * LAG_P99_S:
            wrong.append(f"the event loop came back {ours['p99']} ms late (p99), a bare one {theirs['p99']} ms")
        return {
            "counts": dict(sorted(counts.items())),
            "loop_lag_ms": ours,
            "bare_loop_lag_ms": theirs,
            "flooded_loop_lag_ms": late(self._lags[True]),
            **self._flatness(wrong),
            "wrong": wrong,
        }

    def _flatness(self, wrong: list[str]) -> dict[str, Any]:
        """The first half compiles and fills caches; in the second nothing may grow."""
        middle = len(self._samples) // 2
        first, second = self._samples[:middle], self._samples[middle:]
        if len(first) < 3:
            return {}
        grown = max(s.rss_nbytes for s in second[-3:]) - min(s.rss_nbytes for s in second[:3])
        if grown > RSS_SLACK:
            wrong.append(f"memory grew by {grown >> 20} MiB in the second half")
        # Some come and go, so the most that there were is chance. What leaks is there all the time; but at first
        # not everything is open.
        halves = {
            "threads": [_floor(s.threads for s in part) for part in (first[middle // 2 :], second)],
            "files": [_floor(s.files for s in part) for part in (first[middle // 2 :], second)],
        }
        wrong += [
            f"{name} grew: {a} nearly all the time in the second quarter, {b} in the second half"
            for name, (a, b) in halves.items()
            if b > a + FLOOR_SLACK
        ]
        shown = [self._samples[i * (len(self._samples) - 1) // 8].rss_nbytes >> 20 for i in range(9)]
        return {"rss_mib_over_time": shown, **{f"{name}_nearly_always": pair for name, pair in halves.items()}}
