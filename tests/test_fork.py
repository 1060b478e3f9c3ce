"""Forked processes: what was open belongs to the parent, which goes on; the child is told so and does not hang.

In processes of their own, as pytest's has threads of its own. Every child has an alarm that kills it if it hangs.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

import aiopipe as ap
from aiopipe import _jax
from processes import run_script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

BEGIN = """
import asyncio, gc, multiprocessing, os, signal, sys, threading, warnings
import jax, jax.numpy as jnp, numpy as np
import aiopipe as ap
from aiopipe.devices.sim import Cluster

warnings.filterwarnings("ignore", message=".*fork.*")  # JAX warns of every fork, Python of one beside threads
jax.config.update("jax_num_cpu_devices", 2)
X = np.ones((4, 4), np.float32)
W = [X, X]

def model(w, x):
    for each in w:
        x = x @ each
    return x

def child(call):
    signal.alarm(20)
    try:
        call()
        print("nothing was raised", flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)

def end(code):
    gc.collect()
    sys.stdout.flush()
    os._exit(code)

def forked(call):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            child(call)
        finally:
            end(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status

def sync(coroutine_function, *args):
    return lambda: ap.run_sync(coroutine_function, *args)

def check(y):
    np.testing.assert_allclose(y, model(W, X))
"""


def said_by(program: str, folder: Path) -> list[str]:
    """What a program prints, line by line."""
    script = folder / "program.py"
    script.write_text(BEGIN + textwrap.dedent(program), encoding="utf-8")
    done = run_script(script, folder)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


OPENED = "was opened before this process was forked"


def test_what_was_open_is_refused_in_the_child_and_the_parent_goes_on(tmp_path: Path) -> None:
    said = said_by(
        """
        async def main():
            backend = ap.open_backend("cpu:0")
            async with backend, ap.Pipeline(model, W, devices=["cpu:0", "cpu:1"]) as pipe, ap.Batcher(pipe) as batcher:
                check(await pipe(X))
                check(await batcher(X))
                sched = ap.Scheduler(["cpu:0"])
                graph = ap.trace(model, W, X)
                check(await sched.graph_compute(graph, X))
                new = ap.Scheduler([backend])
                tensor = backend.alloc_buffer(64).alloc((4, 4), "float32")
                await backend.tensor_set(tensor, X)
                running = [await pipe.submit(X) for _ in range(4)]

                async def at_first(graph):
                    async with new:
                        await new.graph_compute(graph, X)

                for call in (
                    sync(pipe, X),
                    sync(pipe, np.ones((8, 4), np.float32)),
                    sync(pipe.plan, np.ones((8, 4), np.float32)),
                    sync(batcher, X),
                    sync(sched.graph_compute, graph, X),
                    sync(sched.plan, ap.trace(model, W, X)),
                    sync(sched.reserve, ap.trace(model, W, X)),
                    sync(sched.synchronize),
                    sync(at_first, graph),
                    sync(backend.graph_compute, graph, X),
                    sync(backend.tensor_get, tensor),
                    sync(backend.synchronize),
                    sync(ap.place, W, {"*": backend}),
                    lambda: ap.Scheduler([backend]),
                ):
                    forked(call)
                print("--")
                for y in running:
                    check(await y)
                for _ in range(8):
                    check(await pipe(X))
                    check(await batcher(X))
                check(await sched.graph_compute(graph, X))
                check(await backend.graph_compute(graph, X))
                await sched.aclose()
                await new.aclose()
            print("end")

        asyncio.run(main())
        """,
        tmp_path,
    )
    refused = said[: said.index("--")]
    assert len(refused) == 14
    for line in refused:
        assert line.startswith("ForkedError") and OPENED in line and "'spawn'" in line, line
    assert said[-1] == "end"


def test_closing_in_the_child_does_nothing_and_nobody_says_a_word(tmp_path: Path) -> None:
    """Not even when what was left open is garbage, and not to the selector that the parent's loop waits with."""
    said = said_by(
        """
        async def main():
            backend = ap.open_backend("cpu:0")
            async with backend, ap.Pipeline(model, W, devices=["cpu:0", "cpu:1"]) as pipe, ap.Batcher(pipe) as batcher:
                kept = [pipe, ap.Scheduler(["cpu:0"]), ap.open_backend("cpu:1")]
                await kept[1].graph_compute(ap.trace(model, W, X), X)
                check(await batcher(X))

                async def close():
                    await batcher.aclose()
                    await pipe.aclose()
                    await backend.aclose()
                    await kept[1].aclose()
                    await kept[2].aclose()
                    kept.clear()
                    gc.collect()

                forked(sync(close))
                forked(lambda: kept.clear() or gc.collect())
                for _ in range(20):
                    check(await pipe(X))
                await kept[1].aclose()
                await kept[2].aclose()
            print("end")

        asyncio.run(main())
        """,
        tmp_path,
    )
    assert said == ["nothing was raised", "nothing was raised", "end"]


def test_a_child_that_leaves_its_blocks_ends_as_it_wants_to(tmp_path: Path) -> None:
    """It goes on inside of the coroutine that forked, on a loop that is no longer running."""
    said = said_by(
        """
        async def main():
            async with ap.Pipeline(model, W, devices=["cpu:0", "cpu:1"]) as pipe, ap.Batcher(pipe) as batcher:
                check(await batcher(X))
                pid = os.fork()
                if pid == 0:
                    signal.alarm(20)
                    try:
                        async with pipe.scheduler.backends[0]:
                            raise KeyError("the child's own")
                    finally:
                        await_nothing(batcher.aclose())
                        await_nothing(pipe.aclose())
                        os._exit(7)
                _, status = os.waitpid(pid, 0)
                print(os.waitstatus_to_exitcode(status))
                for _ in range(20):
                    check(await batcher(X))

        def await_nothing(coroutine):
            try:
                coroutine.send(None)
            except StopIteration:
                return
            os._exit(1)

        asyncio.run(main())
        """,
        tmp_path,
    )
    assert said == ["7"]


def test_what_is_under_way_is_refused_with_a_hint(tmp_path: Path) -> None:
    said = said_by(
        """
        async def main():
            async with ap.Pipeline(model, W, devices=["cpu:0", "cpu:1"]) as pipe:
                await pipe(X)
                sched = pipe.scheduler
                held = asyncio.Event()

                async def look(tensor, ask):
                    await held.wait()
                    return True

                sched.set_eval_callback(look)
                y = await pipe.submit(X)
                sched.set_eval_callback(None)
                event = y.event

                async def wait(awaitable):
                    await awaitable

                for call in (sync(wait, y), sync(wait, event), y.cancel, lambda: y.events):
                    forked(call)
                held.set()
                check(await y)
                await event

        asyncio.run(main())
        """,
        tmp_path,
    )
    assert len(said) == 4
    for line in said:
        assert line.startswith("WrongLoopError") and "this process was forked" in line, line


@pytest.mark.parametrize("when", ["while the loop runs", "between two loops", "from another thread"])
def test_processes_of_a_pool_that_forks(when: str, tmp_path: Path) -> None:
    said = said_by(
        f"""
        async def open():
            global pipe
            pipe = ap.Pipeline(model, W, devices=["cpu:0", "cpu:1"])
            await pipe.__aenter__()
            check(await pipe(X))

        def work(k):
            signal.alarm(20)
            try:
                return ap.run_sync(pipe, X)
            except ap.ForkedError as error:
                return f"{{k}} ForkedError {{error}}"

        def pool():
            with multiprocessing.get_context("fork").Pool(2) as processes:
                print(*processes.map(work, range(4)), sep="\\n")

        async def main():
            await open()
            when = {when!r}
            if when == "from another thread":
                await asyncio.to_thread(pool)
            elif when == "while the loop runs":
                pool()
            for _ in range(8):
                check(await pipe(X))
            await pipe.aclose()

        if {when!r} == "between two loops":
            with asyncio.Runner() as runner:
                runner.run(open())
                pool()
                check(runner.run(pipe(X)))
                runner.run(pipe.aclose())
        else:
            asyncio.run(main())
        """,
        tmp_path,
    )
    assert [line.split()[:2] for line in said] == [[str(k), "ForkedError"] for k in range(4)]


def test_new_devices_in_the_child(tmp_path: Path) -> None:
    """Those of JAX do not work where it was in use before; simulated ones do, and everything where it was not."""
    said = said_by(
        """
        async def xla():
            async with ap.Pipeline(model, W, devices=["cpu:0", "cpu:1"]) as pipe:
                check(await pipe(X))
                check(await pipe(X))

        async def simulated():
            async with ap.Scheduler(Cluster(2).backends) as sched:
                await sched.graph_compute(ap.trace(lambda _, x: x + 1, (), X), X)

        def both():
            ap.run_sync(xla)
            forked(sync(xla))  # JAX was used in this process, not in its parent

        forked(both)
        ap.run_sync(xla)
        forked(sync(xla))
        forked(lambda: ap.open_backend("cpu:0"))
        forked(sync(simulated))
        """,
        tmp_path,
    )
    refused = "ForkedError 'cpu:0' cannot be opened: JAX used its devices before this process was forked"
    assert [line[: len(refused)] for line in said] == [refused, "nothing was raised", refused, refused, said[-1]]
    assert said[-1] == "nothing was raised"


def test_a_child_ends_without_the_parents_threads(tmp_path: Path) -> None:
    """At its end the interpreter of the child waits for no thread of the parent's, and closes nothing of it."""
    said = said_by(
        """
        async def main():
            pipe = ap.Pipeline(model, W, devices=["cpu:0", "cpu:1"])
            await pipe.__aenter__()
            check(await pipe(X))
            return pipe

        with asyncio.Runner() as runner:
            pipe = runner.run(main())
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                from aiopipe import _threads
                assert not _threads._open
                _threads._close_all()
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            print(os.waitstatus_to_exitcode(status))
            check(runner.run(pipe(X)))
            runner.run(pipe.aclose())
        """,
        tmp_path,
    )
    assert said == ["0"]


def test_where_jax_does_not_say_whether_it_has_started_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    ap.open_backend("cpu:0")
    assert _jax.has_started()
    monkeypatch.setattr(_jax, "_bridge", None)
    assert _jax.has_started()
