"""The scheduler on real CPU devices."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices import sim
from gates import Gate, eventually, gated_scheduler
from models import assert_close, batch, mlp, mlp_params, oracle

N_COPIES = [1, 2, 4, 8]


async def placed(sched: ap.Scheduler, params: list[Any], x: Any, fn: Any = mlp) -> ap.Graph:
    """The model's graph, its layers on the scheduler's backends in turn."""
    n = len(params)
    k = len(sched.backends)
    where = {str(i): sched.backends[i * k // n] for i in range(n)}
    return ap.trace(fn, await ap.place(params, where), x)


@pytest.mark.parametrize("n_devices", [1, 2, 3, 6])
@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_equals_jit_on_one_device(n_devices: int, n_copies: int) -> None:
    params = mlp_params(6)
    async with ap.Scheduler([f"cpu:{i}" for i in range(n_devices)], n_copies=n_copies) as sched:
        graph = await placed(sched, params, batch())
        for seed in range(10):
            x = batch(seed=seed)
            assert_close(await sched.graph_compute(graph, x), oracle(mlp, params, x))
        assert sched.n_splits == n_devices


async def test_bit_equal_for_every_n_copies() -> None:
    params = mlp_params(4)
    results = {}
    for n_copies in N_COPIES:
        async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=n_copies) as sched:
            graph = await placed(sched, params, batch())
            evaluations = [await sched.graph_compute_async(graph, batch(seed=s)) for s in range(12)]
            results[n_copies] = [np.asarray(await e).tobytes() for e in evaluations]
    assert results[1] == results[2] == results[4] == results[8]


@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_one_graph_many_runs(n_copies: int) -> None:  # S2
    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=n_copies) as sched:
        graph = await placed(sched, params, batch())
        first = [np.asarray(await sched.graph_compute(graph, batch(seed=s))) for s in range(10)]
        again = [np.asarray(await sched.graph_compute(graph, batch(seed=s))) for s in range(10)]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 16, 1 << 20, 1 << 26])
@pytest.mark.parametrize("aligned", [True, False])
async def test_inputs_may_be_overwritten_at_once(nbytes: int, aligned: bool) -> None:  # S1
    n = nbytes // 4
    raw = np.zeros(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + (0 if aligned else 4)
    x = raw[start : start + nbytes].view(np.float32)
    w = np.float32(2)

    def fn(params: Any, x: Any) -> Any:
        return jnp.cumsum(x * params["a"])[:: max(1, n // 100)] * params["b"]

    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=4) as sched:
        weights = await ap.place({"a": w, "b": w}, {"a": sched.backends[0], "b": sched.backends[1]})
        graph = ap.trace(fn, weights, x)
        await sched.plan(graph)
        evaluations, wanted = [], []
        for i in range(4):
            x[:] = i + 1
            wanted.append(oracle(fn, {"a": w, "b": w}, x.copy()))
            evaluations.append(await sched.graph_compute_async(graph, x))
            x[:] = np.nan
        for evaluation, want in zip(evaluations, wanted, strict=True):
            assert_close(await evaluation, want)


async def test_synchronize_leaves_the_rotation_alone() -> None:  # S3
    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=4) as sched:
        graph = await placed(sched, params, batch())
        await sched.plan(graph)
        for k in range(6):
            assert sched.cur_copy == k % 4
            x = batch(seed=k)
            evaluation = await sched.graph_compute_async(graph, x)
            assert evaluation.copy_id == k % 4
            await sched.synchronize()
            assert evaluation.done()
            assert_close(await evaluation, oracle(mlp, params, x))


async def test_a_fast_producer_waits_and_memory_stays_flat() -> None:  # S19
    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=4) as sched:
        graph = await placed(sched, params, batch())
        await sched.graph_compute(graph, batch())
        most, live = 0, []
        for k in range(10_000):
            await sched.graph_compute_async(graph, batch())
            most = max(most, sched.statistics().in_flight)
            if k % 1000 == 999:
                await sched.synchronize()
                gc.collect()
                live.append(len(jax.live_arrays()))
        assert most <= 4
        assert live[-1] <= live[0]


async def test_users_arrays_are_never_donated_nor_deleted() -> None:  # S22
    def fn(w: Any, a: Any, b: Any) -> Any:
        return (a + b) @ w[0], (a - b) @ w[1], a

    w = mlp_params(2, 600)
    x = jax.device_put(batch(600, 600), jax.devices()[0])
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        weights = await ap.place(w, {"0": sched.backends[0], "1": sched.backends[1]})
        graph = ap.trace(fn, weights, x, x)
        for _ in range(3):
            got = await sched.graph_compute(graph, x, x)
        assert not x.is_deleted()
        assert_close(got, oracle(fn, w, x, x), 1e-3)


async def test_large_values_between_devices_are_copied_donated_and_right() -> None:
    """Values over the view limit take the path of copying and donating."""
    params = mlp_params(4, 640)
    x = batch(640, 640)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = await placed(sched, params, x)
        plan = await sched.plan(graph)
        assert [p.donate for p in plan.programs] == [(), (0,)]
        evaluations = [await sched.graph_compute_async(graph, x * s) for s in range(1, 6)]
        for s, evaluation in enumerate(evaluations, 1):
            assert_close(await evaluation, oracle(mlp, params, x * s), 1e-4)


async def test_every_kind_of_input_in_one_call() -> None:  # S36
    def fn(w: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return (a + b) @ w[0] + (c + d) @ w[1] + e

    w = mlp_params(2)
    x = batch()
    committed = jax.device_put(x, jax.devices()[3])
    uncommitted = jnp.asarray(x)
    dlpack = jnp.from_dlpack(np.array(x))
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        weights = await ap.place(w, {"0": sched.backends[0], "1": sched.backends[1]})
        graph = ap.trace(fn, weights, x, committed, uncommitted, dlpack, 2.0)
        got = await sched.graph_compute(graph, x, committed, uncommitted, dlpack, 2.0)
        assert_close(got, oracle(fn, w, x, x, x, x, 2.0))


async def test_weights_may_be_committed_arrays_plain_arrays_or_tensors() -> None:
    params = mlp_params(4)
    x = batch()
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        mixed: list[Any] = [
            jax.device_put(params[0], jax.devices()[0]),
            params[1],
            (await ap.place([params[2]], {"*": sched.backends[1]}))[0],
            jax.device_put(params[3], jax.devices()[1]),
        ]
        graph = ap.trace(mlp, mixed, x)
        assert_close(await sched.graph_compute(graph, x), oracle(mlp, params, x))
        assert sched.n_splits == 2
        # The plain array is the only one that had to be put anywhere.
        assert sched.statistics().copied_weights_nbytes == params[1].nbytes


def _frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    view = array.view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize(
    ("weight", "copied_again"),
    [
        (lambda memory, path: _frozen(memory), True),
        (lambda memory, path: _frozen(_frozen(memory)[::-1]), True),
        (lambda memory, path: np.broadcast_to(memory[:1], (4,)), True),
        (lambda memory, path: np.frombuffer(memoryview(memory).toreadonly(), np.float32), True),
        (lambda memory, path: np.frombuffer(memoryview(bytearray(memory.tobytes())).toreadonly(), np.float32), True),
        (lambda memory, path: _frozen(np.frombuffer(bytearray(memory.tobytes()), np.float32)), True),
        (lambda memory, path: _frozen(np.array(memory)[:]), True),
        (lambda memory, path: np.from_dlpack(jnp.array(memory)), True),  # which does not say whose memory it is
        (lambda memory, path: _frozen(np.memmap(_file(memory, path), np.float32, "r+")), True),
        (lambda memory, path: memory, True),
        (lambda memory, path: np.memmap(_file(memory, path), np.float32, "r")[:], False),
        (lambda memory, path: np.asarray(np.memmap(_file(memory, path), np.float32, "r"))[:], False),
        (lambda memory, path: np.frombuffer(memory.tobytes(), np.float32)[:], False),
        (lambda memory, path: jnp.array(memory), False),
    ],
)
async def test_a_weight_in_memory_that_somebody_can_write_is_read_again(
    weight: Any, copied_again: bool, tmp_path: Path
) -> None:
    """By the next graph. Its own flag is not all: a read-only view has somebody's memory."""
    memory = np.ones(4, np.float32)
    value = weight(memory, tmp_path / "weight")
    async with ap.Scheduler(["cpu:0"]) as sched:
        graphs = [ap.trace(lambda w, x, k=k: x * w + k, value, memory) for k in range(2)]
        for k, graph in enumerate(graphs):
            x = np.arange(4, dtype=np.float32)
            np.testing.assert_array_equal(await sched.graph_compute(graph, x), x * np.asarray(value) + k)
            memory[...] = 5  # those that have this memory are other weights now
        assert sched.statistics().copied_weights_nbytes == (2 if copied_again else 1) * value.nbytes


