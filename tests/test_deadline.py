"""Evaluations that take too long: deadlines of the scheduler's, and time limits of the caller's own."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.completion import unfinished
from aiopipe.devices.sim import HostOp
from aiopipe.graph import Graph
from aiopipe.graph_builder import GraphBuilder
from aiopipe.loaded import Loaded
from hanging import Later
from models import assert_close, batch, mlp, mlp_params, oracle
from simgraphs import SPEC, array, assert_equal, chain, settled, step, unsplit

SOON, NEVER = 0.01, 1000.0
"""Deadlines that come, and do not come, before the test is over: what hangs, hangs until the test lets it go."""


@asynccontextmanager
async def devices(n: int, **options: Any) -> AsyncIterator[tuple[ap.Scheduler, list[Later]]]:
    """A scheduler on devices that hang at will; they let go at the end."""
    backends = [Later(i) for i in range(n)]
    async with ap.Scheduler([*backends, "cpu:0"], **options) as sched:
        try:
            yield sched, backends
        finally:
            for backend in backends:
                backend.let_go()
            await sched.synchronize()
            settled(sched)


async def on(sched: ap.Scheduler, *cut: int) -> Graph:
    """A chain with one step on each of these devices, ready to run."""
    graph = chain(len(cut), name="on " + ", ".join(map(str, cut)))
    sched.set_cut(graph, cut)
    await sched.plan(graph)
    return graph


# What the caller gets ----------------------------------------------------------------------------


@pytest.mark.parametrize("hanging", [0, 1, 2])
async def test_it_names_the_split_that_is_not_done_and_holds_its_slot(hanging: int) -> None:
    async with devices(3, n_copies=2) as (sched, backends):
        graph = await on(sched, 0, 1, 2)
        backends[hanging].hangs = True
        evaluation = await sched.graph_compute_async(graph, array(1), deadline=SOON)
        with pytest.raises(ap.DeadlineExceeded) as caught:
            await evaluation
        error = caught.value
        assert isinstance(error, ap.EvaluationError) and isinstance(error, TimeoutError)
        assert (error.split, error.backend, error.node) == (hanging, f"later:{hanging}", graph.nodes[hanging].name)
        assert error.source == f"model.py:{10 + hanging} (stage {hanging})"
        assert str(error) == (
            f"evaluation 0 of 'on 0, 1, 2' was not done within {SOON} s: split {hanging} on 'later:{hanging}', which "
            f"begins with 'step' at {error.source}, is still running"
        )
        assert sched.statistics().in_flight == 1 and evaluation.failed and not evaluation.cancelled()
        backends[hanging].let_go()
        await sched.synchronize()
        assert (sched.statistics().in_flight, sched.statistics().failed) == (0, 1)
        assert_equal((await sched.graph_compute(graph, array(2))).array, unsplit(graph, array(2)))


async def test_who_waits_for_a_slot_is_told_so() -> None:
    async with devices(1, n_copies=2, deadline=SOON) as (sched, backends):
        graph = await on(sched, 0)
        backends[0].hangs = True
        for _ in range(2):
            await sched.graph_compute_async(graph, array(1), deadline=math.inf)
        late = await sched.graph_compute_async(graph, array(1))
        assert late.copy_id == -1
        with pytest.raises(ap.DeadlineExceeded, match=r"waits for a slot; .* held by the evaluations 0, 1$") as e:
            await late
        assert (e.value.split, e.value.backend) == (-1, "")


async def test_a_launch_that_hangs_is_named() -> None:
    gate = threading.Event()

    def wait(x: Any) -> Any:
        assert gate.wait(30)
        return np.asarray(x)

    def model(w: Any, x: Any) -> Any:
        y = jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jnp.tanh(y @ w[0])

    async with ap.Pipeline(model, mlp_params(1), devices=["cpu:0", "cpu:1"], deadline=SOON) as pipe:
        await pipe.plan(batch())
        evaluation = await pipe.submit(batch())
        with pytest.raises(ap.DeadlineExceeded, match=r"split 0 on 'cpu:.', .* 'pure_callback' at test_deadline.py"):
            await evaluation
        gate.set()
        await pipe.scheduler.synchronize()
        settled(pipe.scheduler)


async def test_inputs_that_cannot_be_captured_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate, capture = threading.Event(), threading.Event(), Loaded.capture

    def slowly(self: Loaded, *args: Any) -> None:
        entered.set()
        assert gate.wait(30)
        capture(self, *args)

    large = batch(1024, 512)
    async with ap.Pipeline(mlp, mlp_params(1, 512), devices=["cpu:0"], n_copies=1) as pipe:
        await pipe(large)
        monkeypatch.setattr(Loaded, "capture", slowly)
        graph = next(iter(pipe._graphs.values()))
        submitting = asyncio.ensure_future(pipe.scheduler.graph_compute_async(graph, large, deadline=SOON))
        with pytest.raises(ap.DeadlineExceeded, match="its inputs are still being captured"):
            await (await submitting)
        assert entered.is_set() and pipe.statistics().in_flight == 1
        gate.set()
        assert_close(await pipe(large), oracle(mlp, mlp_params(1, 512), large), 1e-4)
        settled(pipe.scheduler)


async def test_an_eval_callback_that_hangs() -> None:
    async with devices(1) as (sched, _):
        graph = await on(sched, 0)
        broken_off: list[bool] = []

        async def hang(tensor: ap.Tensor, ask: bool) -> bool:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                broken_off.append(ask)
                raise
            return True

        sched.set_eval_callback(hang)
        with pytest.raises(ap.DeadlineExceeded, match=r"split 0 on 'later:0'.*is not launched yet"):
            await sched.graph_compute(graph, array(1), deadline=SOON)
        await sched.synchronize()
        assert broken_off == [True]


def test_what_is_said_where_no_split_is_to_blame() -> None:
    split, why = unfinished((), ())
    assert split == -1 and "an input that it returns is not ready" in why


# The others go on --------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["deadline", "timeout around awaiting", "timeout around all"])
async def test_the_others_go_on_with_the_slots_that_are_left(limit: str) -> None:
    async with devices(2, n_copies=2) as (sched, backends):
        stuck, free = await on(sched, 0), await on(sched, 1)
        backends[0].hangs = True
        if limit == "deadline":
            with pytest.raises(ap.DeadlineExceeded):
                await sched.graph_compute(stuck, array(1), deadline=SOON)
        elif limit == "timeout around awaiting":
            evaluation = await sched.graph_compute_async(stuck, array(1))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(SOON):
                    await evaluation
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(SOON):
                    await sched.graph_compute(stuck, array(1))
        for k in range(5):
            evaluation = await sched.graph_compute_async(free, array(k), deadline=NEVER)
            assert evaluation.copy_id == 1  # slot 0 is held by what hangs
            assert_equal((await evaluation).array, unsplit(free, array(k)))
        assert sched.statistics().in_flight == 1
        assert [(await sched.graph_compute_async(free, array(k))).copy_id for k in range(2)] == [1, 1]
        backends[0].let_go()
        await sched.synchronize()
        assert {(await sched.graph_compute_async(free, array(k))).copy_id for k in range(4)} == {0, 1}


async def test_when_everything_hangs_every_caller_hears_of_it_and_all_slots_come_back() -> None:
    async with devices(2, n_copies=2, deadline=SOON) as (sched, backends):
        graph = await on(sched, 0, 1)
        backends[1].hangs = True
        errors = await asyncio.gather(
            *(sched.graph_compute(graph, array(k)) for k in range(7)), return_exceptions=True
        )
        assert all(isinstance(error, ap.DeadlineExceeded) for error in errors)
        assert [error.split for error in errors if isinstance(error, ap.DeadlineExceeded)] == [1, 1, *[-1] * 5]
        assert (sched.statistics().in_flight, sched.statistics().waiting) == (2, 0)
        backends[1].let_go()
        assert_equal((await sched.graph_compute(graph, array(9), deadline=NEVER)).array, unsplit(graph, array(9)))


async def test_a_stream_fails_where_it_is_late_and_another_begins() -> None:
    async with devices(1, n_copies=2, deadline=SOON) as (sched, backends):
        graph = await on(sched, 0)
        got = []
        with pytest.raises(ap.DeadlineExceeded):
            async for y in sched.stream(graph, (array(k) for k in range(9))):
                got.append(y)
                backends[0].hangs = len(got) == 3
        assert len(got) >= 3
        backends[0].let_go()
        await sched.synchronize()
        assert len([y async for y in sched.stream(graph, (array(k) for k in range(9)))]) == 9


async def test_closing_ends_within_its_limit_though_a_device_hangs() -> None:
    backend = Later()
    sched = ap.Scheduler([backend, "cpu:0"], n_copies=2)
    graph = await on(sched, 0)
    backend.hangs = True
    evaluations = [await sched.graph_compute_async(graph, array(k)) for k in range(2)]
    waiting = asyncio.ensure_future(sched.graph_compute_async(graph, array(2)))
    await asyncio.sleep(0)
    await sched.aclose(timeout_s=SOON)
    assert all(evaluation.cancelled() for evaluation in [*evaluations, await waiting])
    assert sched.statistics().in_flight == 2  # as it is: the device has them still
    backend.let_go()
    await sched.synchronize()
    settled(sched)


# What is in time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("deadline", [None, NEVER, math.inf])
async def test_who_is_in_time_notices_nothing(deadline: float | None) -> None:
    params = mlp_params(4)
    async with ap.Scheduler(["cpu:0", "cpu:1"], deadline=NEVER if deadline is None else SOON) as sched:
        graph = ap.trace(mlp, params, batch())
        await sched.plan(graph)
        for k in range(20):
            got = await sched.graph_compute(graph, batch(seed=k), deadline=deadline)
            assert_close(got, oracle(mlp, params, batch(seed=k)))
        settled(sched)
        assert sched.statistics().failed == 0


async def test_a_deadline_that_did_not_come_keeps_nothing_alive() -> None:
    async with devices(1, deadline=NEVER) as (sched, backends):
        graph = await on(sched, 0)
        backends[0].hangs = True
        evaluation = await sched.graph_compute_async(graph, array(1))
        backends[0].let_go()
        await evaluation
        known = weakref.ref(evaluation)
        del evaluation
        gc.collect()
        assert known() is None


@pytest.mark.parametrize("deadline", [-1.0, math.nan])
async def test_deadlines_that_make_no_sense(deadline: float) -> None:
    with pytest.raises(ValueError, match=r"deadline is .*: expected seconds"):
        ap.Scheduler(["cpu:0"], deadline=deadline)
    async with devices(1) as (sched, _):
        graph = await on(sched, 0)
        with pytest.raises(ValueError, match="expected seconds"):
            await sched.graph_compute(graph, array(1), deadline=deadline)


async def test_a_deadline_with_inputs_that_were_set_by_hand() -> None:
    async with devices(1) as (sched, backends):
        graph = await on(sched, 0)
        await sched.tensor_set(graph.inputs[0], array(4))
        backends[0].hangs = True
        with pytest.raises(ap.DeadlineExceeded):
            await sched.graph_compute(graph, deadline=SOON)
        with pytest.raises(ap.DeadlineExceeded):
            await sched.tensor_get(graph.outputs[0])


# State -------------------------------------------------------------------------------------------


def adds() -> Graph:
    """(s, x) -> (s + x) * 3 + 1; the state becomes s + x."""
    b = GraphBuilder("adds")
    x, s = b.input("x", *SPEC), b.state("s", *SPEC)
    (y,) = b.node("add", [x, s], [SPEC], fn=HostOp(lambda x, s: x + s), source="model.py:1")
    (z,) = b.node("step", [y], [SPEC], fn=step(1), source="model.py:2")
    return b.build([z], new_state=[y])


async def test_what_was_launched_marks_its_state() -> None:
    with jax.enable_x64(True):
        async with devices(1, n_copies=3) as (sched, backends):
            graph, state = adds(), ap.State([array(0)])
            await sched.alloc_graph(graph, state=state)
            backends[0].hangs = True
            first = await sched.graph_compute_async(graph, array(1), state=state)
            with pytest.raises(ap.DeadlineExceeded, match="split 0"):
                await sched.graph_compute(graph, array(2), state=state, deadline=SOON)
            assert not first.done()
            backends[0].let_go()
            with pytest.raises(ap.StateError) as caught:
                await sched.graph_compute(graph, array(3), state=state)
            assert isinstance(caught.value.__cause__, ap.DeadlineExceeded)
            assert_equal((await first).array, (array(0) + array(1)) * 3 + 1)
            await state.reset()
            assert_equal((await sched.graph_compute(graph, array(1), state=state)).array, (array(0) + array(1)) * 3 + 1)


@pytest.mark.parametrize("where", ["at its launch", "on the device"])
async def test_who_fails_behind_one_that_hangs_on_its_state_hears_of_it_in_time(where: str) -> None:
    """Which of the two failed first is not known while the first one hangs: the error waits, but not for ever."""
    with jax.enable_x64(True):
        async with devices(1, n_copies=3) as (sched, (backend,)):
            graph, state = adds(), ap.State([array(0)])
            await sched.alloc_graph(graph, state=state)
            backend.hangs = True
            first = await sched.graph_compute_async(graph, array(1), state=state)
            setattr(backend, "fails" if where == "at its launch" else "fails_later", RuntimeError("broken"))
            with pytest.raises(ap.DeadlineExceeded):
                await sched.graph_compute(graph, array(2), state=state, deadline=SOON)
            assert not first.done()
            backend.let_go()
            assert_equal((await first).array, (array(0) + array(1)) * 3 + 1)
            with pytest.raises(ap.StateError):
                await sched.graph_compute(graph, array(3), state=state)


async def test_what_waits_for_its_turn_leaves_the_state_alone() -> None:
    go_on = asyncio.Event()

    async def hold(tensor: ap.Tensor, ask: bool) -> bool:
        await go_on.wait()
        return False

    with jax.enable_x64(True):
        async with devices(1) as (sched, _):
            graph, state = adds(), ap.State([array(0)])
            await sched.alloc_graph(graph, state=state)
            sched.set_eval_callback(hold)
            first = await sched.graph_compute_async(graph, array(1), state=state)
            sched.set_eval_callback(None)
            with pytest.raises(ap.DeadlineExceeded, match=r"split 0 on 'later:0'.*waits for its turn"):
                await sched.graph_compute(graph, array(2), state=state, deadline=SOON)
            go_on.set()
            await first
            total = array(0) + array(1) + array(3)
            assert_equal((await sched.graph_compute(graph, array(3), state=state)).array, total * 3 + 1)
