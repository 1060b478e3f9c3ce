"""Graph plans: a graph on one backend, compiled once, computed by hand."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.sim import Cluster, HostOp
from hanging import Later
from models import assert_close, batch, mlp, mlp_params, oracle
from simgraphs import SPEC, array, chain, unsplit


class TestPlans:
    async def test_create_compute_free(self) -> None:
        params, x = mlp_params(3), batch()
        graph = ap.trace(mlp, params, x)
        async with ap.open_backend("cpu:1") as backend:
            plan = await backend.graph_plan_create(graph)
            assert isinstance(plan, ap.GraphPlan) and plan.graph is graph and plan.backend is backend
            assert plan.program is not None and plan.program.nodes == graph.nodes  # one program, whatever the graph
            for k in range(3):
                y = await backend.graph_plan_compute(plan, x + k)
                assert y.devices() == {jax.devices()[1]} and y.is_ready()
                assert_close(y, oracle(mlp, params, x + k))
            backend.graph_plan_free(plan)
            backend.graph_plan_free(plan)
            backend.graph_plan_free(None)
            assert plan.freed
            with pytest.raises(ap.TensorError, match="plan of graph 'mlp' on cpu:1 was freed: make another"):
                await backend.graph_plan_compute(plan, x)

    async def test_a_plan_is_one_backends(self) -> None:
        graph = ap.trace(mlp, mlp_params(1), batch())
        async with ap.open_backend("cpu:0") as a, ap.open_backend("cpu:1") as b:
            plan = await a.graph_plan_create(graph)
            with pytest.raises(ap.PlacementError, match="made by cpu:0, not by cpu:1"):
                await b.graph_plan_compute(plan, batch())
            with pytest.raises(ap.PlacementError, match="made by cpu:0"):
                b.graph_plan_free(plan)
            assert not plan.freed

    async def test_what_is_queued_survives_the_plan(self) -> None:
        params, x = mlp_params(1), batch()
        async with ap.open_backend("cpu:0") as backend:
            plan = await backend.graph_plan_create(ap.trace(mlp, params, x))
            gate = ap.Event("gate")
            backend.event_wait(gate)
            running = asyncio.ensure_future(backend.graph_plan_compute(plan, x))
            await asyncio.sleep(0)
            backend.graph_plan_free(plan)
            gate.set()
            assert_close(await running, oracle(mlp, params, x))

    async def test_a_freed_plan_lets_go_of_its_weights(self) -> None:
        async with ap.open_backend("cpu:0") as backend:
            plan = await backend.graph_plan_create(ap.trace(mlp, mlp_params(1), batch()))
            (uploaded,) = plan.load().uploaded.values()
            gone = weakref.ref(uploaded)
            del uploaded
            backend.graph_plan_free(plan)
            gc.collect()
            assert gone() is None

    async def test_an_op_that_the_device_lacks(self) -> None:
        (backend,) = Cluster(1, unsupported_ops={"step"}).backends
        with pytest.raises(
            ap.PlacementError, match=r"sim:0 does not support step#0, which makes .*int64\[4\] at model.py:10"
        ):
            await backend.graph_plan_create(chain(2))
        with pytest.raises(ap.PlacementError, match="give the graph to a Scheduler"):
            backend.graph_compute_async(chain(2), array())

    async def test_no_room(self) -> None:
        cluster = Cluster(1)
        cluster.fail_next_allocation(0)
        with pytest.raises(ap.AllocationError, match="sim:0 has no room"):
            await cluster.backends[0].graph_plan_create(chain(1))
        b = ap.GraphBuilder("heavy")
        w = b.weight("w", *SPEC, source=array())
        graph = b.build(b.node("neg", [w], [SPEC], fn=HostOp(lambda v: -v)))
        (small,) = Cluster(1, memory_nbytes=16).backends
        with pytest.raises(ap.AllocationError, match=r"no room on 'sim:0' for .* 32 bytes: 16 of 16 are left"):
            await small.graph_plan_create(graph)

    async def test_it_compiles_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loads: list[str] = []
        graph = ap.trace(mlp, mlp_params(1), batch())
        async with ap.open_backend("cpu:0") as backend:
            load = backend.load
            monkeypatch.setattr(backend, "load", lambda program: (loads.append(program.name), load(program))[1])
            for _ in range(3):
                await backend.graph_compute(graph, batch())
            assert loads == ["mlp_plan"]


class TestValues:
    @pytest.mark.parametrize("kind", ["numpy", "cpu:0", "cpu:1", "placed"])
    async def test_weights_from_anywhere(self, kind: str) -> None:
        params, x = mlp_params(2), batch()
        async with ap.open_backend("cpu:0") as a, ap.open_backend("cpu:1") as b:
            weights: Any = params
            if kind == "placed":
                weights = await ap.place(params, {"0": a, "1": b})
            elif kind != "numpy":
                weights = [jax.device_put(w, jax.devices()[int(kind[-1])]) for w in params]
            graph = ap.trace(mlp, weights, x)
            for backend in (a, b):
                assert_close(await backend.graph_compute(graph, x), oracle(mlp, params, x))

    async def test_structure_and_odd_types(self) -> None:
        def fn(params: Any, inputs: Any, key: Any) -> Any:
            noise = jax.random.normal(key, (2,))
            return {"sum": inputs["a"] + params, "noise": noise, "same": inputs["b"], "w": params, "n": inputs["n"] * 2}

        inputs = {"a": jnp.ones(2, jnp.bfloat16), "b": np.arange(3, dtype=np.int32), "n": 3}
        params, key = jnp.full(2, 2, jnp.bfloat16), jax.random.key(1)
        graph = ap.trace(fn, params, inputs, key)
        async with ap.open_backend("cpu:2") as backend:
            got = await backend.graph_compute(graph, inputs, key)
            assert_close(got, oracle(fn, params, inputs, key))
            inputs["b"][:] = 9
            np.testing.assert_array_equal(np.asarray(got["same"]), [0, 1, 2])  # the caller's array is its own again

    async def test_a_graph_without_nodes(self) -> None:
        graph = ap.trace(lambda w, x: (x, w), np.float32(3), batch())
        async with ap.open_backend("cpu:0") as backend:
            x, w = await backend.graph_compute(graph, batch())
            np.testing.assert_array_equal(np.asarray(x), batch())
            assert float(w) == 3.0

    # D3
    async def test_inputs_may_be_overwritten_at_once(self) -> None:
        params, x = mlp_params(1, 256), batch(64, 256)
        graph = ap.trace(mlp, params, x)
        async with ap.open_backend("cpu:1") as backend:
            expected, evaluations = [], []
            for k in range(8):
                x[:] = batch(64, 256, seed=k)
                expected.append(oracle(mlp, params, x.copy()))
                evaluations.append(backend.graph_compute_async(graph, x))
                x[:] = -1
            for evaluation, want in zip(evaluations, expected, strict=True):
                assert_close(await evaluation, want)

    async def test_arguments_that_do_not_fit(self) -> None:
        graph = ap.trace(mlp, mlp_params(1), batch())
        async with ap.open_backend("cpu:0") as backend:
            with pytest.raises(ap.TensorError, match=r"input 'x' got float32\[3,8\], expected float32\[2,8\]"):
                backend.graph_compute_async(graph, batch(3))
            with pytest.raises(ap.TensorError, match="got 2 arguments, expected 1"):
                await backend.graph_compute(graph, batch(), batch())


class TestTensors:
    """Inputs, weights and outputs in buffers: their values count in the order of the queue."""

    async def test_from_tensor_to_tensor(self) -> None:
        graph = chain(2)
        async with ap.open_backend("sim:0") as backend:
            region = backend.alloc_buffer(256)
            x, y = region.alloc((4,), "int64", "x"), region.alloc((4,), "int64", "y")
            for k in range(3):
                backend.tensor_set_async(x, array(k))
                result = await backend.graph_compute(graph, x, outputs=[y])
                np.testing.assert_array_equal(await backend.tensor_get(y), unsplit(graph, array(k)))
                np.testing.assert_array_equal(result, unsplit(graph, array(k)))

    @pytest.mark.parametrize("shape", [(), (8, 8)])
    async def test_a_weight_that_was_traced_from_a_shape_alone_is_refused(self, shape: tuple[int, ...]) -> None:
        """NumPy makes a NaN of None, where one number is wanted."""
        async with ap.open_backend("cpu:1") as backend:
            graph = ap.trace(lambda w, x: (x[:, :, None] * w).sum(-1), jax.ShapeDtypeStruct(shape, np.float32), batch())
            with pytest.raises(ap.TensorError, match=r"'weights' .* has no value"):
                await backend.graph_compute(graph, batch())

    async def test_a_weight_that_is_set_again_counts(self) -> None:
        async with ap.open_backend("cpu:1") as backend:
            w = backend.alloc_buffer(256, usage=ap.BufferUsage.WEIGHTS).alloc((8, 8), "float32", "w")
            graph = ap.trace(lambda w, x: x @ w, w, batch())
            plan = await backend.graph_plan_create(graph)
            with pytest.raises(ap.TensorError, match=r"'weights' float32\[8,8\] on cpu:1 has no value"):
                await backend.graph_plan_compute(plan, batch())
            for k in range(3):
                value = mlp_params(1, seed=k)[0]
                backend.tensor_set_async(w, value)
                assert_close(await backend.graph_plan_compute(plan, batch()), oracle(jnp.matmul, batch(), value))

    async def test_tensors_that_do_not_fit(self) -> None:
        graph = chain(1)
        async with ap.open_backend("sim:0") as backend, ap.open_backend("sim:1") as other:
            here = backend.alloc_buffer(256)
            good, wrong = here.alloc((4,), "int64", "good"), here.alloc((2,), "int64", "wrong")
            away = other.alloc_buffer(256).alloc((4,), "int64", "away")
            for args, outputs, match in [
                ((wrong,), None, r"input 'x' int64\[4\] of graph 'chain' got the tensor 'wrong' int64\[2\]"),
                ((away,), None, r"'away' int64\[4\] has no buffer on sim:0 \(where it has one: sim:1\)"),
                ((good, good), None, "got 2 values, expected 1"),
                ((good,), [], "got 0 output tensors, expected 1"),
                ((good,), [wrong], r"got the tensor 'wrong'"),
                ((good,), [away], "no buffer on sim:0"),
            ]:
                with pytest.raises(ap.TensorError, match=match):
                    backend.graph_compute_async(graph, *args, outputs=outputs)
            with pytest.raises(ap.TensorError, match=r"'good' .* has no value"):
                await backend.graph_compute(graph, good)

    async def test_values_beside_tensors(self) -> None:
        b = ap.GraphBuilder("two")
        x, y = b.input("x", *SPEC), b.input("y", *SPEC)
        graph = b.build(b.node("minus", [x, y], [SPEC], fn=HostOp(lambda x, y: x - y)))
        async with ap.open_backend("sim:0") as backend:
            tensor = backend.alloc_buffer(64).alloc((4,), "int64", "x")
            backend.tensor_set_async(tensor, array(7))
            result = await backend.graph_compute(graph, tensor, array(2))
            np.testing.assert_array_equal(result, array(7) - array(2))
            narrow = array().astype(np.int32)
            for wrong, got in [(array()[:2], r"int64\[2\]"), (narrow, r"int32\[4\]"), (5, r"int\[\]")]:
                with pytest.raises(ap.TensorError, match=rf"'y' int64\[4\] of graph 'two' got {got}: give a value"):
                    backend.graph_compute_async(graph, tensor, wrong)

    async def test_a_pipeline_by_hand_overlaps(self) -> None:
        """Two stages of a second each, and events: four evaluations take five seconds."""
        cluster = Cluster(2, compute=True)
        a, b = cluster.backends
        first = chain([HostOp(lambda x: x * 3, cost_s=1.0)], name="first")
        second = chain([HostOp(lambda x: x + 1, cost_s=1.0)], name="second")
        of_a = [a.alloc_buffer(64).alloc((4,), "int64", f"a{i}") for i in range(2)]
        of_b = [b.alloc_buffer(64).alloc((4,), "int64", f"b{i}") for i in range(2)]
        results = []
        for k in range(4):
            a.graph_compute_async(first, array(k), outputs=[of_a[k % 2]])
            made = a.event_new()
            assert made is not None
            a.event_record(made)
            b.event_wait(made)
            b.tensor_copy_async(of_a[k % 2], of_b[k % 2])
            results.append(b.graph_compute_async(second, of_b[k % 2]))
        for k, result in enumerate(results):
            np.testing.assert_array_equal(await result, array(k) * 3 + 1)
        assert cluster.clock.now == 5.0


class TestEvaluations:
    async def test_it_is_async_and_synchronize(self) -> None:
        cluster = Cluster(1, compute=True)
        (backend,) = cluster.backends
        graph = chain([HostOp(lambda x: x + 1, cost_s=2.0)])
        evaluation = backend.graph_compute_async(graph, array())
        assert not evaluation.done() and cluster.clock.now == 0.0
        got = await backend.graph_compute(graph, array(1))
        assert evaluation.done() and cluster.clock.now == 4.0 and backend.queue.pending == 0
        np.testing.assert_array_equal(got, array(1) + 1)
        np.testing.assert_array_equal(await evaluation, array() + 1)
        np.testing.assert_array_equal(await evaluation, array() + 1)
        assert evaluation.event.done() and [event.done() for event in evaluation.events] == [True]

    async def test_a_failure_is_typed_and_the_next_one_works(self) -> None:
        def fn(w: Any, x: Any) -> Any:
            def check(v: Any) -> Any:
                if v[0] < 0:
                    raise ValueError("negative")
                return v

            return jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * w

        graph = ap.trace(fn, np.float32(2), np.ones(3, np.float32))
        async with ap.open_backend("cpu:0") as backend:
            with pytest.raises(ap.EvaluationError, match="failed on 'cpu:0', in the graph that begins with") as failed:
                await backend.graph_compute(graph, -np.ones(3, np.float32))
            assert failed.value.backend == "cpu:0" and "test_graph_plan.py" in failed.value.source
            assert "negative" in str(failed.value.__cause__)
            got = await backend.graph_compute(graph, np.ones(3, np.float32))
            np.testing.assert_array_equal(np.asarray(got), np.full(3, 2.0))

    @pytest.mark.parametrize("error", [MemoryError("boom"), RuntimeError("RESOURCE_EXHAUSTED: boom")])
    async def test_no_memory_left(self, error: Exception) -> None:
        def fail(x: Any) -> Any:
            raise error

        (backend,) = Cluster(1, compute=True, memory_nbytes=4096).backends
        with pytest.raises(ap.OutOfMemoryError, match=r"boom\n'sim:0' has no memory left.* returns 64 bytes") as oom:
            await backend.graph_compute(chain([HostOp(fail)]), array())
        assert (oom.value.asked_nbytes, oom.value.available_nbytes) == (64, 4096)
        assert (oom.value.backend, oom.value.__cause__) == ("sim:0", error)

    async def test_only_who_is_cancelled_is_cancelled(self) -> None:
        """An operation that raises `CancelledError` fails; what waits for a cancelled evaluation is cancelled, too."""

        def fail(x: Any) -> Any:
            raise asyncio.CancelledError("by the operation")

        (backend,) = Cluster(1, compute=True).backends
        async with Later() as other:
            for owner in (backend, other):
                with pytest.raises(ap.EvaluationError, match="by the operation"):
                    await owner.graph_compute(chain([HostOp(fail)]), array())
        first = ap.Event("first")
        backend.event_wait(first)
        behind = backend.graph_compute_async(chain(1), array())
        first.set(asyncio.CancelledError())
        with pytest.raises(asyncio.CancelledError):
            await behind
        assert behind.cancelled()

    async def test_a_state_needs_a_scheduler(self) -> None:
        b = ap.GraphBuilder("counter")
        s, x = b.state("s", *SPEC), b.input("x", *SPEC)
        (new,) = b.node("add", [s, x], [SPEC], fn=HostOp(lambda s, x: s + x))
        (backend,) = Cluster(1).backends
        graph = b.build([], new_state=[new])
        with pytest.raises(ap.StateError, match=r"'counter' has a state .*which only a Scheduler keeps"):
            await backend.graph_plan_create(graph)

    async def test_cancelling_drops_what_has_not_been_launched(self) -> None:
        cluster = Cluster(1, compute=True, record=True)
        (backend,) = cluster.backends
        gate = ap.Event("gate")
        backend.event_wait(gate)
        graph = chain(1)
        dropped, kept = backend.graph_compute_async(graph, array(1)), backend.graph_compute_async(graph, array(2))
        assert dropped.cancel() and not dropped.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        np.testing.assert_array_equal(await kept, unsplit(graph, array(2)))
        assert sum(record.kind == "launch" for record in cluster.log) == 1

    async def test_nothing_keeps_results_alive(self) -> None:
        graph = ap.trace(mlp, mlp_params(1), batch())
        gc.disable()
        try:
            async with ap.open_backend("cpu:0") as backend:
                evaluation = backend.graph_compute_async(graph, batch())
                first = weakref.ref(await evaluation)
                del evaluation
                await backend.graph_compute(graph, batch())  # `newest` is another one now
                assert first() is None
        finally:
            gc.enable()

    async def test_an_effect_alone_is_waited_for(self) -> None:
        seen: list[int] = []
        b = ap.GraphBuilder("effect")
        x = b.input("x", *SPEC)
        b.node("note", [x], [], fn=HostOp(lambda v: seen.append(1) or (), cost_s=3.0), has_effect=True)
        cluster = Cluster(1, compute=True)
        assert await cluster.backends[0].graph_compute(b.build([]), array()) == ()
        assert seen == [1] and cluster.clock.now == 3.0

    async def test_after_close(self) -> None:
        graph = chain(1)
        backend = Cluster(1).backends[0]
        plan = await backend.graph_plan_create(graph)
        await backend.aclose()
        for use in (
            lambda: backend.graph_plan_create(graph),
            lambda: backend.graph_plan_compute(plan, array()),
            lambda: backend.graph_compute(graph, array()),
        ):
            with pytest.raises(ap.BackendClosedError, match="sim:0"):
                await use()
