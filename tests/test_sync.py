"""Use from code that is not asynchronous: `run_sync`, and anyio's blocking portal for what stays open."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio.from_thread
import numpy as np
import pytest

import aiopipe as ap
from models import assert_close, batch, mlp, mlp_params, oracle

ROOT = Path(__file__).resolve().parent.parent
DEVICES = ["cpu:0", "cpu:1"]


async def compute(*seeds: int, n_copies: int = 4) -> list[Any]:
    async with ap.Pipeline(mlp, mlp_params(2), devices=DEVICES, n_copies=n_copies) as pipe:
        return [await pipe(batch(seed=s)) for s in seeds]


def test_it_runs_a_coroutine_function_to_its_end() -> None:
    for _ in range(2):  # one loop after the other
        for s, y in enumerate(ap.run_sync(compute, 0, 1, 2)):
            assert_close(y, oracle(mlp, mlp_params(2), batch(seed=s)))
    (y,) = ap.run_sync(functools.partial(compute, n_copies=1), 0)
    assert_close(y, oracle(mlp, mlp_params(2), batch()))


def test_it_runs_whatever_can_be_awaited() -> None:
    class Later:
        def __init__(self, value: int) -> None:
            self.value = value

        def __await__(self) -> Any:
            yield from asyncio.sleep(0).__await__()
            return self.value

    assert ap.run_sync(Later, 7) == 7
    assert ap.run_sync(lambda: asyncio.sleep(0, "now")) == "now"


def test_it_runs_in_any_thread() -> None:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.extend(ap.run_sync(compute, 0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert len(results) == 3
    for y in results:
        assert_close(y, oracle(mlp, mlp_params(2), batch()))


def test_what_is_raised_comes_out() -> None:
    async def main(what: BaseException) -> None:
        async with ap.Pipeline(mlp, mlp_params(2), devices=DEVICES) as pipe:
            await pipe(batch())
            raise what

    for what in (KeyError("mine"), SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(what)) as caught:
            ap.run_sync(main, what)
        assert caught.value is what


async def test_it_is_refused_where_a_loop_runs() -> None:
    with pytest.raises(ap.WrongLoopError, match=r"`await compute\(\.\.\.\)` instead"):
        ap.run_sync(compute, 0)
    (y,) = await asyncio.to_thread(ap.run_sync, compute, 0)  # in another thread there is room for one
    assert_close(y, oracle(mlp, mlp_params(2), batch()))


def test_a_coroutine_is_refused_in_favour_of_its_function() -> None:
    with pytest.raises(TypeError, match=r"run_sync\(main, x\), not run_sync\(main\(x\)\)"):
        ap.run_sync(compute(0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got 3"):
        ap.run_sync(3)  # type: ignore[arg-type]


# A pipeline that stays open -----------------------------------------------------------------------


def test_a_pipeline_behind_a_portal_serves_several_threads() -> None:
    """And their calls overlap: all slots are in use at the same time."""
    results: dict[int, Any] = {}
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(ap.Pipeline(mlp, mlp_params(2), devices=DEVICES)) as pipe,
    ):

        def client(first: int) -> None:
            for s in range(first, first + 5):
                results[s] = portal.call(pipe, batch(seed=s))

        threads = [threading.Thread(target=client, args=(5 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        state = ap.State(np.zeros(()))
        assert portal.call(pipe.statistics).succeeded == 20
        with pytest.raises(ap.TraceError, match="takes 2 positional arguments"):
            portal.call(functools.partial(pipe, batch(), state=state))
    assert len(results) == 20
    for s, y in results.items():
        assert_close(y, oracle(mlp, mlp_params(2), batch(seed=s)))
    with pytest.raises(ap.BackendClosedError):
        ap.run_sync(pipe, batch())


def test_a_stream_behind_a_portal_is_an_ordinary_iterator() -> None:
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(ap.Pipeline(mlp, mlp_params(2), devices=DEVICES)) as pipe,
    ):
        stream = pipe.stream(batch(seed=s) for s in range(6))
        got = []
        while (y := portal.call(anext, stream, None)) is not None:
            got.append(y)
    for s, y in enumerate(got):
        assert_close(y, oracle(mlp, mlp_params(2), batch(seed=s)))
    assert len(got) == 6


PROGRAM = """
import itertools
import jax, jax.numpy as jnp, numpy as np
import aiopipe as ap

jax.config.update("jax_num_cpu_devices", 2)

async def main():
    w = np.eye(64, dtype=np.float32)
    async with ap.Pipeline(lambda w, x: jnp.sort(x @ w), w, devices=["cpu:0", "cpu:1"]) as pipe:
        async for _ in pipe.stream(np.full((64, 64), i, np.float32) for i in itertools.count()):
            print("ready", flush=True)

ap.run_sync(main)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to one process there")
def test_ctrl_c_ends_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)" + PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=40)
    assert process.returncode == -signal.SIGINT and stderr.rstrip().endswith("KeyboardInterrupt")
