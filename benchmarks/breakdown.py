"""Where one evaluation's time goes: tiny stages, phase by phase.

    python benchmarks/breakdown.py [--devices cpu:0,cpu:1] [--dispatch auto|shared|own]

aiopipe's own functions are wrapped with timers that subtract what their callees take. The timers
cost something themselves, so the sum exceeds what `overhead.py` measures: look at the shares.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from _common import WINDOW, finish, hand_written, make_model, progress, start_jax, windowed

import aiopipe as ap
from aiopipe import run, runner
from aiopipe.devices.xla import XlaBackend
from aiopipe.loaded import Loaded
from aiopipe.mailbox import Mailbox
from aiopipe.sched.state import RunState

SPENT: dict[str, float] = defaultdict(float)
CALLS: dict[str, int] = defaultdict(int)
_stack = threading.local()


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its own time added to `SPENT[name]`."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        stack = _stack.__dict__.setdefault("children", [])
        stack.append(0.0)
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            took = time.perf_counter() - began
            SPENT[name] += took - stack.pop()
            CALLS[name] += 1
            if stack:
                stack[-1] += took

    return wrapper


switch = {"on": False}


def switched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, timed once the switch is on: a runner keeps some of them when it is made."""
    with_timer = timed(name, function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return (with_timer if switch["on"] else function)(*args, **kwargs)

    return wrapper


PHASES: list[tuple[str, Any, str]] = [
    ("run state: decide", RunState, "handle"),
    ("capture inputs", Loaded, "capture"),
    ("hand values to the next device", XlaBackend, "transfer"),
    ("look whether results are ready", XlaBackend, "all_ready"),
    ("look for errors", XlaBackend, "error_of"),
    ("ask for a call when ready", XlaBackend, "notify"),
    ("build the result", Loaded, "result"),
    ("prepare launches", run, "launch_splits"),
    ("carry out instructions", runner.Runner, "_feed"),
    ("wake the loop", Mailbox, "post"),
]


async def measure(specs: list[str], devices: list[Any], dispatch: Any, evaluations: int) -> dict[str, Any]:
    model, params, x = make_model("tiny", len(specs))
    chain = hand_written("tiny", params, devices)
    backends = [ap.open_backend(spec, dispatch=dispatch) for spec in specs]
    for name, owner, attribute in PHASES:
        setattr(owner, attribute, switched(name, getattr(owner, attribute)))
    async with ap.Pipeline(model, params, devices=backends, n_copies=WINDOW, split=[1] * len(specs)) as pipe:
        loaded = pipe.scheduler._plans.get((await pipe.plan(x)).graph)
        assert loaded is not None

        async def stream() -> float:
            began = time.perf_counter()
            async for _ in pipe.stream(itertools.repeat(x, evaluations)):
                pass
            return (time.perf_counter() - began) / evaluations

        await stream()
        bare = min([await stream() for _ in range(3)])
        began = time.perf_counter()
        for _ in windowed(chain, itertools.repeat(x, evaluations)):
            pass
        loop = (time.perf_counter() - began) / evaluations
        switch["on"] = True
        for split in loaded.splits:
            split.call = timed("compiled calls", split.call)
        SPENT.clear()
        CALLS.clear()
        total = await stream()
    for backend in backends:
        await backend.aclose()
    table = {name: spent / evaluations * 1e6 for name, spent in SPENT.items()}
    table["asyncio, stream, pipeline"] = total * 1e6 - sum(table.values())
    for name, us in sorted(table.items(), key=lambda item: -item[1]):
        progress(f"  {name:34} {us:7.2f} us  {CALLS[name] / evaluations:5.1f} calls")
    return {
        "devices": len(specs),
        "dispatch": dispatch,
        "inline": loaded.inline,
        "us": {name: round(us, 2) for name, us in table.items()},
        "share_of_loop": {name: round(us / 1e6 / loop, 3) for name, us in table.items()},
        "total_us": round(total * 1e6, 1),
        "without_timers_us": round(bare * 1e6, 1),
        "hand_written_loop_us": round(loop * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0,cpu:1", help="specs, comma-separated")
    parser.add_argument("--dispatch", default="auto", choices=["auto", "shared", "own"])
    parser.add_argument("--evaluations", type=int, default=3000)
    args = parser.parse_args()
    specs = args.devices.split(",")
    result = asyncio.run(measure(specs, start_jax(specs), args.dispatch, args.evaluations))
    finish({"benchmark": "breakdown", **result})


if __name__ == "__main__":
    main()
