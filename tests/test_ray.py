"""Backends on other machines: a real Ray of a few processes on this one. The oracle is `jax.jit` on one device."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import secrets
import signal
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.remote import RemoteBackend
from conftest import ROOT
from models import assert_close, batch, mlp, mlp_params, oracle

if importlib.util.find_spec("ray") is None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    pytest.skip(f"Ray is not installed: it may have no release for Python {version} yet", allow_module_level=True)

MODULE = sys.modules["aiopipe.devices.ray"]  # `aiopipe.devices` is a function, too

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # Ray would keep one in the user's home
}

TIME_S = 20.0
"""How long a test waits for what should come at once."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray on the loopback interface, with places for a few actors."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Ray warns of while it starts, and JAX of Ray's forks
            import ray

            ray.init(
                num_cpus=8,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
                object_store_memory=200 << 20,
            )
        yield
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()


def test_a_ray_that_cannot_be_imported_or_started_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        with pytest.raises(ap.PlacementError, match=r"ray:cpu:0 needs the extra: pip install 'aiopipe\[ray\]'"):
            MODULE._ray("ray:cpu:0")

    class Broken:
        def init(self) -> None:
            raise OSError("no room")

    with pytest.raises(ap.PlacementError, match=r"cannot be initialized: no room; call ray\.init yourself") as caught:
        MODULE._initialize(Broken())
    assert isinstance(caught.value.__cause__, OSError)


def test_what_ray_says_of_a_message_that_was_not_answered() -> None:
    """What the actor raised is an answer; all else that Ray raises means that the actor is gone."""
    from concurrent.futures import Future

    import ray

    carrier, told = object.__new__(MODULE._RayCarrier), []
    future: Future[Any] = Future()

    class Sent:
        def remote(self, *_: Any) -> Any:
            return self

        def future(self) -> Future[Any]:
            return future

    carrier._ray = ray
    carrier._actor = type("Actor", (), {"execute": Sent()})
    for error, lost in [
        (ray.exceptions.RayActorError(), True),
        (ray.exceptions.RayTaskError("execute", "trace", ValueError("wrong")), False),
        (ValueError("of ours"), False),
    ]:
        future = Future()
        carrier.send(0, (), lambda *answer: told.append(answer))
        future.set_exception(error)
        assert told.pop() == (None, error, lost)


@pytest.fixture
async def remote() -> AsyncIterator[RemoteBackend]:
    async with ap.open_backend("ray:cpu:0") as backend:
        assert isinstance(backend, RemoteBackend)
        yield backend


async def spread(backends: list[ap.Backend], params: list[Any], x: Any = None) -> ap.Graph:
    """`mlp` with its layers dealt out to the backends in turn."""
    weights = await ap.place(params, lambda path: backends[int(path) % len(backends)])
    return ap.trace(mlp, weights, batch() if x is None else x)


async def test_an_mlp_over_here_and_there(remote: RemoteBackend) -> None:
    params = mlp_params(4)
    async with ap.Scheduler([remote, "cpu:0"], n_copies=3) as sched:
        graph = await spread(list(sched.backends), params)
        evaluations = [await sched.graph_compute_async(graph, batch(seed=k)) for k in range(12)]
        for k, evaluation in enumerate(evaluations):
            assert_close(await evaluation, oracle(mlp, params, batch(seed=k)))
        plan = await sched.plan(graph)
        assert [plan.devices[split.backend].name for split in plan.splits] == ["ray:cpu:0", "cpu:0"] * 2


