"""JAX's persistent compilation cache is used: a second process compiles nothing anew."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import asyncio, collections, json, sys
import jax, jax.monitoring
import jax.numpy as jnp
import numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name.rpartition("/")[2]]))
import aiopipe as ap

def model(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x

async def main():
    params = [np.full((8 + i, 9 + i), 0.1, np.float32) for i in range(4)]
    async with ap.Pipeline(model, params, devices=["cpu:0", "cpu:1"]) as pipe:
        y = await pipe(np.ones((2, 8), np.float32))
        return {"sum": float(np.asarray(y).sum()), "compiled": pipe.statistics().compiled}

print(json.dumps({**asyncio.run(main()), "hits": counts["cache_hits"], "misses": counts["cache_misses"]}))
"""


def run(cache: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(cache)], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_finds_every_split_in_the_cache(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path)
    assert first["compiled"] == second["compiled"] == 2
    assert first["misses"] >= 2 and first["hits"] == 0
    assert second["hits"] >= 2 and second["misses"] == 0
    assert first["sum"] == second["sum"]
