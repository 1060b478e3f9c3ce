"""Memory: what is reported is what lives; what does not fit is refused before anything is allocated."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.sim import Cluster
from aiopipe.sched.alloc import BackendSize, check_memory, largest_n_copies
from aiopipe.staging import Slots, Staging
from gates import eventually
from hanging import Later
from models import assert_close, batch, mlp, mlp_params, oracle
from simgraphs import SPEC, TOTAL, array, assert_equal, chain, settled, unsplit

ROWS, WIDTH = 1024, 512  # values of 2 MiB: never handed over as views


def live(device: str) -> int:
    """Bytes of the arrays that live on a CPU device; memory that several arrays show counts once."""
    gc.collect()
    there = {jax.local_devices(backend="cpu")[int(device.partition(":")[2])]}
    return sum({a.unsafe_buffer_pointer(): a.nbytes for a in jax.live_arrays() if a.devices() == there}.values())


def staged(sched: ap.Scheduler, device: str, *, as_arrays: bool = True) -> int:
    """Bytes of the staging buffers that a device reads in place; with or without those that JAX counts as arrays."""
    total = 0
    for loaded in sched._plans.values():
        staging = loaded._staging
        for buffers in staging.buffers.values():
            for (buffer, shown), backend in zip(buffers, staging._host_backends, strict=True):
                if buffer is not None and (as_arrays or shown is buffer) and backend.name == device:
                    total += buffer.nbytes
    return total


async def until(condition: Callable[[], Any]) -> None:
    """Poll: what is waited for happens on another thread, which cannot set an `asyncio.Event`."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Hold:
    """Keeps evaluations in flight: nobody is told that their results are ready, until `release`."""

    def __init__(self, backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backends = backends
        self.waiting: list[tuple[Any, Any, Any]] = []
        self.patch = monkeypatch
        for backend in backends:
            monkeypatch.setattr(backend, "all_ready", lambda values: False)
            monkeypatch.setattr(
                backend, "notify", lambda values, callback, b=backend: self.waiting.append((b, values, callback))
            )

    def release(self) -> None:
        self.patch.undo()
        for backend, values, callback in self.waiting:
            backend.notify(values, callback)
        self.waiting.clear()


@pytest.mark.parametrize("n_copies", [1, 2, 4, 8])
async def test_reported_bytes_are_the_measured_ones(n_copies: int, monkeypatch: pytest.MonkeyPatch) -> None:  # S18
    """Weights, and `n_copies` evaluations in flight whose results nobody else holds."""
    names = ["cpu:0", "cpu:1", "cpu:2"]
    before = {name: live(name) for name in names}
    params, x = mlp_params(3, WIDTH), batch(ROWS, WIDTH)

    async def measure() -> None:
        async with ap.Scheduler(names, n_copies=n_copies) as sched:
            weights = await ap.place(params, lambda path: sched.backends[int(path)])
            graph = ap.trace(mlp, weights, x)
            reserved = await sched.reserve(graph)
            await sched.alloc_graph(graph)
            sizes = (await sched.plan(graph)).sizes
            hold = Hold(sched.backends, monkeypatch)
            evaluations = [await sched.graph_compute_async(graph, x) for _ in range(n_copies)]
            await until(lambda: len(hold.waiting) == n_copies)
            for name, size in zip(names, sizes, strict=True):
                assert reserved[name] == sched.buffer_size(name) == size.total(n_copies)
                # XLA allocates scratch while it computes; what it says of it is all that can be known.
                measured = live(name) - before[name] + staged(sched, name, as_arrays=False) + size.temp_nbytes
                assert measured == pytest.approx(reserved[name], rel=0.01)
                assert size.total(n_copies) - size.total(0) == n_copies * size.copy_nbytes  # linear
            assert [size.copy_nbytes for size in sizes] == [2 * x.nbytes, x.nbytes, x.nbytes]
            hold.release()
            for evaluation in evaluations:
                assert_close(await evaluation, oracle(mlp, params, x), 1e-4)

    await measure()
    assert {name: live(name) for name in names} == before, "something is left"


def narrowing(params: list[Any], x: Any, y: Any) -> Any:
    """Copies that no result can take over, results of several sizes, a value read twice, an input that is returned."""
    a = jnp.tanh(x @ params[0])  # (1024, 512) on the first device
    b = jnp.tanh(a @ params[1])  # (1024, 384) on the second
    c = jnp.tanh(a @ params[2]) * 2.0  # (1024, 300) on the first again
    d = jnp.tanh(b @ params[3])  # (1024, 300) on the first
    return c + d, b, y


async def test_the_most_that_one_evaluation_holds() -> None:  # S18
    """Looked at after each launch, before anything is let go: the peak is what a copy is said to need."""
    rng = np.random.default_rng(0)
    shapes = [(512, 512), (512, 384), (512, 300), (384, 300)]
    params = [(rng.standard_normal(shape) / 20).astype(np.float32) for shape in shapes]
    x, y = batch(ROWS, 512), batch(ROWS, 700, seed=1)
    names = ["cpu:0", "cpu:1", "cpu:2"]
    before = {name: live(name) for name in names}
    async with ap.Scheduler(names, n_copies=1) as sched:
        weights = await ap.place(params, {"1": sched.backends[1], "*": sched.backends[0]})
        graph = ap.trace(narrowing, weights, x, y)
        plan = await sched.plan(graph)
        loaded = sched._plans.get(graph)
        assert loaded is not None
        peak = dict.fromkeys(names, 0)

        def watched(call: Any) -> Any:
            def launch(*args: Any) -> Any:
                results = call(*args)
                for name in names:
                    peak[name] = max(peak[name], live(name) - before[name] + staged(sched, name, as_arrays=False))
                return results

            return launch

        for split in loaded.splits:
            split.call = watched(split.call)
        got = await sched.graph_compute(graph, x, y)
        assert_close(got, oracle(narrowing, params, x, y), 1e-4)
        for name, size in zip(names, plan.sizes, strict=True):
            assert peak[name] == pytest.approx(size.total(1) - size.temp_nbytes, rel=0.01)


async def test_slots_are_staged_once_however_many_plans_there_are() -> None:
    params = mlp_params(2, 64)
    async with ap.Scheduler(["cpu:0"], n_copies=2) as sched:
        weights = await ap.place(params, {"*": sched.backends[0]})
        graphs = [ap.trace(mlp, weights, batch(rows, 64)) for rows in (1, 2, 4, 8)]
        for _ in range(3):
            for rows, graph in zip((1, 2, 4, 8), graphs, strict=True):
                x = batch(rows, 64, seed=rows)
                for y in [await sched.graph_compute_async(graph, x) for _ in range(2)]:
                    assert_close(await y, oracle(mlp, params, x))
                assert staged(sched, "cpu:0") == 2 * x.nbytes


async def test_slots_that_go_away_take_their_staging_with_them() -> None:
    params, x = mlp_params(1, 64), batch(4, 64)
    async with ap.Scheduler(["cpu:0"], n_copies="auto", memory_limit=40_000) as sched:
        weights = await ap.place(params, {"*": sched.backends[0]})
        graph, large = ap.trace(mlp, weights, x), ap.trace(mlp, weights, batch(30, 64))
        for y in [await sched.graph_compute_async(graph, x) for _ in range(4)]:
            await y
        assert (sched.n_copies, staged(sched, "cpu:0")) == (4, 4 * x.nbytes)
        await sched.alloc_graph(large)
        assert (sched.n_copies, staged(sched, "cpu:0")) == (1, x.nbytes)
        assert_close(await sched.graph_compute(large, batch(30, 64)), oracle(mlp, params, batch(30, 64)))


async def test_copies_that_do_not_fit_are_refused_and_one_fits() -> None:  # S17
    params, x = mlp_params(2, WIDTH), batch(ROWS, WIDTH)
    before = [live("cpu:0"), live("cpu:1")]
    limit = {"cpu:1": params[1].nbytes + 2 * x.nbytes + x.nbytes // 2}
    for n_copies, fits in ((4, 1), (1, 1)):
        async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=n_copies, memory_limit=limit) as sched:
            graph = ap.trace(mlp, params, x)
            sched.set_tensor_backend(graph, graph.outputs[0], "cpu:1")
            for i, tensor in enumerate(graph.weights):
                sched.set_tensor_backend(graph, tensor, f"cpu:{i}")
            if n_copies > fits:
                for attempt in (sched.reserve, sched.alloc_graph, sched.graph_compute_async):
                    inputs = (x,) if attempt == sched.graph_compute_async else ()
                    with pytest.raises(ap.AllocationError, match=r"'cpu:1' needs .* n_copies=1 would fit") as caught:
                        await attempt(graph, *inputs)
                    error = caught.value
                    assert (error.backend, error.available_nbytes, error.fits_n_copies) == ("cpu:1", limit["cpu:1"], 1)
                    assert error.asked_nbytes > error.available_nbytes
                    assert (sched.statistics().plans, sched.buffer_size("cpu:1")) == (0, 0)
                del caught, error
            else:
                assert_close(await sched.graph_compute(graph, x), oracle(mlp, params, x), 1e-4)
        del graph, sched
        assert [live("cpu:0"), live("cpu:1")] == before, "something is left"


async def test_auto_takes_as_many_copies_as_fit() -> None:  # S17
    params, x = mlp_params(1, WIDTH), batch(ROWS, WIDTH)
    async with ap.Scheduler(["cpu:0"], n_copies="auto") as sched:
        assert sched.n_copies == 4
        graph = ap.trace(mlp, params, x)
        (size,) = (await sched.plan(graph)).sizes
        assert sched.n_copies == 4
    for fits in (1, 2, 3):
        limit = size.total(fits) + size.copy_nbytes // 2
        async with ap.Scheduler(["cpu:0"], n_copies="auto", memory_limit=limit) as sched:
            graph = ap.trace(mlp, params, x)
            reserved = await sched.reserve(graph)
            assert sched.n_copies == fits and reserved == {"cpu:0": size.total(fits)}
            results = [y async for y in sched.stream(graph, [batch(ROWS, WIDTH, seed=s) for s in range(6)])]
            for s, y in enumerate(results):
                assert_close(y, oracle(mlp, params, batch(ROWS, WIDTH, seed=s)), 1e-4)
            assert sched.buffer_size("cpu:0") <= limit
    async with ap.Scheduler(["cpu:0"], n_copies="auto", memory_limit=size.weights_nbytes) as sched:
        with pytest.raises(ap.AllocationError, match="move weights") as caught:
            await sched.reserve(ap.trace(mlp, params, x))
        assert caught.value.fits_n_copies == 0 and sched.n_copies == 4


def wide(n: int) -> ap.Graph:
    """A graph of `n` inputs, so that one copy needs `n` + 1 values."""
    b = ap.GraphBuilder("wide")
    return b.build(b.node("total", [b.input(f"x{i}", *SPEC) for i in range(n)], [SPEC], fn=TOTAL))


async def test_auto_gives_slots_up_while_evaluations_are_in_flight() -> None:
    """Virtual time: four are in flight when a graph comes that leaves room for one copy. It waits for them."""
    cluster = Cluster(1, memory_nbytes=[10 * 32], split_cost_s=1.0, compute=True)
    small, large = chain(2), wide(5)
    inputs = [array(i) for i in range(5)]
    async with ap.Scheduler(cluster.backends, n_copies="auto") as sched:
        await sched.alloc_graph(small)
        running = [await sched.graph_compute_async(small, array(i)) for i in range(4)]
        assert sched.statistics().in_flight == sched.n_copies == 4
        later = await sched.graph_compute_async(large, *inputs)
        assert sched.statistics().in_flight == sched.n_copies == 1 and all(r.done() for r in running)
        assert later.copy_id == 0
        last = await sched.graph_compute_async(small, array(9))
        assert later.done() and last.copy_id == 0 == sched.cur_copy
        for i, r in enumerate(running):
            assert_equal(await r, unsplit(small, array(i)))
        assert_equal(await later, unsplit(large, *inputs))
        assert_equal(await last, unsplit(small, array(9)))
        settled(sched)


async def test_auto_loads_what_fits_beside_slots_that_a_device_holds() -> None:
    """One graph waits until the device gives up slots; another, which needs none of their memory, does not."""
    backend = Later()
    small, large, other = chain(2, name="small"), wide(5), chain(3, name="other")
    inputs = [array(i) for i in range(5)]
    async with ap.Scheduler([backend, "cpu:0"], n_copies="auto", memory_limit={"later:0": 10 * 32}) as sched:
        for graph in (small, large, other):
            sched.set_cut(graph, [0] * len(graph.nodes))
        await sched.alloc_graph(small)
        backend.hangs = True
        hung = [await sched.graph_compute_async(small, array(i), deadline=0.0) for i in range(3)]
        for evaluation in hung:
            with pytest.raises(ap.DeadlineExceeded):
                await evaluation
        assert sched.statistics().in_flight == 3 and sched.n_copies == 4
        waits = asyncio.ensure_future(sched.graph_compute(large, *inputs))
        await eventually(lambda: sched.n_copies == 1)
        await sched.alloc_graph(other)
        with pytest.raises(ap.DeadlineExceeded, match="still waits for a slot"):
            await sched.graph_compute(other, array(1), deadline=0.0)
        assert not waits.done() and sched.statistics().in_flight == 3
        backend.let_go()
        assert_equal((await waits).array, unsplit(large, *inputs))
        assert_equal((await sched.graph_compute(other, array(1))).array, unsplit(other, array(1)))
        assert sched.n_copies == 1
        settled(sched)


def test_the_largest_number_of_copies_is_that_of_all_backends() -> None:
    sizes, limits = [BackendSize(10, 10), BackendSize(0, 30, 5), BackendSize()], [55, 100, 0]
    assert largest_n_copies(sizes, limits, 8) == 3
    assert largest_n_copies(sizes, limits, 2) == 2
    assert largest_n_copies(sizes, [55, None, None], 8) == 4
    assert largest_n_copies(sizes, [9, None, None], 8) == 0
    with pytest.raises(ap.AllocationError, match="n_copies=3 would fit") as caught:
        check_memory(sizes, ["a", "b", "c"], limits, 8)
    assert (caught.value.backend, caught.value.fits_n_copies) == ("a", 3)


async def test_a_tensor_larger_than_the_largest_buffer() -> None:
    params, x = mlp_params(1), batch()
    small = ap.BufferType("cpu:0", "device", is_host=True, max_nbytes=100)
    async with ap.Scheduler(["cpu:0"], buffer_types=[small]) as sched:
        with pytest.raises(ap.AllocationError, match=r"tensor '0' float32\[8,8\] has 256 bytes.*'cpu:0' at most 100"):
            await sched.alloc_graph(ap.trace(mlp, params, x))
        assert sched.statistics().compiled == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["hbm9"], "'cpu:0' has no memory kind 'hbm9', expected one of"),
        ({"cpu:7": "device"}, "buffer_types names 'cpu:7'"),
        (["device", "device", "device"], "3 entries"),
        ([ap.BufferType("gpu:3", "device")], "'cpu:0' cannot work in buffer type 'device' of 'gpu:3'"),
    ],
)
async def test_buffer_types_that_a_backend_lacks(given: Any, message: str) -> None:  # S34
    with pytest.raises(ap.PlacementError, match=message):
        ap.Scheduler(["cpu:0", "cpu:1"], buffer_types=given)