async def test_it_may_come_last_and_a_host_is_added_where_there_is_none(remote: RemoteBackend) -> None:
    params = mlp_params(2)
    async with ap.Scheduler(["cpu:1", remote]) as sched:
        assert [backend.name for backend in sched.backends] == ["cpu:1", "ray:cpu:0"]
        graph = await spread(list(sched.backends), params)
        result = await sched.graph_compute(graph, batch())
        assert isinstance(result, ap.Handle) and result.shape == (2, 8) and result.dtype == np.float32
        tree = await ap.fetch({"y": result, "n": 3})
        assert tree["n"] == 3 and type(tree["y"]) is np.ndarray
        assert_close(tree["y"], oracle(mlp, params, batch()))
        again = await ap.fetch(await sched.graph_compute(graph, result))
        assert_close(again, oracle(mlp, params, oracle(mlp, params, batch())))
    async with ap.Scheduler([remote]) as sched:
        assert [backend.name for backend in sched.backends] == ["ray:cpu:0", "cpu:0"]
    with pytest.raises(ap.PlacementError, match="give the host CPU last"):
        ap.Scheduler(["cpu:0", "ray:gpu:0"])


async def test_a_stream_is_the_same_for_every_number_of_copies() -> None:
    params, xs = mlp_params(4), [batch(64, seed=k) for k in range(9)]
    want = [oracle(mlp, params, x) for x in xs]
    exact = set()
    for n_copies in (1, 3):
        async with ap.Pipeline(mlp, params, devices=["cpu:0", "ray:cpu:0"], split=(1, 1), n_copies=n_copies) as pipe:
            got = [y async for y in pipe.stream(xs)]  # NumPy arrays, for they have been fetched
            assert all(type(y) is np.ndarray for y in got)
            assert_close(got, want)
            assert_close(await pipe(xs[0]), want[0])
            exact.add(np.stack(got).tobytes())
    assert len(exact) == 1


WIDTH, ROWS = 8, 16


