"""The scheduler's life cycle: reserve, allocate, set, compute many times, get, reset; and moving host weights' work."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe import by_hand
from aiopipe.devices.base import DeviceType
from aiopipe.devices.sim import Cluster, fail
from aiopipe.devices.xla import XlaDevice
from graphs import FakeDevice
from hanging import Later
from models import assert_close, batch, mlp, mlp_params, oracle
from simgraphs import array, assert_equal, chain, settled, unsplit


async def placed(sched: ap.Scheduler, params: list[Any], x: Any) -> ap.Graph:
    n = len(sched.backends)
    return ap.trace(mlp, await ap.place(params, lambda path: sched.backends[int(path) * n // len(params)]), x)


# Reserving ---------------------------------------------------------------------------------------


async def test_pins_survive_and_nothing_is_planned_again() -> None:  # S20
    params, x = mlp_params(2), batch()
    async with ap.Scheduler(["cpu:0", "cpu:1", "cpu:2"]) as sched:
        graph = await placed(sched, params, x)
        sched.set_tensor_backend(graph, graph.outputs[0], "cpu:2")
        sizes = await sched.reserve(graph)
        assert set(sizes) == {"cpu:0", "cpu:1", "cpu:2"} and sizes["cpu:2"] > 0
        assert sched.statistics().plans == 0 and sched.n_splits == 3
        for seed in range(5):
            y = await sched.graph_compute(graph, batch(seed=seed))
            assert y.devices() == {jax.devices()[2]}
            assert_close(y, oracle(mlp, params, batch(seed=seed)))
        assert sched.get_tensor_backend(graph, graph.outputs[0]) is sched.backends[2]
        assert {b.name: sched.buffer_size(b) for b in sched.backends} == sizes
        assert await sched.reserve(graph) == sizes
        s = sched.statistics()
        assert (s.plans, s.planned, s.replanned) == (1, 1, 0)


async def test_reserving_allocates_nothing_and_compiles_for_good() -> None:
    params, x = mlp_params(2, 64), batch(1, 64)
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(mlp, params, x)
        gc.collect()
        before = sum(a.nbytes for a in jax.live_arrays())
        await sched.reserve(graph)
        gc.collect()
        assert sum(a.nbytes for a in jax.live_arrays()) == before
        assert sched.buffer_size("cpu:0") == 0
        compiled = sched.statistics().compiled
        assert_close(await sched.graph_compute(graph, x), oracle(mlp, params, x))
        assert sched.statistics().compiled == compiled == 1


async def test_nothing_in_flight_is_disturbed() -> None:  # D4
    """Virtual time stands still while a larger graph is reserved under evaluations that are running."""
    cluster = Cluster(2, split_cost_s=1.0, compute=True)
    graph, larger = chain(2), chain(4, name="larger")
    async with ap.Scheduler(cluster.backends, n_copies=4) as sched:
        sched.set_cut(graph, range(2))
        sched.set_cut(larger, (0, 1, 0, 1))
        running = [await sched.graph_compute_async(graph, array(i)) for i in range(3)]
        cur_copy, now = sched.cur_copy, cluster.clock.now
        in_flight = sched.statistics().in_flight
        await sched.reserve(larger)
        assert (sched.cur_copy, sched.n_copies) == (cur_copy, 4)
        assert sched.statistics().in_flight <= in_flight and sched.statistics().admitted == 3
        assert cluster.clock.now - now <= 3.0
        for i, evaluation in enumerate(running):
            assert_equal(await evaluation, unsplit(graph, array(i)))
        assert_equal(await sched.graph_compute(larger, array(7)), unsplit(larger, array(7)))
        settled(sched)


async def test_a_reservation_that_is_pinned_anew_is_planned_again() -> None:
    params, x = mlp_params(1), batch()
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = ap.trace(mlp, params, x)
        await sched.reserve(graph)
        sched.set_tensor_backend(graph, graph.outputs[0], "cpu:1")
        assert (await sched.graph_compute(graph, x)).devices() == {jax.devices()[1]}
        s = sched.statistics()
        assert (s.planned, s.replanned) == (2, 1)
        other = ap.trace(mlp, params, batch(5))  # another shape is another graph
        await sched.graph_compute(other, batch(5))
        s = sched.statistics()
        assert (s.planned, s.replanned) == (3, 1)


async def test_plans_that_nobody_asked_for_are_errors_when_forbidden() -> None:
    params, x = mlp_params(1), batch()
    async with ap.Scheduler(["cpu:0", "cpu:1"], forbid_replan=True) as sched:
        graph, other = ap.trace(mlp, params, x), ap.trace(mlp, params, batch(5))
        with pytest.raises(ap.ReplanError, match=r"'mlp' for \('x' float32\[2,8\]\) would have to be planned"):
            await sched.graph_compute(graph, x)
        await sched.reserve(graph)
        assert_close(await sched.graph_compute(graph, x), oracle(mlp, params, x))
        with pytest.raises(ap.ReplanError, match=r"float32\[5,8\]"):  # outgrown
            await sched.graph_compute(other, batch(5))
        await sched.alloc_graph(other)
        assert_close(await sched.graph_compute(other, batch(5)), oracle(mlp, params, batch(5)))
        sched.set_tensor_backend(graph, graph.outputs[0], "cpu:1")
        with pytest.raises(ap.ReplanError, match="after its pins change"):
            await sched.graph_compute(graph, x)
        assert (sched.statistics().planned, sched.statistics().replanned) == (2, 0)


# Allocate once, compute many ---------------------------------------------------------------------


@pytest.mark.parametrize("n_copies", [1, 2, 4, 8])
async def test_one_allocated_graph_many_runs(n_copies: int) -> None:  # S2, S3, D5
    """Bit-equal to `n_copies=1` by call, whatever is synchronized or allocated in between."""
    params = mlp_params(4, 32)
    inputs = [batch(3, 32, seed=s) for s in range(10)]
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=1) as sched:
        graph = await placed(sched, params, inputs[0])
        want = [np.asarray(await sched.graph_compute(graph, x)) for x in inputs]
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=n_copies) as sched:
        graph = await placed(sched, params, inputs[0])
        await sched.alloc_graph(graph)
        mine = np.empty_like(inputs[0])
        evaluations = []
        for i, x in enumerate(inputs):
            if i % 3 == 1:
                await sched.synchronize()
            if i % 3 == 2:
                await sched.alloc_graph(graph)
            mine[:] = x
            await sched.tensor_set(graph.inputs[0], mine)
            mine[:] = np.nan  # it is the caller's again
            evaluations.append(await sched.graph_compute_async(graph))
            if i % 4 == 0:
                np.testing.assert_array_equal(await sched.tensor_get(graph.outputs[0]), want[i], strict=True)
        for evaluation, y in zip(evaluations, want, strict=True):
            np.testing.assert_array_equal(np.asarray(await evaluation), y, strict=True)
        np.testing.assert_array_equal(await sched.tensor_get(graph.outputs[0]), want[-1], strict=True)
        s = sched.statistics()
        assert (s.succeeded, s.planned, s.replanned) == (10, 1, 0)


def two_in_three_out(w: Any, a: Any, b: dict[str, Any]) -> Any:
    return {"sum": a @ w + b["bias"], "same": a, "weight": w}, (b["bias"] * 2).astype(jnp.bfloat16)


async def test_several_inputs_and_outputs() -> None:
    w, a, bias = mlp_params(1)[0], batch(), np.ones(8, np.float32)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = ap.trace(two_in_three_out, w, a, {"bias": bias})
        with pytest.raises(ap.TensorError, match=r"input 'a' float32\[2,8\] of graph .* is not set"):
            await sched.graph_compute(graph)
        await sched.tensor_set(graph.inputs[0], jnp.asarray(a))
        with pytest.raises(ap.TensorError, match=r"input 'b/bias' .* is not set"):
            await sched.graph_compute(graph)
        await sched.tensor_set(graph.inputs[1], bias.astype(np.float64))
        with pytest.raises(ap.TensorError, match=r"has no value: get one of graph.outputs"):
            await sched.tensor_get(graph.outputs[1])
        result = await sched.graph_compute(graph)
        want = oracle(two_in_three_out, w, a, {"bias": bias})
        assert_close(result, want)
        for tensor, value in zip(graph.outputs, jax.tree.leaves(want), strict=True):
            got = await sched.tensor_get(tensor)
            assert got.dtype == value.dtype
            np.testing.assert_allclose(got.astype(np.float32), value.astype(np.float32), rtol=1e-5)
        np.testing.assert_array_equal(await sched.tensor_get(graph.inputs[1]), bias)
        await sched.tensor_set(graph.inputs[1], [3] * 8)  # numbers take the type of the tensor
        assert_close((await sched.graph_compute(graph))[0]["sum"], a @ w + 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((3, 8), np.float32), r"'x' float32\[2,8\] got float32\[3,8\]"),
        (np.zeros((2, 8), np.int32), r"'x' float32\[2,8\] got int32\[2,8\]"),
        (np.zeros((2, 8), np.complex128), "got complex128"),
        ([[1j] * 8] * 2, r"'x' got a list .*, expected float32\[2,8\]: complex128 numbers are not converted"),
        (None, "got a NoneType"),
    ],
)
async def test_data_that_does_not_fit(data: Any, message: str) -> None:
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(mlp, mlp_params(1), batch())
        with pytest.raises(ap.TensorError, match=message):
            await sched.tensor_set(graph.inputs[0], data)
        with pytest.raises(ap.TensorError, match="is a weight, not an input"):
            await sched.tensor_set(graph.weights[0], data)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.float32, np.bool_])
async def test_numbers_are_converted_as_in_a_call(dtype: Any) -> None:
    """By call, by `Scheduler.tensor_set` and by `Backend.tensor_set`: the same value, or refused by all three."""
    numbers = (3, -1, 300, 2**40, 2**63, 2.5, True, 1j, "1")
    n_refused = 0
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(lambda w, x: x, (), np.zeros((), dtype))
        tensor = sched.backends[0].alloc_buffer(64).alloc((), np.dtype(dtype).name)
        for number in numbers:
            got: list[Any] = []
            for way in ("call", "set", "backend"):
                try:
                    if way == "call":
                        got.append(await sched.graph_compute(graph, number))
                    elif way == "set":
                        await sched.tensor_set(graph.inputs[0], number)
                        got.append(await sched.graph_compute(graph))
                    else:
                        await sched.backends[0].tensor_set(tensor, number)
                        got.append(await sched.backends[0].tensor_get(tensor))
                except ap.TensorError:
                    got.append(None)
            if None in got:
                assert got == [None] * 3, number
                n_refused += 1
            else:
                assert all(np.asarray(value) == number for value in got)
    assert n_refused == {"int8": 7, "uint8": 8, "int32": 6, "uint32": 7, "float32": 3, "bool": 8}[np.dtype(dtype).name]


@pytest.mark.parametrize("data", [np.float64(2), np.array(2, ">f8"), np.array(2, ">f4"), np.float32(2), 2, 2.0])
async def test_whatever_fits_by_call_can_be_set(data: Any) -> None:
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(lambda w, x: x * w, np.float32(3), np.float32(0))
        await sched.tensor_set(graph.inputs[0], data)
        assert float(await sched.graph_compute(graph)) == float(await sched.graph_compute(graph, data)) == 6


async def test_a_large_input_is_captured_at_once_and_arrays_as_they_are() -> None:
    params, x = mlp_params(1, 512), batch(1024, 512)
    want = oracle(mlp, params, x)
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(mlp, params, x)
        mine = x.copy()
        await sched.tensor_set(graph.inputs[0], mine)
        mine[:] = np.nan
        assert_close(await sched.graph_compute(graph), want, 1e-4)
        await sched.tensor_set(graph.inputs[0], jax.device_put(x))
        assert_close(await sched.graph_compute(graph), want, 1e-4)


@pytest.mark.parametrize("then", ["set", "refused", "reset"])
async def test_of_several_calls_the_last_one_counts(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier one, whose data is large, is still being copied when the last one is done."""
    copying, go = asyncio.Event(), asyncio.Event()

    async def slow(call: Callable[[], Any], name: str) -> Any:
        copying.set()
        await go.wait()
        return call()

    monkeypatch.setattr(by_hand, "in_thread", slow)
    first, last = np.ones(1 << 18, np.float32), np.full(1 << 18, 2, np.float32)
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(lambda w, x: x[:1], (), first)
        earlier = asyncio.ensure_future(sched.tensor_set(graph.inputs[0], first))
        await copying.wait()
        if then == "set":
            await sched.tensor_set(graph.inputs[0], jnp.asarray(last))
        elif then == "refused":
            with pytest.raises(ap.TensorError):
                await sched.tensor_set(graph.inputs[0], last[1:])
        else:
            sched.reset()
        go.set()
        await earlier
        if then == "reset":
            with pytest.raises(ap.TensorError, match="is not set"):
                await sched.graph_compute(graph)
        else:
            assert (await sched.graph_compute(graph)).tolist() == [2.0 if then == "set" else 1.0]


