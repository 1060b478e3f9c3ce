"""The short way: `Pipeline`."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from gates import eventually
from models import assert_close, batch, mlp, mlp_params, oracle

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


async def test_call_and_stream() -> None:
    params = mlp_params(6)
    batches = [batch(seed=s) for s in range(20)]
    async with ap.Pipeline(mlp, params, devices=DEVICES) as pipe:
        assert_close(await pipe(batches[0]), oracle(mlp, params, batches[0]))
        got = [y async for y in pipe.stream(batches)]
    assert len(got) == 20
    for y, x in zip(got, batches, strict=True):
        assert_close(y, oracle(mlp, params, x))


async def test_closing_one_that_was_never_opened_or_is_closed_does_nothing() -> None:
    pipe = ap.Pipeline(mlp, mlp_params(1), devices=["cpu:0"])
    await pipe.aclose()
    async with pipe:
        await pipe(batch())
    await pipe.aclose()


def test_a_split_that_nobody_knows() -> None:
    with pytest.raises(ap.PlacementError, match="split='even': expected 'auto', one number for each device, or a map"):
        ap.Pipeline(mlp, mlp_params(1), devices=["cpu:0"], split="even")


async def test_each_device_gets_a_part() -> None:
    async with ap.Pipeline(mlp, mlp_params(6), devices=DEVICES) as pipe:
        plan = await pipe.plan(batch())
        assert [split.backend for split in plan.splits] == [0, 1, 2]
        assert len({size.weights_nbytes for size in plan.sizes}) == 1


async def test_ratios_and_empty_parts() -> None:  # S12
    params = mlp_params(6)
    for split, backends in (([2, 1, 0], [0, 1]), ([1, 0, 0], [0]), ([0, 0, 1], [2])):
        async with ap.Pipeline(mlp, params, devices=DEVICES, split=split) as pipe:
            plan = await pipe.plan(batch())
            assert [s.backend for s in plan.splits] == backends
            for backend, size in enumerate(plan.sizes):
                assert (size.total(4) == 0) == (backend not in backends)
            assert_close(await pipe(batch()), oracle(mlp, params, batch()))


async def test_more_devices_than_layers() -> None:  # S12
    params = mlp_params(2)
    async with ap.Pipeline(mlp, params, devices=[f"cpu:{i}" for i in range(6)]) as pipe:
        assert_close(await pipe(batch()), oracle(mlp, params, batch()))
        assert len((await pipe.plan(batch())).splits) <= 4  # each matmul and each tanh at most


async def test_placement_by_path() -> None:
    params = {"first": {"w": mlp_params(1)[0]}, "rest": mlp_params(2, seed=1)}

    def fn(p: Any, x: Any) -> Any:
        return mlp([p["first"]["w"], *p["rest"]], x)

    split = {"first/*": "cpu:2", "rest/[0]": "cpu:0", "*": "cpu:1"}
    async with ap.Pipeline(fn, params, devices=DEVICES, split=split) as pipe:
        plan = await pipe.plan(batch())
        used = [s.backend for s in plan.splits]
        assert used == [2, 0, 1]
        assert_close(await pipe(batch()), oracle(fn, params, batch()))


async def test_a_placement_that_names_no_device_for_a_weight() -> None:
    async with ap.Pipeline(mlp, mlp_params(2), devices=DEVICES, split={"0": "cpu:0"}) as pipe:
        with pytest.raises(ap.PlacementError, match="no glob of the placement matches the weight '1'"):
            await pipe(batch())
    async with ap.Pipeline(mlp, mlp_params(2), devices=DEVICES, split={"*": "cpu:5"}) as pipe:
        with pytest.raises(ap.PlacementError, match="gives 'cpu:5' for the weight '0': expected a backend"):
            await pipe(batch())


@pytest.mark.parametrize("split", ["even", [1], [1, 1, 1, 1], [0, 0, 0], [-1, 1, 1]])
async def test_bad_splits(split: Any) -> None:
    with pytest.raises(ap.PlacementError):
        async with ap.Pipeline(mlp, mlp_params(3), devices=DEVICES, split=split) as pipe:
            await pipe(batch())


async def test_a_smaller_last_batch() -> None:  # S11
    params = mlp_params(6)
    sizes = [512, 512, 512, 37]
    batches = [batch(n, seed=i) for i, n in enumerate(sizes)]
    async with ap.Pipeline(mlp, params, devices=DEVICES) as pipe:
        got = [y async for y in pipe.stream(batches)]
        assert [len(y) for y in got] == sizes
        for y, x in zip(got, batches, strict=True):
            assert_close(y, oracle(mlp, params, x))
        plans = pipe.statistics().plans
        compiled = pipe.statistics().compiled
        assert plans == 2
        async for _ in pipe.stream(batches):
            pass
        assert (pipe.statistics().plans, pipe.statistics().compiled) == (plans, compiled)


async def test_plans_are_kept_in_a_bounded_lru() -> None:
    params = mlp_params(3)
    async with ap.Pipeline(mlp, params, devices=DEVICES, max_plans=2) as pipe:
        for rows in (1, 2, 1, 3, 1):  # 2 is the one not used for longest when 3 comes
            assert_close(await pipe(batch(rows)), oracle(mlp, params, batch(rows)))
        gc.collect()
        assert pipe.statistics().plans == 2
        before = pipe.statistics().compiled
        await pipe(batch(1))
        assert pipe.statistics().compiled == before
        await pipe(batch(2))
        assert pipe.statistics().compiled > before


async def test_weights_are_uploaded_once_for_all_shapes() -> None:
    params = mlp_params(6)
    async with ap.Pipeline(mlp, params, devices=DEVICES) as pipe:
        for rows in (1, 2, 3):
            await pipe(batch(rows))
        assert pipe.statistics().copied_weights_nbytes == 0  # beyond the first placing
        plan = await pipe.plan(batch(1))
        again = await pipe.plan(batch(2))
        held = [[b.value for b in t.buffers] for t in plan.graph.weights]
        assert held == [[b.value for b in t.buffers] for t in again.graph.weights]


@pytest.mark.parametrize("split", ["auto", [1, 1], {"*": "cpu:1"}], ids=["auto", "shares", "globs"])
async def test_params_that_the_caller_lets_go_of_are_gone(split: Any) -> None:
    """A model that is on its devices need not be in the host's memory, too."""
    params = [np.eye(8, dtype=np.float32) for _ in range(4)]
    theirs = [weakref.ref(w) for w in params]
    async with ap.Pipeline(mlp, params, devices=["cpu:0", "cpu:1"], split=split) as pipe:
        del params
        first = np.asarray(await pipe(np.ones((2, 8), np.float32)))
        gc.collect()
        assert all(w() is None for w in theirs)
        assert_close(await pipe(np.ones((3, 8), np.float32)), np.repeat(first[:1], 3, axis=0))


