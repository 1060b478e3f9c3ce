"""Work by hand on backends' queues: order, events between backends, errors, closing. No scheduler here."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import jax
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.sim import Cluster, HostOp, fail, sleep
from aiopipe.graph_builder import GraphBuilder
from odd_errors import Empty, Falsy, raising
from simgraphs import SPEC, array, chain, unsplit


def new_event(backend: ap.Backend, name: str = "event") -> ap.Event:
    event = backend.event_new(name)
    assert event is not None
    return event


def nothing(*_: Any) -> None:
    return None


def slow(seconds: float, fn: Any = lambda x: x * 3) -> HostOp:
    return HostOp(fn, cost_s=seconds)


class TestRealQueues:
    async def test_jobs_run_in_order_off_the_loop(self) -> None:
        seen: list[int] = []
        where: set[int] = set()
        async with ap.open_backend("cpu:0") as backend:

            def job(i: int) -> None:
                seen.append(i)
                where.add(threading.get_ident())

            events = [backend.queue.post(lambda i=i: job(i)) for i in range(50)]  # type: ignore[misc]
            assert not events[-1].done()
            await events[-1]
            assert all(event.done() for event in events)
            assert seen == list(range(50))
            assert len(where) == 1 and threading.get_ident() not in where
            assert backend.queue.pending == 0

    async def test_then_comes_after_the_job_and_before_its_event(self) -> None:
        box: list[Any] = []
        async with ap.open_backend("cpu:0") as backend:
            made: list[Any] = []

            def job() -> list[Any]:
                made.append(jax.device_put(np.arange(4.0), jax.devices()[0]))
                return made

            await backend.queue.post(job, lambda: box.append(backend.download(made[0])))
            np.testing.assert_array_equal(box[0], np.arange(4.0))

    async def test_a_queue_waits_for_another_and_its_caller_does_not(self) -> None:
        order: list[str] = []
        gate = threading.Event()
        async with ap.open_backend("cpu:0") as a, ap.open_backend("cpu:1") as b:
            a.queue.post(lambda: gate.wait(30) and order.append("a"))  # type: ignore[func-returns-value,arg-type]
            done = new_event(a)
            a.event_record(done)
            b.queue.post(lambda: order.append("b before"))
            b.event_wait(done)
            after = b.queue.post(lambda: order.append("b after"))
            last = new_event(b)
            b.event_record(last)
            assert not done.done() and not after.done()
            await asyncio.sleep(0)
            gate.set()
            await last
            assert order.index("a") < order.index("b after") and order.index("b before") < order.index("b after")
            assert after.done()

    # S5, D2
    async def test_work_without_inputs_waits_and_records_like_any_other(self) -> None:
        def constant() -> ap.Graph:
            b = GraphBuilder("constant")
            (y,) = b.node("seven", [], [((4,), "float32", 16)], fn=HostOp(lambda: jax.numpy.full(4, 7.0, "float32")))
            return b.build([y])

        gate = threading.Event()
        order: list[str] = []
        async with ap.open_backend("cpu:0") as a, ap.open_backend("cpu:1") as b:
            a.queue.post(lambda: gate.wait(30) and order.append("a"))  # type: ignore[func-returns-value,arg-type]
            done = new_event(a)
            a.event_record(done)
            b.event_wait(done)
            evaluation = b.graph_compute_async(constant())
            evaluation.event.add_callback(lambda _: order.append("b"))
            recorded = new_event(b)
            b.event_record(recorded)
            await asyncio.sleep(0)
            assert not evaluation.done() and not recorded.done()
            gate.set()
            np.testing.assert_array_equal(np.asarray(await evaluation), np.full(4, 7.0))
            await recorded
            assert order == ["a", "b"]

    async def test_many_queues_that_wait_for_each_other(self) -> None:
        seen: list[int] = []
        backends = ap.open_backends(*(f"cpu:{i}" for i in range(6)))
        previous = None
        for i in range(60):
            backend = backends[i % 6]
            if previous is not None:
                backend.event_wait(previous)
            backend.queue.post(lambda i=i: seen.append(i))  # type: ignore[misc]
            previous = new_event(backend)
            backend.event_record(previous)
        await asyncio.gather(*(backend.synchronize() for backend in backends))
        assert seen == list(range(60))
        for backend in backends:
            await backend.aclose()

    async def test_an_event_of_an_evaluation_can_be_waited_for(self) -> None:
        order: list[str] = []
        async with ap.Scheduler(["cpu:0"]) as sched, ap.open_backend("cpu:1") as b:
            graph = ap.trace(lambda w, x: x * w, np.float32(2), np.ones(3, np.float32))
            evaluation = await sched.graph_compute_async(graph, np.ones(3, np.float32))
            evaluation.event.add_callback(lambda _: order.append("evaluation"))
            b.event_wait(evaluation.event)
            b.queue.post(lambda: order.append("b"))
            await b.synchronize()
            assert order == ["evaluation", "b"]


class TestErrors:
    async def test_an_event_carries_the_error_of_what_it_marks(self) -> None:
        def job() -> None:
            raise ValueError("no")

        async with ap.open_backend("cpu:0") as backend:
            failed = backend.queue.post(job)
            good = backend.queue.post(lambda: None)
            first, second = new_event(backend, "first"), new_event(backend, "second")
            backend.event_record(first)
            backend.event_record(second)
            with pytest.raises(ValueError, match="no"):
                await first
            with pytest.raises(ValueError, match="no"):
                await failed
            await good  # jobs of one queue do not depend on each other
            await second  # an error is told once
            with pytest.raises(ValueError, match="no"):
                await backend.synchronize()
            await backend.synchronize()

    async def test_what_waits_for_a_failure_does_not_run(self) -> None:
        def job() -> None:
            raise ValueError("no")

        ran: list[int] = []
        async with ap.open_backend("cpu:0") as a, ap.open_backend("cpu:1") as b:
            a.queue.post(job)
            event = new_event(a)
            a.event_record(event)
            b.event_wait(event)
            waited = b.queue.post(lambda: ran.append(1))
            with pytest.raises(ValueError, match="no"):
                await waited
            b.event_wait(event)  # it has failed already
            with pytest.raises(ValueError, match="no"):
                await b.queue.post(lambda: ran.append(2))
            with pytest.raises(ValueError, match="no"):
                await b.synchronize()
            await b.queue.post(lambda: ran.append(3))
            assert ran == [3]
            with pytest.raises(ValueError, match="no"):
                await a.synchronize()

    async def test_events_are_one_shot(self) -> None:
        async with ap.open_backend("cpu:0") as backend:
            event = new_event(backend, "mine")
            backend.event_record(event)
            with pytest.raises(ap.PlacementError, match="'mine' cannot be recorded on cpu:0"):
                backend.event_record(event)
            await event
            happened = ap.Event("old")
            happened.set()
            with pytest.raises(ap.PlacementError, match="make another"):
                backend.event_record(happened)

    async def test_none_is_refused(self) -> None:
        async with ap.open_backend("cpu:0") as backend:
            with pytest.raises(ap.PlacementError, match=r"make it with event_new\(\)"):
                backend.event_record(None)

    async def test_closing_finishes_what_runs_and_drops_what_waits(self) -> None:
        ran: list[int] = []
        backend = ap.open_backend("cpu:0")
        before = backend.queue.post(lambda: ran.append(1))
        backend.event_wait(ap.Event("never"))
        waits = backend.queue.post(lambda: ran.append(2))
        await backend.aclose()
        await backend.aclose()
        assert before.done() and ran == [1]
        with pytest.raises(ap.BackendClosedError, match="closed before this could run"):
            await waits
        for use in (
            lambda: backend.queue.post(lambda: None),
            lambda: backend.event_record(ap.Event()),
            lambda: backend.event_wait(ap.Event()),
        ):
            with pytest.raises(ap.BackendClosedError, match="cpu:0"):
                use()
        with pytest.raises(ap.BackendClosedError, match="cpu:0"):
            await backend.synchronize()

    def test_it_belongs_to_one_loop_at_a_time(self) -> None:
        backend = ap.open_backend("cpu:0")
        gate = threading.Event()

        async def other() -> None:
            with pytest.raises(ap.WrongLoopError, match="'cpu:0' has work of another event loop"):
                backend.queue.post(lambda: None)

        async def first() -> None:
            backend.queue.post(lambda: gate.wait(30) and None)
            await asyncio.to_thread(asyncio.run, other())
            gate.set()
            await backend.synchronize()

        async def second() -> None:
            await backend.queue.post(lambda: None)
            await backend.aclose()

        asyncio.run(first())
        asyncio.run(second())

    def test_a_loop_that_ended_takes_its_work_along(self) -> None:
        backend = ap.open_backend("cpu:0")
        ran: list[int] = []

        async def first() -> None:
            backend.event_wait(ap.Event("never"))
            backend.queue.post(lambda: ran.append(1))

        async def second() -> None:
            await backend.queue.post(lambda: ran.append(2))
            await backend.aclose()

        asyncio.run(first())
        asyncio.run(second())
        assert ran == [2]


class TestVirtualTime:
    """The same on simulated devices, where when something happens is exact."""

    async def test_a_record_happens_when_the_work_before_it_ends(self) -> None:
        cluster = Cluster(1, compute=True)
        (a,) = cluster.backends
        graph = chain([slow(2.0), slow(3.0)])
        evaluation = a.graph_compute_async(graph, array())
        event = new_event(a)
        a.event_record(event)
        await event
        assert cluster.clock.now == 5.0
        np.testing.assert_array_equal(await evaluation, array() * 9)

    async def test_a_wait_moves_what_is_behind_it(self) -> None:
        cluster = Cluster(2, compute=True, record=True)
        a, b = cluster.backends
        long, short = chain([slow(4.0)], name="long"), chain([slow(1.0)], name="short")
        a.graph_compute_async(long, array())
        event = new_event(a)
        a.event_record(event)
        early = b.graph_compute_async(short, array(1))
        b.event_wait(event)
        late = b.graph_compute_async(short, array(2))
        assert cluster.clock.now == 0.0  # nobody has waited yet
        await asyncio.gather(a.synchronize(), b.synchronize())
        spans = [(r.backend.name, r.start_s, r.end_s) for r in cluster.log if r.kind == "launch"]
        assert spans == [("sim:0", 0.0, 4.0), ("sim:1", 0.0, 1.0), ("sim:1", 4.0, 5.0)]
        np.testing.assert_array_equal(await early, array(1) * 3)
        np.testing.assert_array_equal(await late, array(2) * 3)

    # S5, D2
    async def test_work_without_inputs_keeps_its_place(self) -> None:
        cluster = Cluster(2, compute=True, record=True)
        a, b = cluster.backends
        builder = GraphBuilder("constant")
        (y,) = builder.node("seven", [], [SPEC], fn=HostOp(lambda: array(7), cost_s=1.0))
        constant = builder.build([y])
        a.graph_compute_async(chain([sleep(10.0)]), array())
        slow_done = new_event(a)
        a.event_record(slow_done)
        b.event_wait(slow_done)
        evaluation = b.graph_compute_async(constant)
        b_done = new_event(b)
        b.event_record(b_done)
        a.event_wait(b_done)
        behind = a.graph_compute_async(chain([slow(1.0)]), array(3))
        await a.synchronize()
        starts = [r.start_s for r in cluster.log if r.kind == "launch"]
        assert starts == [0.0, 10.0, 11.0]
        np.testing.assert_array_equal(await evaluation, array(7))
        np.testing.assert_array_equal(await behind, array(3) * 3)

    # D3
    async def test_an_input_may_be_overwritten_although_its_copy_is_slow(self) -> None:
        cluster = Cluster(1, compute=True, host_bytes_per_s=1.0)
        (a,) = cluster.backends
        graph = chain(2)
        x = array(1)
        evaluation = a.graph_compute_async(graph, x)
        x[:] = -1
        np.testing.assert_array_equal(await evaluation, unsplit(graph, array(1)))
        assert cluster.clock.now >= x.nbytes

    async def test_a_failing_op_fails_its_evaluation_and_who_waits_for_it(self) -> None:
        cluster = Cluster(2, compute=True)
        a, b = cluster.backends
        bad, good = chain([slow(1.0), fail("broken")]), chain(1)
        evaluation = a.graph_compute_async(bad, array())
        event = new_event(a)
        a.event_record(event)
        b.event_wait(event)
        behind = b.graph_compute_async(good, array())
        with pytest.raises(ap.EvaluationError, match=r"failed on 'sim:0'.*step#0 at model.py:10.*broken"):
            await evaluation
        with pytest.raises(ap.EvaluationError, match="failed on 'sim:1'"):
            await behind
        with pytest.raises(Exception, match="broken"):
            await event
        with pytest.raises(Exception, match="broken"):
            await b.synchronize()
        await a.synchronize()  # the evaluation has told its caller
        np.testing.assert_array_equal(await b.graph_compute(good, array()), unsplit(good, array()))


@pytest.mark.parametrize("spec", ["cpu:0", "sim:0"])
@pytest.mark.parametrize("where", ["job", "then", "device"])
@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, GeneratorExit])
async def test_whatever_is_raised_fails_the_job_and_nobody_is_cancelled(
    error: type[BaseException], where: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a task that nobody has cancelled, `CancelledError` would end whatever runs there without a word."""

    broken = raising(error("by the user"))
    async with ap.open_backend(spec) as backend:
        if where == "device":
            monkeypatch.setattr(backend, "notify", broken)
        event = backend.queue.post(broken if where == "job" else nothing, broken if where == "then" else nothing)
        with pytest.raises(RuntimeError if error is asyncio.CancelledError else error, match="by the user") as caught:
            await event
        assert error in (type(caught.value), type(caught.value.__cause__))
        monkeypatch.undo()
        with pytest.raises(type(caught.value), match="by the user"):
            await backend.queue.synchronize()
        await backend.queue.post(nothing)
        assert backend.queue.pending == 0