async def test_a_key_is_set_as_a_key_alone() -> None:
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(lambda w, key: jax.random.normal(key, (3,)), (), jax.random.key(0))
        with pytest.raises(ap.TensorError, match=r"'key' got the int 7 .*expected key<fry>\[\]: int64 numbers are not"):
            await sched.tensor_set(graph.inputs[0], 7)
        await sched.tensor_set(graph.inputs[0], jax.random.key(7))
        assert_close(await sched.graph_compute(graph), jax.random.normal(jax.random.key(7), (3,)))


async def test_getting_from_an_evaluation_that_failed() -> None:
    cluster = Cluster(1, compute=True)
    graph = chain([fail("broken", ZeroDivisionError, launches={0})])
    async with ap.Scheduler(cluster.backends) as sched:
        await sched.tensor_set(graph.inputs[0], array(1))
        evaluation = await sched.graph_compute_async(graph)
        with pytest.raises(ap.EvaluationError, match="broken"):
            await sched.tensor_get(graph.outputs[0])
        with pytest.raises(ap.EvaluationError, match="broken"):
            await evaluation
        settled(sched)


async def test_an_error_that_tensor_get_has_raised_is_heard() -> None:
    cluster, told = Cluster(1, compute=True), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    graph = chain([fail("broken", ZeroDivisionError, launches={0, 1})])
    async with ap.Scheduler(cluster.backends) as sched:
        await sched.tensor_set(graph.inputs[0], array(1))
        for asked in (True, False):
            await sched.graph_compute_async(graph)
            if asked:
                with pytest.raises(ap.EvaluationError, match="broken"):
                    await sched.tensor_get(graph.outputs[0])
            await sched.synchronize()
            sched.reset()
            gc.collect()
            assert len(told) == (0 if asked else 1)
            await sched.tensor_set(graph.inputs[0], array(1))
    assert "nobody awaited it" in told[0]["message"]


