"""Calls that share evaluations: `Batcher`."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.batch_request import to_host
from aiopipe.devices.clock import VirtualClock
from aiopipe.devices.sim import Cluster
from models import mlp, mlp_params

DEVICES = ["cpu:0", "cpu:1"]


def rows(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((n, 8), np.float32)


class Recorder:
    """Stands where a pipeline does: notes every batch, and answers when it is told to.

    Attributes:
        batches: the first input of each, so far.
        n_copies: how many may be evaluated at the same time.
    """

    def __init__(self, n_copies: int = 1, function: Callable[..., Any] = lambda x: x * 2) -> None:
        self.n_copies = n_copies
        self.batches: list[np.ndarray[Any, Any]] = []
        self.cancelled = 0
        self._function = function
        self._answers: list[asyncio.Future[None]] = []

    async def __call__(self, *inputs: Any) -> Any:
        self.batches.append(inputs[0])
        answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        try:
            await answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self._function(*inputs)

    def answer(self, i: int, error: Exception | None = None) -> None:
        if error is None:
            self._answers[i].set_result(None)
        else:
            self._answers[i].set_exception(error)

    async def until(self, n: int) -> None:
        """Until so many batches have begun."""
        async with asyncio.timeout(30):
            while len(self.batches) < n:  # noqa: ASYNC110 - a call has no event
                await asyncio.sleep(0)


def batcher_of(recorder: Recorder, **options: Any) -> ap.Batcher:
    return ap.Batcher(recorder, **{"max_wait": 0.0, **options})  # type: ignore[arg-type]


async def begun(calls: list[Awaitable[Any]]) -> list[asyncio.Task[Any]]:
    """As tasks that have made their calls."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


# Values ------------------------------------------------------------------------------------------


async def test_many_calls_at_once_get_what_each_gets_alone() -> None:
    params = mlp_params(6)
    xs = [rows(1 + i % 5, seed=i) for i in range(60)]
    async with ap.Pipeline(mlp, params, devices=DEVICES) as pipe:
        async with ap.Batcher(pipe, max_batch=16) as batcher:
            ys = await asyncio.gather(*(batcher(x) for x in xs))
            found = batcher.statistics()
        for x, y in zip(xs, ys, strict=True):
            np.testing.assert_allclose(y, mlp(params, x), rtol=1e-5, atol=1e-6)
            assert type(y) is np.ndarray and y.shape == x.shape and y.flags.writeable
    assert (found.requests, found.succeeded, found.rows) == (60, 60, sum(map(len, xs)))
    assert found.batches < 20 and set(found.sizes) <= {1, 2, 4, 8, 16} and 0 <= found.padding < 0.3
    assert pipe_is_quiet(found)


def pipe_is_quiet(found: ap.BatcherStatistics) -> bool:
    return found.waiting == 0 and found.requests == found.succeeded + found.failed + found.cancelled


async def test_pytrees_single_items_and_jax_arrays() -> None:
    def model(w: Any, batch: Any, scale: Any) -> Any:
        return {"y": batch["x"] @ w * scale[:, None], "n": (scale > 1, None)}

    w = np.eye(8, dtype=np.float32)
    async with ap.Pipeline(model, w, devices=["cpu:0"]) as pipe, ap.Batcher(pipe, max_batch=4) as batcher:
        x = rows(3)
        whole, one, slow = await asyncio.gather(
            batcher({"x": x}, np.array([1.0, 2.0, 3.0])),  # float64, which JAX takes as float32
            batcher.single({"x": jnp.asarray(x[0])}, 5.0),
            batcher({"x": jax.device_put(x, jax.devices()[1]) @ w}, jnp.ones(3) * 2),
        )
        assert batcher.statistics().batches <= 3
    np.testing.assert_allclose(whole["y"], x * [[1], [2], [3]], rtol=1e-5)
    assert whole["n"][0].tolist() == [False, True, True] and whole["n"][1] is None
    np.testing.assert_allclose(one["y"], x[0] * 5, rtol=1e-5)
    assert one["n"][0] == np.True_ and one["y"].shape == (8,)
    np.testing.assert_allclose(slow["y"], x * 2, rtol=1e-5)


