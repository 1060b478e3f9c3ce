"""Memory after many evaluations: resident bytes must not grow with their number.

    python benchmarks/memory.py [--evaluations 100000]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
from typing import Any

from _common import Check, finish, make_model, progress, start_jax

import aiopipe as ap


def resident_nbytes() -> int:
    """Resident set of this process, in bytes (Linux)."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure(specs: list[str], evaluations: int) -> dict[str, Any]:
    import jax

    model, params, x = make_model("tiny", len(specs))
    async with ap.Pipeline(model, params, devices=specs, n_copies=4, split=[1] * len(specs)) as pipe:

        async def run(n: int) -> tuple[int, int]:
            async for _ in pipe.stream(itertools.repeat(x, n)):
                pass
            gc.collect()
            return resident_nbytes(), len(jax.live_arrays())

        await run(1000)  # allocators and caches settle
        after_few, live_few = await run(1000)
        progress(f"{after_few / 1e6:.1f} MB after 1,000 evaluations")
        after_many, live_many = await run(evaluations)
        progress(f"{after_many / 1e6:.1f} MB after {evaluations:,} evaluations")
    return {
        "rss_ratio": round(after_many / after_few, 4),
        "live_arrays": [live_few, live_many],
        "rss_mb": [round(after_few / 1e6, 1), round(after_many / 1e6, 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--evaluations", type=int, default=100_000)
    args = parser.parse_args()
    specs = args.devices.split(",")
    start_jax(specs)
    result = asyncio.run(measure(specs, args.evaluations))
    what = f"resident memory after {args.evaluations:,} evaluations / after 1,000"
    check = Check(what, result["rss_ratio"], "<=", 1.01)
    finish({"benchmark": "memory", "evaluations": args.evaluations, **result}, [check])


if __name__ == "__main__":
    main()
