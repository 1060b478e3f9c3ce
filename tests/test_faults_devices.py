"""Devices that have no room, and devices that raise when they are used by hand."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.sim import HostOp
from aiopipe.graph import Graph
from aiopipe.graph_builder import GraphBuilder
from aiopipe.lanes import ThreadLane
from hanging import Later
from models import assert_close, batch, mlp, mlp_params, oracle
from simgraphs import SPEC, array, assert_equal, chain, settled, unsplit

NO_ROOM = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.")
"""What XLA raises, whatever the device; it has no type of its own."""


def too_large(w: Any, x: Any) -> Any:
    """Returns 1 PiB, more than any address space has, where the first number is above 50."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], 1 << 46)) * w


def with_weight() -> Graph:
    b = GraphBuilder("weighted")
    x, w = b.input("x", *SPEC), b.weight("w", *SPEC, source=array(2))
    (y,) = b.node("add", [x, w], [SPEC], fn=HostOp(lambda x, w: x + w), source="model.py:7")
    return b.build([y])


# No room -----------------------------------------------------------------------------------------


async def test_xla_has_no_room_for_a_result() -> None:
    x, small = np.ones(4, np.float32), batch()
    async with ap.Pipeline(too_large, np.float32(2), devices=["cpu:0", "cpu:1"], n_copies=2) as pipe:
        for _ in range(3):  # no slot is lost
            with pytest.raises(ap.OutOfMemoryError, match=r"(?s)RESOURCE_EXHAUSTED.*has no memory left.*n_copies") as e:
                await pipe(x)
            error = e.value
            assert isinstance(error, ap.EvaluationError) and isinstance(error, ap.AllocationError)
            assert isinstance(error, MemoryError) and "test_faults_devices.py" in error.source
            assert error.asked_nbytes > 1 << 48 and "memory_limit" in str(error)
        await pipe.scheduler.synchronize()
        settled(pipe.scheduler)
    async with ap.Pipeline(mlp, mlp_params(2), devices=["cpu:0", "cpu:1"]) as pipe:
        assert_close(await pipe(small), oracle(mlp, mlp_params(2), small))


async def test_with_a_memory_limit_it_is_refused_before_it_runs() -> None:
    async with ap.Pipeline(too_large, np.float32(2), devices=["cpu:0"], memory_limit=1 << 30) as pipe:
        with pytest.raises(ap.AllocationError, match="may use 1073741824") as caught:
            await pipe(np.ones(4, np.float32))
        assert not isinstance(caught.value, ap.EvaluationError) and pipe.statistics().submitted == 0


@pytest.mark.parametrize("when", ["launching", "computing"])
@pytest.mark.parametrize("error", [NO_ROOM, MemoryError("Unable to allocate 64 TiB")], ids=["XLA", "NumPy"])
async def test_a_device_that_is_full(when: str, error: Exception) -> None:
    backend, graph = Later(), with_weight()
    async with ap.Scheduler([backend, "cpu:0"], n_copies=2) as sched:
        await sched.plan(graph)
        size = (await sched.plan(graph)).sizes[0]
        if when == "launching":
            backend.fails = error
        else:
            backend.fails_later = error
        with pytest.raises(ap.OutOfMemoryError) as caught:
            await sched.graph_compute(graph, array(1))
        told = caught.value
        assert (told.backend, told.split, told.source) == ("later:0", 0, "model.py:7")
        assert told.asked_nbytes == size.total(1) and told.__cause__ is error
        assert f"needs {size.fixed_nbytes} bytes there, and {size.copy_nbytes} more for each of n_copies" in str(told)
        assert_equal((await sched.graph_compute(graph, array(1))).array, array(1) + array(2))
        settled(sched)