def _file(memory: np.ndarray[Any, Any], path: Path) -> Path:
    memory.tofile(path)
    return path


async def test_a_weight_read_on_two_backends_is_copied_once_for_all_plans() -> None:
    def tied(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w["e"]) @ w["m"] @ w["e"].T

    w = {"e": mlp_params(1)[0], "m": mlp_params(1, seed=1)[0]}
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        weights = await ap.place(w, {"e": sched.backends[0], "m": sched.backends[1]})
        graphs = [ap.trace(tied, weights, batch(rows)) for rows in (1, 2, 3)]  # a copy lives as long as one of them
        for rows, graph in enumerate(graphs, 1):
            sched.set_tensor_backend(graph, graph.outputs[0], "cpu:1")
            assert_close(await sched.graph_compute(graph, batch(rows)), oracle(tied, w, batch(rows)))
        assert sched.statistics().copied_weights_nbytes == w["e"].nbytes


async def test_outputs_that_are_inputs_weights_or_literals() -> None:
    def fn(w: Any, x: Any, y: Any) -> Any:
        return {"x": x, "w": w, "three": 3.0, "sum": x + w, "none": None}

    x = batch()
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(fn, np.float32(2), x, x)
        mine = x.copy()
        got = await sched.graph_compute(graph, mine, x)
        mine[:] = np.nan  # the result must not be the caller's memory
        for _ in range(8):
            await sched.graph_compute(graph, mine, x)  # nor a slot's
        assert_close(got, oracle(fn, np.float32(2), x, x))