async def test_known_shapes_are_served_while_a_new_one_compiles(monkeypatch: pytest.MonkeyPatch) -> None:  # S15
    gate = threading.Event()
    load = type(ap.open_backend("cpu:0")).load

    def slow(self: Any, program: Any) -> Any:
        if program.inputs[0].shape[0] == 7 or (len(program.inputs) > 1 and program.inputs[1].shape[0] == 7):
            assert gate.wait(30)
        return load(self, program)

    params = mlp_params(3)
    async with ap.Pipeline(mlp, params, devices=DEVICES) as pipe:
        await pipe(batch(2))
        monkeypatch.setattr(type(pipe.scheduler.backends[0]), "load", slow)
        new = asyncio.ensure_future(pipe(batch(7)))
        also = asyncio.ensure_future(pipe(batch(7, seed=1)))
        for seed in range(50):
            assert_close(await pipe(batch(2, seed=seed)), oracle(mlp, params, batch(2, seed=seed)))
        assert not new.done()
        gate.set()
        assert_close(await new, oracle(mlp, params, batch(7)))
        assert_close(await also, oracle(mlp, params, batch(7, seed=1)))


async def test_the_loop_keeps_ticking_while_a_new_shape_compiles_and_runs() -> None:  # S15, S16
    """Counted, not timed: a heartbeat gets through many times while the call is pending."""

    def heavy(w: Any, x: Any) -> Any:
        for _ in range(40):
            x = jnp.exp(-jnp.abs(x)) + jnp.sort(x, axis=1)[:, ::-1]
        table = jnp.take(x, jnp.argsort(x[:, 0]), axis=0)
        return jax.lax.while_loop(lambda c: c[0] < 2000, lambda c: (c[0] + 1, c[1] * 1.0001), (0, table))[1] * w

    x = batch(256, 256)
    async with ap.Pipeline(heavy, np.float32(2), devices=["cpu:0", "cpu:1"]) as pipe:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0)
                beats += 1

        heart = asyncio.ensure_future(beat())
        y = await pipe(x)
        while_compiling, beats = beats, 0
        await pipe(x)
        while_running = beats
        heart.cancel()
        await asyncio.wait([heart])
        assert while_compiling > 50
        assert while_running > 5
        assert_close(y, oracle(heavy, np.float32(2), x), 1e-4)