@pytest.mark.parametrize("spec", ["cpu:0", "sim:0"])
@pytest.mark.parametrize("where", ["job", "then", "device", "event"])
@pytest.mark.parametrize("error", [Falsy, Empty])
async def test_an_error_that_is_false_is_an_error(
    error: type[Exception], where: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = raising(error("by the user"))
    async with ap.open_backend(spec) as backend:
        recorded, waited = ap.Event("recorded"), ap.Event("waited")
        waited.set(error("by the user"))
        if where == "device":
            monkeypatch.setattr(backend, "notify", broken)
        elif where == "event":
            backend.queue.wait(waited)
        event = backend.queue.post(broken if where == "job" else nothing, broken if where == "then" else nothing)
        await event.wait()
        monkeypatch.undo()
        backend.queue.post(nothing)
        backend.queue.record(recorded)
        for failed in (event, recorded):
            with pytest.raises(error, match="by the user"):
                await failed
            assert "failed" in repr(failed)
        with pytest.raises(error, match="by the user"):
            await backend.queue.synchronize()
        await backend.queue.synchronize()


async def test_a_lane_that_cannot_be_made_once_the_event_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who called is there any more: it is the job that fails."""

    def refuse(**_: Any) -> Any:
        raise RuntimeError("no more threads")

    async with ap.open_backend("cpu:0") as backend:
        gate = ap.Event("gate")
        backend.event_wait(gate)
        monkeypatch.setattr(backend, "make_lane", refuse)
        held = backend.queue.post(lambda: None)
        gate.set()
        with pytest.raises(RuntimeError, match="no more threads"):
            await held
        monkeypatch.undo()
        await backend.queue.post(lambda: None)
        with pytest.raises(RuntimeError, match="no more threads"):
            await backend.queue.synchronize()