async def test_buffer_types_by_order_and_by_name() -> None:
    kinds = [kind.memory_kind for kind in ap.open_backend("cpu:0").device.buffer_types()]
    async with ap.Scheduler(["cpu:0", "cpu:1"], buffer_types={"cpu:1": kinds[0]}) as sched:
        assert [(k.device, k.memory_kind) for k in sched.buffer_types] == [("cpu:0", kinds[0]), ("cpu:1", kinds[0])]
        graph = ap.trace(mlp, mlp_params(2), batch())
        assert_close(await sched.graph_compute(graph, batch()), oracle(mlp, mlp_params(2), batch()))


async def test_a_pipeline_takes_as_many_copies_as_fit_and_the_refusal_names_one_that_does() -> None:
    x = batch(64, WIDTH)
    async with ap.Pipeline(mlp, mlp_params(4, WIDTH), devices=["cpu:0", "cpu:1"], n_copies=4) as pipe:
        sizes = (await pipe.plan(x)).sizes
        assert pipe.n_copies == 4
    limit = min(size.total(3) for size in sizes[:2])
    async with ap.Pipeline(
        mlp, mlp_params(4, WIDTH), devices=["cpu:0", "cpu:1"], n_copies="auto", memory_limit=limit
    ) as pipe:
        want = oracle(mlp, mlp_params(4, WIDTH), x)
        assert_close(np.asarray(await pipe(x)), np.asarray(want), 1e-4)
        fits = pipe.n_copies
        assert 1 <= fits <= 3
        assert len([y async for y in pipe.stream([x] * 5)]) == 5
    for n_copies in (4, fits):
        async with ap.Pipeline(
            mlp, mlp_params(4, WIDTH), devices=["cpu:0", "cpu:1"], n_copies=n_copies, memory_limit=limit
        ) as pipe:
            if n_copies == 4:
                with pytest.raises(ap.AllocationError, match=f"n_copies={fits} would fit"):
                    await pipe(x)
            else:
                await pipe(x)  # the number counts the compilers' scratch, too