async def test_leaving_a_stream_early_stops_it() -> None:  # S28
    pulled = 0
    closed = False

    async def source() -> AsyncIterator[Any]:
        nonlocal pulled, closed
        try:
            while True:
                pulled += 1
                yield batch(seed=pulled)
        finally:
            closed = True

    async with ap.Pipeline(mlp, mlp_params(3), devices=DEVICES, n_copies=4) as pipe:
        stream = pipe.stream(source())
        async for _ in stream:
            break
        await stream.aclose()
        assert closed
        assert pulled <= 6
        before = pulled
        await pipe.scheduler.synchronize()
        assert pulled == before
        assert pipe.statistics().in_flight == 0
        taken = 0

        def endless() -> Any:
            nonlocal taken
            while True:
                taken += 1
                yield batch()

        async for _ in pipe.stream(endless()):
            break
        assert taken <= 4
        await pipe.scheduler.synchronize()
        assert pipe.statistics().in_flight == 0


async def test_an_async_source_that_needs_the_last_result() -> None:
    """A result that is ready is handed out before the next batch is there: a conversation does not hang."""
    answers: asyncio.Queue[Any] = asyncio.Queue()

    async def questions() -> AsyncIterator[Any]:
        x = batch()
        for _ in range(5):
            yield x
            x = np.asarray(await answers.get())

    async with ap.Pipeline(mlp, mlp_params(3), devices=DEVICES) as pipe:
        n = 0
        async with asyncio.timeout(30):
            async for y in pipe.stream(questions()):
                n += 1
                answers.put_nowait(y)
    assert n == 5


async def test_an_error_in_the_source_of_a_stream_reaches_its_consumer() -> None:
    async def broken() -> AsyncIterator[Any]:
        yield batch()
        raise KeyError("no more")

    def also_broken() -> Any:
        yield batch()
        raise KeyError("no more")

    async with ap.Pipeline(mlp, mlp_params(3), devices=DEVICES) as pipe:
        for source in (broken(), also_broken()):
            with pytest.raises(KeyError, match="no more"):
                async for _ in pipe.stream(source):
                    pass
        assert_close(await pipe(batch()), oracle(mlp, mlp_params(3), batch()))


async def test_two_streams_through_one_pipeline() -> None:  # S31
    params = mlp_params(3)

    async def consume(seed: int, pipe: ap.Pipeline) -> list[Any]:
        return [y async for y in pipe.stream([batch(seed=seed + i) for i in range(40)])]

    async with ap.Pipeline(mlp, params, devices=DEVICES, n_copies=2) as pipe:
        await pipe(batch())
        async with asyncio.timeout(50):
            results = await asyncio.gather(*(consume(100 * k, pipe) for k in range(3)))
    for k, ys in enumerate(results):
        assert len(ys) == 40
        for i, y in enumerate(ys):
            assert_close(y, oracle(mlp, params, batch(seed=100 * k + i)))


