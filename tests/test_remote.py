"""Remote backends without another process: the actor is a thread here, what travels is pickled, messages may overtake.

`test_ray.py` has the same over processes of Ray's; what only processes can show (their death, their start) is there.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe import _jax_export
from aiopipe.devices.base import Program
from aiopipe.devices.remote_actor import _LAUNCHING, Command, Outcome, Ref, RemoteActor, _pickled, error_in
from aiopipe.devices.remote_link import Link, RemoteArray, Reply
from aiopipe.sched.plan import make_plan
from graphs import gpus
from models import assert_close, batch, mlp, mlp_params, oracle
from nearby import Nearby, Opened
from odd_errors import Falsy


@pytest.fixture(autouse=True)
def platforms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """To which platforms actors kept their process: this one has its own already."""
    kept: list[str] = []
    monkeypatch.setattr(_jax_export, "keep_to", kept.append)
    return kept


@pytest.fixture
async def remote() -> AsyncIterator[Opened]:
    opened = Opened()
    async with opened.backend:
        yield opened


async def graph_of(opened: Opened, params: list[Any]) -> ap.Graph:
    return ap.trace(mlp, await ap.place(params, {"*": opened.backend}), batch())


def program_of(graph: ap.Graph) -> Program:
    """The one program of a graph on one device."""
    (program,) = make_plan(graph, gpus(0)).programs
    return program


async def eventually(condition: Callable[[], bool]) -> None:
    """Poll: what is waited for happens on another thread, which cannot set an `asyncio.Event`."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# -- values and programs -------------------------------------------------------------------------


async def test_an_mlp_over_here_and_there(remote: Opened, platforms: list[str]) -> None:
    params = mlp_params(4)
    async with ap.Scheduler([remote.backend, "cpu:1"], n_copies=3) as sched:
        weights = await ap.place(params, lambda path: sched.backends[int(path) % 2])
        graph = ap.trace(mlp, weights, batch())
        evaluations = [await sched.graph_compute_async(graph, batch(seed=k)) for k in range(9)]
        for k, evaluation in enumerate(evaluations):
            assert_close(await evaluation, oracle(mlp, params, batch(seed=k)))
    assert platforms == ["cpu"]
    worker = remote.backend.link.worker
    assert worker is not None and (worker.device, worker.platform) == ("cpu:0", "cpu")
    assert worker.jax_version == jax.__version__


async def test_messages_that_overtake_each_other_are_carried_out_in_order(remote: Opened) -> None:
    params = mlp_params(2)
    async with ap.Scheduler([remote.backend, "cpu:1"], n_copies=8) as sched:
        graph = await graph_of(remote, params)
        await ap.fetch(await sched.graph_compute(graph, batch()))
        remote.carrier.holding = True
        evaluations = [await sched.graph_compute_async(graph, batch(seed=k)) for k in range(6)]
        await eventually(lambda: len(remote.carrier.held) >= 6)
        assert not any(evaluation.done() for evaluation in evaluations)
        rng = random.Random(0)
        remote.carrier.release(lambda held: rng.sample(held[::-1], len(held)))
        for k, evaluation in enumerate(evaluations):
            assert_close(await ap.fetch(await evaluation), oracle(mlp, params, batch(seed=k)))


async def test_what_is_not_ordered_does_not_wait_for_what_is(remote: Opened) -> None:
    """A weight is uploaded, and a program compiled, while an earlier message is still on its way."""
    params = mlp_params(1)
    async with ap.Scheduler([remote.backend, "cpu:1"]) as sched:
        graph = await graph_of(remote, params)
        await sched.plan(graph)
        remote.carrier.holding = True
        evaluation = await sched.graph_compute_async(graph, batch())
        await eventually(lambda: bool(remote.carrier.held))
        held, remote.carrier.held, remote.carrier.holding = remote.carrier.held, [], False
        other = await graph_of(remote, mlp_params(2))
        await sched.plan(other)
        assert not evaluation.done()
        remote.carrier.held = held
        remote.carrier.release()
        assert_close(await ap.fetch(await evaluation), oracle(mlp, params, batch()))