async def test_a_call_larger_than_a_batch() -> None:
    recorder = Recorder(n_copies=2)
    async with batcher_of(recorder, max_batch=4) as batcher:
        (call,) = await begun([batcher(rows(10))])
        await recorder.until(2)
        recorder.answer(1)
        await recorder.until(3)
        recorder.answer(2)
        recorder.answer(0)
        np.testing.assert_array_equal(await call, rows(10) * 2)
    assert [len(batch) for batch in recorder.batches] == [4, 4, 2]


def mean_of_tokens(table: Any, ids: Any, mask: Any) -> Any:
    """Whatever the padding is, it must not matter."""
    return (table[ids] * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True), table[ids]


async def test_ragged_lengths() -> None:
    table = rows(50)
    rng = random.Random(3)
    calls = [np.array([[rng.randrange(50) for _ in range(rng.randint(1, 20))]], np.int32) for _ in range(40)]
    calls.append(np.array([[rng.randrange(50) for _ in range(5)]] * 11, np.int32))  # cut in two
    like = (np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32))
    async with (
        ap.Pipeline(mean_of_tokens, table, devices=["cpu:0"]) as pipe,
        ap.Batcher(pipe, max_batch=8, buckets=[2, 8], lengths=[4, 8, 24], like=like) as batcher,
    ):
        seen: list[tuple[int, int]] = []
        await batcher.prepare(lambda done, n: seen.append((done, n)))
        assert seen == [(i, 6) for i in range(7)]
        compiled = pipe.statistics().compiled
        found = await asyncio.gather(*(batcher(ids, np.ones(ids.shape, np.float32)) for ids in calls))
        assert pipe.statistics().compiled == compiled
        statistics = batcher.statistics()
    for ids, (mean, tokens) in zip(calls, found, strict=True):
        np.testing.assert_allclose(mean, table[ids].mean(1), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(tokens[:, : ids.shape[1]], table[ids])  # the rest is padding
    assert statistics.rows == 51 and 0 < statistics.padding < 0.6


async def test_large_arrays_are_copied_off_the_loop() -> None:
    x = np.random.default_rng(0).random((4, 1 << 17), np.float32)  # 2 MiB
    async with ap.Pipeline(lambda p, x: x + p, 1.0, devices=["cpu:0"]) as pipe, ap.Batcher(pipe) as batcher:
        found = await asyncio.gather(batcher(x), batcher(x))
    for y in found:
        np.testing.assert_array_equal(y, x + 1)


# Which calls share a batch, and when ---------------------------------------------------------------


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its timers go by a virtual clock, so that waiting takes no time and is exact."""

    clock: VirtualClock

    def time(self) -> float:
        return self.clock.now if hasattr(self, "clock") else super().time()

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.clock.call_at(when, lambda: None if handle.cancelled() else handle._run())
        return handle

    def _timer_handle_cancelled(self, handle: Any) -> None:
        pass  # the clock finds it cancelled


def in_virtual_time(work: Callable[[Cluster], Awaitable[None]], **options: Any) -> None:
    cluster = Cluster(2, **{"split_cost_s": 1.0, "compute": True, **options})
    loop = VirtualLoop()
    loop.clock = cluster.clock
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(work(cluster))  # type: ignore[arg-type]


def timed(cluster: Cluster, calls: dict[str, Awaitable[Any]]) -> dict[str, asyncio.Task[float]]:
    """When each call returns."""

    async def until(call: Awaitable[Any]) -> float:
        await call
        return cluster.clock.now

    return {name: asyncio.ensure_future(until(call)) for name, call in calls.items()}


class OnHost:
    """A pipeline of simulated devices whose results are read at once, as those of a thread would be too late."""

    def __init__(self, pipe: ap.Pipeline) -> None:
        self.pipe = pipe
        self.n_copies = pipe.n_copies

    async def __call__(self, *inputs: Any) -> Any:
        return np.asarray(await self.pipe(*inputs))


def test_batches_overlap_on_the_devices() -> None:
    """Two devices, a second each: eight full batches take nine seconds, and not sixteen."""

    async def work(cluster: Cluster) -> None:
        params = mlp_params(4)
        pipe = await ap.Pipeline(mlp, params, devices=cluster.backends, n_copies=3).__aenter__()
        with cluster.clock.hold():
            await pipe.plan(rows(4))
        began = cluster.clock.now
        async with ap.Batcher(OnHost(pipe), max_batch=4, max_wait=0.5) as batcher:  # type: ignore[arg-type]
            xs = [rows(1, seed=i) for i in range(32)]
            ys = await asyncio.gather(*(batcher(x) for x in xs))
            assert cluster.clock.now - began == 9.0
        assert batcher.statistics().sizes == {4: 8}
        for x, y in zip(xs, ys, strict=True):
            np.testing.assert_allclose(y, mlp(params, x), rtol=1e-5, atol=1e-6)
        with cluster.clock.hold():  # or its time limit would be over at once
            await pipe.aclose()

    in_virtual_time(work)


def test_when_batches_begin() -> None:
    """A lone call waits for `max_wait`; a full batch goes at once; while all slots are busy, batches grow."""

    async def work(cluster: Cluster) -> None:
        clock = cluster.clock

        async def pipe(x: Any) -> Any:
            sizes.append((clock.now, len(x)))
            await clock.sleep(4.0)
            return x

        pipe.n_copies = 1  # type: ignore[attr-defined]
        sizes: list[tuple[float, int]] = []
        async with ap.Batcher(pipe, max_batch=4, max_wait=0.5) as batcher:  # type: ignore[arg-type]
            first = timed(cluster, {"lone": batcher(rows(1))})
            await clock.sleep(1.0)
            more = timed(cluster, {f"{i}": batcher(rows(1)) for i in range(3)})
            await clock.sleep(3.0)
            last = timed(cluster, {"late": batcher(rows(1)), "too late": batcher(rows(1))})
            ends = {name: await task for name, task in (first | more | last).items()}
            full = timed(cluster, {f"{i}": batcher(rows(1)) for i in range(4)})
            ends |= {f"full {name}": await task for name, task in full.items()}
        assert sizes == [(0.5, 1), (4.5, 4), (8.5, 1), (12.5, 4)]
        assert ends["lone"] == 4.5 and ends["late"] == 8.5 and ends["too late"] == 12.5 and ends["full 0"] == 16.5
        found = batcher.statistics()
        assert found.max_wait_s == 4.5 and found.mean_wait_s == (0.5 + 3 * 3.5 + 0.5 + 4.5) / 10

    in_virtual_time(work)


async def test_calls_of_one_pass_of_the_loop_share_a_batch_without_waiting() -> None:
    recorder = Recorder()
    async with batcher_of(recorder) as batcher:
        calls = await begun([batcher(rows(1, seed=i)) for i in range(7)])
        await recorder.until(1)
        assert [len(batch) for batch in recorder.batches] == [8]
        recorder.answer(0)
        await asyncio.gather(*calls)


async def test_calls_of_another_kind_do_not_share_a_batch() -> None:
    recorder = Recorder(n_copies=4)
    async with batcher_of(recorder) as batcher:
        calls = await begun(
            [batcher(x) for x in (rows(1), rows(1).astype(np.int32), rows(1)[:, :4], rows(2), {"x": rows(1)}["x"])]
        )
        await recorder.until(3)
        for i in range(3):
            recorder.answer(i)
        await asyncio.gather(*calls)
    assert sorted((batch.shape, batch.dtype.name) for batch in recorder.batches) == [
        ((1, 4), "float32"),
        ((1, 8), "int32"),
        ((4, 8), "float32"),
    ]


async def test_a_batch_belongs_to_no_caller() -> None:
    asked: contextvars.ContextVar[str] = contextvars.ContextVar("asked", default="nobody")
    seen = []
    recorder = Recorder(function=lambda x: (seen.append(asked.get()), x)[1])
    async with batcher_of(recorder, max_batch=2) as batcher:

        async def call() -> None:
            asked.set("somebody")
            await batcher(rows(1))

        calls = await begun([call(), call()])
        await recorder.until(1)
        recorder.answer(0)
        await asyncio.gather(*calls)
    assert seen == ["nobody"]


# What is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "there is nothing to merge"),
        ((1.0,), "'0' is the float 1.0, expected an array with an axis of rows"),
        ((np.float32(1),), "'0' has no axes, expected one of rows in front: use `single`"),
        ((rows(0),), "'0' has no rows"),
        ((rows(2), {"a": rows(3)}), "'1/a' has 3 rows, but '0' has 2"),
        (("text",), "'0' is a str, expected an array"),
        ((jax.ShapeDtypeStruct((2, 8), np.float32),), "has no value"),
        ((jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2)),), "has no value"),
        ((rows(17),), "got 17 rows, but at most 16 may wait"),
    ],
)
async def test_a_call_that_makes_no_sense(inputs: Any, message: str) -> None:
    async with batcher_of(Recorder(), max_queue=16) as batcher:
        with pytest.raises(ap.TensorError, match=message):
            await batcher(*inputs)


async def test_arrays_that_cannot_be_merged() -> None:
    gone = jnp.ones((2, 8)) + 1
    gone.delete()
    async with batcher_of(Recorder()) as batcher:
        with pytest.raises(ap.TensorError, match="a deleted array"):
            await batcher(gone)
        with pytest.raises(ap.TensorError, match="typed PRNG key, which cannot be merged"):
            await batcher(jax.random.split(jax.random.key(0), 2))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((rows(1),), "structure"),
        ((rows(1)[:, :7], {"n": np.ones(1, np.int32)}), r"'0' is float32\[1,7\], expected float32\[rows,8\]"),
        ((rows(1), {"n": np.ones(1, np.float32)}), r"'1/n' is float32\[1\], expected int32\[rows\]"),
    ],
)
async def test_like_refuses_a_call_before_it_is_merged(inputs: Any, message: str) -> None:
    recorder = Recorder(function=lambda x, other: x)
    like = (jax.ShapeDtypeStruct((1, 8), np.float32), {"n": np.ones(5, np.int32)})
    async with batcher_of(recorder, like=like) as batcher:
        good = await begun([batcher(rows(1), {"n": np.ones(1, np.int32)})])
        with pytest.raises(ap.TensorError, match=message):
            await batcher(*inputs)
        await recorder.until(1)
        recorder.answer(0)
        await good[0]
        assert len(recorder.batches) == 1 and len(recorder.batches[0]) == 1


@pytest.mark.parametrize("like", [rows(1), jax.ShapeDtypeStruct((1, 8), np.float32), (rows(1),), [rows(1)]])
async def test_like_of_a_single_input(like: Any) -> None:
    async with batcher_of(Recorder(), like=like) as batcher:
        with pytest.raises(ap.TensorError, match=r"'0' is float32\[1,7\], expected float32\[rows,8\]"):
            await batcher(rows(1)[:, :7])


async def test_like_and_lengths() -> None:
    """The axis that is padded may have any length; a flag for each row has no such axis, and is not padded."""
    like = (np.ones((1, 1), np.int32), jax.ShapeDtypeStruct((1,), np.bool_))
    seen: list[Any] = []

    def model(w: Any, ids: Any, flags: Any) -> Any:
        seen.append((ids.shape, flags.shape))
        return (ids * w).sum(1) * flags

    async with ap.Pipeline(model, np.int32(2), devices=["cpu:0"]) as pipe:
        async with ap.Batcher(pipe, max_batch=2, buckets=[2], lengths=[4], like=like) as batcher:
            await batcher.prepare()
            assert set(seen) == {((2, 4), (2,))}
            ys = await asyncio.gather(
                batcher(np.ones((1, 3), np.int32), np.ones(1, np.bool_)),
                batcher(np.ones((1, 4), np.int32), np.zeros(1, np.bool_)),
            )
            assert [y.tolist() for y in ys] == [[6], [0]]
            with pytest.raises(ap.TensorError, match=r"'0' is float32\[1,3\], expected int32\[rows,length\]"):
                await batcher(np.ones((1, 3), np.float32), np.ones(1, np.bool_))


async def test_values_that_are_not_here_are_read_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(ap.Handle):
        shape, dtype = (2,), np.dtype(np.float32)

        def read(self) -> Callable[[], Any]:
            threads.add(threading.current_thread())
            return lambda: np.array([1, 2], np.float32)

    threads: set[threading.Thread] = set()
    here = np.array([3.0, 4.0])
    away, still = await to_host([Away(), here])
    assert away.tolist() == [1, 2] and still is here
    monkeypatch.setattr("aiopipe._jax.is_ready", lambda value: threads.add(threading.current_thread()))
    (waited,) = await to_host([jnp.arange(3)])
    assert waited.tolist() == [0, 1, 2]
    assert np.asarray(Away(), np.int8).dtype == np.int8 and np.asarray(Away()).dtype == np.float32
    copied = np.array(Away(), copy=True)
    assert copied.tolist() == [1, 2] and copied.flags.writeable
    assert threading.main_thread() not in {thread for thread in threads if thread.name == "aiopipe-fetch"}
    assert any(thread.name == "aiopipe-fetch" for thread in threads)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((rows(1), np.ones((1, 9), np.int32)), "length 9"),
        ((rows(1), np.ones((1, 3), np.int32)), "the length 8 in '0', 3 in '1'"),
        ((np.ones(1, np.float32),), "the length in none"),
        ((np.ones((1, 0), np.float32),), "the length 0 in '0'"),
        ((np.ones((1, 2), np.uint8),), "uint8, which cannot be padded with -1"),
    ],
)
async def test_lengths_that_make_no_sense(inputs: Any, message: str) -> None:
    if "9" in message:
        inputs = (inputs[1],)
    async with batcher_of(Recorder(), lengths=[4, 8], pad=-1) as batcher:
        with pytest.raises(ap.TensorError, match=message):
            await batcher(*inputs)


@pytest.mark.parametrize(
    "options",
    [{"max_batch": 0}, {"max_wait": -1.0}, {"max_queue": 0}, {"buckets": [1, 2]}, {"buckets": []}, {"lengths": [2, 1]}],
)
async def test_options_that_make_no_sense(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        batcher_of(Recorder(), **{"max_batch": 8, **options})
    with pytest.raises(ValueError, match="give the batcher `like`"):
        await batcher_of(Recorder()).prepare()


async def test_too_much_waits() -> None:
    recorder = Recorder()
    async with batcher_of(recorder, max_batch=2, max_queue=4) as batcher:
        calls = await begun([batcher(rows(2)) for _ in range(3)])  # one is evaluated, two wait
        with pytest.raises(ap.OverloadedError, match="4 rows wait, and 1 more are too many") as info:
            await batcher.single(rows(1)[0])
        assert (info.value.waiting, info.value.max_queue, info.value.retry_after_s) == (4, 4, 2.0)
        await recorder.until(1)
        recorder.answer(0)
        await recorder.until(2)
        calls += await begun([batcher(rows(1))])  # there is room again
        with pytest.raises(ap.OverloadedError) as info:
            await batcher(rows(2))
        assert 0 < info.value.retry_after_s < 2.0  # a batch has been timed
        for i in (1, 2, 3):
            await recorder.until(i + 1)
            recorder.answer(i)
        await asyncio.gather(*calls)
        found = batcher.statistics()
    assert (found.refused, found.requests, found.succeeded) == (2, 4, 4)


# Cancelling and failing -----------------------------------------------------------------------------


async def test_a_cancelled_call_takes_its_rows_with_it() -> None:
    recorder = Recorder()
    async with batcher_of(recorder, max_batch=4) as batcher:
        first = await begun([batcher(rows(4))])
        waiting = await begun([batcher(rows(1, seed=i)) for i in range(3)])
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert batcher.statistics().waiting == 2
        await recorder.until(1)
        recorder.answer(0)
        await recorder.until(2)
        np.testing.assert_array_equal(recorder.batches[1], np.concatenate([rows(1, seed=0), rows(1, seed=2)]))
        recorder.answer(1)
        await asyncio.gather(first[0], waiting[0], waiting[2])
        assert waiting[1].cancelled() and batcher.statistics().cancelled == 1


async def test_rows_on_their_way_are_discarded_and_the_others_unharmed() -> None:
    recorder = Recorder()
    async with batcher_of(recorder) as batcher:
        calls = await begun([batcher(rows(2, seed=i)) for i in range(3)])
        await recorder.until(1)
        calls[1].cancel()
        await asyncio.sleep(0)
        assert recorder.cancelled == 0
        recorder.answer(0)
        for i in (0, 2):
            np.testing.assert_array_equal(await calls[i], rows(2, seed=i) * 2)
        assert calls[1].cancelled()


async def test_a_batch_that_nobody_wants_is_cancelled() -> None:
    recorder = Recorder()
    async with batcher_of(recorder) as batcher:
        calls = await begun([batcher(rows(2, seed=i)) for i in range(2)])
        await recorder.until(1)
        for call in calls:
            call.cancel()
        later = await begun([batcher(rows(1))])
        await recorder.until(2)
        assert recorder.cancelled == 1
        recorder.answer(1)
        await later[0]


async def test_cancelled_as_its_batch_fails() -> None:
    recorder = Recorder()
    async with batcher_of(recorder) as batcher:
        (call,) = await begun([batcher(rows(1))])
        await recorder.until(1)
        recorder.answer(0, ValueError("unlucky"))
        await asyncio.sleep(0)  # the batch has failed; its caller does not know yet
        call.cancel()
        await asyncio.wait([call])
        gc.collect()  # nothing is said about an exception that was never retrieved


async def test_a_batch_that_fails_fails_its_own_calls() -> None:
    recorder = Recorder(n_copies=2)
    async with batcher_of(recorder, max_batch=2) as batcher:
        calls = await begun([batcher(rows(1, seed=i)) for i in range(4)])
        large = await begun([batcher(rows(5))])
        await recorder.until(2)
        recorder.answer(0, ValueError("unlucky"))
        recorder.answer(1)
        for call in calls[:2]:
            with pytest.raises(ValueError, match="unlucky"):
                await call
        np.testing.assert_array_equal(await calls[3], rows(1, seed=3) * 2)
        await recorder.until(4)
        recorder.answer(3, ValueError("one part of it"))
        with pytest.raises(ValueError, match="one part of it"):
            await large[0]
        recorder.answer(2)
        await asyncio.sleep(0)
        assert len(recorder.batches) == 4  # the rest of the large one is not evaluated any more
        found = batcher.statistics()
    assert (found.failed, found.succeeded) == (3, 2)


async def test_the_devices_error_reaches_the_calls_of_the_batch() -> None:
    def refuse(x: Any) -> Any:
        if (x > 100).any():
            raise ValueError("too large")
        return x

    def model(_: Any, x: Any) -> Any:
        return jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    async with ap.Pipeline(model, None, devices=["cpu:0"]) as pipe, ap.Batcher(pipe, max_batch=2) as batcher:
        bad, beside, good = await asyncio.gather(
            batcher(rows(1) + 1000), batcher(rows(1)), batcher(rows(2)), return_exceptions=True
        )
        assert isinstance(bad, ap.EvaluationError) and isinstance(beside, ap.EvaluationError)
        np.testing.assert_allclose(good, rows(2) + 1)
        np.testing.assert_allclose(await batcher(rows(1)), rows(1) + 1)


async def test_results_that_are_no_rows() -> None:
    async with ap.Pipeline(lambda p, x: x.sum(), 0.0, devices=["cpu:0"]) as pipe, ap.Batcher(pipe) as batcher:
        with pytest.raises(ap.TensorError, match=r"a result has the shape \(\) for a batch of 1 rows"):
            await batcher(rows(1))


async def test_parts_of_different_shapes_do_not_hang() -> None:
    recorder = Recorder(function=lambda x: np.zeros((len(x), len(x))))
    async with batcher_of(recorder, max_batch=4) as batcher:
        (call,) = await begun([batcher(rows(6))])
        for i in range(2):
            await recorder.until(i + 1)
            recorder.answer(i)
        with pytest.raises(ValueError, match="dimensions"):
            await call


class Fragile:
    """A pytree node of results that cannot be put together where it is told so."""

    refused: Callable[[Any], BaseException | None] = staticmethod(lambda _: None)

    def __init__(self, y: Any) -> None:
        self.y = y


def fragile(_: Any, children: Any) -> Fragile:
    error = Fragile.refused(children[0])
    if error is not None:
        raise error
    return Fragile(children[0])


jax.tree_util.register_pytree_node(Fragile, lambda node: ((node.y,), None), fragile)


class Rare(BaseException):
    """No `Exception`."""


ANY = [ValueError, Rare, asyncio.CancelledError, GeneratorExit, StopIteration]


@pytest.mark.parametrize("error", ANY)
async def test_results_that_cannot_be_put_together_fail_their_call_alone(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(function=lambda x: Fragile(x * 2))
    xs = [np.full((1, 8), i, np.float32) for i in (100, 1, 2)]
    monkeypatch.setattr(Fragile, "refused", lambda y: error("by the user") if (y >= 100).any() else None)
    async with batcher_of(recorder, max_batch=4) as batcher:
        bad, *good = await begun([batcher(x) for x in xs])
        await recorder.until(1)
        (queued,) = await begun([batcher(rows(1)[:, :4])])
        recorder.answer(0)
        for x, call in zip(xs[1:], good, strict=True):
            np.testing.assert_array_equal((await call).y, x * 2)
        await asyncio.wait([bad])
        told = RuntimeError if error is StopIteration else error
        with pytest.raises(told):
            bad.result()
        await recorder.until(2)  # the slot is free again
        recorder.answer(1)
        np.testing.assert_array_equal((await queued).y, rows(1)[:, :4] * 2)
        assert batcher.statistics().in_flight == 0


@pytest.mark.parametrize("error", ANY)
async def test_whatever_a_batch_raises_its_calls_hear_of_it_and_the_next_goes_on(error: type[BaseException]) -> None:
    def function(x: Any) -> Any:
        if x.shape[1] == 8:
            raise error("by the user")
        return x * 2

    recorder = Recorder(function=function)
    async with batcher_of(recorder, max_batch=4) as batcher:
        calls = await begun([batcher(rows(1)), batcher(rows(1))])
        await recorder.until(1)
        (queued,) = await begun([batcher(rows(1)[:, :4])])
        recorder.answer(0)
        told = {StopIteration: RuntimeError, asyncio.CancelledError: ap.BackendClosedError}.get(error, error)
        await asyncio.wait(calls)
        for call in calls:
            with pytest.raises(told):
                call.result()
        await recorder.until(2)
        recorder.answer(1)
        np.testing.assert_array_equal(await queued, rows(1)[:, :4] * 2)
        assert batcher.statistics().in_flight == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_to_end_the_program_does_so_and_no_call_is_left_waiting(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fragile, "refused", lambda y: error("by the user") if y.shape[0] == 1 else None)
    recorder = Recorder(function=lambda x: Fragile(x * 2))
    batcher = batcher_of(recorder, max_batch=4)

    async def call() -> list[asyncio.Task[Any]]:
        calls = await begun([batcher(rows(1)), batcher(rows(2))])
        await recorder.until(1)
        return calls

    async def end(calls: list[asyncio.Task[Any]], answer: bool) -> None:
        if answer:
            recorder.answer(0)
        await asyncio.wait(calls)
        await batcher.aclose()

    with asyncio.Runner() as runner:
        calls = runner.run(call())
        with pytest.raises(error, match="by the user"):
            runner.run(end(calls, True))
        runner.run(end(calls, False))
    for each in calls:
        assert isinstance(each.exception(), ap.BackendClosedError)


async def test_a_structure_that_cannot_be_compared_is_its_callers_problem() -> None:
    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise ValueError("by the user")

        def __hash__(self) -> int:
            return 1

    class Node:
        pass

    jax.tree_util.register_pytree_node(Node, lambda _: ((rows(1),), Incomparable()), lambda _, xs: xs[0])
    recorder = Recorder()
    async with batcher_of(recorder) as batcher:
        first, second = await begun([batcher(Node()), batcher(Node())])
        with pytest.raises(ValueError, match="checking equality"):
            await second
        assert batcher.statistics().waiting == 1
        await recorder.until(1)
        recorder.answer(0)
        np.testing.assert_array_equal(await first, rows(1) * 2)


async def test_cancelling_at_random() -> None:
    """Whatever leaves beside it: everybody else gets their own rows, and nothing is left."""
    params = mlp_params(2)
    rng = random.Random(7)
    async with (
        ap.Pipeline(mlp, params, devices=DEVICES) as pipe,
        ap.Batcher(pipe, max_batch=8, max_queue=4096) as batcher,
    ):

        async def call(i: int) -> None:
            x = rows(rng.randint(1, 20), seed=i)
            await asyncio.sleep(rng.random() * 0.02)
            task = asyncio.ensure_future(batcher(x))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.01)
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled():
                np.testing.assert_allclose(await task, mlp(params, x), rtol=1e-5, atol=1e-6)

        async with asyncio.TaskGroup() as tasks:
            for i in range(150):
                tasks.create_task(call(i))
        found = batcher.statistics()
        assert pipe_is_quiet(found) and found.failed == 0 and not batcher._requests


# The end ------------------------------------------------------------------------------------------


async def test_closing_evaluates_what_waits() -> None:
    recorder = Recorder()
    batcher = batcher_of(recorder, max_wait=1000.0, max_batch=2)
    calls = await begun([batcher(rows(1, seed=i)) for i in range(3)])
    closing = asyncio.ensure_future(batcher.aclose())
    for i in range(2):
        await recorder.until(i + 1)
        with pytest.raises(ap.BackendClosedError, match="this batcher is closed"):
            await batcher(rows(1))
        recorder.answer(i)
    await closing
    for i, call in enumerate(calls):
        np.testing.assert_array_equal(await call, rows(1, seed=i) * 2)
    await batcher.aclose()


@pytest.mark.parametrize("how", ["cancel", "timeout", "cancelled"])
async def test_closing_drops_what_waits_and_what_is_on_its_way(how: str) -> None:
    recorder = Recorder()
    batcher = batcher_of(recorder, max_batch=2)
    calls = await begun([batcher(rows(2)) for _ in range(3)])
    await recorder.until(1)
    if how == "cancelled":
        closing = asyncio.ensure_future(batcher.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    else:
        await batcher.aclose(cancel=how == "cancel", timeout_s=0.0)
    for call in calls:
        with pytest.raises(ap.BackendClosedError, match="closed before this result was there"):
            await call
    assert recorder.cancelled == 1 and len(recorder.batches) == 1


async def test_closing_that_is_cancelled_again_still_waits_for_its_batches() -> None:
    """A pipeline takes its time to hear of a cancellation; no task may be left that nobody knows."""
    gate, ended = asyncio.Event(), False

    async def slow(x: Any) -> Any:
        nonlocal ended
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await gate.wait()
            ended = True

    slow.n_copies = 1  # type: ignore[attr-defined]
    batcher = ap.Batcher(slow, max_wait=0.0)  # type: ignore[arg-type]
    await begun([batcher(rows(1))])
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(batcher.aclose())
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
    await asyncio.sleep(0)
    assert not closing.done() and not ended
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert ended


async def test_the_pipeline_is_closed_first() -> None:
    async with ap.Pipeline(mlp, mlp_params(2), devices=DEVICES) as pipe:
        batcher = ap.Batcher(pipe, max_wait=60.0)
        await begun([])
        calls = await begun([batcher(rows(1))])
    with pytest.raises(ap.BackendClosedError, match="not open"):
        await ap.Batcher(pipe)(rows(1))
    await batcher.aclose()
    with pytest.raises(ap.BackendClosedError, match="not open"):
        await calls[0]


async def test_an_evaluation_that_its_scheduler_cancels() -> None:
    """Its callers hear of it as of an error: they were not cancelled themselves."""
    recorder = Recorder()
    async with batcher_of(recorder) as batcher:
        (call,) = await begun([batcher(rows(1))])
        await recorder.until(1)
        recorder._answers[0].cancel()
        with pytest.raises(ap.BackendClosedError, match="the pipeline was closed"):
            await call


def test_another_loop() -> None:
    recorder = Recorder(function=lambda x: x)
    batcher = batcher_of(recorder)

    async def first() -> None:
        (call,) = await begun([batcher(rows(1))])
        await recorder.until(1)
        recorder.answer(0)
        await call

    asyncio.run(first())
    with pytest.raises(ap.WrongLoopError):
        asyncio.run(batcher(rows(1)))


async def test_nothing_of_a_call_is_kept() -> None:
    async with ap.Pipeline(mlp, mlp_params(2), devices=DEVICES) as pipe, ap.Batcher(pipe) as batcher:
        x = rows(3)
        gone = weakref.ref(x)
        await batcher(x)
        del x
        gc.collect()
        assert gone() is None