async def test_many_tasks_share_a_pipeline() -> None:
    params = mlp_params(3)
    async with ap.Pipeline(mlp, params, devices=DEVICES, n_copies=3) as pipe:
        results = await asyncio.gather(*(pipe(batch(1 + s % 3, seed=s)) for s in range(60)))
    for s, y in enumerate(results):
        assert_close(y, oracle(mlp, params, batch(1 + s % 3, seed=s)))


async def test_tuples_are_several_inputs() -> None:
    def fn(w: Any, a: Any, b: Any) -> Any:
        return mlp(w, a) - b

    w = mlp_params(3)
    async with ap.Pipeline(fn, w, devices=DEVICES) as pipe:
        pairs = [(batch(seed=s), batch(seed=s + 50)) for s in range(8)]
        got = [y async for y in pipe.stream(pairs)]
    for y, (a, b) in zip(got, pairs, strict=True):
        assert_close(y, oracle(fn, w, a, b))


async def test_params_that_fit_no_device() -> None:
    async with ap.Pipeline(mlp, mlp_params(3, 64), devices=DEVICES, memory_limit=1000) as pipe:
        with pytest.raises((ap.PlacementError, ap.AllocationError), match="1000"):
            await pipe(batch(1, 64))


async def test_memory_limits_shape_the_cut() -> None:
    params = mlp_params(6, 64)  # 16 KiB each
    async with ap.Pipeline(mlp, params, devices=DEVICES, memory_limit={"cpu:0": 40_000}) as pipe:
        plan = await pipe.plan(batch(1, 64))
        assert plan.sizes[0].weights_nbytes <= 32_768
        assert_close(await pipe(batch(1, 64)), oracle(mlp, params, batch(1, 64)))


async def test_an_input_that_the_model_cannot_take() -> None:
    async with ap.Pipeline(mlp, mlp_params(3), devices=DEVICES) as pipe:
        with pytest.raises(ap.TraceError, match=r"cannot be traced for inputs .*5"):
            await pipe(batch(2, 5))
        with pytest.raises(ap.AiopipeError):
            await pipe("text")
        with pytest.raises(ap.AiopipeError):
            await pipe(batch(), batch())
        assert_close(await pipe(batch()), oracle(mlp, mlp_params(3), batch()))


@pytest.mark.parametrize("dtype", [">f8", ">i8", ">c16", ">f4", ">i4", "<f8", "<i8"])
@pytest.mark.parametrize("x64", [False, True])
async def test_an_input_or_weight_of_any_byte_order(dtype: str, x64: bool) -> None:
    data = np.arange(4).astype(dtype)
    with jax.enable_x64(x64):
        async with ap.Pipeline(lambda w, x: (w, x * 2), data, devices=DEVICES) as pipe:
            for got, want in zip(await pipe(data), (data, data * 2), strict=True):
                assert got.dtype == jax.dtypes.canonicalize_dtype(np.dtype(dtype).newbyteorder("="))
                np.testing.assert_array_equal(got, want)
        graph = ap.trace(lambda w, x: x * 2, (), data.astype(data.dtype.newbyteorder("=")))
        async with ap.Scheduler(["cpu:0"]) as sched:
            np.testing.assert_array_equal(await sched.graph_compute(graph, data), data * 2)


def test_a_number_of_plans_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="max_plans is 0, expected at least 1"):
        ap.Pipeline(mlp, mlp_params(1), devices=DEVICES, max_plans=0)