async def test_keys_and_types_that_numpy_lacks_travel(remote: Opened) -> None:
    def fn(w: Any, key: Any, x: Any) -> Any:
        return (jax.random.normal(key, x.shape) * w).astype(jnp.bfloat16) + x, jax.random.split(key)[0]

    async with ap.Scheduler([remote.backend, "cpu:1"]) as sched:
        weights = await ap.place(np.float32(2), {"*": remote.backend})
        key, x = jax.random.key(3), np.ones(5, jnp.bfloat16)
        graph = ap.trace(fn, weights, key, x)
        y, bits = await ap.fetch(await sched.graph_compute(graph, key, x))
        want, want_key = jax.jit(fn)(np.float32(2), key, x)
        assert_close(y, np.asarray(want), 1e-2)
        np.testing.assert_array_equal(bits, jax.random.key_data(want_key))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_every_kind_are_unpacked_as_they_were(impl: str) -> None:
    key = jax.random.split(jax.random.key(7, impl=impl), 3)
    packed = _jax_export.pack(key)
    assert isinstance(packed, _jax_export.Bits) and isinstance(packed.data, np.ndarray)
    back = _jax_export.unpack(packed)
    assert back.dtype == key.dtype
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(key))


def test_keys_of_an_unknown_kind_cannot_travel() -> None:
    with pytest.raises(TypeError, match="keys of type 'key<mine>' cannot travel: expected one of JAX's own"):
        _jax_export.key_impl("key<mine>")


