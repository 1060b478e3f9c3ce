"""Setting, getting and copying tensors by hand, on real CPU devices and on simulated ones."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe import _jax_memory
from aiopipe.devices import xla
from aiopipe.devices.sim import Cluster
from aiopipe.graph import Kind
from aiopipe.tensor_range import Range

Pair = tuple[ap.Backend, ap.Backend]


@pytest.fixture(params=["xla", "sim", "mixed", "mixed back"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Two backends: of one kind, or of two that can only reach each other over the host."""
    sims = Cluster(2, compute=True, latency_s=1.0, link_bytes_per_s=8.0, host_bytes_per_s=16.0).backends
    cpus = ap.open_backends("cpu:1", "cpu:2")
    a, b = {
        "xla": (cpus[0], cpus[1]),
        "sim": (sims[0], sims[1]),
        "mixed": (cpus[0], sims[1]),
        "mixed back": (sims[0], cpus[1]),
    }[request.param]
    async with a, b:
        yield a, b


@pytest.fixture(params=["xla", "sim"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[ap.Backend]:
    sim = Cluster(1, compute=True, latency_s=1.0, host_bytes_per_s=16.0).backends[0]
    async with ap.open_backend("cpu:1") if request.param == "xla" else sim as found:
        yield found


def new(backend: ap.Backend, shape: tuple[int, ...] = (3, 4), dtype: str = "float32", name: str = "t") -> ap.Tensor:
    return backend.alloc_buffer(1 << 16).alloc(shape, dtype, name)


def ramp(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


DTYPES = ["float32", "bfloat16", "float16", "int8", "uint32", "int64", "float64", "bool", "complex64", "int4"]


class TestSetAndGet:
    @pytest.mark.parametrize("dtype", DTYPES)
    async def test_what_is_set_is_read(self, backend: ap.Backend, dtype: str) -> None:
        tensor = new(backend, (2, 3), dtype)
        data = (ramp(2, 3) % 7).astype(jnp.dtype(dtype))
        await backend.tensor_set(tensor, data)
        got = await backend.tensor_get(tensor)
        assert got.dtype == data.dtype and got.flags.writeable
        np.testing.assert_array_equal(got.astype(complex), data.astype(complex))
        await backend.tensor_set(tensor, data[:1].reshape(-1)[:2], offset=3)
        expected = data.reshape(-1).copy()
        expected[3:5] = data.reshape(-1)[:2]
        some = await backend.tensor_get(tensor, 1, 4)
        np.testing.assert_array_equal(some.astype(complex), expected[1:5].astype(complex))

    async def test_ranges_count_elements(self, backend: ap.Backend) -> None:
        tensor = new(backend)
        await backend.tensor_set(tensor, ramp(12))
        await backend.tensor_set(tensor, [-1, -2, -3, -4], offset=2, size=3)  # the first three of them
        await backend.tensor_set(tensor, -9, offset=11)
        got = await backend.tensor_get(tensor)
        assert got.shape == (3, 4)
        assert got.reshape(-1).tolist() == [0, 1, -1, -2, -3, 5, 6, 7, 8, 9, 10, -9]
        assert (await backend.tensor_get(tensor, offset=9)).tolist() == [9, 10, -9]
        assert (await backend.tensor_get(tensor, 1, 2)).tolist() == [1, -1]

    async def test_elements_beside_those_that_were_first_set_are_zeros(self, backend: ap.Backend) -> None:
        tensor = new(backend, (4,), "int32")
        await backend.tensor_set(tensor, [7], offset=2)
        assert (await backend.tensor_get(tensor)).tolist() == [0, 0, 7, 0]

    async def test_immutable_arrays_are_taken_as_they_are(self, pair: Pair) -> None:
        a, b = pair
        source = new(a)
        await a.tensor_set(source, ramp(3, 4))
        handle = source.buffers[0].value
        same = new(a)
        await a.tensor_set(same, handle)
        np.testing.assert_array_equal(await a.tensor_get(same), ramp(3, 4))
        await a.tensor_set(same, handle, offset=2, size=5)
        assert (await a.tensor_get(same, 0, 8)).tolist() == [0, 1, 0, 1, 2, 3, 4, 7]
        other = new(b)
        await b.tensor_set(other, handle)  # another backend's, perhaps of another kind
        np.testing.assert_array_equal(await b.tensor_get(other), ramp(3, 4))
        flat = new(a, (12,))
        with pytest.raises(ap.TensorError, match="got shape"):
            await a.tensor_set(flat, handle)

    async def test_what_is_still_being_computed(self) -> None:
        async with ap.open_backend("cpu:1") as cpu:
            tensor = cpu.alloc_buffer(1 << 18).alloc((256, 256), "float32")
            big = jax.device_put(np.ones((256, 256), np.float32), jax.devices()[3])
            for _ in range(20):
                big = jnp.tanh(big @ big)
            event = cpu.tensor_set_async(tensor, big)
            await event
            np.testing.assert_array_equal(await cpu.tensor_get(tensor), np.asarray(big))

    async def test_random_keys(self) -> None:
        async with ap.open_backend("cpu:1") as cpu:
            buffer = cpu.alloc_buffer(1024)
            a, b = buffer.alloc((3,), "key<fry>", "k"), buffer.alloc((3,), "key<fry>")
            keys = jax.random.split(jax.random.key(0), 3)
            await cpu.tensor_set(a, keys)
            await cpu.tensor_copy(a, b)
            assert b.buffers[0].value.devices() == {jax.devices()[1]}
            bits = jax.random.key_data(b.buffers[0].value)
            np.testing.assert_array_equal(np.asarray(bits), np.asarray(jax.random.key_data(keys)))
            for use in (cpu.tensor_get(a), cpu.tensor_memset(a, 0), cpu.tensor_set(a, np.zeros(3))):
                with pytest.raises(ap.TensorError, match="key<fry>"):
                    await use

    async def test_a_replicated_tensor_is_written_where_one_asks(self) -> None:
        a, b = Cluster(2, compute=True).backends
        placed = await ap.place({"w": ramp(4)}, {"*": [a, b]})
        await b.tensor_set(placed["w"], [9, 9, 9, 9])
        assert (await a.tensor_get(placed["w"])).tolist() == [0, 1, 2, 3]
        assert (await b.tensor_get(placed["w"])).tolist() == [9, 9, 9, 9]


class TestChecks:
    """ggml's order: no buffer, not allocated, out of bounds; then nothing to do for no elements."""

    async def test_no_buffer_comes_first(self, backend: ap.Backend) -> None:
        loose = ap.Tensor(-1, "loose", (4,), "float32", Kind.NODE, 16)
        for use in uses(backend, loose, 99, 0):
            with pytest.raises(ap.TensorError, match=r"of 'loose' float32\[4\]: buffer not set; allocate it"):
                await use()

    async def test_then_that_it_is_another_backends(self, pair: Pair) -> None:
        a, b = pair
        for use in uses(b, new(a), 99, 0):
            with pytest.raises(ap.TensorError, match=rf"buffer not set on {b.name}, it is on {a.name}; .*tensor_copy"):
                await use()

    async def test_then_not_allocated(self, backend: ap.Backend) -> None:
        tensor = new(backend)
        assert tensor.buffers[0].parent is not None
        tensor.buffers[0].parent.free()
        for use in uses(backend, tensor, 99, 0):
            with pytest.raises(ap.TensorError, match="not allocated"):
                await use()

    @pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 13), (12, 1), (13, 0), (5, 8), (0, -1)])
    async def test_then_out_of_bounds(self, backend: ap.Backend, offset: int, size: int) -> None:
        for use in uses(backend, new(backend), offset, size):
            with pytest.raises(ap.TensorError, match=r"'t' float32\[3,4\] out of bounds: .* but it has 12"):
                await use()

    @pytest.mark.parametrize("offset", [0, 12])
    async def test_then_there_is_nothing_to_do(self, backend: ap.Backend, offset: int) -> None:
        tensor = new(backend)
        for use in uses(backend, tensor, offset, 0):
            await use()
        assert tensor.buffers[0].value is None
        assert (await backend.tensor_get(tensor, offset, 0)).shape == (0,)

    async def test_reading_what_was_never_set(self, backend: ap.Backend) -> None:
        tensor = new(backend)
        with pytest.raises(ap.TensorError, match=r"'t' float32\[3,4\]: it has no value on .* yet; tensor_set it first"):
            await backend.tensor_get(tensor)
        with pytest.raises(ap.TensorError, match="no value"):
            await backend.synchronize()
        await backend.tensor_set(tensor, ramp(3, 4))  # and it goes on
        assert (await backend.tensor_get(tensor, 11)).tolist() == [11]

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (ramp(4, 3), r"got shape \(4, 3\)"),
            (np.zeros((3, 4), np.int32), "got int32; give an array of type float32"),
            (np.zeros((3, 4), np.complex64), "complex64"),
            ([1j] * 12, "complex128 numbers are not converted"),
            ("text", "got str"),
            ([1, [2, 3]], "inhomogeneous|sequence|shape"),
            (None, "give an array of type float32"),
        ],
    )
    async def test_data_that_does_not_fit(self, backend: ap.Backend, data: Any, message: str) -> None:
        tensor = new(backend)
        with pytest.raises(ap.TensorError, match=message):
            await backend.tensor_set(tensor, data)
        with pytest.raises(ap.TensorError, match=message):
            backend.tensor_set_async(tensor, data)
        assert tensor.buffers[0].value is None

    @pytest.mark.parametrize(
        ("dtype", "data"), [("int8", [1, 300]), ("uint8", [-1, 3]), ("int32", [2**40, 1]), ("int4", [7, 8])]
    )
    async def test_integers_that_the_type_has_no_place_for(self, dtype: str, data: list[int]) -> None:
        async with ap.open_backend("cpu:1") as cpu:
            tensor = new(cpu, (2,), dtype)
            await cpu.tensor_set(tensor, [3, 4])
            with pytest.raises(ap.TensorError, match=rf"is not between -?\d+ and \d+; give an array of type {dtype}"):
                await cpu.tensor_set(tensor, data)
            assert (await cpu.tensor_get(tensor)).tolist() == [3, 4]

    async def test_too_few_elements(self, pair: Pair) -> None:
        a, _ = pair
        tensor = new(a)
        with pytest.raises(ap.TensorError, match=r"write of 5 elements .* got 3"):
            await a.tensor_set(tensor, ramp(3), size=5)
        await a.tensor_set(tensor, ramp(3, 4))
        other = new(a, (3,))
        await a.tensor_set(other, ramp(3))
        with pytest.raises(ap.TensorError, match=r"write of 5 elements .* got 3 of float32"):
            await a.tensor_set(tensor, other.buffers[0].value, size=5)

    async def test_double_precision_becomes_what_jax_makes_of_it(self, backend: ap.Backend) -> None:
        tensor = new(backend)
        await backend.tensor_set(tensor, ramp(3, 4, dtype=np.float64))
        assert (await backend.tensor_get(tensor)).dtype == np.float32