@pytest.mark.parametrize("error", [NO_ROOM, MemoryError("Unable to allocate 64 TiB")], ids=["XLA", "NumPy"])
@pytest.mark.parametrize("what", ["weight", "placed weight", "state", "input", "by hand", "set"])
async def test_a_device_without_room_for_a_value(what: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Later()

    def full(*_: Any) -> Any:
        raise error

    async with backend, ap.Scheduler([backend, "cpu:0"], n_copies=2) as sched:
        graph, state = with_weight(), None
        if what == "state":
            b = GraphBuilder("state")
            x, s = b.input("x", *SPEC), b.state("s", *SPEC)
            y, new = b.node("add", [x, s], [SPEC, SPEC], fn=HostOp(lambda x, s: (x + s, x + s)))
            graph = b.build([y], new_state=[new])
            with jax.enable_x64(True):
                state = ap.State({"s": np.zeros(4, np.int64)})
        elif what == "input":
            graph = chain(1)
            await sched.plan(graph)
        buffer = backend.alloc_buffer(128) if what == "set" else None
        for name in ("host_buffer",) if what == "input" else ("upload", "store", "duplicate"):
            monkeypatch.setattr(backend, name, full)

        async def use() -> Any:
            if what == "placed weight":
                return await ap.place(array(1), {"*": backend})
            if what == "by hand":
                return await backend.graph_compute(graph, array(1))
            if buffer is not None:
                tensor = buffer.alloc((4,), "int64")
                return await backend.tensor_set(tensor, array(1))
            return await sched.graph_compute(graph, array(1), **({"state": state} if state else {}))

        with jax.enable_x64(True):
            with pytest.raises(ap.AllocationError, match="no room on 'later:0'") as caught:
                await use()
            assert caught.value.__cause__ is error and "memory_limit" in str(caught.value)
            monkeypatch.undo()
            await use()
        settled(sched)


# By hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["call", "transfer", "notify"])
async def test_a_queue_goes_on_behind_what_raised(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's thread does not end with it, and who awaits the evaluation gets the error."""
    graph = chain(2)
    async with Later(blocks=True) as backend:
        assert_equal((await backend.graph_compute(graph, array(1))).array, unsplit(graph, array(1)))

        def broken(*_: Any) -> Any:
            raise error("by the device")

        if where == "call":
            backend.fails = error("by the device")
        else:
            monkeypatch.setattr(backend, where, broken)
        evaluation = backend.graph_compute_async(graph, array(2))
        with pytest.raises(ap.EvaluationError, match="by the device") as caught:
            await evaluation
        cause = caught.value.__cause__
        assert cause is not None and error in (type(cause), type(cause.__cause__))
        monkeypatch.undo()
        assert_equal((await backend.graph_compute(graph, array(3))).array, unsplit(graph, array(3)))


def queue_behind(first: Later, second: Later, graph: ap.Graph) -> tuple[Any, ap.Event, Any]:
    """Work on the first backend, the event behind it, and work on the second that waits for that."""
    work, event = first.graph_compute_async(graph, array(1)), first.event_new()
    first.event_record(event)
    assert event is not None
    second.event_wait(event)
    return work, event, second.graph_compute_async(graph, array(2))


async def test_what_waits_for_an_event_that_failed_does_not_run() -> None:
    graph = chain(1)
    async with Later(0) as first, Later(1) as second:
        await first.graph_compute(graph, array(0))
        first.fails_later = OSError("by the device")
        failed, event, waits = queue_behind(first, second, graph)
        for one in (failed, waits):
            with pytest.raises(ap.EvaluationError, match="by the device"):
                await one
        with pytest.raises(OSError, match="by the device"):
            await event
        with pytest.raises(OSError, match="by the device"):
            await second.synchronize()
        assert_equal((await second.graph_compute(graph, array(3))).array, unsplit(graph, array(3)))


async def test_an_event_of_a_device_that_hangs_holds_up_nobody_else() -> None:
    graph = chain(1)
    async with Later(0) as first, Later(1) as second:
        first.hangs = True
        hung, event, waits = queue_behind(first, second, graph)
        for awaitable in (hung, event, waits):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.shield(asyncio.ensure_future(_awaited(awaitable)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await second.synchronize()
        first.let_go()
        assert_equal((await hung).array, unsplit(graph, array(1)))
        assert_equal((await waits).array, unsplit(graph, array(2)))
        await event


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


async def test_backends_that_raise_or_hang_when_they_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are closed, everything else ends, and what was raised is told."""
    opened: list[Later] = []

    class Bad(Later):
        async def aclose(self) -> None:
            await super().aclose()
            if len(opened) == 2:
                opened.append(self)
                raise OSError("cannot close")
            await asyncio.Event().wait()

    def factory(params: str, *, dispatch: Any = "auto") -> Later:
        opened.append(Bad(int(params)))
        return opened[-1]

    registry = sys.modules["aiopipe.registry"]
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    ap.register_backend("bad", factory)
    sched = ap.Scheduler(["bad:0", "bad:1", "cpu:0"])
    graph = chain(1)
    assert_equal((await sched.graph_compute(graph, array(1))).array, unsplit(graph, array(1)))
    async with asyncio.timeout(30):
        with pytest.raises(OSError, match="cannot close"):
            await sched.aclose(timeout_s=0.05)
    assert [backend.closed for backend in sched.backends] == [True, True, True]
    assert sched.statistics().plans == 0
    with pytest.raises(ap.BackendClosedError):
        await sched.graph_compute(graph, array(1))


def stalling(entered: threading.Event, gate: threading.Event) -> tuple[Later, Graph]:
    """A device that computes in a thread, and a graph whose computation waits for the gate when it has been entered."""

    def wait(x: Any) -> Any:
        entered.set()
        assert gate.wait(30)
        return x

    return Later(blocks=True), chain([HostOp(wait)])


@pytest.mark.parametrize("kind", [ap.Scheduler, ap.Pipeline, ap.Batcher])
@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0])
async def test_a_time_limit_that_makes_no_sense_closes_nothing(kind: type, timeout_s: float) -> None:
    x = np.ones((1, 4), np.float32)
    async with ap.Pipeline(lambda w, x: x * w, np.float32(2), devices=["cpu:0"]) as pipe, ap.Batcher(pipe) as batcher:
        one = {ap.Scheduler: pipe.scheduler, ap.Pipeline: pipe, ap.Batcher: batcher}[kind]
        for _ in range(2):
            with pytest.raises(ValueError, match=f"timeout_s is {timeout_s}: expected seconds, at least 0"):
                await one.aclose(timeout_s=timeout_s)
            assert_equal(await batcher(x), x * 2)
        await one.aclose()


async def test_a_warning_that_is_an_error_does_not_break_closing_off() -> None:
    entered, gate = threading.Event(), threading.Event()
    backend, graph = stalling(entered, gate)
    sched = ap.Scheduler([backend, "cpu:0"])
    opened, state = sched.backends[1], ap.State({"s": np.zeros(4, np.float32)})
    stateful = ap.trace(lambda _, s, x: (x, {"s": s["s"] + x}), None, np.ones(4, np.float32), state=state)
    await sched.plan(graph)
    sched.set_cut(stateful, [1] * len(stateful.nodes))
    await sched.graph_compute(stateful, np.ones(4, np.float32), state=state)
    evaluation = await sched.graph_compute_async(graph, array(1))
    assert await asyncio.to_thread(entered.wait, 30)  # what has not been begun is dropped
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for _ in range(2):  # for as long as it is so
            with pytest.raises(ResourceWarning, match="lane 'later:0' is held up by its device"):
                await sched.aclose(timeout_s=0.0)
            assert evaluation.cancelled() and opened.closed and not state.is_allocated
            assert sched.statistics().plans == 0
        gate.set()
        await sched.aclose()
    settled(sched)
    await sched.aclose(timeout_s=0.0)
    await backend.aclose()


async def test_closing_again_closes_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sched = ap.Scheduler(["cpu:0", "cpu:1"])
    broken, other = sched.backends
    await sched.graph_compute(ap.trace(lambda w, x: x * w, np.float32(2), batch()), batch())
    closed: list[str] = []

    async def refuse() -> None:
        closed.append("refused")
        raise OSError("cannot close")

    monkeypatch.setattr(broken, "aclose", refuse)
    for _ in range(2):
        with pytest.raises(OSError, match="cannot close"):
            await sched.aclose()
    assert other.closed and not broken.closed and closed == ["refused"] * 2
    monkeypatch.undo()
    await sched.aclose()
    assert broken.closed


class SlowToEnd(ThreadLane):
    """Its thread takes a moment to end, as it may on a busy machine."""

    def _run(self) -> None:
        super()._run()
        time.sleep(0.02)


async def test_a_lane_that_has_nothing_to_do_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(1)
    async with Later(blocks=True) as backend:
        monkeypatch.setattr(backend, "make_lane", lambda own: SlowToEnd(backend.name))
        sched = ap.Scheduler([backend, "cpu:0"])
        assert_equal((await sched.graph_compute(graph, array(1))).array, unsplit(graph, array(1)))
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            await sched.aclose(timeout_s=0.0)