async def test_a_graph_with_nothing_to_compute() -> None:
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = ap.trace(lambda w, x: (x, w), np.float32(1), batch())
        x, w = await sched.graph_compute(graph, batch())
        assert sched.n_splits == 0
        assert_close(x, batch())
        assert float(w) == 1


async def test_unused_inputs_are_checked_but_not_needed() -> None:
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(lambda w, x, unused: x + w, np.float32(1), batch(), batch(5))
        assert_close(await sched.graph_compute(graph, batch(), batch(5)), batch() + 1)
        with pytest.raises(ap.TensorError, match="unused"):
            await sched.graph_compute(graph, batch(), batch(4))


@pytest.mark.parametrize("bad", [batch(3), batch().astype(np.int32), [batch()], "text", None])
async def test_a_wrong_input_is_refused_and_the_scheduler_goes_on(bad: Any) -> None:
    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = await placed(sched, params, batch())
        with pytest.raises(ap.TensorError):
            await sched.graph_compute_async(graph, bad)
        assert_close(await sched.graph_compute(graph, batch()), oracle(mlp, params, batch()))


async def test_a_deleted_input_is_refused_and_the_scheduler_goes_on() -> None:
    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = await placed(sched, params, batch())
        gone = jax.device_put(batch(), jax.devices()[0])
        gone.delete()
        with pytest.raises(ap.TensorError, match=r"'x' .*deleted"):
            await sched.graph_compute(graph, gone)
        assert_close(await sched.graph_compute(graph, batch()), oracle(mlp, params, batch()))


async def test_wrong_number_of_inputs() -> None:
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(mlp, mlp_params(1), batch())
        with pytest.raises(ap.TensorError):
            await sched.graph_compute_async(graph)
        with pytest.raises(ap.TensorError):
            await sched.graph_compute_async(graph, batch(), batch())