@pytest.mark.parametrize("cancelled", ["before", "meanwhile"])
async def test_getting_from_an_evaluation_that_was_cancelled(cancelled: str) -> None:
    """Nobody has cancelled the task that asks: it is told, and goes on."""
    backend, graph = Later(), chain(1)
    async with ap.Scheduler([backend, "cpu:0"]) as sched:
        await sched.tensor_set(graph.inputs[0], array(1))
        backend.hangs = True
        evaluation = await sched.graph_compute_async(graph)
        if cancelled == "before":
            evaluation.cancel()
        getting = asyncio.ensure_future(sched.tensor_get(graph.outputs[0]))
        await asyncio.sleep(0)
        evaluation.cancel()
        with pytest.raises(ap.TensorError, match="has no value: evaluation 0 of 'chain', the newest, was cancelled"):
            await getting
        backend.let_go()
        assert_equal((await sched.graph_compute(graph)).array, unsplit(graph, array(1)))
        assert_equal(await sched.tensor_get(graph.outputs[0]), unsplit(graph, array(1)))
        settled(sched)


async def test_what_is_set_and_kept_dies_with_its_graph() -> None:
    params, x = mlp_params(1, 64), batch(4, 64)
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(mlp, params, x)
        await sched.tensor_set(graph.inputs[0], x)
        await sched.graph_compute(graph)
        assert (len(sched._by_hand._values), len(sched._by_hand._newest)) == (1, 1)
        del graph
        async with asyncio.timeout(30):
            while sched._by_hand._values or sched._by_hand._newest:  # a thread may still be letting go
                await asyncio.sleep(0.001)
                gc.collect()


