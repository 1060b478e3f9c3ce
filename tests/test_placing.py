"""Weights are put on their backends once, with the value that they have, and no longer than somebody waits for them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import jax
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.live_weights import LiveWeights
from models import assert_close

X = np.arange(4, dtype=np.float32)


def product(weights: list[Any], x: Any) -> Any:
    for w in weights:
        x = x * w
    return x


class Uploads:
    """Counts the uploads of a backend; each can be made to wait."""

    def __init__(self, backend: ap.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        self.under_way, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self._upload = backend.upload
        monkeypatch.setattr(backend, "upload", self)

    def __call__(self, value: Any, tensor: ap.Tensor) -> Any:
        self.n += 1
        self.under_way.set()
        assert self.go_on.wait(30)
        return self._upload(value, tensor)


@pytest.mark.parametrize("writeable", [True, False])
async def test_an_array_that_is_several_weights_is_uploaded_once(
    writeable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = np.full(4, 3, np.float32)
    w.flags.writeable = writeable
    async with ap.open_backend("cpu:0") as backend, ap.Scheduler([backend]) as sched:
        uploads = Uploads(backend, monkeypatch)
        graph = ap.trace(product, [w, w, w], X)
        assert_close(await sched.graph_compute(graph, X), 27 * X)
        assert uploads.n == 1
        assert sched.statistics().copied_weights_nbytes == w.nbytes
        again = ap.trace(lambda p, x: product(p, x) + 1, [w, w], X)
        assert_close(await sched.graph_compute(again, X), 9 * X + 1)
        assert uploads.n == (2 if writeable else 1), "what may change is not the same weight the next time"


async def test_an_array_that_has_changed_is_another_weight_though_it_cannot_change_any_more() -> None:
    w = np.full(4, 2, np.float32)
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(product, [w], X)
        assert_close(await sched.graph_compute(graph, X), 2 * X)
        w[:] = 5
        w.flags.writeable = False
        other = ap.trace(lambda p, x: product(p, x) + 1, [w], X)
        assert_close(await sched.graph_compute(other, X), 5 * X + 1)


async def test_an_array_has_the_type_that_its_graph_was_traced_for() -> None:
    w = np.full(4, 2.5, np.float64)
    w.flags.writeable = False
    async with ap.Scheduler(["cpu:0"]) as sched:
        with jax.enable_x64(True):
            wide = ap.trace(product, [w], X.astype(np.float64))
        narrow = ap.trace(product, [w], X)
        assert [graph.weights[0].dtype for graph in (wide, narrow)] == ["float64", "float32"]
        got = await sched.graph_compute(wide, X.astype(np.float64))
        assert got.dtype == np.float64
        assert_close(got, 2.5 * X.astype(np.float64))
        got = await sched.graph_compute(narrow, X)
        assert got.dtype == np.float32
        assert_close(got, 2.5 * X)


async def test_nothing_more_is_uploaded_when_the_scheduler_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [np.full(4, i, np.float32) for i in range(20)]
    async with ap.open_backend("cpu:0") as backend:
        uploads = Uploads(backend, monkeypatch)
        uploads.go_on.clear()
        sched = ap.Scheduler([backend])
        loading = asyncio.create_task(sched.alloc_graph(ap.trace(product, weights, X)))
        await asyncio.to_thread(uploads.under_way.wait, 30)
        closing = asyncio.create_task(sched.aclose())
        for _ in range(100):  # until the load is given up
            if not sched._plans._loading:
                break
            await asyncio.sleep(0)
        assert not closing.done(), "there is a thread that uploads"
        uploads.go_on.set()
        await closing
        with pytest.raises(ap.BackendClosedError):
            await loading
        assert uploads.n == 1


async def test_a_weight_that_is_set_again_while_its_value_is_brought_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer value stays, though bringing over the older one ends last."""
    a, b = ap.open_backends("cpu:0", "cpu:1")
    async with a, b:
        w = a.alloc_buffer(256, usage=ap.BufferUsage.WEIGHTS).alloc((4,), "float32", "w")
        await a.tensor_set(w, np.zeros(4, np.float32))
        (buffer,) = w.buffers
        first, second = [a.upload(np.full(4, i, np.float32), w) for i in (1, 2)]
        live = LiveWeights([[], [w]], [a, b])
        transfer, operands = b.transfer, [None]

        def slow(values: Any) -> Any:
            moved = transfer(values)
            if values[0] is first:
                setting = threading.Thread(target=setattr, args=(buffer, "value", second))
                setting.start()
                setting.join(30)
                assert not setting.is_alive()
            return moved

        monkeypatch.setattr(b, "transfer", slow)
        buffer.value = first
        live.bind([(w, b, operands, 0)])
        assert_close(operands[0], np.full(4, 2, np.float32))