async def test_awaiting_twice_and_from_two_tasks() -> None:
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = await placed(sched, mlp_params(2), batch())
        evaluation = await sched.graph_compute_async(graph, batch())
        a, b = await asyncio.gather(evaluation, evaluation)
        assert a is b is await evaluation
        assert evaluation.done() and evaluation.exception() is None


async def test_those_who_await_one_evaluation_go_on_in_the_order_in_which_they_came() -> None:
    went_on = []

    async def waits(k: int, run: ap.Evaluation) -> None:
        await run
        went_on.append(k)

    async with ap.Scheduler(sim.Cluster(1).backends) as sched:
        graph = ap.trace(mlp, mlp_params(1), batch())
        run = await sched.graph_compute_async(graph, batch())
        await asyncio.gather(*(waits(k, run) for k in range(50)))
    assert went_on == list(range(50))


async def test_events_of_the_whole_and_of_each_split() -> None:
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = await placed(sched, mlp_params(2, 256), batch(64, 256))
        await sched.plan(graph)
        evaluation = await sched.graph_compute_async(graph, batch(64, 256))
        events = evaluation.events
        assert len(events) == 2
        for event in events:
            await event
        await evaluation.event
        assert evaluation.done()
        assert len(evaluation.events) == 2 and all(event.done() for event in evaluation.events)
        with pytest.raises(TypeError, match="truth value"):
            bool(events[0])


async def test_after_close_everything_is_refused() -> None:
    sched = ap.Scheduler(["cpu:0"])
    async with sched:
        graph = ap.trace(mlp, mlp_params(1), batch())
        await sched.graph_compute(graph, batch())
    with pytest.raises(ap.BackendClosedError, match="closed"):
        await sched.graph_compute(graph, batch())
    with pytest.raises(ap.BackendClosedError):
        async with sched:
            pass
    await sched.aclose()  # again is fine


def test_two_loops_are_refused_clearly() -> None:
    sched = ap.Scheduler(["cpu:0"])
    graph = ap.trace(mlp, mlp_params(1), batch())

    async def use() -> Any:
        return await sched.graph_compute(graph, batch())

    async def close() -> None:
        await sched.aclose()

    first = asyncio.new_event_loop()
    try:
        assert_close(first.run_until_complete(use()), oracle(mlp, mlp_params(1), batch()))
        with pytest.raises(ap.WrongLoopError, match="one scheduler for each loop"):
            asyncio.run(use())
        assert_close(first.run_until_complete(use()), oracle(mlp, mlp_params(1), batch()))
        first.run_until_complete(close())
    finally:
        first.run_until_complete(first.shutdown_default_executor())
        first.close()


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu:0", "cpu:0"], "given twice"),
        (["cpu:99"], "jax_num_cpu_devices"),
        (["toaster:0"], "unknown device 'toaster:0'"),
        (["cpu:x"], "expected a number"),
        ([], "no backends"),
    ],
)
def test_bad_devices(devices: list[str], message: str) -> None:
    with pytest.raises(ap.PlacementError, match=message):
        ap.Scheduler(devices)