async def test_reset_forgets_pins_plans_and_inputs_and_lets_go_on_what_runs() -> None:
    cluster = Cluster(2, split_cost_s=1.0, compute=True)
    graph = chain(2)
    async with ap.Scheduler(cluster.backends) as sched:
        for i, tensor in enumerate(graph.tensors[1:]):
            sched.set_tensor_backend(graph, tensor, f"sim:{i}")
        await sched.tensor_set(graph.inputs[0], array(1))
        running = await sched.graph_compute_async(graph)
        assert sched.n_splits == 2
        sched.reset()
        assert sched.get_tensor_backend(graph, graph.outputs[0]) is None
        assert sched.buffer_size("sim:0") == sched.buffer_size("sim:1") == 0
        assert_equal(await running, unsplit(graph, array(1)))
        with pytest.raises(ap.TensorError, match=r"'x' .* is not set"):
            await sched.graph_compute(graph)
        assert_equal(await sched.graph_compute(graph, array(2)), unsplit(graph, array(2)))
        assert sched.n_splits == 1  # the pin is gone
        assert (sched.statistics().planned, sched.statistics().replanned) == (2, 1)
        settled(sched)


# Offloading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "wanted"), [(1, False), (32, True)])
def test_accelerators_want_big_batches(rows: int, wanted: bool) -> None:
    graph = ap.trace(lambda w, x: x @ w, jnp.zeros((4096, 4096)), jax.ShapeDtypeStruct((rows, 4096), jnp.float32))
    assert FakeDevice("gpu:0").offload_op(graph.nodes[0]) is wanted
    assert FakeDevice("cpu:0", type=DeviceType.CPU).offload_op(graph.nodes[0]) is False