def step(weights: list[Any], state: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
    """Every layer writes a row of its cache and reads all of it."""
    caches = []
    for w, cache in zip(weights, state["cache"], strict=True):
        cache = jax.lax.dynamic_update_slice(cache, (x @ w)[None], (state["n"], 0))
        caches.append(cache)
        x = jnp.tanh(x @ w + cache.sum(0))
    return x, {"cache": caches, "n": state["n"] + 1}


def empty() -> dict[str, Any]:
    return {"cache": [np.zeros((ROWS, WIDTH), np.float32) for _ in range(2)], "n": np.int32(0)}


async def test_a_state_lives_there(remote: RemoteBackend) -> None:
    params, xs = mlp_params(2), [batch(1, seed=k)[0] for k in range(6)]
    want, after, fn = [], empty(), jax.jit(step)
    for x in xs:
        y, after = fn(params, after, x)
        want.append(np.asarray(y))
    async with ap.Scheduler([remote, "cpu:0"]) as sched:
        weights = await ap.place(params, {"0": sched.backends[0], "1": sched.backends[1]})
        graph = ap.trace(step, weights, xs[0], state=empty())
        state = ap.State(empty())
        for x, y in zip(xs[:3], want[:3], strict=True):
            assert_close(await sched.graph_compute(graph, x, state=state), y)
        assert state.backends["cache/0"] == "ray:cpu:0" and state.backends["cache/1"] == "cpu:0"
        fork, snapshot = await state.fork(), await state.snapshot()
        assert isinstance(snapshot.value["cache"][0], ap.Handle)  # copied there, not brought here
        for x, y in zip(xs[3:], want[3:], strict=True):
            assert_close(await sched.graph_compute(graph, x, state=state), y)
        assert_close(await sched.graph_compute(graph, xs[3], state=fork), want[3])
        last = await ap.fetch((await state.snapshot()).value)
        assert_close(jax.tree.map(np.asarray, last), jax.tree.map(np.asarray, after))
        await state.restore(snapshot)
        assert_close(await sched.graph_compute(graph, xs[3], state=state), want[3])
        other = ap.State((await fork.snapshot()).value)
        assert_close(await sched.graph_compute(graph, xs[4], state=other), want[4])
        assert other.backends["cache/0"] == "ray:cpu:0"


async def test_types_that_numpy_lacks_travel(remote: RemoteBackend) -> None:
    def fn(w: Any, key: Any, x: Any) -> Any:
        return (jax.random.normal(key, x.shape) * w).astype(jnp.bfloat16) + x, jax.random.split(key)[0]

    async with ap.Scheduler([remote, "cpu:0"]) as sched:
        weights = await ap.place(np.float32(2), {"*": remote})
        key, x = jax.random.key(3), np.ones(5, jnp.bfloat16)
        graph = ap.trace(fn, weights, key, x)
        y, bits = await ap.fetch(await sched.graph_compute(graph, key, x))
        want, want_key = jax.jit(fn)(np.float32(2), key, x)
        assert_close(y, np.asarray(want), 1e-2)
        np.testing.assert_array_equal(bits, jax.random.key_data(want_key))
        with jax.enable_x64(True):
            wide = ap.trace(lambda w, x: x * 2 + w, weights, np.arange(3.0))
            assert_close(await ap.fetch(await sched.graph_compute(wide, np.arange(3.0))), np.arange(3.0) * 2 + 2)


async def test_tensors_by_hand(remote: RemoteBackend) -> None:
    graph = ap.trace(mlp, mlp_params(2), batch())
    assert_close(await ap.fetch(await remote.graph_compute(graph, batch())), oracle(mlp, mlp_params(2), batch()))
    region = remote.alloc_buffer(1 << 16)
    x = region.alloc((2, 8), "float32")
    await remote.tensor_set(x, np.zeros((2, 8), np.float32))
    await remote.tensor_set(x, np.arange(3, dtype=np.float32), offset=5)
    np.testing.assert_array_equal(await remote.tensor_get(x, 4, 5), [0, 0, 1, 2, 0])
    async with ap.open_backend("cpu:0") as cpu:
        y = cpu.alloc_buffer(1 << 16).alloc((2, 8), "float32")
        await remote.tensor_copy_async(x, y)
        np.testing.assert_array_equal(await cpu.tensor_get(y, 5, 3), [0, 1, 2])
        await cpu.tensor_set(y, np.ones((2, 8), np.float32))
        await cpu.tensor_copy_async(y, x)
    np.testing.assert_array_equal(await remote.tensor_get(x), np.ones((2, 8)))
    await remote.synchronize()


# What it cannot do -------------------------------------------------------------------------------


async def test_what_calls_back_runs_here(remote: RemoteBackend) -> None:
    def fn(w: Any, x: Any) -> Any:
        x = jnp.sin(x * w)
        return jax.pure_callback(lambda v: v + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * w

    async with ap.Scheduler([remote, "cpu:0"]) as sched:
        graph = ap.trace(fn, await ap.place(np.float32(2), {"*": remote}), batch())
        assert_close(await ap.fetch(await sched.graph_compute(graph, batch())), np.asarray(fn(np.float32(2), batch())))
        where = {n.op: sched.get_tensor_backend(graph, graph.tensors[n.outputs[0]]).name for n in graph.nodes}
        assert where["pure_callback"] == "cpu:0" and where["sin"] == "ray:cpu:0"
    with pytest.raises(ap.PlacementError, match="pure_callback"):
        await remote.graph_plan_create(graph)


def out_of_memory(w: Any, x: Any) -> Any:
    """Asks for 16 TiB when it runs."""
    huge = jnp.cumsum(jnp.broadcast_to(x[0, 0] * w, (1 << 11, 1 << 31)), axis=0)
    return jnp.tanh(jnp.sort(huge, axis=0)[0, :8])


async def test_a_failure_is_that_of_the_evaluation_and_its_split(remote: RemoteBackend) -> None:
    async with ap.Scheduler([remote, "cpu:0"]) as sched:
        weights = await ap.place([np.float32(1), np.float32(1)], {"0": remote, "1": sched.backends[1]})
        graph = ap.trace(lambda w, x: out_of_memory(w[0], x) * w[1], weights, batch())
        fine = await spread(list(sched.backends), mlp_params(4))
        before, bad, after = [await sched.graph_compute_async(g, batch()) for g in (fine, graph, fine)]
        with pytest.raises(ap.EvaluationError, match=r"split 0 on 'ray:cpu:0'.*test_ray.py") as failed:
            await bad
        assert failed.value.backend == "ray:cpu:0" and failed.value.split == 0
        assert "memory" in str(failed.value.__cause__)
        for evaluation in (before, after):
            assert_close(await evaluation, oracle(mlp, mlp_params(4), batch()))


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ray" in ap.registered_backends()
    for spec in ("ray", "ray:cpu:0@10.0.0.7", "ray:gpu:0#a", "ray:cpu:0@10.0.0.7#b"):
        backend = ap.open_backend(spec)  # nothing is started
        assert backend.name == (spec if spec != "ray" else "ray:cpu:0")
        assert isinstance(backend, RemoteBackend) and backend.link.worker is None
    for spec in ("ray:sim:0", "ray:cpu:x", "ray:@"):
        with pytest.raises(ap.PlacementError, match="unknown device"):
            ap.open_backend(spec)
    monkeypatch.setattr(MODULE, "find_spec", lambda name: None)
    with pytest.raises(ap.PlacementError, match=r"needs the extra: pip install 'aiopipe\[ray\]'"):
        ap.open_backend("ray:cpu:0")


async def test_a_place_that_the_cluster_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "START_S", 0.5)
    for spec, why in [
        ("ray:cpu:0@10.9.8.7", "names the node '10.9.8.7', but the cluster has"),
        ("ray:gpu:0", "found no place within .* it asks for {'num_gpus': 1}"),
    ]:
        async with ap.open_backend(spec) as backend:
            with pytest.raises(ap.PlacementError, match=why):
                await ap.place(np.ones(3), {"*": backend})


async def test_a_device_that_its_machine_lacks() -> None:
    async with ap.open_backend("ray:cpu:7") as backend:
        with pytest.raises(ap.PlacementError, match=r"cannot be opened on its machine.*unknown device 'cpu:7'"):
            await ap.place(np.ones(3), {"*": backend})


LAZY = """
import asyncio, sys
import numpy as np
import aiopipe as ap

async def main():
    async with ap.Pipeline(lambda w, x: x @ w, np.eye(3, dtype=np.float32), devices=["ray:cpu:0"]) as pipe:
        assert "ray" not in sys.modules
        y = await pipe(np.arange(3, dtype=np.float32))
    print(type(y).__name__, y, sys.modules["ray"].is_initialized())

asyncio.run(main())
"""


async def test_ray_is_imported_and_initialized_when_it_is_first_needed() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAZY,
        env={**os.environ, **ENVIRONMENT, "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(50):
        out, error = await process.communicate()
    assert out.decode().splitlines()[-1:] == ["ndarray [0. 1. 2.] True"], error.decode()


# The end -----------------------------------------------------------------------------------------


def forever(w: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 1 << 30, lambda i, v: jnp.tanh(v @ w), x)


def ends_within(true: Callable[[], bool]) -> bool:
    """Whether something is true before `TIME_S` have passed."""
    deadline = time.monotonic() + TIME_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def is_gone(pid: int) -> bool:
    """Whether no process has that number; one that only waits for its parent is gone."""
    try:
        return "(zombie)" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return True


async def test_a_process_that_is_killed_is_told_to_every_waiter_at_once() -> None:  # S33
    backend = ap.open_backend("ray:cpu:0")
    assert isinstance(backend, RemoteBackend)
    params = mlp_params(2)
    async with ap.Scheduler([backend, "cpu:1"], n_copies=3) as sched:
        weights = await ap.place(params[0], {"*": backend})
        state = ap.State(np.ones((8, 8), np.float32))
        endless = ap.trace(forever, weights, batch())
        with_state = ap.trace(lambda w, s, x: (forever(w, x), s @ w), weights, batch(), state=state)
        local = await spread([sched.backends[1]], params)
        assert_close(await sched.graph_compute(local, batch()), oracle(mlp, params, batch()))
        await sched.plan(endless)
        in_flight = [await sched.graph_compute_async(endless, batch()) for _ in range(2)]
        in_flight.append(await sched.graph_compute_async(with_state, batch(), state=state))
        waiting = [asyncio.create_task(sched.graph_compute(endless, batch())) for _ in range(2)]
        event = in_flight[0].events[0]
        by_hand = backend.graph_compute_async(ap.trace(mlp, mlp_params(1), batch()), batch())
        assert backend.link.worker is not None and not any(evaluation.done() for evaluation in in_flight)

        os.kill(backend.link.worker.pid, signal.SIGKILL)
        async with asyncio.timeout(TIME_S):
            results = await asyncio.gather(*in_flight, *waiting, by_hand, return_exceptions=True)
            with pytest.raises(ap.BackendLostError):
                await event
        for result in results:
            assert isinstance(result, ap.BackendLostError), result
            assert "is gone" in str(result) and "open_backend('ray:cpu:0')" in str(result)
        assert isinstance(state.error, ap.BackendLostError)
        for use in (
            lambda: sched.graph_compute(endless, batch()),
            lambda: backend.synchronize(),
            lambda: ap.place(np.ones(3), {"*": backend}),
        ):
            with pytest.raises(ap.BackendLostError, match="was lost"):
                await use()
        # Whoever does without it goes on.
        assert_close(await sched.backends[1].graph_compute(local, batch()), oracle(mlp, params, batch()))
        async with ap.open_backend("ray:cpu:0") as another:
            graph = await spread([another], params)
            assert_close(await ap.fetch(await another.graph_compute(graph, batch())), oracle(mlp, params, batch()))
    await backend.aclose()


async def test_values_of_one_that_is_gone_cannot_be_read() -> None:
    async with ap.open_backend("ray:cpu:0") as backend:
        assert isinstance(backend, RemoteBackend)
        result = await backend.graph_compute(ap.trace(mlp, mlp_params(1), batch()), batch())
        assert backend.link.worker is not None
        os.kill(backend.link.worker.pid, signal.SIGKILL)
        with pytest.raises(ap.BackendLostError, match=r"'ray:cpu:0' was lost: process \d+ on .* is gone"):
            await result.fetch()
    with pytest.raises(ap.BackendClosedError):
        backend.check_open()


async def test_closing_ends_the_process_and_its_threads() -> None:
    backend = ap.open_backend("ray:cpu:0")
    assert isinstance(backend, RemoteBackend)
    async with backend:
        result = await backend.graph_compute(ap.trace(mlp, mlp_params(1), batch()), batch())
        assert backend.link.worker is not None
        pid = backend.link.worker.pid
        assert not is_gone(pid)
    assert await asyncio.to_thread(ends_within, lambda: is_gone(pid))
    await backend.aclose()
    with pytest.raises(ap.BackendClosedError, match="was closed"):
        await result.fetch()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("aiopipe-ray")]


async def test_what_nobody_has_any_more_is_freed_there(remote: RemoteBackend) -> None:
    async with ap.Scheduler([remote, "cpu:0"], n_copies=2) as sched:
        graph = await spread(list(sched.backends), mlp_params(4))

        def kept() -> int:
            gc.collect()
            count: int = remote.link.send("count").wait()
            return count

        # Two weights, two programs, and for each of the two splits what the last launches left.
        assert_close(await sched.graph_compute(graph, batch()), oracle(mlp, mlp_params(4), batch()))
        most = await asyncio.to_thread(kept) + 4
        for k in range(40):
            await sched.graph_compute(graph, batch(seed=k))
        assert await asyncio.to_thread(kept) <= most
    del graph, sched
    remote.newest.clear()
    # Those that go while nothing else is sent go all the same.
    assert await asyncio.to_thread(ends_within, lambda: kept() == 0)
