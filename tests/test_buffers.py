"""Buffer types, regions, the tensors in them, views, and borrowed memory."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.buffer import backing
from aiopipe.devices.sim import Cluster
from aiopipe.live_weights import LiveWeights
from models import batch


@pytest.fixture(params=["xla", "sim"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[ap.Backend]:
    found: ap.Backend = ap.open_backend("cpu:1") if request.param == "xla" else Cluster(1, compute=True).backends[0]
    async with found:
        yield found


@pytest.fixture
async def cpu() -> AsyncIterator[ap.Backend]:
    async with ap.open_backend("cpu:0") as backend:
        yield backend


def limited(nbytes: int) -> ap.Backend:
    return Cluster(1, compute=True, memory_nbytes=nbytes).backends[0]


class TestBufferTypes:
    def test_a_device_has_its_own_memory_first(self, cpu: ap.Backend) -> None:
        kinds = cpu.device.buffer_types()
        assert kinds[0].memory_kind == "device"
        assert {kind.memory_kind for kind in kinds} >= {"pinned_host", "unpinned_host"}
        assert all(kind.is_host and kind.alignment == 64 and kind.device == "cpu:0" for kind in kinds)
        assert cpu.supports_buffer_type(kinds[0])
        assert not cpu.supports_buffer_type(kinds[1])  # its operations read the first in place
        assert not cpu.supports_buffer_type(ap.BufferType("cpu:1"))

    def test_a_simulated_device_has_memory_that_the_host_cannot_read(self) -> None:
        (kind,) = Cluster(1).backends[0].device.buffer_types()
        assert not kind.is_host

    async def test_every_memory_holds_values(self, cpu: ap.Backend) -> None:
        for kind in cpu.device.buffer_types():
            buffer = cpu.alloc_buffer(1024, buffer_type=kind)
            tensor = buffer.alloc((3, 4), "float32")
            await cpu.tensor_set(tensor, batch().reshape(-1)[:12])
            assert buffer.is_host and buffer.buffer_type is kind
            assert tensor.buffers[0].value.sharding.memory_kind == kind.memory_kind
            await cpu.tensor_set(tensor, np.zeros(2, np.float32), offset=5)
            assert tensor.buffers[0].value.sharding.memory_kind == kind.memory_kind
            expected = batch().reshape(-1)[:12].copy()
            expected[5:7] = 0
            np.testing.assert_array_equal(await cpu.tensor_get(tensor), expected.reshape(3, 4))

    async def test_values_travel_between_memories(self, cpu: ap.Backend) -> None:
        device, pinned = cpu.device.buffer_types()[:2]
        a = cpu.alloc_buffer(64, buffer_type=device).alloc((4,), "int32")
        b = cpu.alloc_buffer(64, buffer_type=pinned).alloc((4,), "int32")
        await cpu.tensor_set(a, [1, 2, 3, 4])
        await cpu.tensor_copy(a, b)
        assert b.buffers[0].value.sharding.memory_kind == pinned.memory_kind
        await cpu.tensor_set(a, [0, 0, 0, 0])
        await cpu.tensor_copy(b, a)
        assert a.buffers[0].value.sharding.memory_kind == device.memory_kind
        assert (await cpu.tensor_get(a)).tolist() == [1, 2, 3, 4]

    def test_a_memory_that_the_device_lacks(self, backend: ap.Backend) -> None:
        name = backend.device.name
        for kind in (ap.BufferType("elsewhere:0"), ap.BufferType(name, "imaginary")):
            with pytest.raises(ap.PlacementError, match=rf"{name} has no memory .* one of its own buffer_types\(\)"):
                backend.alloc_buffer(8, buffer_type=kind)

    def test_the_largest_buffer(self, backend: ap.Backend) -> None:
        kind = ap.BufferType(backend.device.name, max_nbytes=100)
        assert backend.alloc_buffer(100, buffer_type=kind).nbytes == 100
        with pytest.raises(ap.AllocationError, match="allocate several") as caught:
            backend.alloc_buffer(101, buffer_type=kind)
        assert (caught.value.asked_nbytes, caught.value.available_nbytes) == (101, 100)


class TestRegions:
    @pytest.mark.parametrize("usage", ap.BufferUsage)
    def test_a_region_says_what_it_is(self, backend: ap.Backend, usage: ap.BufferUsage) -> None:
        buffer = backend.alloc_buffer(1000, usage=usage)
        assert (buffer.backend, buffer.usage, buffer.nbytes) == (backend, usage, 1000)
        assert buffer.buffer_type == backend.device.buffer_types()[0]
        assert (buffer.parent, buffer.value, buffer.used_nbytes, buffer.freed) == (None, None, 0, False)
        tensor = buffer.alloc((2, 3), "float32", "kv")
        (part,) = tensor.buffers
        assert (tensor.name, tensor.shape, tensor.dtype, tensor.nbytes, tensor.id) == ("kv", (2, 3), "float32", 24, -1)
        assert (part.parent, part.usage, part.nbytes, part.backend) == (buffer, usage, 24, backend)
        assert part.value is None
        assert (tensor.kind.value == "weight") == (usage is ap.BufferUsage.WEIGHTS)
        assert "1000 bytes" in repr(buffer) and usage.value in repr(buffer)

    def test_tensors_are_padded_by_the_alignment(self, backend: ap.Backend) -> None:
        kind = ap.BufferType(backend.device.name, alignment=32)
        buffer = backend.alloc_buffer(100, buffer_type=kind)
        buffer.alloc((), "float32")
        assert buffer.used_nbytes == 32
        buffer.alloc((33,), "int8")
        assert buffer.used_nbytes == 96
        buffer.alloc((0, 7), "float32")  # takes nothing
        assert buffer.used_nbytes == 96
        with pytest.raises(ap.AllocationError, match=r"'x' int8\[1\].*takes 32 bytes, and 4 of 100 are left") as caught:
            buffer.alloc((1,), "int8", "x")
        assert (caught.value.asked_nbytes, caught.value.available_nbytes) == (32, 4)
        assert buffer.padded_nbytes(33) == 64

    def test_types_by_name_and_by_themselves(self, backend: ap.Backend) -> None:
        buffer = backend.alloc_buffer(1000)
        assert [buffer.alloc((2,), t).dtype for t in ("bfloat16", np.int8, np.dtype(bool), jax.numpy.float16)] == [
            "bfloat16",
            "int8",
            "bool",
            "float16",
        ]
        with pytest.raises(ap.TensorError, match="expected an element type and sizes"):
            buffer.alloc((2,), "float99")
        with pytest.raises(ap.TensorError, match="expected an element type and sizes"):
            buffer.alloc((2,), np.dtype([("a", "f4")]))
        with pytest.raises(ap.TensorError, match="sizes of 0 or more"):
            buffer.alloc((-1,), "int8")
        with pytest.raises(ap.TensorError, match="only borrowed memory"):
            buffer.alloc((1,), "int8", at=0)
        tensor = buffer.alloc((1,), "int8")
        with pytest.raises(ap.TensorError, match="allocate in a region"):
            tensor.buffers[0].alloc((1,), "int8")

    async def test_empty_and_negative_regions(self, backend: ap.Backend) -> None:
        buffer = backend.alloc_buffer(0)
        tensor = buffer.alloc((0, 3), "float32")
        assert (await backend.tensor_get(tensor)).shape == (0, 3)
        with pytest.raises(ap.AllocationError):
            buffer.alloc((1,), "int8")
        with pytest.raises(ap.TensorError, match="0 or more"):
            backend.alloc_buffer(-1)

    async def test_reset_forgets_the_tensors(self, backend: ap.Backend) -> None:
        buffer = backend.alloc_buffer(64)
        old = buffer.alloc((4,), "float32")
        await backend.tensor_set(old, np.ones(4, np.float32))
        buffer.reset()
        assert buffer.used_nbytes == 0 and not buffer.freed
        assert old.buffers[0].freed
        with pytest.raises(ap.TensorError, match="not allocated"):
            await backend.tensor_get(old)
        assert buffer.alloc((16,), "float32").buffers[0].value is None

    async def test_freeing_ends_every_use(self, backend: ap.Backend) -> None:
        buffer = backend.alloc_buffer(64)
        tensor = buffer.alloc((4,), "float32")
        await backend.tensor_set(tensor, np.ones(4, np.float32))
        buffer.free()
        buffer.free()
        assert buffer.freed and tensor.buffers[0].freed and "freed" in repr(buffer)
        for use in (buffer.reset, buffer.clear, lambda: buffer.alloc((1,), "int8"), lambda: tensor.buffers[0].value):
            with pytest.raises(ap.TensorError, match="has been freed"):
                use()  # type: ignore[operator]
        with pytest.raises(ap.TensorError, match="not allocated"):
            await backend.tensor_set(tensor, np.ones(4, np.float32))

    async def test_a_write_under_way_does_not_bring_a_freed_buffer_back(self, backend: ap.Backend) -> None:
        buffer = backend.alloc_buffer(64)
        tensor = buffer.alloc((4,), "float32")
        gate = ap.Event("gate")
        backend.queue.wait(gate)
        event = backend.tensor_set_async(tensor, np.ones(4, np.float32))
        buffer.free()
        gate.set()
        with pytest.raises(ap.TensorError, match="has been freed"):
            await event
        with pytest.raises(ap.TensorError):
            await backend.synchronize()

    async def test_clear_sets_every_byte_of_every_tensor(self, backend: ap.Backend) -> None:
        buffer = backend.alloc_buffer(256)
        a, b, c = buffer.alloc((2, 2), "int32"), buffer.alloc((3,), "bool"), buffer.alloc((2,), "bfloat16")
        await backend.tensor_set(a, np.ones((2, 2), np.int32))
        await buffer.clear(1)
        assert (await backend.tensor_get(a)).tolist() == [[0x01010101] * 2] * 2
        assert (await backend.tensor_get(b)).tolist() == [True] * 3
        await buffer.clear()
        assert (await backend.tensor_get(a)).tolist() == [[0, 0], [0, 0]]
        assert (await backend.tensor_get(c)).astype(np.float32).tolist() == [0, 0]
        with pytest.raises(ap.TensorError, match="tensor_memset the tensor"):
            a.buffers[0].clear()
        for byte in (-1, 256):
            with pytest.raises(ap.TensorError, match="expected a byte, 0 to 255"):
                buffer.clear(byte)

    async def test_a_tensor_that_is_gone_keeps_no_value_alive(self, cpu: ap.Backend) -> None:
        import weakref

        buffer = cpu.alloc_buffer(64)
        tensor = buffer.alloc((4,), "float32")
        await cpu.tensor_set(tensor, np.ones(4, np.float32))
        value = weakref.ref(tensor.buffers[0].value)
        del tensor
        gc.collect()
        assert value() is None
        await buffer.clear()

    async def test_closed_backends_allocate_nothing(self, backend: ap.Backend) -> None:
        tensor = backend.alloc_buffer(64).alloc((1,), "int8")
        await backend.aclose()
        with pytest.raises(ap.BackendClosedError):
            backend.alloc_buffer(8)
        with pytest.raises(ap.BackendClosedError):
            await backend.tensor_set(tensor, [1])
        with pytest.raises(ap.BackendClosedError):
            await backend.tensor_get(tensor)


class TestMemory:
    def test_a_devices_memory_bounds_its_buffers(self) -> None:
        backend = limited(1000)
        a = backend.alloc_buffer(600)
        with pytest.raises(ap.AllocationError, match=r"no room on 'sim:0' .*: 400 of 1000 are left") as caught:
            backend.alloc_buffer(401)
        assert (caught.value.backend, caught.value.asked_nbytes, caught.value.available_nbytes) == ("sim:0", 401, 400)
        b = backend.alloc_buffer(400)
        a.alloc((100,), "float32")  # inside: nothing more
        assert backend.memory.nbytes == 1000
        a.free()
        assert backend.memory.nbytes == 400
        assert backend.alloc_buffer(600).nbytes == 600  # and nobody has it
        assert backend.memory.nbytes == 400
        del b
        assert backend.memory.nbytes == 0

    async def test_placed_weights_count(self) -> None:
        backend = limited(1000)
        placed = [await ap.place({"w": np.zeros(200, np.float32)}, {"*": backend})]
        assert backend.memory.nbytes == 800
        with pytest.raises(ap.AllocationError, match="200 of 1000 are left"):
            backend.alloc_buffer(201)
        placed[0]["w"].buffers[0].free()
        assert backend.memory.nbytes == 0
        assert backend.alloc_buffer(1000).nbytes == 1000

    def test_an_allocation_that_fails_on_request(self) -> None:
        cluster = Cluster(1, compute=True)
        cluster.fail_next_allocation(0)
        with pytest.raises(ap.AllocationError, match="told to fail"):
            cluster.backends[0].alloc_buffer(8)
        assert cluster.backends[0].alloc_buffer(8).nbytes == 8

    async def test_a_device_that_is_full_says_so(self, cpu: ap.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*args: Any) -> Any:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

        tensor = cpu.alloc_buffer(64).alloc((4,), "float32", "w")
        monkeypatch.setattr(cpu, "store", full)
        with pytest.raises(ap.AllocationError, match=r"no room on 'cpu:0' for 'w' float32\[4\] of 16 bytes"):
            await cpu.tensor_set(tensor, np.ones(4, np.float32))
        with pytest.raises(ap.AllocationError):
            await cpu.synchronize()


    async def test_a_device_that_is_full_of_weights_says_so(self, cpu: ap.Backend, monkeypatch: Any) -> None:
        errors = [RuntimeError("RESOURCE_EXHAUSTED: out"), MemoryError("RESOURCE_EXHAUSTED"), ValueError("no")]
        monkeypatch.setattr(cpu, "upload", lambda *_: (_ for _ in ()).throw(errors.pop(0)))
        for _ in range(2):
            with pytest.raises(ap.AllocationError, match=r"on 'cpu:0' for 'w' float32\[4\] of 16 b") as caught:
                await ap.place({"w": np.ones(4, np.float32)}, {"*": cpu})
            assert (caught.value.backend, caught.value.asked_nbytes) == ("cpu:0", 16)
        with pytest.raises(ValueError, match="no"):  # anything else as it is
            await ap.place({"w": np.ones(4, np.float32)}, {"*": cpu})


class TestViews:
    async def test_views_read_and_write_their_source(self, backend: ap.Backend) -> None:
        tensor = backend.alloc_buffer(256).alloc((3, 4), "int32", "t")
        await backend.tensor_set(tensor, np.arange(12, dtype=np.int32))
        view = ap.tensor_view(tensor, 4, (2, 3))
        inner = ap.tensor_view(view, 3, (3,))
        assert view.buffers == () and backing(inner) == (tensor, 7)
        assert (view.nbytes, inner.name, inner.dtype) == (24, "t[4:][3:]", "int32")
        assert (await backend.tensor_get(view)).tolist() == [[4, 5, 6], [7, 8, 9]]
        assert (await backend.tensor_get(inner)).tolist() == [7, 8, 9]
        await backend.tensor_set(inner, [70, 80, 90])
        await backend.tensor_set(view, [-5], offset=1)
        assert (await backend.tensor_get(tensor)).reshape(-1).tolist() == [0, 1, 2, 3, 4, -5, 6, 70, 80, 90, 10, 11]
        assert (await backend.tensor_get(view, 1, 3)).tolist() == [-5, 6, 70]
        await backend.tensor_memset(inner, 0)
        assert (await backend.tensor_get(view)).tolist() == [[4, -5, 6], [0, 0, 0]]

    async def test_copies_from_and_to_views(self, backend: ap.Backend) -> None:
        buffer = backend.alloc_buffer(256)
        a, b = buffer.alloc((2, 3), "int32"), buffer.alloc((6,), "int32")
        await backend.tensor_set(a, [1, 2, 3, 4, 5, 6])
        await backend.tensor_copy(ap.tensor_view(a, 0, (6,)), b)  # another shape of the same elements
        assert (await backend.tensor_get(b)).tolist() == [1, 2, 3, 4, 5, 6]
        await backend.tensor_copy(ap.tensor_view(a, 4, (2,)), ap.tensor_view(b, 1, (2,)))
        assert (await backend.tensor_get(b)).tolist() == [1, 5, 6, 4, 5, 6]

    def test_views_lie_within_their_source(self, backend: ap.Backend) -> None:
        tensor = backend.alloc_buffer(256).alloc((3, 4), "int32", "t")
        for offset, shape in [(-1, (1,)), (12, (1,)), (0, (13,)), (0, (-1,))]:
            with pytest.raises(ap.TensorError, match=r"out of bounds of 't' int32\[3,4\], which has 12"):
                ap.tensor_view(tensor, offset, shape)
        assert ap.tensor_view(tensor, 12, (0,)).size == 0

    async def test_bounds_are_the_views_own(self, backend: ap.Backend) -> None:
        tensor = backend.alloc_buffer(256).alloc((12,), "int32")
        view = ap.tensor_view(tensor, 4, (3,))
        with pytest.raises(ap.TensorError, match="out of bounds: elements 1 to 4, but it has 3"):
            await backend.tensor_set(view, [1, 2, 3], offset=1)
        with pytest.raises(ap.TensorError, match="buffer not set"):
            await backend.tensor_get(ap.tensor_view(ap.Tensor(-1, "x", (4,), "int8", tensor.kind, 4), 0, (2,)))

    async def test_a_view_is_no_weight(self, backend: ap.Backend) -> None:
        tensor = backend.alloc_buffer(256).alloc((12,), "float32")
        with pytest.raises(ap.TensorError, match="is a view: tensor_copy it"):
            await ap.place({"w": ap.tensor_view(tensor, 0, (4,))}, {"*": backend})


def aligned(n: int, dtype: str) -> np.ndarray[Any, Any]:
    raw = np.zeros(n * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n * np.dtype(dtype).itemsize].view(dtype)


class TestBorrowedMemory:
    async def test_a_buffer_shows_the_callers_array(self, cpu: ap.Backend) -> None:
        mine = aligned(32, "float32")
        mine[:] = np.arange(32)
        buffer = cpu.buffer_from_array(mine)
        tensor = buffer.alloc((4, 8), "float32", "w")
        assert buffer.usage is ap.BufferUsage.WEIGHTS and buffer.nbytes == 128 and buffer.used_nbytes == 128
        value = tensor.buffers[0].value
        assert value.unsafe_buffer_pointer() == mine.ctypes.data  # in place
        np.testing.assert_array_equal(await cpu.tensor_get(tensor), mine.reshape(4, 8))
        assert cpu.memory.nbytes == 0  # it is the caller's
        (await cpu.tensor_get(tensor))[:] = 0  # what is read is a copy
        assert mine[1] == 1
        await cpu.synchronize()

    async def test_tensors_of_a_file(self, cpu: ap.Backend, tmp_path: Any) -> None:
        path = tmp_path / "weights"
        np.arange(96, dtype=np.int32).tofile(path)
        buffer = cpu.buffer_from_array(np.memmap(path, np.uint8, mode="r"))
        a, b = buffer.alloc((16,), "int32"), buffer.alloc((2, 8), "int32", at=128)
        c = buffer.alloc((3,), "int32", at=68)  # not aligned: copied
        assert (await cpu.tensor_get(a)).tolist() == list(range(16))
        assert (await cpu.tensor_get(b)).reshape(-1).tolist() == list(range(32, 48))
        assert (await cpu.tensor_get(c)).tolist() == [17, 18, 19]
        assert buffer.used_nbytes == 192
        graph = ap.trace(lambda w, x: w * x, b, np.ones(8, np.int32))
        async with ap.Scheduler([cpu]) as sched:
            y = await sched.graph_compute(graph, np.full(8, 2, np.int32))
        np.testing.assert_array_equal(np.asarray(y).reshape(-1), 2 * np.arange(32, 48))
        with pytest.raises(ap.AllocationError, match="4 of 384 are left"):
            buffer.alloc((2,), "int32", at=380)

    async def test_it_is_read_only(self, cpu: ap.Backend) -> None:
        mine = aligned(4, "float32")
        buffer = cpu.buffer_from_array(mine)
        tensor = buffer.alloc((4,), "float32")
        for write in (cpu.tensor_set(tensor, np.ones(4, np.float32)), cpu.tensor_memset(tensor, 1)):
            with pytest.raises(ap.TensorError, match="borrowed memory, which is read only"):
                await write
        with pytest.raises(ap.TensorError, match="borrowed memory"):
            buffer.clear()
        own = cpu.alloc_buffer(64).alloc((4,), "float32")
        with pytest.raises(ap.TensorError, match="borrowed memory"):
            await cpu.tensor_copy(own, tensor)
        await cpu.tensor_copy(tensor, own)
        assert mine.tolist() == [0, 0, 0, 0]
        assert mine.flags.writeable  # the caller's array is still the caller's

    def test_only_where_the_host_is_read_in_place(self) -> None:
        with pytest.raises(ap.PlacementError, match="sim:0 cannot read host memory in place"):
            Cluster(1).backends[0].buffer_from_array(np.zeros(4))

    def test_only_contiguous_memory(self, cpu: ap.Backend) -> None:
        with pytest.raises(ap.TensorError, match="ascontiguousarray"):
            cpu.buffer_from_array(np.zeros((4, 4)).T)


class TestWeights:
    async def test_tensors_in_a_buffer_are_weights(self, backend: ap.Backend) -> None:
        buffer = backend.alloc_buffer(256, usage=ap.BufferUsage.WEIGHTS)
        w = buffer.alloc((8,), "float32", "w")
        graph = ap.trace(lambda w, x: w * x, w, np.ones(8, np.float32))
        assert graph.weights[0].buffers == w.buffers
        if backend.name.startswith("sim"):
            return  # a traced function runs on JAX's devices
        async with ap.Scheduler([backend, "cpu:0"]) as sched:
            with pytest.raises(ap.TensorError, match="has no value on cpu:1 yet: tensor_set it first"):
                await sched.graph_compute(graph, np.ones(8, np.float32))
            await backend.tensor_set(w, np.arange(8, dtype=np.float32))
            y = await sched.graph_compute(graph, np.full(8, 3, np.float32))
            np.testing.assert_array_equal(np.asarray(y), 3 * np.arange(8))

    async def test_weights_in_another_memory_are_brought_over(self, cpu: ap.Backend) -> None:
        pinned = cpu.device.buffer_types()[1]
        w = cpu.alloc_buffer(256, buffer_type=pinned, usage=ap.BufferUsage.WEIGHTS).alloc((8,), "float32", "w")
        await cpu.tensor_set(w, np.arange(8, dtype=np.float32))
        graph = ap.trace(lambda w, x: w * x, w, np.ones(8, np.float32))
        async with ap.Scheduler([cpu]) as sched:
            y = await sched.graph_compute(graph, np.full(8, 3, np.float32))
        np.testing.assert_array_equal(np.asarray(y), 3 * np.arange(8))
        assert w.buffers[0].value.sharding.memory_kind == pinned.memory_kind

    async def test_weights_in_another_memory_by_hand(self, cpu: ap.Backend) -> None:
        pinned = cpu.device.buffer_types()[1]
        w = cpu.alloc_buffer(256, buffer_type=pinned, usage=ap.BufferUsage.WEIGHTS).alloc((8,), "float32", "w")
        await cpu.tensor_set(w, np.arange(8, dtype=np.float32))
        graph = ap.trace(lambda w, x: w * x, w, np.ones(8, np.float32))
        y = await cpu.graph_compute(graph, np.full(8, 3, np.float32))
        np.testing.assert_array_equal(np.asarray(y), 3 * np.arange(8))

    async def test_setting_a_weight_counts_for_the_next_evaluation(self) -> None:
        """Also where the plan had copied it to another backend, and where it is an output."""
        a, b = ap.open_backends("cpu:0", "cpu:1")
        async with a, b, ap.Scheduler([b, a]) as sched:
            u = b.alloc_buffer(256, usage=ap.BufferUsage.WEIGHTS).alloc((8,), "float32", "u")
            w = a.alloc_buffer(256, usage=ap.BufferUsage.WEIGHTS).alloc((8,), "float32", "w")
            await b.tensor_set(u, np.full(8, 2, np.float32))
            await a.tensor_set(w, np.full(8, 3, np.float32))
            graph = ap.trace(lambda p, x: (p[0] * x + p[1], p[1]), (u, w), np.ones(8, np.float32))
            x = np.full(8, 10, np.float32)
            for u_value, w_value in [(2, 3), (4, 3), (4, 5), (6, 7)]:
                await b.tensor_set(u, np.full(8, u_value, np.float32))
                await a.tensor_set(w, [w_value] * 4, offset=0)
                await a.tensor_set(w, [w_value] * 4, offset=4)
                y, shown = await sched.graph_compute(graph, x)
                assert set(np.asarray(y).tolist()) == {u_value * 10.0 + w_value}
                assert set(np.asarray(shown).tolist()) == {float(w_value)}

    async def test_sizes_are_known_before_weights_are_set(self) -> None:
        async with ap.open_backend("cpu:0") as cpu, ap.Scheduler([cpu]) as sched:
            buffer = cpu.alloc_buffer(256, usage=ap.BufferUsage.WEIGHTS)
            pair = (buffer.alloc((8,), "float32", "u"), buffer.alloc((8,), "float32", "w"))
            graph = ap.trace(lambda p, x: p[0] * x + p[1], pair, np.ones(8, np.float32))
            sizes = await sched.reserve(graph)
            await cpu.tensor_set(pair[0], np.ones(8, np.float32))
            await cpu.tensor_set(pair[1], np.zeros(8, np.float32))
            await sched.graph_compute(graph, np.ones(8, np.float32))
            assert sizes == await sched.reserve(graph)
            assert sizes["cpu:0"] >= 64

    async def test_setting_a_weight_that_somebody_elses_backend_got_a_copy_of(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(Path(__file__).parent / "third_party"))
        async with importlib.import_module("abacus").open_abacus("0") as abacus, ap.open_backend("cpu:0") as cpu:
            w = cpu.alloc_buffer(256, usage=ap.BufferUsage.WEIGHTS).alloc((4,), "float32", "w")
            await cpu.tensor_set(w, [1, 2, 3, 4])
            graph = ap.trace(lambda w, x: w * x, w, np.ones(4, np.float32))
            async with ap.Scheduler([abacus, cpu]) as sched:
                sched.set_tensor_backend(graph, graph.outputs[0], abacus)
                for scale in (1, 5):
                    await cpu.tensor_set(w, np.array([1, 2, 3, 4], np.float32) * scale)
                    y = await sched.graph_compute(graph, np.ones(4, np.float32))
                    assert np.asarray(y).tolist() == [scale, 2 * scale, 3 * scale, 4 * scale]
                assert sched.get_tensor_backend(graph, graph.outputs[0]) is abacus

    async def test_a_weight_that_is_set_while_its_plan_is_being_bound(self, backend: ap.Backend) -> None:
        """Plans are bound in a thread, weights are set on a lane: every place has the new value."""
        w = backend.alloc_buffer(256, usage=ap.BufferUsage.WEIGHTS).alloc((8,), "float32", "w")
        await backend.tensor_set(w, np.zeros(8, np.float32))
        (buffer,) = w.buffers
        old, new = buffer.value, backend.upload(np.ones(8, np.float32), w)
        live = LiveWeights([[w]], [backend])
        operands = [old, old, old]
        setting = threading.Thread(target=setattr, args=(buffer, "value", new))

        class Places(Sequence[Any]):
            def __len__(self) -> int:
                return len(operands)

            def __getitem__(self, i: Any) -> Any:
                if i == 1:  # the first place is bound already
                    setting.start()
                    setting.join(0.2)  # to its end, unless it has to wait
                return w, backend, operands, range(len(operands))[i]

        live.bind(Places())
        setting.join()
        assert all(operand is new for operand in operands)