async def test_what_is_too_large_for_a_device_is_not_placed() -> None:
    cluster = Cluster(1, memory_nbytes=[1000])
    with pytest.raises(ap.AllocationError, match="no room on 'sim:0'"):
        await ap.place({"w": np.zeros(300, np.float32)}, {"*": cluster.backends[0]})
    await ap.place({"w": np.zeros(200, np.float32)}, {"*": cluster.backends[0]})


def test_slots_are_trimmed_while_a_thread_takes_some() -> None:
    """What another thread may do between any two instructions of `trim`, done there."""
    slots, owner = Slots(), Staging.__new__(Staging)
    owner.buffers = {}
    for copy_id in range(4):
        slots.take(copy_id, owner)
        owner.buffers[copy_id] = []
    taken = itertools.count(10)

    def between(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            slots.take(next(taken), owner)
        return between

    before = sys.gettrace()
    sys.settrace(between)
    try:
        slots.trim(2)
    finally:
        sys.settrace(before)
    assert next(taken) > 20, "some were taken meanwhile"
    assert sorted(owner.buffers) == [0, 1] and {0, 1} <= set(slots._owner)


@pytest.mark.parametrize("lane", [False, True])
async def test_a_backend_keeps_no_result_of_a_scheduler_that_is_closed(lane: bool) -> None:
    def model(w: Any, x: Any) -> Any:
        if lane:  # host callbacks are launched by a thread
            x = jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x * w

    x = np.ones(1 << 16, np.float32)
    async with ap.open_backend("cpu:0") as backend:
        async with ap.Scheduler([backend]) as sched:
            result = await sched.graph_compute(ap.trace(model, np.float32(2), x), x)
            kept = weakref.ref(result)
        del result
        gc.collect()
        assert kept() is None
