"""Backends that raise around a launch, arrays that are deleted under way, odd exceptions: one caller hears of it.

Whatever it is, no thread ends with it, the slot comes back, and the next evaluation runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.graph_builder import GraphBuilder
from hanging import Later
from odd_errors import Falsy, Speechless, raising
from simgraphs import SPEC, array, assert_equal, chain, settled, step, unsplit


@asynccontextmanager
async def ready(graph: ap.Graph, n: int, *, blocks: bool, **options: Any) -> AsyncIterator[tuple[ap.Scheduler, Any]]:
    """A graph on so many backends; afterwards it runs, and everything is settled."""
    backends = [Later(i, blocks=blocks) for i in range(n)]
    async with ap.Scheduler([*backends, "cpu:0"], n_copies=1, **options) as sched:
        sched.set_cut(graph, list(range(n)))
        await sched.plan(graph)
        yield sched, backends
        result = jax.tree.leaves(await sched.graph_compute(graph, array(2)))
        expected = jax.tree.leaves(unsplit(graph, array(2)))
        for got, wanted in zip(result, expected, strict=True):
            assert_equal(got.array, wanted)
        settled(sched)


# Arrays that are deleted --------------------------------------------------------------------------


def hold_up(go_on: threading.Event) -> Callable[[Any], Any]:
    def held(value: Any) -> Any:
        go_on.wait(30)
        return value

    return held


@pytest.mark.parametrize("how", ["deleted", "donated"])
@pytest.mark.parametrize("observed", [False, True])
async def test_an_input_that_its_owner_gives_away_before_it_is_read(how: str, observed: bool) -> None:
    """The evaluation fails, whose input is gone; the lane that was to launch it goes on."""
    go_on = threading.Event()
    like = jax.ShapeDtypeStruct((4,), np.float32)
    ones = np.ones(4, np.float32)
    graph = ap.trace(lambda w, x: jax.pure_callback(hold_up(go_on), like, x) * w, np.float32(2), ones)
    async with ap.Scheduler(["cpu:0"], n_copies=2) as sched:
        await sched.plan(graph)
        x = jax.device_put(np.full(4, 3, np.float32), jax.devices()[0])
        first = await sched.graph_compute_async(graph, ones)  # the lane is busy with it
        if observed:
            sched.set_eval_callback(lambda tensor, ask: False if ask else True)
        second = await sched.graph_compute_async(graph, x)
        sched.set_eval_callback(None)
        if how == "deleted":
            x.delete()
        else:
            jax.jit(lambda v: v + 1, donate_argnums=0)(x)
        assert x.is_deleted()
        go_on.set()
        np.testing.assert_array_equal(np.asarray(await first), 2 * ones)
        with pytest.raises(ap.EvaluationError, match="deleted"):
            await second
        np.testing.assert_array_equal(np.asarray(await sched.graph_compute(graph, ones)), 2 * ones)
        settled(sched)


async def test_an_input_that_is_deleted_before_its_turn_on_a_state() -> None:
    """It is launched when the one before it has ended, on the event loop."""
    go_on = threading.Event()
    ones = np.ones(4, np.float32)
    like = jax.ShapeDtypeStruct((4,), np.float32)
    state = ap.State(ones)
    slow = ap.trace(lambda w, s, x: (jax.pure_callback(hold_up(go_on), like, x) + s, s + x * w), 1.0, ones, state=state)
    quick = ap.trace(lambda w, s, x: (s + x, s + x * w), np.float32(1), ones, state=state)
    async with ap.Scheduler(["cpu:0"], n_copies=2) as sched:
        for graph in (slow, quick):
            await sched.alloc_graph(graph, state=state)
        first = await sched.graph_compute_async(slow, ones, state=state)
        x = jax.device_put(ones, jax.devices()[0])
        second = await sched.graph_compute_async(quick, x, state=state)
        x.delete()
        go_on.set()
        np.testing.assert_array_equal(np.asarray(await first), 2 * ones)
        try:  # it may have been launched before its input was deleted
            np.testing.assert_array_equal(np.asarray(await second), 3 * ones)
        except ap.EvaluationError as error:
            assert "deleted" in str(error)
        other = ap.State(ones)
        np.testing.assert_array_equal(np.asarray(await sched.graph_compute(quick, ones, state=other)), 2 * ones)
        settled(sched)


# Backends that raise where they are asked ---------------------------------------------------------


@pytest.mark.parametrize("blocks", [False, True])
async def test_whether_it_takes_an_input(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        async with ready(chain(2), 2, blocks=blocks) as (sched, backends):
            graph = chain(2)
            sched.set_cut(graph, [0, 1])
            await sched.plan(graph)
            with monkeypatch.context() as patched:
                patched.setattr(backends[0], "accepts", raising(OSError("accepts broke")))
                with pytest.raises((OSError, ap.AiopipeError), match="accepts broke"):
                    await sched.graph_compute(graph, jnp.asarray(array(1)))
            settled(sched)


@pytest.mark.parametrize("asked", ["all_ready", "error_of", "notify"])
async def test_whether_a_split_is_done_whose_event_somebody_wants(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    graph = chain(3)
    async with ready(graph, 3, blocks=True) as (sched, backends):
        loaded = sched._plans.get(graph)
        call = loaded.splits[0].call
        monkeypatch.setattr(loaded.splits[0], "call", lambda *args: (go_on.wait(30), call(*args))[1])
        evaluation = await sched.graph_compute_async(graph, array(1))
        events = evaluation.events
        with monkeypatch.context() as patched:
            backends[0].hangs = asked == "notify"
            patched.setattr(backends[0], asked, raising(OSError(f"{asked} broke")))
            go_on.set()
            with pytest.raises(OSError, match="broke"):
                await events[0]
        backends[0].let_go()
        assert_equal((await evaluation).array, unsplit(graph, array(1)))


async def test_when_a_split_is_done_that_the_timeline_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(3)
    async with ready(graph, 3, blocks=True, timeline=True) as (sched, backends):
        with monkeypatch.context() as patched:
            patched.setattr(backends[0], "notify", raising(OSError("notify broke")))
            assert_equal((await sched.graph_compute(graph, array(1))).array, unsplit(graph, array(1)))


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
async def test_whether_it_holds_what_was_brought_over_for_a_launch_that_failed(
    blocks: bool, observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = chain(2)
    async with ready(graph, 2, blocks=blocks) as (sched, backends):
        with monkeypatch.context() as patched:
            holds, left = backends[1].holds, [1]

            def broken(value: Any) -> bool:
                if left:
                    left.pop()
                    return holds(value)
                raise OSError("holds broke")

            patched.setattr(backends[1], "holds", broken)
            backends[1].fails = ValueError("no launch")
            if observed:
                sched.set_eval_callback(lambda tensor, ask: False if ask else True)
            with pytest.raises(ap.EvaluationError, match=r"split 1 on 'later:1'.*no launch"):
                await sched.graph_compute(graph, array(1))
            sched.set_eval_callback(None)


# Odd exceptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
async def test_an_exception_that_has_no_text(blocks: bool, later: bool) -> None:
    graph = chain(2)
    async with ready(graph, 2, blocks=blocks) as (sched, backends):
        setattr(backends[1], "fails_later" if later else "fails", Speechless())
        with pytest.raises(ap.EvaluationError, match=r"split 1 on 'later:1'.*Speechless, whose text cannot be") as info:
            await sched.graph_compute(graph, array(1))
        assert type(info.value.__cause__) is Speechless


def fan() -> ap.Graph:
    """Two results, which have nothing to do with each other."""
    b = GraphBuilder("fan")
    x = b.input("x", *SPEC)
    made = [b.node(name, [x], [SPEC], fn=step(i))[0] for i, name in enumerate(("a", "b"))]
    return b.build(made)


@pytest.mark.parametrize("graph", [chain(2), fan()], ids=["chain", "fan"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("later", [False, True])
async def test_an_exception_that_is_false(graph: ap.Graph, failing: int, later: bool) -> None:
    async with ready(graph, 2, blocks=False) as (sched, backends):
        if later:
            for backend in backends:
                backend.hangs = True
        setattr(backends[failing], "fails_later" if later else "fails", Falsy("no"))
        evaluation = await sched.graph_compute_async(graph, array(1))
        await asyncio.sleep(0)
        for backend in backends:
            backend.let_go()
        with pytest.raises(ap.EvaluationError, match=f"split {failing} on 'later:{failing}'") as info:
            await evaluation
        assert type(info.value.__cause__) is Falsy


def test_a_lanes_thread_survives_its_jobs() -> None:
    """Should one raise all the same, what is queued behind it is done."""
    told: list[Any] = []
    before, threading.excepthook = threading.excepthook, told.append
    try:
        lane, done = ap.backend.ThreadLane("tried"), threading.Event()
        lane.post(raising(RuntimeError("a job that raises")))
        lane.post(done.set)
        assert done.wait(30)
        assert lane.close(30)
    finally:
        threading.excepthook = before
    assert [str(args.exc_value) for args in told] == ["a job that raises"]
