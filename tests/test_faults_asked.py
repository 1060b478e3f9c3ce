"""Backends that raise where they are asked what went wrong: nobody waits for ever, and nothing hides."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import aiopipe as ap
from hanging import Later
from odd_errors import raising
from simgraphs import array, assert_equal, chain, settled, unsplit

CANNOT_SAY = (ValueError, asyncio.CancelledError, GeneratorExit)


@asynccontextmanager
async def one_after_the_other() -> AsyncIterator[tuple[ap.Scheduler, ap.Graph, list[Later]]]:
    """Two splits on two backends; in the end everything is settled."""
    backends, graph = [Later(0), Later(1)], chain(2)
    async with ap.Scheduler([*backends, "cpu:0"]) as sched:
        sched.set_cut(graph, [0, 1])
        await sched.plan(graph)
        yield sched, graph, backends
        await sched.synchronize()
        settled(sched)


@pytest.mark.parametrize("error", CANNOT_SAY)
async def test_a_backend_that_cannot_say_whether_it_failed_is_to_blame_for_what_could_not_be_launched_after_it(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_after_the_other() as (sched, graph, backends):
        backends[1].fails = RuntimeError("no launch")
        monkeypatch.setattr(backends[0], "all_ready", raising(error("cannot say")))
        evaluation = await sched.graph_compute_async(graph, array(1))
        with pytest.raises(ap.EvaluationError, match=r"split 0 on 'later:0'.*cannot say") as caught:
            await evaluation
        assert type(caught.value.__cause__) is error
        monkeypatch.undo()
        assert_equal((await sched.graph_compute(graph, array(2))).array, unsplit(graph, array(2)))


@pytest.mark.parametrize("ready", [True, False])
async def test_what_could_not_be_launched_after_a_split_that_failed_is_that_splits_fault(ready: bool) -> None:
    """As far as it is known by then: nobody waits for a device to say so."""
    async with one_after_the_other() as (sched, graph, backends):
        backends[0].fails_later, backends[0].hangs = ValueError("earlier"), not ready
        backends[1].fails = RuntimeError("no launch")
        evaluation = await sched.graph_compute_async(graph, array(1))
        guilty = "split 0 on 'later:0'.*earlier" if ready else "split 1 on 'later:1'.*no launch"
        with pytest.raises(ap.EvaluationError, match=guilty):
            await evaluation
        backends[0].let_go()
        assert_equal((await sched.graph_compute(graph, array(2))).array, unsplit(graph, array(2)))


@pytest.mark.parametrize("error", CANNOT_SAY)
async def test_a_backend_that_cannot_say_which_split_failed_ends_the_evaluation_all_the_same(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_after_the_other() as (sched, graph, backends):
        backends[1].hangs, backends[1].fails_later = True, RuntimeError("later")
        evaluation = await sched.graph_compute_async(graph, array(1))
        monkeypatch.setattr(backends[0], "error_of", raising(error("cannot say")))
        backends[1].let_go()
        with pytest.raises(ap.EvaluationError, match=r"split 1 on 'later:1'.*cannot say") as caught:
            await evaluation
        assert type(caught.value.__cause__) is error
        monkeypatch.undo()
        assert_equal((await sched.graph_compute(graph, array(2))).array, unsplit(graph, array(2)))


async def test_the_first_split_that_failed_is_to_blame_also_where_its_device_says_so_last() -> None:
    async with one_after_the_other() as (sched, graph, backends):
        for backend, name in zip(backends, ("first", "second"), strict=True):
            backend.hangs, backend.fails_later = True, ValueError(name)
        evaluation = await sched.graph_compute_async(graph, array(1))
        backends[1].let_go()
        await asyncio.sleep(0)
        backends[0].let_go()
        with pytest.raises(ap.EvaluationError, match=r"split 0 on 'later:0'.*first"):
            await evaluation


async def test_an_overdue_evaluation_is_said_to_hang_where_nobody_can_say_that_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with one_after_the_other() as (sched, graph, backends):
        backends[1].hangs = True
        evaluation = await sched.graph_compute_async(graph, array(1), deadline=1e-3)
        monkeypatch.setattr(backends[0], "all_ready", raising(ValueError("cannot say")))
        with pytest.raises(ap.DeadlineExceeded, match=r"split 0 on 'later:0'.*is still running"):
            await evaluation
        monkeypatch.undo()
        backends[1].let_go()


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_to_end_the_program_does_so_where_a_result_is_put_together(
    error: type[BaseException], by_hand: bool
) -> None:
    async def main() -> None:
        graph = dataclasses.replace(chain(1), unflatten_outputs=raising(error("by the user")))
        async with Later() as backend:
            if by_hand:
                await backend.graph_compute(graph, array(1))
            sched = ap.Scheduler([backend, "cpu:0"])
            try:
                await sched.graph_compute(graph, array(1))
            finally:
                await sched.aclose(timeout_s=0.01)

    with pytest.raises(error, match="by the user"):
        asyncio.run(main())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("asked", ["who failed", "whether launched"])
def test_what_is_to_end_the_program_does_so_where_backends_are_asked(
    error: type[BaseException], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        backends = [Later(0), Later(1)]
        graph = chain(2)
        sched = ap.Scheduler([*backends, "cpu:0"])
        sched.set_cut(graph, [0, 1])
        await sched.plan(graph)
        try:
            if asked == "whether launched":
                backends[1].fails = RuntimeError("no launch")
                monkeypatch.setattr(backends[0], "all_ready", raising(error("by the user")))
                await sched.graph_compute(graph, array(1))
            else:
                backends[1].hangs, backends[1].fails_later = True, RuntimeError("later")
                evaluation = await sched.graph_compute_async(graph, array(1))
                monkeypatch.setattr(backends[0], "error_of", raising(error("by the user")))
                backends[1].let_go()
                await evaluation
        finally:
            monkeypatch.undo()
            await sched.aclose(timeout_s=0.01)

    with pytest.raises(error, match="by the user"):
        asyncio.run(main())
