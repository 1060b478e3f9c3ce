"""Lanes, the registry, placing weights, and XLA backends by themselves."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.backend import InlineLane, ThreadLane
from aiopipe.devices import xla
from aiopipe.devices.base import Program
from aiopipe.sched.plan import make_plan
from models import batch, mlp, mlp_params


class TestLanes:
    def test_a_thread_lane_keeps_the_order_and_starts_no_thread_before_it_must(self) -> None:
        lane = ThreadLane("test")
        before = threading.active_count()
        seen: list[int] = []
        done = threading.Event()
        for i in range(100):
            lane.post(lambda i=i: seen.append(i))  # type: ignore[misc]
        lane.post(done.set)
        assert done.wait(10)
        assert seen == list(range(100))
        assert threading.active_count() == before + 1
        lane.close()
        lane.close()
        assert threading.active_count() == before

    def test_closing_finishes_what_is_queued(self) -> None:
        lane = ThreadLane("test")
        gate, seen = threading.Event(), []
        lane.post(lambda: gate.wait(10) and None)
        lane.post(lambda: seen.append(1))
        threading.Timer(0.01, gate.set).start()
        lane.close()
        assert seen == [1]
        with pytest.raises(ap.BackendClosedError, match="lane 'test' is closed"):
            lane.post(gate.set)

    def test_an_idle_lane_keeps_no_job_alive(self) -> None:
        import weakref

        class Job:
            def __call__(self) -> None:
                pass

        lane, job, done = ThreadLane("test"), Job(), threading.Event()
        ref = weakref.ref(job)
        lane.post(job)
        lane.post(done.set)
        del job
        assert done.wait(10)
        assert ref() is None
        lane.close()

    def test_an_inline_lane_runs_in_the_caller(self) -> None:
        where: list[int] = []
        lane = InlineLane()
        lane.post(lambda: where.append(threading.get_ident()))
        lane.close()
        assert where == [threading.get_ident()]


class TestRegistry:
    def test_devices_lists_what_can_be_opened(self) -> None:
        names = [device.name for device in ap.devices()]
        assert [f"cpu:{i}" for i in range(6)] == [n for n in names if n.startswith("cpu")]

    async def test_a_third_partys_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aiopipe.registry._registry", {})
        seen: list[Any] = []

        def factory(params: str, *, dispatch: str) -> ap.Backend:
            seen.append((params, dispatch))
            return xla.open_xla("cpu")("0")

        ap.register_backend("mine", factory)
        ap.open_backend("mine:a=1,b=2", dispatch="own")
        assert seen == [("a=1,b=2", "own")]
        with pytest.raises(ap.PlacementError, match="one of the backends mine"):
            ap.open_backend("yours:0")

    @pytest.mark.parametrize("name", ["", "a:b"])
    def test_bad_names(self, name: str) -> None:
        with pytest.raises(ap.PlacementError, match="without a colon"):
            ap.register_backend(name, xla.open_xla("cpu"))

    def test_bad_dispatch(self) -> None:
        with pytest.raises(ap.PlacementError, match="expected 'auto', 'shared' or 'own'"):
            ap.open_backend("cpu:0", dispatch="sometimes")  # type: ignore[arg-type]

    def test_a_missing_platform_is_an_unknown_device(self) -> None:
        with pytest.raises(ap.PlacementError, match=r"unknown device 'tpu:0': JAX has cpu:0"):
            ap.open_backend("tpu:0")

    def test_the_host_comes_last(self) -> None:
        class NoCpu(xla.XlaDevice):
            is_host_cpu = False  # type: ignore[assignment]

        accelerator = xla.XlaBackend(NoCpu(jax.devices()[1]))
        sched = ap.Scheduler([accelerator])
        assert [b.name for b in sched.backends] == ["cpu:1", "cpu:0"]  # the fallback was added
        with pytest.raises(ap.PlacementError, match="give the host CPU last"):
            ap.Scheduler(["cpu:0", accelerator])


class TestPlace:
    async def test_first_glob_that_matches(self) -> None:
        tree = {"layers": [{"w": batch()} for _ in range(3)], "head": batch(), "none": None}
        a, b, c = ap.open_backends("cpu:0", "cpu:1", "cpu:2")
        placed = await ap.place(tree, {"layers/[0-1]/*": a, "layers/*": b, "*": c})
        assert [leaf["w"].buffers[0].backend for leaf in placed["layers"]] == [a, a, b]
        assert placed["head"].buffers[0].backend is c
        assert placed["none"] is None
        assert placed["layers"][2]["w"].name == "layers/2/w"
        assert placed["head"].buffers[0].value.devices() == {jax.devices()[2]}
        assert placed["head"].buffers[0].usage is ap.BufferUsage.WEIGHTS

    async def test_a_function_of_the_path_and_replicas(self) -> None:
        a, b = ap.open_backends("cpu:0", "cpu:1")
        placed = await ap.place({"x": batch(), "y": 2.0}, lambda path: [a, b] if path == "x" else b)
        assert [buffer.backend for buffer in placed["x"].buffers] == [a, b]
        assert placed["y"].shape == () and placed["y"].dtype == "float32"

    async def test_a_placed_tree_can_be_placed_again(self) -> None:
        a, b = ap.open_backends("cpu:0", "cpu:1")
        once = await ap.place({"x": batch()}, {"*": a})
        twice = await ap.place(once, {"*": [b, a]})
        assert twice["x"].buffers[1] is once["x"].buffers[0]
        np.testing.assert_array_equal(np.asarray(twice["x"].buffers[0].value), batch())

    async def test_it_copies_numpy_but_no_array_that_is_there(self) -> None:
        a = ap.open_backend("cpu:0")
        mine, there = batch(), jax.device_put(batch(), jax.devices()[0])
        placed = await ap.place([mine, there], {"*": a})
        mine[:] = 0
        np.testing.assert_array_equal(np.asarray(placed[0].buffers[0].value), batch())
        assert placed[1].buffers[0].value is there

    async def test_errors(self) -> None:
        a = ap.open_backend("cpu:0")
        with pytest.raises(ap.PlacementError, match=r"no glob .* matches the weight 'y'"):
            await ap.place({"x": batch(), "y": batch()}, {"x": a})
        with pytest.raises(ap.PlacementError, match="expected a backend"):
            await ap.place({"x": batch()}, {"*": []})
        with pytest.raises(ap.TensorError, match="'x'"):
            await ap.place({"x": "text"}, {"*": a})
        await a.aclose()
        with pytest.raises(ap.BackendClosedError, match="cpu:0"):
            await ap.place({"x": batch()}, {"*": a})


def only_program(fn: Any, params: Any, *inputs: Any) -> Program:
    graph = ap.trace(fn, params, *inputs)
    plan = make_plan(graph, [xla.XlaDevice(jax.devices()[0])])
    assert len(plan.programs) == 1
    return plan.programs[0]


class TestXlaBackend:
    def test_what_can_block_its_dispatcher(self) -> None:
        backend = ap.open_backend("cpu:0")
        big = np.ones((512, 1024), np.float32)

        def callback(w: Any, x: Any) -> Any:
            return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * w

        def long_loop(w: Any, x: Any) -> Any:
            return jax.lax.while_loop(lambda c: c[0] < 10**6, lambda c: (c[0] + 1, c[1] * 1.0001), (0, x))[1] * w

        cases = {
            "tiny matmul": (mlp, mlp_params(1), batch(1), False),
            "medium matmul": (mlp, mlp_params(1, 256), batch(64, 256), False),
            "callback": (callback, np.float32(1), batch(), True),
            "pure exp": (lambda w, x: jnp.exp(jnp.exp(x)), np.float32(1), big, True),
            "transposing copy": (lambda w, x: x.T, np.float32(1), big, True),
            "cheap-bodied loop": (long_loop, np.float32(1), np.ones(4, np.float32), True),
        }
        for name, (fn, params, x, blocks) in cases.items():
            assert backend.load(only_program(fn, params, x)).blocks is blocks, name

    def test_transfer_gives_views_of_small_ready_values_and_copies_of_large_ones(self) -> None:
        backend = ap.open_backend("cpu:1")
        small = jax.device_put(batch(), jax.devices()[0]).block_until_ready()
        large = jax.device_put(np.ones((1024, 1024), np.float32), jax.devices()[0]).block_until_ready()
        host = batch()
        view, copy, same, here = backend.transfer([small, large, host, jax.device_put(host, jax.devices()[1])])
        assert isinstance(view, np.ndarray) and np.shares_memory(view, np.asarray(small))
        assert copy.devices() == {jax.devices()[1]}
        assert not np.shares_memory(np.asarray(copy), np.asarray(large))
        assert same is host
        for value in (view, copy, here):
            assert np.asarray(value).size

    async def test_notify_comes_in_order_and_tells_errors(self) -> None:
        def boom(x: Any) -> Any:
            raise ValueError("boom")

        backend = ap.open_backend("cpu:0")
        spec = jax.ShapeDtypeStruct((2,), np.float32)
        seen: list[Any] = []
        done = threading.Event()
        good = jax.device_put(batch(), jax.devices()[0])
        backend.notify((good,), lambda e: seen.append(e))
        backend.notify((), lambda e: done.set())
        await backend.synchronize()
        assert done.wait(10) and seen == [None]
        program = only_program(lambda w, x: jax.pure_callback(boom, spec, x) * w, np.float32(1), np.ones(2, np.float32))
        executable = backend.load(program)

        def call() -> None:
            jax.block_until_ready(executable.call(*(np.ones(t.shape, t.dtype) for t in program.inputs)))

        # In a thread of its own: in JAX 0.8, where a callback has raised all later calls of a thread block it.
        with pytest.raises(Exception, match="boom"):
            await asyncio.to_thread(call)
        await backend.aclose()
        with pytest.raises(ap.BackendClosedError, match="open it again"):
            await backend.synchronize()

    def test_host_buffers_are_aligned_and_typed(self) -> None:
        backend = ap.open_backend("cpu:0")
        inputs = jnp.zeros((3, 5), jnp.bfloat16), np.zeros(0, bool), jax.random.key(0)
        graph = ap.trace(lambda w, a, b, k: (a, b, k), 0.0, *inputs)
        a, b, key = (backend.host_buffer(t) for t in graph.inputs)
        assert a.shape == (3, 5) and a.dtype == jnp.bfloat16 and a.ctypes.data % 64 == 0
        assert b.shape == (0,)
        assert key is None

    def test_a_device_describes_itself(self) -> None:
        device = xla.XlaDevice(jax.devices()[2])
        assert device.name == "cpu:2" and device.is_host_cpu
        kinds = device.buffer_types()
        assert kinds[0].is_host and {k.device for k in kinds} == {"cpu:2"}
        assert device.supports_buffer_type(kinds[0])
        assert xla.XlaDevice(jax.devices()[3]).props.client == device.props.client
