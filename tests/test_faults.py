"""Backends that raise where nobody expects it, time limits, programs that forget to close."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import aiopipe as ap
from aiopipe.devices.sim import Cluster, HostOp
from aiopipe.graph_builder import GraphBuilder
from happens_before import HappensBefore
from models import assert_close, batch, mlp, mlp_params, oracle
from processes import run_script
from simgraphs import SPEC, array, assert_equal, chain, settled, step, unsplit

# Backends ----------------------------------------------------------------------------------------


class Fault:
    """Has a method of a backend raise, as long as it is `on`."""

    def __init__(self, backend: Any, name: str, patch: pytest.MonkeyPatch) -> None:
        self.on = False
        self.error = OSError(f"{name} broke")
        original = getattr(backend, name)

        def broken(*args: Any) -> Any:
            if self.on:
                raise self.error
            return original(*args)

        if name == "load":
            patch.setattr(backend, name, lambda program: self.replaced(original(program)))
        else:
            patch.setattr(backend, name, broken)

    def replaced(self, executable: Any) -> Any:
        call = executable.call

        def broken(*args: Any) -> Any:
            if self.on:
                raise self.error
            return call(*args)

        return replace(executable, call=broken)


@pytest.mark.parametrize("device", range(3))
@pytest.mark.parametrize("where", ["load", "transfer", "launched", "all_ready", "error_of", "notify"])
async def test_a_backend_that_raises_fails_one_evaluation_and_no_other(
    where: str, device: int, monkeypatch: pytest.MonkeyPatch, happens_before: HappensBefore
) -> None:
    cluster = Cluster(3, compute=True, split_cost_s=1.0, latency_s=0.5)  # a copy is under way while a launch fails
    fault = Fault(cluster.backends[device], where, monkeypatch)
    if where in ("load", "transfer", "launched"):  # else nobody can know when it is done
        happens_before.watch(*cluster.backends)
    graph = chain(3)
    async with ap.Scheduler(cluster.backends, n_copies=2) as sched:
        sched.set_cut(graph, range(3))
        await sched.plan(graph)
        before = await sched.graph_compute_async(graph, array(1))
        for k in range(5):
            fault.on = True
            evaluation = await sched.graph_compute_async(graph, array(k))
            fault.on = False
            try:
                assert_equal(await evaluation, unsplit(graph, array(k)))
                # Nobody asks a split that is no sink, nor for the error of one that is not ready.
                assert where == "error_of" or (where in ("all_ready", "notify") and device < 2)
            except ap.EvaluationError as error:
                assert error.__cause__ is fault.error
        assert_equal(await before, unsplit(graph, array(1)))
        assert_equal(await sched.graph_compute(graph, array(7)), unsplit(graph, array(7)))
        await sched.synchronize()
        settled(sched)


@pytest.mark.parametrize("where", ["upload", "host_buffer"])
async def test_a_backend_that_cannot_allocate_is_asked_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(2, compute=True)
    fault = Fault(cluster.backends[1], where, monkeypatch)
    other = Fault(cluster.backends[0], where, monkeypatch)
    b = GraphBuilder("weights")
    x, w = b.input("x", *SPEC), b.weight("w", *SPEC, source=array(2))
    (y,) = b.node("add", [x, w], [SPEC], fn=HostOp(lambda x, w: x + w))
    graph = b.build([y])
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [1])
        fault.on = other.on = True
        with pytest.raises(Exception, match=f"{where} broke"):
            await sched.graph_compute(graph, array(1))
        fault.on = other.on = False
        assert_equal(await sched.graph_compute(graph, array(1)), array(1) + array(2))
        settled(sched)


async def test_a_backend_that_breaks_at_completion_marks_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(1, compute=True, split_cost_s=1.0)
    fault = Fault(cluster.backends[0], "notify", monkeypatch)
    graph = with_state(read=True)
    with jax.enable_x64(True):
        async with ap.Scheduler(cluster.backends) as sched:
            state = ap.State([array(0)])
            await sched.graph_compute(graph, array(1), state=state)
            fault.on = True
            with pytest.raises(ap.EvaluationError, match="notify broke"):
                await sched.graph_compute(graph, array(1), state=state)
            fault.on = False
            with pytest.raises(ap.StateError, match="notify broke"):
                await sched.graph_compute(graph, array(1), state=state)
            await state.reset()
            assert_equal(await sched.graph_compute(graph, array(1), state=state), array(1) * 3)


# State -------------------------------------------------------------------------------------------


def with_state(*, read: bool) -> Any:
    """x -> 3 * x; the state becomes that, plus what it was where it is `read`."""
    b = GraphBuilder("state")
    x, s = b.input("x", *SPEC), b.state("s", *SPEC)
    (y,) = b.node("step", [x], [SPEC], fn=step(0))
    (new,) = b.node("new", [y, s] if read else [y], [SPEC], fn=HostOp(lambda *xs: sum(xs[1:], xs[0])))
    return b.build([y], new_state=[new])


@pytest.mark.parametrize("read", [True, False])
async def test_cancelled_before_anything_is_launched_it_leaves_the_state_as_it_was(read: bool) -> None:
    cluster = Cluster(1, compute=True, split_cost_s=1.0)
    graph = with_state(read=read)

    async def slowly(tensor: ap.Tensor, ask: bool) -> bool:
        await cluster.clock.sleep(5.0)
        return True

    with jax.enable_x64(True):
        async with ap.Scheduler(cluster.backends) as sched:
            state = ap.State([array(4)])
            await sched.alloc_graph(graph, state=state)
            sched.set_eval_callback(slowly)
            evaluation = await sched.graph_compute_async(graph, array(1), state=state)
            sched.set_eval_callback(None)
            await cluster.clock.sleep(1.0)
            assert evaluation.cancel()
            await sched.synchronize()
            assert_equal((await state.snapshot()).value[0], array(4))


async def test_values_restored_while_a_state_is_first_put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(1, compute=True)
    graph = with_state(read=True)
    with jax.enable_x64(True):
        async with ap.Scheduler(cluster.backends) as sched:
            state, snapshot = ap.State([array(0)]), await ap.State([array(5)]).snapshot()
            await sched.plan(graph)
            first = asyncio.ensure_future(sched.graph_compute(graph, array(1), state=state))
            upload = cluster.backends[0].upload
            began: list[Any] = []
            monkeypatch.setattr(cluster.backends[0], "upload", lambda *args: (began.append(args), upload(*args))[1])
            while not began:  # noqa: ASYNC110  # it happens in a thread
                await asyncio.sleep(0)
            await state.restore(snapshot)
            assert_equal(await first, array(1) * 3)
            assert_equal((await state.snapshot()).value[0], array(5) + array(1) * 3)
            settled(sched)


async def test_an_eval_callback_does_not_see_snapshots() -> None:
    cluster = Cluster(1, compute=True)
    graph = with_state(read=True)
    with jax.enable_x64(True):
        async with ap.Scheduler(cluster.backends) as sched:
            state = ap.State([array(0)])
            await sched.graph_compute(graph, array(1), state=state)
            sched.set_eval_callback(lambda tensor, ask: ask)
            fork, snapshot = await state.fork(), await state.snapshot()
            assert_equal(snapshot.value[0], array(0) + array(1) * 3)
            assert fork.error is None and state.error is None


async def test_what_computes_nothing_heeds_a_mark_too() -> None:
    cluster = Cluster(1, compute=True)
    b = GraphBuilder("keeps")
    x, s = b.input("x", *SPEC), b.state("s", *SPEC)
    keeps = b.build([x], new_state=[s])
    b = GraphBuilder("breaks")
    x, s = b.input("x", *SPEC), b.state("s", *SPEC)
    (y,) = b.node("add", [x, s], [SPEC], fn=HostOp(lambda x, s: 1 // 0))
    breaks = b.build([x], new_state=[y])
    with jax.enable_x64(True):
        async with ap.Scheduler(cluster.backends, n_copies=1) as sched:
            state = ap.State([array(0)])
            await sched.graph_compute(keeps, array(1), state=state)
            await sched.alloc_graph(breaks, state=state)
            both = [asyncio.ensure_future(sched.graph_compute(g, array(1), state=state)) for g in (breaks, keeps)]
            first, second = await asyncio.gather(*both, return_exceptions=True)
            assert isinstance(first, ap.EvaluationError)
            assert isinstance(second, ap.StateError) and second.__cause__ is first


# Time limits -------------------------------------------------------------------------------------


async def test_a_time_limit_around_submitting_and_around_awaiting() -> None:
    async with ap.Pipeline(mlp, mlp_params(4), devices=["cpu:0", "cpu:1"], n_copies=1) as pipe:
        want = oracle(mlp, mlp_params(4), batch())
        for seconds in (0.0, 0.0, 1e-4, 1e-3, 0.01, 10.0):  # the first ones while it is traced and compiled
            for whole in (True, False):
                try:
                    async with asyncio.timeout(seconds):
                        running = await pipe.submit(batch())
                        if whole:
                            assert_close(await running, want)
                except TimeoutError:
                    assert seconds < 10
        assert_close(await pipe(batch()), want)
        await pipe.scheduler.synchronize()
        settled(pipe.scheduler)


async def test_a_time_limit_while_waiting_for_a_slot_takes_none() -> None:
    cluster = Cluster(1, compute=True, split_cost_s=1.0)
    graph = chain(1)
    async with ap.Scheduler(cluster.backends, n_copies=1) as sched:
        await sched.plan(graph)
        with cluster.clock.hold():
            first = await sched.graph_compute_async(graph, array(1))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await sched.graph_compute_async(graph, array(2))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.shield(asyncio.wait_for(first, None))
        assert_equal(await sched.graph_compute(graph, array(3)), unsplit(graph, array(3)))
        await sched.synchronize()
        settled(sched)


# Forgetting to close -----------------------------------------------------------------------------


async def opened(kind: str) -> Any:
    if kind == "pipeline":
        pipe = ap.Pipeline(mlp, mlp_params(2), devices=["cpu:0", "cpu:1"])
        await pipe.__aenter__()
        await pipe(batch())
        return pipe
    sched = ap.Scheduler(["cpu:0", "cpu:1"])
    await sched.graph_compute(ap.trace(mlp, mlp_params(2), batch()), batch())
    return sched


def what_is_said_of(make: Callable[[], Any]) -> list[str]:
    gc.collect()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make()
        for thread in threading.enumerate():  # one that has done its work still holds it until it has ended
            if thread.name.startswith("aiopipe-") and not thread.daemon:
                thread.join(10)
        gc.collect()
    return [str(w.message) for w in said if w.category is ResourceWarning]


@pytest.mark.parametrize("kind", ["scheduler", "pipeline"])
def test_one_that_is_garbage_while_open_says_so(kind: str) -> None:
    said = what_is_said_of(lambda: asyncio.run(opened(kind)) and None)
    assert [message for message in said if "a scheduler over cpu:0, cpu:1" in message and "never closed" in message]


@pytest.mark.parametrize("kind", ["scheduler", "pipeline"])
def test_one_that_was_closed_or_never_opened_does_not(kind: str) -> None:
    async def closed() -> None:
        await (await opened(kind)).aclose()

    assert not what_is_said_of(lambda: asyncio.run(closed()))
    assert not what_is_said_of(lambda: ap.Scheduler(["cpu:0"]))
    assert not what_is_said_of(lambda: ap.Pipeline(mlp, mlp_params(2), devices=["cpu:0"]))


EXITS = {
    "a backend with work in its queue": """
        backend = ap.open_backend("cpu:0")
        buffer = backend.alloc_buffer(1 << 20)
        pending.append((backend, buffer))
    """,
    "a scheduler with evaluations in flight": """
        sched = ap.Scheduler(["cpu:0", "cpu:1"])
        graph = ap.trace(lambda w, x: jnp.sort(x @ w, axis=0), np.eye(64, dtype=np.float32), x)
        pending.append([sched] + [await sched.graph_compute_async(graph, x) for _ in range(4)])
    """,
    "an evaluation whose scheduler is gone": """
        sched = ap.Scheduler(["cpu:0", "cpu:1"])
        graph = ap.trace(lambda w, x: jnp.sort(x @ w, axis=0), np.eye(64, dtype=np.float32), x)
        pending.append([await sched.graph_compute_async(graph, x) for _ in range(4)])
    """,
}


@pytest.mark.parametrize("what", EXITS)
def test_the_interpreter_ends_with_something_open(what: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    lines = ["import asyncio", "import jax, jax.numpy as jnp, numpy as np", "import aiopipe as ap"]
    lines += ["jax.config.update('jax_num_cpu_devices', 2)", "pending = []", "async def main():"]
    lines += ["    x = np.ones((64, 64), np.float32)"]
    lines += [line[4:] for line in EXITS[what].strip("\n").splitlines()] + ["asyncio.run(main())", "print('end')"]
    script.write_text("\n".join(lines), encoding="utf-8")
    done: subprocess.CompletedProcess[str] = run_script(script, tmp_path, warnings="ignore::ResourceWarning")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