async def test_a_failing_split_fails_only_its_evaluation() -> None:  # S23, S24
    def picky(x: np.ndarray) -> np.ndarray:
        if np.isnan(x).any():
            raise ValueError("a NaN came in")
        return x

    def fn(w: list[Any], x: Any) -> Any:
        x = jnp.tanh(x @ w[0])
        x = jnp.tanh(x @ w[1])
        x = jax.pure_callback(picky, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        x = jnp.tanh(x @ w[2])
        return jnp.tanh(x @ w[3])

    params = mlp_params(4)
    async with ap.Scheduler([f"cpu:{i}" for i in range(4)]) as sched:
        weights = await ap.place(params, {str(i): sched.backends[i] for i in range(4)})
        graph = ap.trace(fn, weights, batch())
        callback = next(node for node in graph.nodes if node.op == "pure_callback")
        sched.set_tensor_backend(graph, graph.tensors[callback.outputs[0]], "cpu:1")
        await sched.plan(graph)
        bad = batch()
        bad[0, 0] = np.nan
        runs = [await sched.graph_compute_async(graph, x) for x in (batch(), bad, batch(seed=1), bad)]
        assert_close(await runs[0], oracle(fn, params, batch()))
        assert_close(await runs[2], oracle(fn, params, batch(seed=1)))
        for failed in (runs[1], runs[3]):
            with pytest.raises(ap.EvaluationError, match="a NaN came in") as caught:
                await failed
            assert caught.value.backend == "cpu:1"
            assert caught.value.split == 1
            assert "test_scheduler.py" in caught.value.source
            assert caught.value.__cause__ is not None
        await sched.synchronize()
        assert sched.statistics().failed == 2
        assert sched.statistics().in_flight == 0


async def test_weights_go_with_their_graph_though_another_one_runs_the_same_programs() -> None:
    params = [np.eye(8, dtype=np.float32) for _ in range(2)]
    theirs = [weakref.ref(w) for w in params]
    x = batch(2, 8)
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(mlp, params, x)
        await sched.graph_compute(graph, x)
        other = ap.trace(mlp, [2 * w for w in params], x)
        await sched.graph_compute(other, x)
        assert sched.statistics().compiled == 1
        del graph, params
        gc.collect()
        assert all(w() is None for w in theirs)


async def test_a_failure_nobody_awaits_reaches_the_loops_handler() -> None:
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    build = ap.GraphBuilder("failing")
    x = build.input("x", (2,), "float32", 8)
    graph = build.build(build.node("fail", [x], [((2,), "float32", 8)], fn=sim.fail("boom")))
    async with ap.Scheduler(sim.Cluster(1).backends) as sched:
        evaluation = await sched.graph_compute_async(graph, np.zeros(2, np.float32))
        await sched.synchronize()
        assert evaluation.done()
        del evaluation
        gc.collect()
    assert len(seen) == 1 and isinstance(seen[0]["exception"], ap.EvaluationError)


@pytest.fixture
async def gated() -> AsyncIterator[tuple[ap.Scheduler, ap.Graph, Gate]]:
    async with gated_scheduler() as parts:
        yield parts


async def test_a_full_pipeline_makes_the_submitter_wait(gated: tuple[ap.Scheduler, ap.Graph, Gate]) -> None:
    sched, graph, gate = gated
    runs = [await sched.graph_compute_async(graph, batch(seed=s)) for s in range(2)]
    third = asyncio.ensure_future(sched.graph_compute_async(graph, batch(seed=2)))
    await eventually(lambda: sched.statistics().waiting == 1)
    await eventually(gate.entered.is_set)
    assert not third.done()
    assert sched.statistics().in_flight == 2
    gate.open.set()
    results = [await run for run in runs] + [await (await third)]
    for seed, result in enumerate(results):
        assert_close(result, oracle(gate.fn, mlp_params(2), batch(seed=seed)))


async def test_cancelling_a_running_evaluation_keeps_its_slot_until_the_device_is_done(
    gated: tuple[ap.Scheduler, ap.Graph, Gate],
) -> None:
    sched, graph, gate = gated
    run = await sched.graph_compute_async(graph, batch())
    await eventually(gate.entered.is_set)
    assert run.cancel()
    assert run.cancelled() and not run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert sched.statistics().in_flight == 1
    gate.open.set()
    await sched.synchronize()
    assert sched.statistics().in_flight == 0
    assert_close(await sched.graph_compute(graph, batch()), oracle(gate.fn, mlp_params(2), batch()))


async def test_cancelling_right_after_submitting(gated: tuple[ap.Scheduler, ap.Graph, Gate]) -> None:  # S27
    sched, graph, gate = gated
    gate.open.set()
    for _ in range(50):
        run = await sched.graph_compute_async(graph, batch())
        run.cancel()
    await sched.synchronize()
    statistics = sched.statistics()
    assert statistics.in_flight == statistics.waiting == 0
    assert statistics.cancelled + statistics.succeeded == 50
    assert_close(await sched.graph_compute(graph, batch()), oracle(gate.fn, mlp_params(2), batch()))


async def test_cancelling_the_task_that_waits_for_admission(gated: tuple[ap.Scheduler, ap.Graph, Gate]) -> None:
    sched, graph, gate = gated
    runs = [await sched.graph_compute_async(graph, batch(seed=s)) for s in range(2)]
    waiting = asyncio.ensure_future(sched.graph_compute_async(graph, batch()))
    await eventually(lambda: sched.statistics().waiting == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sched.statistics().waiting == 0
    gate.open.set()
    for run in runs:
        await run


async def test_cancelling_the_last_awaiter_cancels_the_evaluation(
    gated: tuple[ap.Scheduler, ap.Graph, Gate],
) -> None:
    sched, graph, gate = gated
    run = await sched.graph_compute_async(graph, batch())

    async def wait() -> Any:
        return await run

    first, second = asyncio.ensure_future(wait()), asyncio.ensure_future(wait())
    await eventually(gate.entered.is_set)
    first.cancel()
    await asyncio.wait([first])
    assert not run.done()  # somebody else still wants it
    second.cancel()
    await asyncio.wait([second])
    assert run.cancelled()


async def test_leaving_on_an_error_drops_what_is_in_flight() -> None:
    gate = Gate()
    sched = ap.Scheduler(["cpu:0", "cpu:1"], n_copies=2)
    weights = await ap.place(mlp_params(2), {"0": sched.backends[0], "1": sched.backends[1]})
    graph = ap.trace(gate.fn, weights, batch())
    with pytest.raises(KeyError):
        async with sched:
            run = await sched.graph_compute_async(graph, batch())
            await eventually(gate.entered.is_set)
            threading.Timer(0.01, gate.open.set).start()
            raise KeyError("mine")
    assert run.cancelled()


async def test_what_waits_for_its_lane_is_not_launched_after_a_cancellation(
    gated: tuple[ap.Scheduler, ap.Graph, Gate],
) -> None:
    sched, graph, gate = gated
    runs = [await sched.graph_compute_async(graph, batch(seed=s)) for s in range(2)]
    await eventually(gate.entered.is_set)
    assert gate.calls == 1  # the second one's callback waits for the lane
    runs[1].cancel()
    gate.open.set()
    await runs[0]
    await sched.synchronize()
    assert gate.calls == 1


async def test_closing_with_a_time_limit_cancels_what_hangs() -> None:
    gate = Gate()
    sched = ap.Scheduler(["cpu:0", "cpu:1"], n_copies=2)
    weights = await ap.place(mlp_params(2), {"0": sched.backends[0], "1": sched.backends[1]})
    graph = ap.trace(gate.fn, weights, batch())
    run = await sched.graph_compute_async(graph, batch())
    await eventually(gate.entered.is_set)
    with pytest.warns(ResourceWarning, match="is held up by its device"):
        closing = asyncio.ensure_future(sched.aclose(timeout_s=0.01))
        await eventually(lambda: run.done())
        assert run.cancelled()
        threading.Timer(0.2, gate.open.set).start()  # the completion threads end when the device is done
        await closing


async def test_closing_while_a_plan_is_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate = threading.Event(), threading.Event()

    def slow(self: Any, program: Any) -> Any:
        entered.set()
        assert gate.wait(30)
        raise AssertionError("nobody wants it any more")

    sched = ap.Scheduler(["cpu:0"])
    monkeypatch.setattr(type(sched.backends[0]), "load", slow)
    graph = ap.trace(mlp, mlp_params(1), batch())
    waiting = asyncio.ensure_future(sched.graph_compute(graph, batch()))
    await eventually(entered.is_set)
    closing = asyncio.ensure_future(sched.aclose())
    with pytest.raises(ap.BackendClosedError, match="closed while"):
        await waiting
    assert not closing.done(), "a thread compiles"
    gate.set()
    await closing


async def test_a_pin_set_while_the_graph_is_being_loaded_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate = threading.Event(), threading.Event()
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        load = type(sched.backends[0]).load

        def slow(self: Any, program: Any) -> Any:
            entered.set()
            assert gate.wait(30)
            return load(self, program)

        monkeypatch.setattr(type(sched.backends[0]), "load", slow)
        graph = ap.trace(mlp, mlp_params(1), batch())
        waiting = asyncio.ensure_future(sched.graph_compute(graph, batch()))
        await eventually(entered.is_set)
        sched.set_tensor_backend(graph, graph.outputs[0], "cpu:1")
        gate.set()
        assert (await waiting).devices() == {jax.devices()[1]}


async def test_buffer_sizes_count_each_weight_once_and_only_what_can_be_in_flight() -> None:
    params = mlp_params(2, 64)
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=4, memory_limit=60_000) as sched:
        weights = await ap.place(params, {"0": sched.backends[0], "1": sched.backends[1]})
        graphs = [ap.trace(mlp, weights, batch(rows, 64)) for rows in range(1, 9)]
        for graph in graphs:  # each would fit alone; together they hold the same weights
            await sched.plan(graph)
        sizes = [(await sched.plan(graph)).sizes[0] for graph in graphs]
        scratch = max(size.temp_nbytes for size in sizes)
        assert sched.buffer_size("cpu:0") == params[0].nbytes + 4 * sizes[-1].copy_nbytes + scratch
        other = ap.trace(mlp, await ap.place(mlp_params(2, 100), {"*": sched.backends[0]}), batch(1, 100))
        with pytest.raises(ap.AllocationError, match="'cpu:0'"):  # their weights come on top
            await sched.plan(other)


async def test_a_backend_waits_for_what_was_launched_on_it(gated: tuple[ap.Scheduler, ap.Graph, Gate]) -> None:
    sched, graph, gate = gated
    gate.open.set()
    evaluation = await sched.graph_compute_async(graph, batch())
    await sched.synchronize()
    assert evaluation.done()
    for backend in sched.backends:
        await backend.synchronize()
        assert all(value.is_ready() for value in backend.newest.values())


async def test_side_by_side_where_independent() -> None:
    """Two towers on two devices: each waits inside a callback until the other is under way, too."""
    barrier = threading.Barrier(2)

    def meet(x: np.ndarray) -> np.ndarray:
        barrier.wait(30)
        return x

    def fn(w: list[Any], x: Any) -> Any:
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
        a = jax.pure_callback(meet, spec, x @ w[0]) @ w[0]
        b = jax.pure_callback(meet, spec, x @ w[1]) @ w[1]
        return a + b

    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = ap.trace(fn, await ap.place(params, {"0": sched.backends[0], "1": sched.backends[1]}), batch())
        for node in graph.nodes:
            if node.op == "pure_callback":
                first = next(n for n in graph.nodes if node.inputs[0] in n.outputs)
                weight = next(t for t in first.inputs if graph.tensors[t] in graph.weights)
                sched.set_tensor_backend(graph, graph.tensors[node.outputs[0]], f"cpu:{graph.tensors[weight].name}")
        async with asyncio.timeout(30):
            for _ in range(3):
                await sched.graph_compute(graph, batch())


async def test_effects_run_inside_their_split(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(w: Any, x: Any) -> Any:
        jax.debug.print("first is {}", x[0, 0])
        return x * w

    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(fn, np.float32(2), batch())
        x = np.full((2, 8), 7, np.float32)
        assert_close(await sched.graph_compute(graph, x), x * 2)
    assert "first is 7.0" in capfd.readouterr().out


async def test_an_effect_whose_value_nobody_needs_still_runs_and_is_waited_for() -> None:
    seen: list[float] = []

    def fn(w: list[Any], x: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(float(v)), (x @ w[1]).sum())
        return x @ w[0]

    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = ap.trace(fn, await ap.place(params, {"0": sched.backends[0], "1": sched.backends[1]}), batch())
        await sched.graph_compute(graph, batch())
        assert len(seen) == 1
        np.testing.assert_allclose(seen[0], (batch() @ params[1]).sum(), rtol=1e-4)


async def test_pins_and_what_became_of_them() -> None:
    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = ap.trace(mlp, params, batch())
        out = graph.outputs[0]
        assert sched.get_tensor_backend(graph, out) is None
        await sched.plan(graph)
        home = sched.get_tensor_backend(graph, out)
        other = sched.backends[1 - sched.backends.index(home)]
        sched.set_tensor_backend(graph, out, other)
        assert sched.get_tensor_backend(graph, out) is other
        y = await sched.graph_compute(graph, batch())
        assert y.devices() == {other.jax_device}
        plan = await sched.plan(graph)
        assert plan.assignment.node_cause[graph.producers()[out.id]] == "usr"
        with pytest.raises(ap.PlacementError, match="not one of this scheduler's backends"):
            sched.set_tensor_backend(graph, out, "cpu:5")
        stranger = ap.trace(mlp, params, batch())
        with pytest.raises(ap.PlacementError, match="is not of graph"):
            sched.set_tensor_backend(graph, stranger.outputs[0], "cpu:0")


async def test_two_schedulers_plan_one_graph_at_once() -> None:  # S14
    params = mlp_params(4)
    graph = ap.trace(mlp, params, batch())
    before = (graph.nodes, graph.tensors)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as a, ap.Scheduler(["cpu:2", "cpu:3", "cpu:4"]) as b:
        for sched in (a, b):
            sched.set_tensor_backend(graph, graph.outputs[0], sched.backends[-1])
        results = await asyncio.gather(*(s.graph_compute(graph, batch()) for s in (a, b, a, b)))
    for result in results:
        assert_close(result, oracle(mlp, params, batch()))
    assert before == (graph.nodes, graph.tensors)


async def test_sixteen_distinct_splits_compile_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:  # S37
    """Shown by a barrier that only two compilations at the same time can pass."""
    both = threading.Barrier(2)
    met = threading.Event()
    load = type(ap.open_backend("cpu:0")).load

    def watched(self: Any, program: Any) -> Any:
        if not met.is_set():
            both.wait(30)
            met.set()
        return load(self, program)

    monkeypatch.setattr(type(ap.open_backend("cpu:0")), "load", watched)
    params = [p[: 8 + i, : 9 + i] for i, p in enumerate(mlp_params(16, 40))]
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=2) as sched:
        graph = ap.trace(
            mlp, await ap.place(params, lambda path: sched.backends[int(path) % 2]), batch(2, 8)
        )
        got = await sched.graph_compute(graph, batch(2, 8))
        assert sched.n_splits == 16
        assert sched.statistics().compiled == 16
    assert met.is_set()
    assert_close(got, oracle(mlp, params, batch(2, 8)))


async def test_equal_splits_compile_once_for_each_device() -> None:
    def linear(params: list[Any], x: Any) -> Any:
        for w in params:
            x = x @ w
        return x

    params = mlp_params(12)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = ap.trace(linear, await ap.place(params, lambda path: sched.backends[int(path) % 2]), batch())
        await sched.plan(graph)
        assert sched.n_splits == 12
        assert sched.statistics().compiled == 2


async def test_too_little_memory_is_refused_before_anything_is_allocated() -> None:
    params = mlp_params(2, 64)
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=4, memory_limit={"cpu:1": 40_000}) as sched:
        graph = await placed(sched, params, batch(32, 64))
        with pytest.raises(ap.AllocationError, match=r"'cpu:1' needs .* n_copies=1 would fit") as caught:
            await sched.plan(graph)
        assert caught.value.available_nbytes == 40_000 < caught.value.asked_nbytes
        small = await placed(sched, params, batch(1, 64))
        assert_close(await sched.graph_compute(small, batch(1, 64)), oracle(mlp, params, batch(1, 64)))


async def test_own_dispatch_threads_give_the_same_results() -> None:
    params = mlp_params(6)
    backends = [ap.open_backend(f"cpu:{i}", dispatch=d) for i, d in enumerate(["own", "shared", "own"])]
    async with ap.Scheduler(backends) as sched:
        graph = await placed(sched, params, batch())
        runs = [await sched.graph_compute_async(graph, batch(seed=s)) for s in range(20)]
        for s, run in enumerate(runs):
            assert_close(await run, oracle(mlp, params, batch(seed=s)))
    for backend in backends:
        await backend.aclose()


async def test_a_plan_prints_splits_bytes_and_causes() -> None:
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = await placed(sched, mlp_params(2), batch())
        text = str(await sched.plan(graph))
    assert "2 splits" in text and "cpu:0" in text and "64 B" in text and "1.wgt1:1" in text
    assert "models.py" in text