def uses(backend: ap.Backend, tensor: ap.Tensor, offset: int, size: int) -> list[Callable[[], Any]]:
    """Every way to read or write a range."""
    data = np.zeros(max(0, size), np.float32)

    async def set_async() -> None:
        await backend.tensor_set_async(tensor, data, offset, size)

    async def get_async() -> None:
        await backend.tensor_get_async(tensor, offset, size)

    return [
        lambda: backend.tensor_set(tensor, data, offset, size),
        lambda: backend.tensor_get(tensor, offset, size),
        set_async,
        get_async,
        lambda: backend.tensor_memset(tensor, 0, offset, size),
        lambda: backend.tensor_get_2d(tensor, offset, size, 1, 0),
        lambda: backend.tensor_set_2d(tensor, data[None], offset, 0) if size >= 0 else set_async(),
    ]


class TestOrder:
    async def test_reads_and_writes_happen_in_order(self, backend: ap.Backend) -> None:
        tensor = new(backend, (4,), "int32")
        backend.tensor_set_async(tensor, [0, 0, 0, 0])
        reads = []
        for i in range(1, 20):
            event = backend.tensor_set_async(tensor, [i], offset=i % 4)
            reads.append(backend.tensor_get_async(tensor))
        expected = np.zeros(4, np.int32)
        for i, read in enumerate(reads, 1):
            expected[i % 4] = i
            assert (await read).tolist() == expected.tolist()
        assert event.done() and reads[0].done()
        assert (await reads[0]).tolist() == (await reads[0]).tolist()

    async def test_the_callers_array_is_its_own_again_at_once(self, backend: ap.Backend) -> None:
        # S1
        for shape in [(4,), (1 << 18,)]:  # copied by the loop, and by a thread
            tensor = backend.alloc_buffer(1 << 21).alloc(shape, "float32")
            data = np.ones(shape, np.float32)
            event = backend.tensor_set_async(tensor, data)
            data[:] = 2
            await event
            assert set((await backend.tensor_get(tensor)).tolist()) == {1.0}
            await backend.tensor_set(tensor, data)
            data[:] = 3
            assert set((await backend.tensor_get(tensor)).tolist()) == {2.0}

    async def test_a_source_that_is_overwritten_before_a_slow_copy_reads_it(self) -> None:
        # D3 of ggml, S4: a copy from the host, or from another device, that has not begun when its source changes.
        cluster = Cluster(2, compute=True, link_bytes_per_s=4.0, host_bytes_per_s=4.0, record=True)
        a, b = cluster.backends
        src, dst = new(a, (4,)), new(b, (4,))
        data = np.full(4, 1, np.float32)
        cluster_start = cluster.clock.now
        first = a.tensor_set_async(src, data)
        data[:] = 2  # the host's array, while its first bytes are on the way
        copied = ap.tensor_copy_async(a, b, src, dst)
        read = b.tensor_get_async(dst)
        a.tensor_set_async(src, data)  # the source, while it is read
        a.tensor_memset(src, 0).close()  # a coroutine that nobody runs does nothing
        await copied
        assert first.done()
        assert cluster.clock.now - cluster_start >= 8  # 16 bytes on each link, at 4 bytes a second
        assert (await read).tolist() == [1, 1, 1, 1]
        assert (await a.tensor_get(src)).tolist() == [2, 2, 2, 2]
        assert (await b.tensor_get(dst)).tolist() == [1, 1, 1, 1]

    async def test_d3_on_real_devices(self) -> None:
        # D3 of ggml: copies whose source is rewritten as soon as they are queued.
        a, b = ap.open_backends("cpu:1", "cpu:2")
        async with a, b:
            src, dst = new(a, (64,), "int32"), new(b, (64,), "int32")
            data = np.zeros(64, np.int32)
            reads = []
            for i in range(100):
                data[:] = i
                a.tensor_set_async(src, data)
                ap.tensor_copy_async(a, b, src, dst)
                reads.append(b.tensor_get_async(dst))
            for i, read in enumerate(reads):
                assert set((await read).tolist()) == {i}

    async def test_nothing_is_lost_when_a_caller_is_cancelled(self, backend: ap.Backend) -> None:
        tensor = new(backend, (4,))
        gate = ap.Event("gate")
        backend.queue.wait(gate)
        data = np.ones(4, np.float32)
        task = asyncio.ensure_future(backend.tensor_set(tensor, data))
        await asyncio.sleep(0)
        task.cancel()
        data[:] = 9
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        assert (await backend.tensor_get(tensor)).tolist() == [1, 1, 1, 1]

    async def test_a_failing_write_is_its_own_affair(
        self, backend: ap.Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensor = new(backend, (4,))
        store = backend.store

        def fail_once(*args: Any) -> Any:
            monkeypatch.setattr(backend, "store", store)
            raise ValueError("no")

        monkeypatch.setattr(backend, "store", fail_once)
        event = backend.tensor_set_async(tensor, ramp(4))
        with pytest.raises(ValueError, match="no"):
            await event
        await backend.tensor_set(tensor, ramp(4))
        with pytest.raises(ValueError, match="no"):
            await backend.synchronize()
        assert (await backend.tensor_get(tensor)).tolist() == [0, 1, 2, 3]


class TestCopy:
    async def test_between_backends(self, pair: Pair) -> None:
        a, b = pair
        src, dst = new(a, (3, 4)), new(b, (3, 4))
        await a.tensor_set(src, ramp(3, 4))
        await a.tensor_copy(src, dst)
        np.testing.assert_array_equal(await b.tensor_get(dst), ramp(3, 4))
        assert b.holds(dst.buffers[0].value)
        await b.tensor_set(dst, -ramp(3, 4))
        event = b.tensor_copy_async(dst, src)  # and back
        assert isinstance(event, ap.Event)
        await event
        np.testing.assert_array_equal(await a.tensor_get(src), -ramp(3, 4))
        await a.tensor_copy(ap.tensor_view(src, 2, (3,)), ap.tensor_view(dst, 0, (3,)))
        assert (await b.tensor_get(dst, 0, 4)).tolist() == [-2, -3, -4, -3]

    async def test_within_a_backend(self, backend: ap.Backend) -> None:
        src, dst = new(backend), new(backend)
        await backend.tensor_set(src, ramp(3, 4))
        await backend.tensor_copy(src, dst)
        await backend.tensor_set(src, [99], offset=0)  # the copy is its own
        np.testing.assert_array_equal(await backend.tensor_get(dst), ramp(3, 4))

    async def test_layouts_must_be_equal(self, pair: Pair) -> None:
        a, b = pair
        src = new(a, (3, 4))
        for dst in (new(b, (4, 3)), new(b, (12,)), new(b, (3, 4), "int32")):
            with pytest.raises(ap.TensorError, match=r"copy of 't' float32\[3,4\] to .*: the layouts differ"):
                await a.tensor_copy(src, dst)

    async def test_onto_itself_nothing_happens(self, backend: ap.Backend) -> None:
        tensor = new(backend)
        await backend.tensor_copy(tensor, tensor)  # though it has no value
        assert ap.tensor_copy_async(backend, backend, tensor, tensor).done()
        await backend.synchronize()

    async def test_no_elements(self, pair: Pair) -> None:
        a, b = pair
        assert ap.tensor_copy_async(a, b, new(a, (0, 3)), new(b, (0, 3))).done()

    async def test_it_comes_after_all_that_is_queued_on_both(self, pair: Pair) -> None:
        a, b = pair
        src, dst = new(a, (4,)), new(b, (4,))
        gate = ap.Event("gate")
        a.queue.wait(gate)
        a.tensor_set_async(src, [1, 1, 1, 1])
        b.tensor_set_async(dst, [5, 5, 5, 5])
        before = b.tensor_get_async(dst)
        copied = ap.tensor_copy_async(a, b, src, dst)
        after = b.tensor_get_async(dst)
        a.tensor_set_async(src, [2, 2, 2, 2])
        assert (await before).tolist() == [5, 5, 5, 5]
        assert not copied.done()
        gate.set()
        assert (await after).tolist() == [1, 1, 1, 1]
        assert copied.done()
        assert (await a.tensor_get(src)).tolist() == [2, 2, 2, 2]

    async def test_there_and_back_at_once(self, pair: Pair) -> None:
        a, b = pair
        x, y, z = new(a, (4,)), new(b, (4,)), new(a, (4,))
        a.tensor_set_async(x, [1, 2, 3, 4])
        for _ in range(20):
            ap.tensor_copy_async(a, b, x, y)
            ap.tensor_copy_async(b, a, y, z)
            ap.tensor_copy_async(a, b, z, y)
            last = ap.tensor_copy_async(b, a, y, x)
        await last
        assert (await a.tensor_get(x)).tolist() == [1, 2, 3, 4]

    async def test_a_source_without_a_value_fails_its_copy_alone(self, pair: Pair) -> None:
        a, b = pair
        src, dst = new(a, (4,)), new(b, (4,))
        event = ap.tensor_copy_async(a, b, src, dst)
        later = b.tensor_set_async(dst, [1, 2, 3, 4])
        with pytest.raises(ap.TensorError, match=rf"'t' float32\[4\]: it has no value on {a.name} yet"):
            await event
        await later
        assert (await b.tensor_get(dst)).tolist() == [1, 2, 3, 4]
        for backend in pair:
            with pytest.raises(ap.TensorError, match="no value"):
                await backend.synchronize()

    async def test_the_destination_is_asked_first_and_the_host_comes_last(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = pair
        src, dst = new(a), new(b)
        await a.tensor_set(src, ramp(3, 4))
        seen: list[str] = []
        for backend, name in [(b, "copy_from"), (b, "store"), (a, "download")]:
            spy(backend, name, seen, monkeypatch)
        await a.tensor_copy(src, dst)
        direct = type(a) is type(b)
        assert seen == (["copy_from"] if direct else ["download", "store"])
        seen.clear()
        if direct:  # a kind of backend that has nothing better
            monkeypatch.setattr(b, "copy_from", lambda *args: seen.append("asked") and None)
            await a.tensor_copy(src, dst)
            assert seen[:1] == ["asked"] and "store" in seen
        np.testing.assert_array_equal(await b.tensor_get(dst), ramp(3, 4))

    async def test_copies_between_devices_take_their_links_time(self) -> None:
        cluster = Cluster(2, compute=True, link_bytes_per_s=4.0, latency_s=1.0, record=True)
        a, b = cluster.backends
        src, dst = new(a, (4,)), new(b, (4,))
        await a.tensor_set(src, [1, 2, 3, 4])
        start = cluster.clock.now
        await a.tensor_copy(src, dst)
        assert cluster.clock.now - start == 5.0
        assert cluster.log[-1].src is a and cluster.log[-1].nbytes == 16

    async def test_closed_backends(self, pair: Pair) -> None:
        a, b = pair
        src, dst = new(a), new(b)
        await a.tensor_set(src, ramp(3, 4))
        await b.aclose()
        with pytest.raises(ap.BackendClosedError, match=b.name):
            await a.tensor_copy(src, dst)


def spy(backend: ap.Backend, name: str, seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(backend, name)

    def call(*args: Any) -> Any:
        seen.append(name)
        return original(*args)

    monkeypatch.setattr(backend, name, call)


class TestRowsAndFill:
    async def test_a_block_of_a_matrix(self, backend: ap.Backend) -> None:
        tensor = new(backend, (4, 5))
        await backend.tensor_set(tensor, ramp(4, 5))
        block = await backend.tensor_get_2d(tensor, offset=6, size=3, n=2, stride=5)
        np.testing.assert_array_equal(block, ramp(4, 5)[1:3, 1:4])
        assert block.flags.writeable
        await backend.tensor_set_2d(tensor, -block, offset=6, stride=5)
        expected = ramp(4, 5)
        expected[1:3, 1:4] *= -1
        np.testing.assert_array_equal(await backend.tensor_get(tensor), expected)
        column = await backend.tensor_get_2d(ap.tensor_view(tensor, 5, (3, 5)), offset=4, size=1, n=3, stride=5)
        assert column.reshape(-1).tolist() == [9, 14, 19]

    async def test_rows_lie_within_and_apart(self, backend: ap.Backend) -> None:
        tensor = new(backend, (4, 5))
        with pytest.raises(ap.TensorError, match="out of bounds: elements 6 to 21, but it has 20"):
            await backend.tensor_get_2d(tensor, offset=6, size=5, n=3, stride=5)
        with pytest.raises(ap.TensorError, match="rows of 3 elements every 2 overlap"):
            await backend.tensor_set_2d(tensor, np.zeros((2, 3), np.float32), offset=0, stride=2)
        with pytest.raises(ap.TensorError, match=r"expected \(n, size\)"):
            await backend.tensor_set_2d(tensor, np.zeros(3, np.float32), offset=0, stride=2)
        assert (await backend.tensor_get_2d(tensor, 0, 3, 0, 5)).shape == (0, 3)

    async def test_filling_with_a_byte(self, backend: ap.Backend) -> None:
        tensor = new(backend, (6,), "int16")
        await backend.tensor_memset(tensor, 0xFF)
        await backend.tensor_memset(tensor, 1, offset=1, size=2)
        assert (await backend.tensor_get(tensor)).tolist() == [-1, 0x0101, 0x0101, -1, -1, -1]
        with pytest.raises(ap.TensorError, match="0 to 255"):
            await backend.tensor_memset(tensor, 256)


class TestOnTheDevice:
    """What devices that are not the host do with parts of an array."""

    @pytest.mark.parametrize("where", [Range(3, 5), Range(0, 1), Range(1, 2, 3, 4), Range(0, 0), Range(2, 0, 3, 2)])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
    def test_parts_are_read_and_replaced(self, where: Range, dtype: str) -> None:
        data = (ramp(4, 5) % 3).astype(jnp.dtype(dtype))
        value = jax.device_put(data, jax.devices()[1])
        index = where.offset + where.stride * np.arange(where.n)[:, None] + np.arange(where.size)
        np.testing.assert_array_equal(_jax_memory.read_on_device(value, where), data.reshape(-1)[index])
        new_data = np.ones((where.n, where.size), data.dtype)
        made = _jax_memory.write_on_device(value, where, new_data)
        assert made.devices() == value.devices() and made.committed
        expected = data.reshape(-1).copy()
        expected[index] = 1
        np.testing.assert_array_equal(np.asarray(made), expected.reshape(4, 5))
        np.testing.assert_array_equal(np.asarray(value), data)

    async def test_a_backend_away_from_the_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = xla.XlaBackend(xla.XlaDevice(jax.devices()[1]))
        backend._aliases_host = False
        seen: list[str] = []
        monkeypatch.setattr(backend, "download", lambda value: seen.append("all of it") or np.asarray(value))
        async with backend:
            tensor = new(backend, (4, 5))
            await backend.tensor_set(tensor, ramp(4, 5))
            await backend.tensor_set(tensor, [-1, -2], offset=4)
            await backend.tensor_set_2d(tensor, np.zeros((2, 2), np.float32), offset=10, stride=5)
            assert (await backend.tensor_get(tensor, 3, 4)).tolist() == [3, -1, -2, 6]
            assert (await backend.tensor_get_2d(tensor, 9, 3, 2, 5)).tolist() == [[9, 0, 0], [14, 0, 0]]
            assert seen == []
            await backend.tensor_get(tensor)
            wide = new(backend, (4,), "int64")
            await backend.tensor_set(wide, [1 << 40, 2, 3, 4])
            await backend.tensor_set(wide, [5], offset=1)
            assert (await backend.tensor_get(wide, 0, 2)).tolist() == [1 << 40, 5]
            with pytest.raises(ap.PlacementError, match="cannot read host memory in place"):
                backend.borrow(np.zeros(4), tensor)

    def test_what_is_left_to_the_host(self) -> None:
        def spec(shape: tuple[int, ...], dtype: str) -> ap.Tensor:
            return ap.Tensor(-1, "t", shape, dtype, Kind.NODE, 0)

        assert _jax_memory.ranges_on_device(spec((4,), "bfloat16"))
        assert not _jax_memory.ranges_on_device(spec((1 << 31,), "int8"))
        assert not _jax_memory.ranges_on_device(spec((4,), "int64"))
        assert not _jax_memory.ranges_on_device(spec((4,), "int4"))
        assert not _jax_memory.ranges_on_device(spec((4,), "key<fry>"))


class TestWithoutValues:
    async def test_a_cluster_that_does_not_compute_reads_zeros_on_time(self) -> None:
        cluster = Cluster(1, host_bytes_per_s=4.0)
        (a,) = cluster.backends
        tensor = new(a, (4,))
        await a.tensor_set(tensor, ramp(4))
        assert cluster.clock.now == 4.0
        await a.tensor_set(tensor, [1], offset=2)
        assert cluster.clock.now == 5.0
        assert (await a.tensor_get(tensor)).tolist() == [0, 0, 0, 0]


class TestMinimum:
    """A backend of somebody else's that implements no more than it must: no events, nothing asynchronous."""

    @pytest.fixture
    async def abacus(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ap.Backend]:
        monkeypatch.syspath_prepend(str(Path(__file__).parent / "third_party"))
        async with importlib.import_module("abacus").open_abacus("0") as backend:
            yield backend

    async def test_it_sets_gets_and_fills(self, abacus: ap.Backend) -> None:
        tensor = new(abacus, (3, 4))
        await abacus.tensor_set(tensor, ramp(3, 4))
        abacus.tensor_set_async(tensor, [-1, -2], offset=5)
        read = abacus.tensor_get_async(tensor, 4, 4)
        await abacus.tensor_memset(tensor, 0, offset=8)
        assert (await read).tolist() == [4, -1, -2, 7]
        assert (await abacus.tensor_get_2d(tensor, 2, 2, 3, 4)).tolist() == [[2, 3], [-2, 7], [0, 0]]
        with pytest.raises(ap.PlacementError, match="abacus:0 cannot read host memory in place"):
            abacus.buffer_from_array(ramp(4))

    async def test_copies_go_over_the_host_both_ways(self, abacus: ap.Backend, backend: ap.Backend) -> None:
        here, there = new(abacus), new(backend)
        await abacus.tensor_set(here, ramp(3, 4))
        await abacus.tensor_copy(here, there)
        np.testing.assert_array_equal(await backend.tensor_get(there), ramp(3, 4))
        await backend.tensor_set(there, [9], offset=3)
        await abacus.tensor_copy(there, here)
        assert (await abacus.tensor_get(here, 2, 3)).tolist() == [2, 9, 4]
        assert isinstance(here.buffers[0].value, np.ndarray)
