"""State on real devices: what it holds, where, and what evaluations do to it. The oracle is `jax.jit` on one device."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.xla import XlaBackend
from models import assert_close, oracle

WIDTH, ROWS, LAYERS = 8, 16, 4
X = jax.ShapeDtypeStruct((WIDTH,), np.float32)


def step(weights: list[Any], state: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
    """A decoder in small: every layer writes a row of its cache and reads all of it."""
    caches = []
    for w, cache in zip(weights, state["cache"], strict=True):
        cache = jax.lax.dynamic_update_slice(cache, (x @ w)[None], (state["n"], 0))
        caches.append(cache)
        x = jnp.tanh(x @ w + cache.sum(0))
    return x, {"cache": caches, "n": state["n"] + 1}


def weights() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH for _ in range(LAYERS)]


def empty() -> dict[str, Any]:
    return {"cache": [np.zeros((ROWS, WIDTH), np.float32) for _ in range(LAYERS)], "n": np.int32(0)}


def xs(n: int = 6, seed: int = 1) -> list[np.ndarray]:
    return [np.random.default_rng([seed, i]).standard_normal(WIDTH).astype(np.float32) for i in range(n)]


def one_by_one(values: list[np.ndarray], state: Any = None) -> tuple[list[Any], Any]:
    """What the same steps give on one device."""
    state, results, fn = empty() if state is None else state, [], jax.jit(step)
    for x in values:
        y, state = fn(weights(), state, x)
        results.append(np.asarray(y))
    return results, jax.tree.map(np.asarray, state)


async def spread(sched: ap.Scheduler, n_devices: int = 2) -> ap.Graph:
    """`step` with its layers spread over the first devices, in order."""
    place = {str(i): sched.backends[i * n_devices // LAYERS] for i in range(LAYERS)}
    return ap.trace(step, await ap.place(weights(), place), X, state=empty())


def devices(n: int) -> list[str]:
    return [f"cpu:{i}" for i in range(n)]


# What comes out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_devices", [1, 2, 4])
async def test_steps_equal_one_device_for_every_number_of_copies(n_devices: int) -> None:
    want, last = one_by_one(xs(10))
    exact: list[Any] = []
    for n_copies in (1, 2, 4, 8):
        async with ap.Scheduler(devices(n_devices), n_copies=n_copies) as sched:
            graph, state = await spread(sched, n_devices), ap.State(empty())
            evaluations = [await sched.graph_compute_async(graph, x, state=state) for x in xs(10)]
            got = [np.asarray(await evaluation) for evaluation in evaluations]
            for a, b in zip(got, want, strict=True):
                assert_close(a, b)
            assert_close(jax.tree.map(np.asarray, (await state.snapshot()).value), last)
            assert state.n_evaluations == 10 + 1  # the snapshot is one, too
            exact.append(np.stack(got).tobytes())
    assert len(set(exact)) == 1


async def test_many_states_at_once_each_go_their_own_way() -> None:
    async with ap.Scheduler(devices(2), n_copies=3) as sched:
        graph = await spread(sched)
        states = [ap.State(empty(), name=f"s{i}") for i in range(8)]

        async def session(i: int) -> list[Any]:
            return [np.asarray(await sched.graph_compute(graph, x, state=states[i])) for x in xs(5, seed=i)]

        for i, got in enumerate(await asyncio.gather(*map(session, range(8)))):
            assert_close(got, one_by_one(xs(5, seed=i))[0])
        assert sched.statistics().planned == 1


async def test_a_stream_goes_on_from_batch_to_batch() -> None:
    async with ap.Pipeline(step, weights(), devices=devices(2)) as pipe:
        state = ap.State(empty())
        got = [np.asarray(y) async for y in pipe.stream(xs(7), state=state)]
        assert_close(got, one_by_one(xs(7))[0])
        assert_close(np.asarray(await pipe(xs(9)[8], state=state)), one_by_one([*xs(7), xs(9)[8]])[0][-1])
        assert set(state.backends.values()) == {"cpu:0", "cpu:1"}
        assert (await pipe.plan(X, state=state)).state_homes == state.home_indices


async def test_an_eval_callback_sees_the_same_steps() -> None:
    async with ap.Scheduler(devices(2)) as sched:
        graph, state = await spread(sched), ap.State(empty())
        sched.set_eval_callback(lambda tensor, ask: tensor.name.startswith("dynamic_update_slice") or not ask)
        got = [np.asarray(await sched.graph_compute(graph, x, state=state)) for x in xs(4)]
        assert_close(got, one_by_one(xs(4))[0])


async def test_inputs_that_were_set_before_use_a_state_too() -> None:
    async with ap.Scheduler(devices(2)) as sched:
        graph, state = await spread(sched), ap.State(empty())
        for x, want in zip(xs(3), one_by_one(xs(3))[0], strict=True):
            await sched.tensor_set(graph.inputs[0], x)
            await (await sched.graph_compute_async(graph, state=state))
            assert_close(await sched.tensor_get(graph.outputs[0]), want)


# Where it is -------------------------------------------------------------------------------------


async def test_arrays_stay_on_their_devices_and_are_replaced_in_place() -> None:
    async with ap.Scheduler(devices(2)) as sched:
        graph, state = await spread(sched), ap.State(empty())
        for x in xs(2):
            await sched.graph_compute(graph, x, state=state)
        before = [array.unsafe_buffer_pointer() for array in state._arrays[:-1]]
        for x in xs(5):
            await sched.graph_compute(graph, x, state=state)
        assert [array.unsafe_buffer_pointer() for array in state._arrays[:-1]] == before
        assert [state.backends[f"cache/{i}"] for i in range(LAYERS)] == ["cpu:0", "cpu:0", "cpu:1", "cpu:1"]
        for array, name in zip(state._arrays, state.backends.values(), strict=True):
            assert f"cpu:{next(iter(array.devices())).id}" == name


async def test_memory_is_flat() -> None:
    async with ap.Scheduler(devices(2)) as sched:
        graph, state = await spread(sched), ap.State(empty())
        for x in xs(sched.n_copies):  # every slot has its staging buffers, which are arrays too
            await sched.graph_compute(graph, x, state=state)
        gc.collect()
        before = len(jax.live_arrays())
        for x in xs(30):
            await sched.graph_compute(graph, x, state=state)
        gc.collect()
        assert len(jax.live_arrays()) == before


async def test_state_that_is_placed_keeps_its_place_and_its_nodes() -> None:
    async with ap.Scheduler(devices(3)) as sched:
        here = jax.devices()[2]
        arrays = {"cache": [jax.device_put(c, here) for c in empty()["cache"]], "n": jax.device_put(np.int32(0), here)}
        placed = await ap.place(weights(), {"*": sched.backends[0]})
        graph = ap.trace(step, placed, X, state=arrays)
        state = ap.State(arrays)
        got = [np.asarray(await sched.graph_compute(graph, x, state=state)) for x in xs(3)]
        assert_close(got, one_by_one(xs(3))[0])
        assert set(state.backends.values()) == {"cpu:2"}
        plan = await sched.plan(graph)
        causes = {plan.assignment.leaf_cause[t.id] for t in graph.state}
        assert causes == {"1.dst"}
        makers = {plan.assignment.cause_of(graph, t.id) for t in graph.new_state}
        assert makers == {"1.dst"}
        # the caller's own arrays are as they were
        assert not any(np.asarray(a).any() for a in arrays["cache"])
        await state.reset()
        assert_close(np.asarray(await sched.graph_compute(graph, xs(1)[0], state=state)), one_by_one(xs(1))[0][0])


async def test_another_graph_follows_the_state() -> None:
    def forget(_: Any, state: dict[str, Any], keep: Any) -> tuple[Any, dict[str, Any]]:
        return keep + 1, {"cache": [c * keep for c in state["cache"]], "n": state["n"]}

    async with ap.Scheduler(devices(3)) as sched:
        graph, state = await spread(sched), ap.State(empty())
        other = ap.trace(forget, None, np.float32(0), state=state)
        await sched.graph_compute(graph, xs(1)[0], state=state)
        homes = state.backends
        assert float(await sched.graph_compute(other, np.float32(0), state=state)) == 1
        assert state.backends == homes
        assert not any(np.asarray(c).any() for c in (await state.snapshot()).value["cache"])
        # for a state that is elsewhere it is planned again
        fresh = ap.State({"cache": [jax.device_put(c, jax.devices()[2]) for c in empty()["cache"]], "n": np.int32(0)})
        planned = sched.statistics().replanned
        await sched.graph_compute(other, np.float32(2), state=fresh)
        assert sched.statistics().replanned == planned + 1
        assert [fresh.backends[f"cache/{i}"] for i in range(LAYERS)] == ["cpu:2"] * LAYERS


async def test_a_pin_decides_where_it_begins() -> None:
    async with ap.Scheduler(devices(2)) as sched:
        graph = ap.trace(step, await ap.place(weights(), {"*": sched.backends[0]}), X, state=empty())
        sched.set_tensor_backend(graph, graph.state[0], sched.backends[1])
        state = ap.State(empty())
        await sched.graph_compute(graph, xs(1)[0], state=state)
        assert state.backends["cache/0"] == "cpu:1" and state.backends["cache/1"] == "cpu:0"
        sched.set_tensor_backend(graph, graph.state[0], sched.backends[0])
        with pytest.raises(ap.PlacementError, match=r"'cache/0'.*is on 'cpu:1', but pinned to 'cpu:0'"):
            await sched.graph_compute(graph, xs(1)[0], state=state)


async def test_bytes_are_counted_and_refused_before_anything_is_allocated() -> None:
    n = 1 << 18
    big = {"cache": jax.ShapeDtypeStruct((n,), np.float32)}

    def fill(_: Any, state: Any, x: Any) -> Any:
        return x + state["cache"][0], {"cache": state["cache"] + x}

    async with ap.Scheduler(["cpu:0"], memory_limit=5 * n * 4, n_copies=1) as sched:
        graph = ap.trace(fill, None, np.float32(0), state=big)
        states = [ap.State(big, name=f"s{i}") for i in range(8)]
        assert states[0].nbytes == 4 * n
        before = sched.buffer_size("cpu:0")
        room = 0
        with pytest.raises(ap.AllocationError, match="free other states") as info:
            for state in states:
                assert float(await sched.graph_compute(graph, np.float32(1), state=state)) == 1
                room += 1
                assert sched.buffer_size("cpu:0") >= before + room * 4 * n
        assert 1 <= room < 6 and info.value.asked_nbytes == 4 * n
        with pytest.raises(ap.AllocationError):
            await states[0].fork()
        await states[0].free()
        assert float(await sched.graph_compute(graph, np.float32(1), state=states[room])) == 1
        with pytest.raises(ap.StateError, match="was freed"):
            await sched.graph_compute(graph, np.float32(1), state=states[0])


@pytest.mark.parametrize("mib", [3, 5, 7])
async def test_a_state_needs_its_bytes_once(mib: int) -> None:
    start = np.zeros(mib << 18, np.float32)
    async with ap.Scheduler(["cpu:0"], memory_limit=8 << 20, n_copies=1) as sched:
        state, other = ap.State(start), ap.State(start, name="other")
        graph = ap.trace(lambda _, s, x: (x, s + x), None, np.float32(0), state=state)
        await sched.graph_compute(graph, np.float32(1), state=state)
        used = sched.buffer_size("cpu:0")
        assert used < 8 << 20
        if mib == 3:
            await sched.graph_compute(graph, np.float32(1), state=other)
        else:
            with pytest.raises(ap.AllocationError, match=r"'other'.*they have") as info:
                await sched.graph_compute(graph, np.float32(1), state=other)
            assert info.value.asked_nbytes == mib << 20
            assert info.value.available_nbytes == (8 << 20) - used


# Snapshots ---------------------------------------------------------------------------------------


async def test_snapshot_restore_fork_and_reset() -> None:
    values = xs(6)
    want, _ = one_by_one(values)
    async with ap.Scheduler(devices(2)) as sched:
        graph, state = await spread(sched), ap.State(empty())
        running = [await sched.graph_compute_async(graph, x, state=state) for x in values[:3]]
        taken = await state.snapshot()  # behind those that were submitted
        fork = await state.fork()
        running += [await sched.graph_compute_async(graph, x, state=state) for x in values[3:]]
        assert_close([np.asarray(await e) for e in running], want)
        for _ in range(2):  # a snapshot can be restored as often as one likes
            await state.restore(taken)
            assert_close(np.asarray(await sched.graph_compute(graph, values[3], state=state)), want[3])
        assert_close(np.asarray(await sched.graph_compute(graph, values[3], state=fork)), want[3])
        assert_close(np.asarray(await sched.graph_compute(graph, values[4], state=fork)), want[4])
        await fork.reset()
        assert_close(np.asarray(await sched.graph_compute(graph, values[0], state=fork)), want[0])
        assert taken.nbytes == state.nbytes and "'state'" in repr(taken)
        other = ap.State({"a": np.zeros(3)})
        with pytest.raises(ap.StateError, match="other arrays"):
            await other.restore(taken)


@asynccontextmanager
async def taking_a_first_snapshot(x: Any) -> AsyncIterator[tuple[ap.Scheduler, ap.Graph, ap.State, Any]]:
    """A state after one evaluation, of which a snapshot has been begun, whose plan is being made."""
    async with ap.Scheduler(devices(2)) as sched:
        graph, state = await spread(sched), ap.State(empty())
        await sched.graph_compute(graph, x, state=state)
        taking = asyncio.ensure_future(state.snapshot())
        await asyncio.sleep(0)
        yield sched, graph, state, taking


@pytest.mark.parametrize("then", ["evaluations", "reset", "fork", "free"])
async def test_the_first_snapshot_is_in_order_too(then: str) -> None:
    """It needs a plan, which is made in threads. What is asked for meanwhile comes behind it."""
    values = xs(3)
    async with taking_a_first_snapshot(values[0]) as (sched, graph, state, taking):
        if then == "evaluations":
            second, third = [sched.graph_compute(graph, x, state=state) for x in values[1:]]
            assert_close(list(map(np.asarray, await asyncio.gather(second, third))), one_by_one(values)[0][1:])
        elif then == "reset":
            await state.reset()
            got = await sched.graph_compute(graph, values[0], state=state)
            assert_close(np.asarray(got), one_by_one(values)[0][0])
        elif then == "fork":
            fork = asyncio.ensure_future(state.fork())
            await asyncio.sleep(0)
            await sched.graph_compute(graph, values[2], state=state)
            got = await sched.graph_compute(graph, values[1], state=await fork)
            assert_close(np.asarray(got), one_by_one(values)[0][1])
        else:
            await state.free()
        assert_close(jax.tree.map(np.asarray, (await taking).value), one_by_one(values[:1])[1])


async def test_a_first_snapshot_that_is_cancelled_or_fails_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    values = xs(3)
    async with taking_a_first_snapshot(values[0]) as (sched, graph, state, taking):
        second = asyncio.ensure_future(sched.graph_compute(graph, values[1], state=state))
        await asyncio.sleep(0)
        taking.cancel()
        assert_close(np.asarray(await second), one_by_one(values)[0][1])
        with pytest.raises(asyncio.CancelledError):
            await taking
        await sched.synchronize()
        sched.reset()
        with monkeypatch.context() as patch:
            patch.setattr(XlaBackend, "load", lambda self, program: 1 // 0)
            taking = asyncio.ensure_future(state.snapshot())
            await asyncio.sleep(0)
            third = asyncio.ensure_future(sched.graph_compute(graph, values[2], state=state))
            with pytest.raises(ZeroDivisionError):
                await taking
        assert_close(np.asarray(await third), one_by_one(values)[0][2])


async def test_the_plan_of_snapshots_goes_with_the_last_state_of_its_kind() -> None:
    start = np.zeros(1 << 10, np.float32)
    async with ap.Scheduler(devices(1)) as sched:
        first, second = ap.State(start), ap.State(start)
        graph = ap.trace(lambda _, s, x: (x, s + x), None, np.float32(0), state=start)
        for state in (first, second):
            await sched.graph_compute(graph, np.float32(1), state=state)
        before = sched.buffer_size("cpu:0")
        await first.snapshot()
        fork = await first.fork()
        planned = sched.statistics().planned
        await first.free()
        third = ap.State(start)
        await sched.graph_compute(graph, np.float32(1), state=third)
        for state in (second, third, fork):  # one plan for all of them
            await state.snapshot()
        assert sched.statistics().planned == planned
        await third.free()
        await fork.free()
        assert sched.buffer_size("cpu:0") > before
        await second.free()
        assert sched.buffer_size("cpu:0") == before - start.nbytes  # a plan counts one state where none is there
        assert len(sched._plans.values()) == 1
        fourth = ap.State(start)
        await sched.graph_compute(graph, np.float32(1), state=fourth)
        await fourth.snapshot()
        del fourth, state
        await asyncio.sleep(0)  # asyncio lets go of the task that loaded it
        gc.collect()
        assert len(sched._plans.values()) == 1


async def test_before_its_first_evaluation() -> None:
    state = ap.State({"a": np.arange(3.0, dtype=np.float32)})
    fork = await state.fork()
    await state.reset()
    await state.restore(await fork.snapshot())
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(lambda _, s, x: (s["a"].sum() + x, {"a": s["a"] * 2}), None, np.float32(0), state=state)
        for each in (state, fork):
            assert float(await sched.graph_compute(graph, np.float32(1), state=each)) == 4
            assert float(await sched.graph_compute(graph, np.float32(1), state=each)) == 7


async def test_the_callers_arrays_stay_the_callers() -> None:
    mine = np.ones(4, np.float32)
    theirs = jnp.ones(4)
    state = ap.State({"a": mine, "b": theirs})
    mine[:] = 7
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(
            lambda _, s: (s["a"] + s["b"], jax.tree.map(lambda a: a + 1, s)), None, state={"a": mine, "b": theirs}
        )
        first = await sched.graph_compute(graph, state=state)
        second = await sched.graph_compute(graph, state=state)
        assert np.asarray(first).tolist() == [2.0] * 4 and np.asarray(second).tolist() == [4.0] * 4
    assert np.asarray(theirs).tolist() == [1.0] * 4


async def test_what_a_snapshot_shows_cannot_be_changed() -> None:
    """Neither of a state that was not used yet, whose arrays are those that it begins with, nor of one that was."""
    start = {"a": np.ones(4, np.float32), "n": np.float32(1), "z": jax.ShapeDtypeStruct((4,), np.float32)}
    state = ap.State(start)
    graph = ap.trace(lambda _, s: (s["a"].sum() + s["n"] + s["z"].sum(), s), None, state=state)

    async def unchanged() -> Any:
        taken = await state.snapshot()
        for leaf in taken.value.values():
            with pytest.raises((ValueError, TypeError)):
                leaf[...] = 100
        return taken

    async with ap.Scheduler(["cpu:0"]) as sched:
        taken = await unchanged()
        assert float(await sched.graph_compute(graph, state=state)) == 5
        await unchanged()
        for again in (state.reset(), state.restore(taken)):
            await again
            await unchanged()
            assert float(await sched.graph_compute(graph, state=state)) == 5


# Functions of all kinds --------------------------------------------------------------------------


def swap(_: Any, s: Any, x: Any) -> Any:
    return x, {"a": s["b"], "b": s["a"]}


def keep_input(_: Any, s: Any, x: Any) -> Any:
    return s["a"] + s["b"], {"a": x, "b": s["a"]}


def constant(w: Any, s: Any, x: Any) -> Any:
    return s["a"] + x, {"a": w, "b": jnp.zeros(4)}


def same_for_both(_: Any, s: Any, x: Any) -> Any:
    y = s["a"] + x
    return y, {"a": y, "b": y}


def unchanged(_: Any, s: Any, x: Any) -> Any:
    return s, {"a": s["a"], "b": jax.jit(lambda b: b)(s["b"])}


def write_only(_: Any, s: Any, x: Any) -> Any:
    return None, {"a": x * 2, "b": x * 3}


def literal(_: Any, s: Any, x: Any) -> Any:
    return s["b"], {"a": s["b"] * 2, "b": jnp.full(4, 3.0)}


@pytest.mark.parametrize("fn", [swap, keep_input, constant, same_for_both, unchanged, write_only, literal])
@pytest.mark.parametrize("apart", [False, True])
async def test_whatever_takes_the_place_of_a_state(fn: Any, apart: bool) -> None:
    w = np.full(4, 5, np.float32)
    at = jax.devices() if apart else jax.devices()[:1] * 2
    start = {"a": np.arange(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    state = ap.State({key: jax.device_put(v, at[i]) for i, (key, v) in enumerate(start.items())})
    async with ap.Scheduler(devices(2)) as sched:
        graph = ap.trace(fn, w, w, state=state)
        want: Any = start
        for k in range(5):
            x = np.full(4, k, np.float32)
            y, want = oracle(fn, w, want, x)
            got = await sched.graph_compute(graph, x, state=state)
            x[:] = 99  # the caller's own again
            assert_close(jax.tree.map(np.asarray, got), y)
            assert_close(jax.tree.map(np.asarray, (await state.snapshot()).value), want)
            kept = got  # what a caller holds is never taken over
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))


async def test_types_of_all_kinds() -> None:
    def fn(_: Any, s: Any) -> Any:
        key, used = jax.random.split(s["key"])
        drawn = jax.random.uniform(used, (2,))
        new = {"half": s["half"] * 2, "flag": ~s["flag"], "n": s["n"] + 1}
        return drawn, {"key": key, "none": None, "empty": s["empty"], **new}

    start = {
        "key": jax.random.key(3),
        "half": jnp.ones(3, jnp.bfloat16),
        "flag": np.array([True, False]),
        "none": None,
        "n": 0,
        "empty": np.zeros((0, 3), np.float32),
    }
    state = ap.State(start)
    async with ap.Scheduler(devices(2)) as sched:
        graph = ap.trace(fn, None, state=start)
        want: Any = jax.tree.map(lambda x: x, start)
        for _ in range(4):
            y, want = jax.jit(fn)(None, want)
            assert_close(np.asarray(await sched.graph_compute(graph, state=state)), np.asarray(y))
        got = (await state.snapshot()).value
        assert got["half"].dtype == jnp.bfloat16 and got["none"] is None and int(got["n"]) == 4
        assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(want["key"]).tolist()


# What is refused ---------------------------------------------------------------------------------


def test_what_a_function_with_a_state_must_return() -> None:
    s = {"a": np.zeros(3, np.float32)}
    with pytest.raises(ap.TraceError, match=r"expected a tuple of two: \(outputs, new_state\)"):
        ap.trace(lambda w, s: s["a"], None, state=s)
    with pytest.raises(ap.TraceError, match="structure"):
        ap.trace(lambda w, s: (0.0, {"b": s["a"]}), None, state=s)
    with pytest.raises(ap.TraceError, match=r"'a' as float32\[2\], expected float32\[3\]: it has to keep its shape"):
        ap.trace(lambda w, s: (0.0, {"a": s["a"][:2]}), None, state=s)
    with pytest.raises(ap.TraceError, match=r"as int32\[3\], expected float32"):
        ap.trace(lambda w, s: (0.0, {"a": s["a"].astype(jnp.int32)}), None, state=s)


async def test_a_state_where_none_belongs_and_none_where_one_does() -> None:
    plain = ap.trace(lambda w, x: x, None, X)
    async with ap.Scheduler(["cpu:0"]) as sched, ap.Scheduler(["cpu:0"]) as other:
        graph, state = await spread(sched, 1), ap.State(empty())
        with pytest.raises(ap.StateError, match=r"was traced with a state .* but got none"):
            await sched.graph_compute(graph, xs(1)[0])
        with pytest.raises(ap.StateError, match=r"takes 0 arrays of state, but .* has 5"):
            await sched.graph_compute(plain, xs(1)[0], state=state)
        narrow = ap.State({"cache": [np.zeros((3, WIDTH), np.float32)] * LAYERS, "n": np.int32(0)})
        with pytest.raises(ap.StateError, match=r"'cache/0' float32\[16,8\], but .* has float32\[3, 8\]"):
            await sched.graph_compute(graph, xs(1)[0], state=narrow)
        await sched.graph_compute(graph, xs(1)[0], state=state)
        with pytest.raises(ap.StateError, match="belongs to another scheduler"):
            await other.graph_compute(await spread(other, 1), xs(1)[0], state=state)
        with pytest.raises(ap.TensorError):
            ap.State({"a": "text"})


async def test_forbid_replan_holds_for_states() -> None:
    async with ap.Scheduler(["cpu:0"], forbid_replan=True) as sched:
        graph, state = await spread(sched, 1), ap.State(empty())
        with pytest.raises(ap.ReplanError):
            await sched.graph_compute(graph, xs(1)[0], state=state)
        await sched.alloc_graph(graph)
        assert_close(np.asarray(await sched.graph_compute(graph, xs(1)[0], state=state)), one_by_one(xs(1))[0][0])


async def test_a_state_somewhere_else_needs_a_plan_of_its_own() -> None:
    async with ap.Scheduler(devices(2), forbid_replan=True) as sched:
        first, second = await spread(sched, 1), await spread(sched, 2)
        a, b = ap.State(empty()), ap.State(empty())
        await sched.alloc_graph(first, state=a)
        await sched.alloc_graph(second, state=b)
        assert a.backends != b.backends
        with pytest.raises(ap.ReplanError):
            await sched.graph_compute(first, xs(1)[0], state=b)
        for graph, state in ((first, a), (second, b)):
            assert_close(np.asarray(await sched.graph_compute(graph, xs(1)[0], state=state)), one_by_one(xs(1))[0][0])


async def test_reset_while_it_is_being_put_in_place() -> None:
    async with ap.Scheduler(devices(2)) as sched:
        graph, state = await spread(sched), ap.State(empty())
        running = asyncio.ensure_future(sched.graph_compute(graph, xs(1)[0], state=state))
        while not running.done():  # as often as it can be
            await asyncio.sleep(0)
            await state.reset()
        assert_close(np.asarray(await running), one_by_one(xs(1))[0][0])


async def test_the_value_of_a_snapshot_has_zeros_where_nothing_was_given() -> None:
    state = ap.State({"a": jax.ShapeDtypeStruct((2,), np.float32), "b": np.ones(2, np.int32)})
    value = (await state.snapshot()).value
    assert value["a"].tolist() == [0, 0] and value["b"].tolist() == [1, 1]


async def test_it_ends_with_its_scheduler() -> None:
    state = ap.State(empty())
    async with ap.Scheduler(["cpu:0"]) as sched:
        await sched.graph_compute(await spread(sched, 1), xs(1)[0], state=state)
        taken = await state.snapshot()
    with pytest.raises(ap.StateError, match="ended with its scheduler"):
        await state.fork()
    async with ap.Scheduler(["cpu:0"]) as sched:  # a snapshot does not
        again = ap.State(taken.value)
        got = await sched.graph_compute(await spread(sched, 1), xs(2)[1], state=again)
        assert_close(np.asarray(got), one_by_one(xs(2))[0][1])


async def test_it_ends_with_its_scheduler_also_while_it_is_put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    upload, began, go_on = XlaBackend.upload, threading.Event(), threading.Event()

    def held_up(self: XlaBackend, value: Any, tensor: ap.Tensor) -> Any:
        uploaded = upload(self, value, tensor)
        if tensor.name == "n":  # the last of them
            began.set()
            assert go_on.wait(30)
        return uploaded

    state = ap.State(empty())
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = await spread(sched, 1)
        await sched.plan(graph)
        monkeypatch.setattr(XlaBackend, "upload", held_up)
        running = asyncio.ensure_future(sched.graph_compute(graph, xs(1)[0], state=state))
        assert await asyncio.to_thread(began.wait, 30)
        with pytest.warns(ResourceWarning, match="the thread 'aiopipe-upload' is still at work"):
            await sched.aclose(timeout_s=0)
    go_on.set()  # what was uploaded arrives when all is closed
    with pytest.raises(ap.BackendClosedError):
        await running
    assert not state.is_allocated
    with pytest.raises(ap.StateError, match="ended with its scheduler"):
        await state.snapshot()