async def test_a_deleted_input() -> None:
    async with ap.Pipeline(mlp, mlp_params(3), devices=DEVICES) as pipe:
        await pipe(batch())
        gone = jax.device_put(batch(), jax.devices()[0])
        gone.delete()
        with pytest.raises(ap.TensorError, match=r"input 'x' .* cannot be read: .*deleted"):
            await pipe(gone)
        assert_close(await pipe(batch()), oracle(mlp, mlp_params(3), batch()))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros(4, [("a", "f4")]), r"'x/mask' is an array of \[\('a', '<f4'\)\], expected"),
        (np.zeros(4, "V8"), r"'x/mask' is an array of \|V8, expected"),
        ("text", "'x/mask' is a str, expected an array"),
    ],
)
async def test_an_input_that_is_none_is_named(bad: Any, message: str) -> None:
    """As the model calls it, with and without a state."""

    def model(weights: Any, x: Any) -> Any:
        return x["ids"] @ weights["w"]

    def recurrent(weights: Any, state: Any, x: Any) -> Any:
        return x["ids"] @ weights["w"] + state, state + 1

    weights = {"w": np.ones((4, 4), np.float32)}
    inputs = {"ids": np.ones((2, 4), np.float32), "mask": bad}
    async with ap.Pipeline(model, weights, devices=DEVICES) as pipe:
        with pytest.raises(ap.TensorError, match=message):
            await pipe(inputs)
        with pytest.raises(ap.TensorError, match=message):
            await pipe.plan(inputs)
    async with ap.Pipeline(recurrent, weights, devices=DEVICES) as pipe:
        with pytest.raises(ap.TensorError, match=message):
            await pipe(inputs, state=ap.State(np.zeros((2, 4), np.float32)))


async def test_only_inside_its_context() -> None:
    pipe = ap.Pipeline(mlp, mlp_params(3), devices=DEVICES)
    with pytest.raises(ap.BackendClosedError, match="async with"):
        await pipe(batch())
    async with pipe:
        await pipe(batch())
    with pytest.raises(ap.BackendClosedError, match="async with"):
        await pipe(batch())
    with pytest.raises(ap.BackendClosedError, match="make a new one"):
        async with pipe:
            pass


async def test_callers_params_may_change_afterwards() -> None:
    params = mlp_params(3)
    want = oracle(mlp, params, batch())
    async with ap.Pipeline(mlp, params, devices=DEVICES) as pipe:
        await pipe(batch())
        for p in params:
            p[:] = np.nan
        assert_close(await pipe(batch()), want)
        assert_close(await pipe(batch(1)), want[:1])


async def test_busy_shares() -> None:
    async with ap.Pipeline(mlp, mlp_params(8, 256), devices=DEVICES, timeline=True) as pipe:
        async for _ in pipe.stream([batch(64, 256, seed=s) for s in range(20)]):
            pass
        busy = pipe.statistics().busy
        assert set(busy) == set(DEVICES)
        assert all(0 < share <= 1 for share in busy.values())


async def test_progress_of_compiling_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    async with ap.Pipeline(
        mlp, mlp_params(6), devices=DEVICES, on_progress=lambda done, total: seen.append((done, total))
    ) as pipe:
        await pipe(batch())
    assert seen == [(1, 3), (2, 3), (3, 3)]


async def test_a_result_does_not_depend_on_earlier_calls() -> None:
    """A Python number stays weakly typed, also after a call with a strongly typed one."""

    def fn(w: Any, x: Any, s: Any) -> Any:
        return (x * w).astype(jnp.bfloat16) * s

    async with ap.Pipeline(fn, np.float32(2), devices=DEVICES) as pipe:
        for s in (np.float32(2), 2.0, np.float32(2), 2.0):
            assert_close(await pipe(batch(), s), oracle(fn, np.float32(2), batch(), s), 1e-2)


async def test_weights_that_fit_but_not_with_their_copies_are_refused_before_the_upload() -> None:
    params = mlp_params(1, 64)
    async with ap.Pipeline(mlp, params, devices=["cpu:0"], memory_limit=20_000) as pipe:
        with pytest.raises(ap.AllocationError, match="20000"):
            await pipe(batch(32, 64))
        assert_close(await pipe(batch(1, 64)), oracle(mlp, params, batch(1, 64)))