@pytest.mark.parametrize(
    ("platform", "version", "described"),
    [("tpu", "any", "tpu"), ("gpu", "CUDA 12.8", "cuda"), ("gpu", "ROCm 6.2", "rocm")],
)
def test_programs_are_exported_for_the_platform_over_there(
    platform: str, version: str, described: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        def __init__(self) -> None:
            self.platform = platform
            self.client = self
            self.platform_version = version

    monkeypatch.setattr(jax, "local_devices", lambda backend: [Found()] if backend == platform else [])
    assert _jax_export.describe(platform) == (described, jax.__version__)


async def test_tensors_by_hand(remote: Opened) -> None:
    backend = remote.backend
    x = backend.alloc_buffer(1 << 16).alloc((2, 8), "float32")
    await backend.tensor_set(x, np.zeros((2, 8), np.float32))
    await backend.tensor_set(x, np.arange(3, dtype=np.float32), offset=5)
    np.testing.assert_array_equal(await backend.tensor_get(x, 4, 5), [0, 0, 1, 2, 0])
    twin = backend.alloc_buffer(1 << 16).alloc((2, 8), "float32")
    await backend.tensor_copy_async(x, twin)  # the same value over there, for values are immutable
    await backend.tensor_set(x, np.ones((2, 8), np.float32))
    np.testing.assert_array_equal(await backend.tensor_get(twin, 4, 5), [0, 0, 1, 2, 0])
    async with ap.open_backend("cpu:1") as cpu:
        y = cpu.alloc_buffer(1 << 16).alloc((2, 8), "float32")
        await backend.tensor_copy_async(twin, y)
        np.testing.assert_array_equal(await cpu.tensor_get(y, 5, 3), [0, 1, 2])
    await backend.synchronize()


async def test_part_of_a_value_that_came_with_a_launch(remote: Opened) -> None:
    """It is NumPy's over there; an output that is an input is one."""
    backend = remote.backend
    x = backend.alloc_buffer(1 << 16).alloc((4,), "float32")
    await backend.tensor_set(x, np.arange(4, dtype=np.float32))
    (arrived,) = await asyncio.to_thread(backend.transfer, [np.arange(8, dtype=np.float32)])
    assert isinstance(arrived, RemoteArray) and backend.holds(arrived) and backend.accepts(arrived)
    reply = backend.link.send("read_range", Ref(arrived.id), _jax_export.bare(x), None)
    with pytest.raises(AttributeError):  # no range, which is not the point: it got as far as reading
        await asyncio.to_thread(reply.wait)
    (same,) = await asyncio.to_thread(backend.transfer, [arrived])
    assert same is arrived
    assert "float32[8] on near:cpu:0 ready" in repr(arrived)


async def test_a_state_lives_there(remote: Opened) -> None:
    def step(w: Any, state: Any, x: Any) -> tuple[Any, Any]:
        state = state + x @ w
        return state.sum(0), state

    params, state_array = np.eye(8, dtype=np.float32), np.zeros((2, 8), np.float32)
    async with ap.Scheduler([remote.backend, "cpu:1"]) as sched:
        weights = await ap.place(params, {"*": remote.backend})
        graph = ap.trace(step, weights, batch(), state=state_array)
        state = ap.State(state_array)
        for k in range(1, 4):
            y = await ap.fetch(await sched.graph_compute(graph, batch(), state=state))
            assert_close(y, k * batch().sum(0))
        fork, snapshot = await state.fork(), await state.snapshot()
        assert isinstance(snapshot.value, ap.Handle)
        for kept in (state, fork):
            assert_close(await ap.fetch(await sched.graph_compute(graph, batch(), state=kept)), 4 * batch().sum(0))
        await state.restore(snapshot)
        assert_close(await ap.fetch((await state.snapshot()).value), 3 * batch())


async def test_what_nobody_has_any_more_is_freed_there(remote: Opened) -> None:
    async with ap.Scheduler([remote.backend, "cpu:1"], n_copies=2) as sched:
        graph = await graph_of(remote, mlp_params(2))
        for k in range(20):
            await ap.fetch(await sched.graph_compute(graph, batch(seed=k)))
        assert len(remote.carrier.actor._values) < 20
    del graph, sched
    remote.backend.newest.clear()
    gc.collect()
    await eventually(lambda: not remote.carrier.actor._values)  # though nothing else is sent


async def test_what_cannot_travel_is_refused(remote: Opened) -> None:
    def calls_back(w: Any, x: Any) -> Any:
        return jax.pure_callback(lambda v: v + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * w

    graph = ap.trace(calls_back, np.float32(2), batch())
    with pytest.raises(ap.PlacementError, match=r"near:cpu:0 does not support pure_callback#0"):
        await remote.backend.graph_plan_create(graph)
    with pytest.raises(ap.PlacementError, match=r"far cannot run pure_callback#0 \(test_remote.py:.*\): it calls back"):
        _jax_export.export_program(program_of(graph), "cpu", "far")


def test_what_jax_cannot_export_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(ap.trace(mlp, mlp_params(1), batch()))

    def exported(error: Exception) -> None:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise error

        monkeypatch.setattr(_jax_export.export, "export", refuse)
        _jax_export.export_program(program, "tpu", "far")

    with pytest.raises(ap.PlacementError, match=r"far cannot run 'mlp_.*operations: dot_general, tanh\): .*'tpu' \(no"):
        exported(NotImplementedError("no rule"))
    with pytest.raises(ap.PlacementError, match=r"far needs the extra .* pip install 'aiopipe\[ray\]' \(no flat"):
        exported(ImportError("no flatbuffers"))


# -- failures ------------------------------------------------------------------------------------


def actor_with(values: dict[int, Any]) -> Nearby:
    near = Nearby()
    near.actor._values.update(values)
    return near


def outcomes(near: Nearby, number: int, *commands: Command) -> list[Outcome]:
    """What the actor answers to one message. Blocks."""
    there, found = threading.Event(), list[Any]()

    def then(answer: Any, error: BaseException | None, lost: bool) -> None:
        found.extend(answer)
        there.set()

    near.send(number, commands, then)
    assert there.wait(60)
    return found


def test_who_reads_what_failed_fails_with_the_same() -> None:
    """Also in later messages, until it is let go of; the rest of the message is carried out."""
    near = Nearby()
    x = np.arange(4.0, dtype=np.float32)
    bad = Command("launch", (Ref(99), Ref(99)), out=(1,))
    fetch_bad, fetch = (Command("download", (Ref(number),)) for number in (1, 2))
    made, read, fine, fetched = outcomes(near, 0, bad, fetch_bad, Command("transfer", (x,), out=(2,)), fetch)
    for failed in (made, read):
        assert isinstance(error_in(failed), KeyError)
    assert error_in(fine) is None
    np.testing.assert_array_equal(fetched.value, x)
    (again,) = outcomes(near, 1, Command("store", (Ref(1), None), out=(3,)))
    assert isinstance(error_in(again), KeyError)
    assert outcomes(near, 2, Command("free", (1, 2, 3)), Command("count", ()))[-1].value == 0
    near.end(1.0)


def test_a_wait_that_fails_is_told_and_kept() -> None:
    near = Nearby()
    (made,) = outcomes(near, -1, Command("upload", (object, None), out=(1,)))
    assert error_in(made) is not None
    (read,) = outcomes(near, 0, Command("download", (Ref(1),)))
    assert type(error_in(read)) is type(error_in(made))
    near.end(1.0)


class Stubborn(Exception):
    """Can be written, but not be read."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def test_an_exception_that_cannot_travel_becomes_one_that_can() -> None:
    assert error_in(Outcome()) is None
    same = error_in(Outcome(_pickled(ValueError("boom"))))
    assert type(same) is ValueError and same.args == ("boom",)
    for error in (Stubborn(1, 2), type("Local", (Exception,), {})("1 and 2")):
        told = error_in(Outcome(_pickled(error)))
        assert type(told) is RuntimeError and str(told) == f"{type(error).__name__}: 1 and 2"
    unread = error_in(Outcome(b"of another version"))
    assert type(unread) is RuntimeError and "cannot be read on this machine" in str(unread)


async def test_a_failure_is_that_of_its_evaluation_alone(remote: Opened) -> None:
    params = mlp_params(2)
    async with ap.Scheduler([remote.backend, "cpu:1"], n_copies=3) as sched:
        graph = await graph_of(remote, params)
        await ap.fetch(await sched.graph_compute(graph, batch()))
        actor, launch = remote.carrier.actor, RemoteActor._launch
        calls = 0

        def second_fails(self: RemoteActor, executable: Any, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("boom over there")
            return launch(self, executable, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(_LAUNCHING, "launch", second_fails)
            found = [await sched.graph_compute_async(graph, batch(seed=k)) for k in range(3)]
            with pytest.raises(ap.EvaluationError, match=r"split 0 on 'near:cpu:0'.*boom over there"):
                await found[1]
            for k in (0, 2):
                assert_close(await ap.fetch(await found[k]), oracle(mlp, params, batch(seed=k)))
        assert actor._backend is not None


async def test_a_message_that_cannot_leave_fails_alone(remote: Opened) -> None:
    """Its number is sent again, empty: the actor would wait for it."""
    params = mlp_params(2)
    async with ap.Scheduler([remote.backend, "cpu:1"]) as sched:
        graph = await graph_of(remote, params)
        await ap.fetch(await sched.graph_compute(graph, batch()))
        remote.carrier.refuse.append(MemoryError("the store is full"))
        with pytest.raises(ap.EvaluationError, match="the store is full"):
            await sched.graph_compute(graph, batch())
        assert_close(await ap.fetch(await sched.graph_compute(graph, batch())), oracle(mlp, params, batch()))
        remote.carrier.refuse.append(MemoryError("full again"))
        with pytest.raises(MemoryError, match="full again"):  # one that is not ordered leaves no gap
            await ap.place(params, {"*": remote.backend})
        assert_close(await ap.fetch(await sched.graph_compute(graph, batch())), oracle(mlp, params, batch()))


async def test_if_not_even_the_number_can_leave_the_actor_is_lost(remote: Opened) -> None:
    async with ap.Scheduler([remote.backend, "cpu:1"]) as sched:
        graph = await graph_of(remote, mlp_params(1))
        await ap.fetch(await sched.graph_compute(graph, batch()))
        remote.carrier.refuse += [MemoryError("full"), MemoryError("still full")]
        with pytest.raises((ap.BackendLostError, ap.EvaluationError)):
            await sched.graph_compute(graph, batch())
        with pytest.raises(ap.BackendLostError, match=r"process \d+ on .* is gone \(still full\)"):
            await sched.graph_compute(graph, batch())


# -- the end -------------------------------------------------------------------------------------


async def test_an_error_that_is_false_is_the_first_all_the_same(remote: Opened) -> None:
    arrays = [RemoteArray(remote.backend.link, (), np.dtype(np.float32), Reply()) for _ in range(2)]
    errors = [Falsy("first"), ValueError("second")]
    for array, error in zip(arrays, errors, strict=True):
        array.reply.settle(None, error)
    assert remote.backend.error_of(arrays) is errors[0]
    assert remote.backend.error_of(arrays[:1]) is errors[0]


async def test_a_loss_is_told_to_everybody_who_waits(remote: Opened) -> None:
    async with ap.Scheduler([remote.backend, "cpu:1"], n_copies=3) as sched:
        graph = await graph_of(remote, mlp_params(2))
        result = await sched.graph_compute(graph, batch())
        remote.carrier.holding = True
        waiting = [await sched.graph_compute_async(graph, batch()) for _ in range(2)]
        await asyncio.to_thread(remote.carrier.lose, "\nit burned down.\nfar away")
        for evaluation in waiting:
            with pytest.raises(ap.BackendLostError, match=r"is gone \(it burned down\)"):
                await evaluation
        with pytest.raises(ap.BackendLostError, match=r"open_backend\('near:cpu:0'\)"):
            await result.fetch()
        submitted = sched.statistics().submitted
        with pytest.raises(ap.BackendLostError, match="it burned down"):
            await sched.graph_compute_async(graph, batch())
        assert sched.statistics().submitted == submitted  # refused at the door, not by its launch
        with pytest.raises(ap.BackendLostError):
            await remote.backend.synchronize()


async def test_closing_fails_who_still_waits() -> None:
    opened = Opened()
    backend, carried = opened.backend, await graph_of(opened, mlp_params(1))
    result = await backend.graph_compute(carried, batch())
    opened.carrier.holding = True
    pending = backend.link.send("download", Ref(result.id))
    later = backend.link.send("download", Ref(result.id), at_once=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["aiopipe.devices.remote"], "CLOSE_S", 0.01)  # `aiopipe.devices` is a function, too
        await backend.aclose()
    for reply in (pending, later, backend.link.send("download", Ref(result.id))):
        with pytest.raises(ap.BackendClosedError, match="'near:cpu:0' was closed: open it again"):
            await asyncio.to_thread(reply.wait)
    await backend.aclose()
    told = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    backend.notify([result], lambda error: loop.call_soon_threadsafe(told.set_result, error))
    assert await told is None  # it had ended well before


async def test_what_is_sent_after_a_loss_hears_of_it(remote: Opened) -> None:
    await remote.backend.graph_compute(await graph_of(remote, mlp_params(1)), batch())
    await asyncio.to_thread(remote.carrier.lose, "it burned down")
    link = remote.backend.link
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "connect", lambda: None)  # which looked just before that
        for op in ("free", "download"):
            with pytest.raises(ap.BackendLostError, match="it burned down"):
                await asyncio.to_thread(link.send(op, 0).wait)


async def test_a_host_of_the_lowest_priority_may_be_another_machine(remote: Opened) -> None:
    """A slow one, with this host before it: nothing is opened beside them."""
    params = mlp_params(2)
    async with ap.Scheduler(["cpu:1", remote.backend]) as sched:
        assert [backend.name for backend in sched.backends] == ["cpu:1", "near:cpu:0"]
        graph = ap.trace(mlp, params, batch())
        sched.set_cut(graph, [0] * (len(graph.nodes) - 1) + [1])
        assert_close(await ap.fetch(await sched.graph_compute(graph, batch())), oracle(mlp, params, batch()))


async def test_closing_before_the_first_use_starts_nothing() -> None:
    opened = Opened()
    await opened.backend.aclose()
    assert not opened.carriers
    with pytest.raises(ap.BackendClosedError):
        opened.backend.link.connect()


def test_an_actor_that_starts_while_it_is_closed_ends() -> None:
    carriers: list[Nearby] = []

    def start() -> Nearby:
        closing.start()
        while link._lost is None:
            time.sleep(0.001)
        carriers.append(Nearby())
        return carriers[-1]

    link = Link("late", start)
    closing = threading.Thread(target=link.close)
    with pytest.raises(ap.BackendClosedError, match="'late' was closed"):
        link.connect()
    closing.join()
    assert not carriers[0]._thread.is_alive()


def test_an_actor_that_cannot_be_started_may_be_tried_again() -> None:
    tries = iter([ap.PlacementError("no place"), None])

    def start() -> Nearby:
        error = next(tries)
        if error is not None:
            raise error
        return Nearby()

    link = Link("again", start)
    with pytest.raises(ap.PlacementError, match="no place"):
        link.send("count")
    assert link.send("count").wait() == 0
    assert link.connect() is link.worker
    link.close()


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ap.PlacementError, match="unknown device 'cpu:77'"):
        Nearby("cpu:77")


def test_an_outcome_is_settled_once() -> None:
    reply = Reply()
    assert not reply.done()
    reply.settle(1, None)
    reply.settle(2, ValueError())
    assert reply.done() and reply.wait() == 1


async def test_what_watches_an_actor_never_ends_while_it_lives() -> None:
    actor = RemoteActor("cpu:0")
    watching = asyncio.ensure_future(actor.watch())
    await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    actor._waiting.shutdown()


async def test_work_by_hand_on_values_from_elsewhere(remote: Opened) -> None:
    """Handles, arrays of this process, NumPy: what is not over there yet is sent, the rest is not."""
    backend = remote.backend
    graph = await graph_of(remote, mlp_params(1))
    result = await backend.graph_compute(graph, jnp.asarray(batch()))
    kept = await asyncio.to_thread(partial(backend.upload, result, graph.outputs[0]))
    assert kept is result
    copy = await asyncio.to_thread(partial(backend.duplicate, result, graph.outputs[0]))
    assert copy is not result
    assert_close(await ap.fetch(copy), await ap.fetch(result))
    assert await ap.fetch({"n": 3}) == {"n": 3}
