"""Ctrl-C, and programs that end without closing: each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to one process there")

ENDS_WITHIN_S = 10.0
"""Far more than it takes, so that a busy machine makes no difference."""

HANGS_AFTER_S = 40

PRELUDE = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1)  # to see where it hangs
signal.signal(signal.SIGINT, signal.default_int_handler)  # children of a background job ignore it
"""

BAD_SIGNS = ("Exception in thread", "Exception ignored", "Fatal Python error", "terminate called", "never retrieved")


def interrupt(code: str, *, presses: int = 1) -> tuple[int, str, float]:
    """Run a program until it prints "ready", then press Ctrl-C.

    Returns:
        Its exit code, what it wrote to stderr, and how long it took to end.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            process.kill()
            pytest.fail(f"it never was ready: {process.communicate()[1]}", pytrace=False)
        began = time.monotonic()
        for press in range(presses):
            time.sleep(0.1 * press)  # signals that come too close to each other are one
            process.send_signal(signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=HANGS_AFTER_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            process.kill()
            pytest.fail(f"it hangs: {process.communicate()[1]}", pytrace=False)
        took = time.monotonic() - began
    finally:
        process.kill()
        process.communicate()
    print(f"ended after {took:.2f} s")
    return process.returncode, stderr, took


# The example, which promises to end soon and quietly ---------------------------------------------

DEMO = """
import functools, os, sys
import embed
from minilm import text
from aiopipe import Pipeline
from aiopipe.devices.xla import XlaBackend

text.batches = functools.partial(text.batches, lengths=(64, 128))  # so that it soon streams
stream, load = Pipeline.stream, XlaBackend.load

async def announced_stream(self, batches):
    n = 0
    async for result in stream(self, batches):
        n += 1
        if n == 3:
            print("ready", flush=True)
        yield result

def announced_load(self, program):
    os.write(1, b"ready\\n")  # in one go: several threads compile
    return load(self, program)

{hook}
sys.exit(embed.main(["--devices", "cpu:0,cpu:1"]))
"""


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize(
    "hook",
    [
        pytest.param("Pipeline.stream = announced_stream", id="streaming"),
        pytest.param("XlaBackend.load = announced_load", id="compiling"),
    ],
)
def test_ctrl_c_ends_the_example_soon_and_quietly(hook: str, presses: int) -> None:
    code, stderr, took = interrupt(DEMO.format(hook=hook), presses=presses)
    assert code == 130
    assert stderr.count("interrupted\n") == 1
    assert "Traceback" not in stderr
    assert not [sign for sign in BAD_SIGNS if sign in stderr]
    assert took < ENDS_WITHIN_S


# Programs that take no precautions ---------------------------------------------------------------

PROGRAM = """
import asyncio, itertools, os
import jax, jax.numpy as jnp, numpy as np
import aiopipe as ap

jax.config.update("jax_num_cpu_devices", 2)
N_OPS = {n_ops}

def model(w, x):
    for i in range(N_OPS):
        x = jnp.sort(jnp.tanh(x @ w) + i, axis=0)
    return x

w = np.eye(128, dtype=np.float32)
endless = (np.full((128, 128), i, np.float32) for i in itertools.count())
pipe = ap.Pipeline(model, w, devices=["cpu:0", "cpu:1"])

async def stream():
    n = 0
    async for _ in pipe.stream(endless):
        n += 1
        if n == 5:
            print("ready", flush=True)

async def main():
    async with pipe:
        await stream()

async def never_closed():
    await pipe.__aenter__()
    await stream()

async def returns_without_closing():
    await pipe.__aenter__()
    running = [await pipe.submit(next(endless)) for _ in range(4)]
    print("ready", flush=True)

async def compiles():
    from aiopipe.devices.xla import XlaBackend
    load = XlaBackend.load
    def announced(self, program):
        os.write(1, b"ready\\n")  # in one go: several threads compile
        return load(self, program)
    XlaBackend.load = announced
    await main()

{run}
"""

RUNS = {
    "asyncio.run": "asyncio.run(main())",
    "never closed": "asyncio.run(never_closed())",
    # Nothing is cancelled and nothing awaited here: the loop is broken off in the middle.
    "broken off": "asyncio.new_event_loop().run_until_complete(main())",
}


@pytest.mark.parametrize("run", RUNS)
def test_ctrl_c_ends_any_program_that_streams(run: str) -> None:
    code, stderr, took = interrupt(PROGRAM.format(n_ops=20, run=RUNS[run]))
    assert code == -signal.SIGINT
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert not [sign for sign in BAD_SIGNS if sign in stderr]
    assert took < ENDS_WITHIN_S


def test_ctrl_c_while_compiling_waits_for_the_compiler_only() -> None:
    """Nothing can stop XLA's compiler, and leaving without it crashes: the process ends when it has ended."""
    code, stderr, _ = interrupt(PROGRAM.format(n_ops=20, run="asyncio.run(compiles())"))
    assert code == -signal.SIGINT
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert not [sign for sign in BAD_SIGNS if sign in stderr]


def test_a_program_that_ends_without_closing_ends_well() -> None:
    program = PROGRAM.format(n_ops=20, run="asyncio.run(returns_without_closing())")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    assert not [sign for sign in BAD_SIGNS if sign in done.stderr]