async def test_settings_of_jax_are_those_of_the_call() -> None:
    """As under `jax.jit`: another setting is another trace, and known ones are kept."""

    def model(params: Any, x: Any) -> Any:
        return jnp.dot(x, params) / jnp.arange(1.0, 3.0)  # of the default float type

    params, x = np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)
    async with ap.Pipeline(model, params, devices=DEVICES) as pipe:
        assert (await pipe(x)).dtype == np.float32
        with jax.enable_x64(True):
            want = jax.jit(model)(params, x)
        planned = pipe.statistics().planned
        jax.config.update("jax_enable_x64", True)
        try:
            got = await pipe(x)
        finally:
            jax.config.update("jax_enable_x64", False)
        assert got.dtype == want.dtype == np.float64
        assert pipe.statistics().planned == planned + 1
        assert (await pipe(x)).dtype == np.float32
        assert pipe.statistics().planned == planned + 1


async def test_closing_again_waits_for_the_first() -> None:
    entered, gate = threading.Event(), threading.Event()

    def wait(x: Any) -> Any:
        entered.set()
        assert gate.wait(30)
        return x

    def model(w: Any, x: Any) -> Any:
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((4,), np.float32), x) * w

    x = np.ones(4, np.float32)
    async with ap.Pipeline(model, np.float32(2), devices=["cpu:0"]) as pipe:
        evaluation = await pipe.submit(x)
        await eventually(entered.is_set)
        first, second = asyncio.ensure_future(pipe.aclose()), asyncio.ensure_future(pipe.aclose())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done() and not second.done()
        gate.set()
        await second
        assert evaluation.done()
        await first
        await pipe.aclose()


@pytest.mark.parametrize(
    ("n_copies", "error"),
    [
        *(("8", ValueError), ("Auto", ValueError), (0, ValueError), (-1, ValueError)),
        *((2.0, TypeError), (True, TypeError), (None, TypeError)),
    ],
)
def test_numbers_of_copies_that_make_no_sense(n_copies: Any, error: type[Exception]) -> None:
    for make in (
        lambda: ap.Scheduler(["cpu:0"], n_copies=n_copies),
        lambda: ap.Pipeline(mlp, mlp_params(1), devices=["cpu:0"], n_copies=n_copies),
    ):
        with pytest.raises(error, match=f"n_copies is {n_copies!r}.* whole number of at least 1 .* or 'auto'"):
            make()


@pytest.mark.parametrize("n_copies", [2, np.int64(2)])
async def test_numbers_of_copies(n_copies: Any) -> None:
    async with ap.Pipeline(mlp, mlp_params(1), devices=["cpu:0"], n_copies=n_copies) as pipe:
        assert pipe.n_copies == 2


async def test_closing_waits_for_the_thread_that_traces() -> None:
    entered, gate, left = threading.Event(), threading.Event(), threading.Event()

    def model(w: Any, x: Any) -> Any:
        entered.set()
        assert gate.wait(30)
        left.set()
        return x * w

    for timeout_s in (0.0, 30.0):
        entered.clear()
        pipe = ap.Pipeline(model, np.float32(2), devices=["cpu:0"])
        await pipe.__aenter__()
        call = asyncio.ensure_future(pipe(np.ones(4, np.float32)))
        await eventually(entered.is_set)
        if not timeout_s:
            with pytest.warns(ResourceWarning, match="the thread 'aiopipe-trace' is still at work"):
                await pipe.aclose(timeout_s=timeout_s)
        else:
            closing = asyncio.ensure_future(pipe.aclose(timeout_s=timeout_s))
            with pytest.raises(ap.BackendClosedError, match="closed while"):
                await call
            assert not closing.done()
            gate.set()
            await closing
            assert left.is_set()
        with pytest.raises(ap.BackendClosedError, match="closed while"):
            await call
