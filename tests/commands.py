"""The command line, called as a user would: in this process where that is enough, else in one of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typer.testing import CliRunner

import aiopipe as ap
from aiopipe.cli.app import app
from aiopipe.devices.sim import Cluster

ROOT = Path(__file__).resolve().parent.parent

MODEL = '''
"""What a user has: a function, its weights, an input."""

import jax
import jax.numpy as jnp
import numpy as np


def model(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


params = [np.eye(64, dtype=np.float32) for _ in range(8)]
batch = np.ones((4, 64), np.float32)


def init():
    return [jax.random.normal(jax.random.key(i), (64, 64)) for i in range(8)]


def pair(params, batch):
    return {"sum": model(params, batch["x"]) + batch["y"]}


def step(params, cache, x):
    cache = cache + x
    return model(params, cache), cache


def breaks(params, x):
    return x @ params[0].T[:3]


def fails(params, x):
    def no(x):
        raise RuntimeError("the camera is off")

    return model(params, jax.pure_callback(no, x, x))
'''


def save_timeline(path: Path) -> None:
    """What two simulated devices did, the second half as long as the first: the same in every run."""
    graph = ap.trace(lambda w, x: x @ w @ w @ w, np.ones((64, 64), np.float32), np.ones((4, 64), np.float32))
    cluster = Cluster(2, node_cost_s=1e-3, link_bytes_per_s=1e6)

    async def main() -> None:
        async with ap.Scheduler(cluster.backends, n_copies=4, timeline=True) as sched:
            sched.set_cut(graph, [0, 0, 1])
            async for _ in sched.stream(graph, [np.ones((4, 64), np.float32)] * 10):
                pass
            assert sched.timeline is not None
            sched.timeline.save(path)

    ap.run_sync(main)


class Answer(NamedTuple):
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its standard output, which is one JSON object and nothing else."""
        return json.loads(self.out)


def call(*argv: str, code: int = 0) -> Answer:
    """A command in this process; it must end with that exit code."""
    done = CliRunner().invoke(app, list(argv))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, f"{done.exit_code}: {done.output}"
    assert "Traceback" not in done.stderr
    return Answer(done.exit_code, done.stdout, done.stderr)


def environment() -> dict[str, str]:
    """What a process needs to find this aiopipe, wherever it runs."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}


def run(*argv: str, folder: Path, code: int = 0, python: Sequence[str] = (sys.executable, "-W", "error")) -> Answer:
    """A command in a process of its own, with warnings as errors."""
    done = subprocess.run(
        [*python, "-m", "aiopipe", *argv],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
    return Answer(done.returncode, done.stdout, done.stderr)


def interrupted(*argv: str, folder: Path, when: str) -> Answer:
    """A command that gets Ctrl-C when a line of its standard error has a certain text."""
    process = subprocess.Popen(
        # Children of a background job ignore SIGINT.
        [sys.executable, "-c", _AS_AIOPIPE, *argv],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = []
    try:
        for line in process.stderr:
            seen.append(line)
            if when in line:
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    return Answer(process.returncode, out, "".join(seen) + err)


_AS_AIOPIPE = (
    "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('aiopipe', run_name='__main__')"
)