async def test_offloaded_operations_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(XlaDevice, "offload_op", lambda self, node: node.op == "dot_general" and self.name != "cpu:2")
    params, x = mlp_params(3), batch()
    async with ap.Scheduler(["cpu:0", "cpu:1", "cpu:2"], op_offload=True) as sched:
        weights = await ap.place(params, {"*": sched.backends[2]})
        graph = ap.trace(mlp, weights, x)
        plan = await sched.plan(graph)
        assert set(plan.assignment.node_backend) == {0} and "1.off" in plan.assignment.node_cause
        for seed in range(4):
            assert_close(await sched.graph_compute(graph, batch(seed=seed)), oracle(mlp, params, batch(seed=seed)))
        assert sched.statistics().copied_weights_nbytes == sum(p.nbytes for p in params)  # once, not each time


# Buffer types in assignment ----------------------------------------------------------------------


async def test_a_weight_in_memory_that_nobody_computes_in_decides_nothing_and_is_brought_once() -> None:
    params, x = mlp_params(1), batch()
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        far = sched.backends[1]
        pinned = next(kind for kind in far.device.buffer_types() if not far.supports_buffer_type(kind))
        region = far.alloc_buffer(4096, buffer_type=pinned, usage=ap.BufferUsage.WEIGHTS)
        tensor = region.alloc(params[0].shape, "float32", "w")
        await far.tensor_set(tensor, params[0])
        graph = ap.trace(mlp, [tensor], x)
        plan = await sched.plan(graph)
        assert "1.wgt" not in plan.assignment.leaf_cause and set(plan.assignment.node_backend) == {0}
        for seed in range(3):
            assert_close(await sched.graph_compute(graph, batch(seed=seed)), oracle(mlp, params, batch(seed=seed)))
        assert sched.statistics().copied_weights_nbytes == params[0].nbytes
