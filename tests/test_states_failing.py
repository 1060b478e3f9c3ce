"""State and what goes wrong: failed, aborted and cancelled evaluations, in order, on simulated and real devices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.sim import Cluster, HostOp, SimBackend, SimValue
from aiopipe.devices.simvalue import read
from aiopipe.graph import Graph
from aiopipe.graph_builder import GraphBuilder
from simgraphs import SPEC, array, settled

ADD = HostOp(lambda s, x: s * 3 + x)
SHOW = HostOp(lambda s, x: s * 7 + x)


def chain(n: int, *, show: Sequence[HostOp] = ()) -> Graph:
    """x -> stage -> ... -> stage; each adds to a state of its own and passes on what it then holds."""
    b = GraphBuilder("stages")
    x = b.input("x", *SPEC)
    leaves = [b.state(f"s{i}", *SPEC) for i in range(n)]
    new = []
    for i, leaf in enumerate(leaves):
        (s,) = b.node("add", [leaf, x], [SPEC], fn=ADD, source=f"model.py:{10 + i} (stage {i})")
        (x,) = b.node("show", [s, x], [SPEC], fn=show[i] if show else SHOW, source=f"model.py:{10 + i} (stage {i})")
        new.append(s)
    return b.build([x], new_state=new)


def zeros(n: int) -> ap.State:
    return ap.State([np.zeros(SPEC[0], np.int64) for _ in range(n)])


async def test_a_key_without_a_value_cannot_begin_a_state() -> None:
    def draw(w: Any, key: Any, x: Any) -> tuple[Any, Any]:
        key, used = jax.random.split(key)
        return jax.random.normal(used, x.shape) + x, key

    kind = jax.eval_shape(lambda: jax.random.key(0))
    async with ap.Scheduler(["cpu:0"]) as sched:
        graph = ap.trace(draw, (), np.zeros(3, np.float32), state=kind)
        with pytest.raises(ap.StateError, match=r"'state' key<fry>\[\] has no value, and a key cannot begin with"):
            await sched.graph_compute(graph, np.zeros(3, np.float32), state=ap.State(kind))
        state = ap.State(jax.random.key(0))
        first = np.asarray(await sched.graph_compute(graph, np.zeros(3, np.float32), state=state))
        assert (first != np.asarray(await sched.graph_compute(graph, np.zeros(3, np.float32), state=state))).all()


def by_hand(n: int, inputs: list[Any]) -> list[Any]:
    state, results = [np.zeros(SPEC[0], np.int64) for _ in range(n)], []
    for x in inputs:
        for i in range(n):
            state[i] = state[i] * 3 + x
            x = state[i] * 7 + x
        results.append(x)
    return results


@pytest.fixture(autouse=True)
def wide() -> Any:
    with jax.enable_x64(True):
        yield


async def scheduler(cluster: Cluster, graph: Graph, **options: Any) -> ap.Scheduler:
    sched = ap.Scheduler(cluster.backends, **options)
    n = len(cluster.backends)
    sched.set_cut(graph, [min(i * n // len(graph.nodes), n - 1) for i in range(len(graph.nodes))])
    return sched


# Order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
async def test_states_in_order_whatever_is_submitted_between(seed: int) -> None:
    rng = random.Random(seed)
    n_devices = rng.randint(1, 4)
    cluster = Cluster(n_devices, compute=True, split_cost_s=1.0, latency_s=rng.choice([0.0, 2.5]))
    graph = chain(rng.randint(n_devices, 6))
    n = len(graph.state)
    async with await scheduler(cluster, graph, n_copies=rng.choice([1, 2, 4, 8])) as sched:
        states = [zeros(n) for _ in range(rng.randint(1, 4))]
        given: list[list[Any]] = [[] for _ in states]
        running: list[list[ap.Evaluation]] = [[] for _ in states]
        for k in range(30):
            i = rng.randrange(len(states))
            given[i].append(array(k))
            running[i].append(await sched.graph_compute_async(graph, array(k), state=states[i]))
        for inputs, evaluations in zip(given, running, strict=True):
            for want, evaluation in zip(by_hand(n, inputs), evaluations, strict=True):
                assert np.array_equal(await evaluation, want)
        settled(sched)


async def test_different_states_overlap_and_one_state_follows_itself_from_device_to_device() -> None:
    cluster = Cluster(4, split_cost_s=1.0)
    graph = chain(4)
    async with await scheduler(cluster, graph, n_copies=8) as sched:
        states = [zeros(4) for _ in range(4)]
        for state in states:
            await sched.graph_compute(graph, array(), state=state)
        began = cluster.clock.now
        await asyncio.gather(*(sched.graph_compute(graph, array(), state=state) for state in states))
        assert cluster.clock.now - began == pytest.approx(4 + 3)  # as a pipeline does
        began = cluster.clock.now
        for evaluation in [await sched.graph_compute_async(graph, array(), state=states[0]) for _ in range(4)]:
            await evaluation
        assert cluster.clock.now - began == pytest.approx(4 + 3)  # the next chunk enters behind the one before


async def test_a_step_that_waits_for_its_turn_takes_no_turn_of_others() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2)
    async with await scheduler(cluster, graph, n_copies=3) as sched:
        a, b = zeros(2), zeros(2)
        first = await sched.graph_compute_async(graph, array(1), state=a)
        second = await sched.graph_compute_async(graph, array(2), state=a)
        third = await sched.graph_compute_async(graph, array(3), state=b)
        second.cancel()
        assert np.array_equal(await first, by_hand(2, [array(1)])[0])
        assert np.array_equal(await third, by_hand(2, [array(3)])[0])
        with pytest.raises(asyncio.CancelledError):
            await second


# Failing -----------------------------------------------------------------------------------------


async def test_a_failure_marks_its_state_and_no_other() -> None:
    boom = RuntimeError("boom")

    def show(s: Any, x: Any) -> Any:
        if x[0] == poison:
            raise boom
        return s * 7 + x

    poison = -1
    cluster = Cluster(4, compute=True, split_cost_s=1.0)
    graph = chain(4, show=[SHOW, SHOW, HostOp(show), SHOW])
    async with await scheduler(cluster, graph, n_copies=8) as sched:
        state, other = zeros(4), zeros(4)
        await sched.graph_compute(graph, array(1), state=state)
        taken = await state.snapshot()
        poison = by_hand(2, [array(1), array(2)])[1][0]
        broken = await sched.graph_compute_async(graph, array(2), state=state)
        behind = [await sched.graph_compute_async(graph, array(k), state=state) for k in (3, 4)]
        beside = await sched.graph_compute_async(graph, array(5), state=other)
        with pytest.raises(ap.EvaluationError, match=r"split 2 on 'sim:2'.*stage 2") as info:
            await broken
        assert info.value.__cause__ is boom
        for evaluation in behind:  # they got what the failure left
            with pytest.raises(ap.StateError, match="an evaluation left it in between") as late:
                await evaluation
            assert late.value.__cause__ is info.value
        assert np.array_equal(await beside, by_hand(4, [array(5)])[0])
        with pytest.raises(ap.StateError, match=r"await state.reset\(\)") as refused:
            await sched.graph_compute_async(graph, array(6), state=state)
        assert refused.value.__cause__ is info.value
        with pytest.raises(ap.StateError):
            await state.snapshot()
        await state.restore(taken)
        want = by_hand(4, [array(1), array(7)])[1]
        assert np.array_equal(await sched.graph_compute(graph, array(7), state=state), want)
        settled(sched)


def failing_at(value: int) -> HostOp:
    def show(s: Any, x: Any) -> Any:
        if x[0] == value:
            raise ArithmeticError("poisoned")
        return s * 7 + x

    return HostOp(show)


async def test_who_failed_is_told_so_although_a_later_one_has_marked_the_state_meanwhile() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2, show=[failing_at(2000), SHOW])
    async with await scheduler(cluster, graph) as sched:
        state = zeros(2)
        await sched.alloc_graph(graph, state=state)
        first = await sched.graph_compute_async(graph, array(2), state=state)
        sched.set_eval_callback(lambda tensor, ask: 1 // 0 > 0)
        second = await sched.graph_compute_async(graph, array(1), state=state)
        sched.set_eval_callback(None)
        with pytest.raises(ap.EvaluationError) as its_own:
            await second
        assert isinstance(its_own.value.__cause__, ZeroDivisionError)
        assert cluster.clock.now == 0.0 and state.error is its_own.value
        with pytest.raises(ap.EvaluationError) as info:
            await first
        assert isinstance(info.value.__cause__, ArithmeticError) and info.value.split == 0
        assert state.error is info.value  # what was submitted first stays
        settled(sched)


@pytest.mark.parametrize("seen", ["add#2", "show#3"])
async def test_who_is_observed_and_reads_what_failed_is_told_of_the_state(seen: str) -> None:
    """The first evaluation fails on the second device; the one behind it sees what it left there, where it notices."""
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    bad = by_hand(1, [array(2)])[0][0]

    def add(s: Any, x: Any) -> Any:
        if x[0] == bad:
            raise ArithmeticError("poisoned")
        return s * 3 + x

    b = GraphBuilder("fails second")
    x, *leaves = b.input("x", *SPEC), b.state("s0", *SPEC), b.state("s1", *SPEC)
    (s0,) = b.node("add", [leaves[0], x], [SPEC], fn=ADD)
    (y,) = b.node("show", [s0, x], [SPEC], fn=SHOW)
    (s1,) = b.node("add", [leaves[1], y], [SPEC], fn=HostOp(add))
    (z,) = b.node("show", [s1, y], [SPEC], fn=SHOW)
    graph = b.build([z], new_state=[s0, s1])
    async with await scheduler(cluster, graph) as sched:
        state = zeros(2)
        await sched.alloc_graph(graph, state=state)
        first = await sched.graph_compute_async(graph, array(2), state=state)
        sched.set_eval_callback(lambda tensor, ask: not ask or tensor.name == seen)
        second = await sched.graph_compute_async(graph, array(1), state=state)
        sched.set_eval_callback(None)
        with pytest.raises(ap.EvaluationError) as info:
            await first
        assert isinstance(info.value.__cause__, ArithmeticError) and info.value.split == 1
        with pytest.raises(ap.StateError) as late:
            await second
        assert late.value.__cause__ is info.value
        await sched.synchronize()
        settled(sched)


async def test_a_callback_that_raises_on_a_real_device_marks_the_state() -> None:
    def check(x: Any) -> Any:
        if x[0] > 1:
            raise ValueError("too large")
        return x

    def step(w: Any, state: Any, x: Any) -> Any:
        y = state["a"] + w[0] * x
        z = jax.pure_callback(check, jax.ShapeDtypeStruct((2,), np.float32), y)
        return z * w[1], {"a": y, "b": state["b"] + z}

    start = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    one = np.ones(2, np.float32)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        weights = await ap.place([one, one], {"0": sched.backends[0], "1": sched.backends[1]})
        state = ap.State(start)
        graph = ap.trace(step, weights, one, state=state)
        await sched.graph_compute(graph, one, state=state)
        with pytest.raises(ap.EvaluationError, match="too large"):
            await sched.graph_compute(graph, one, state=state)
        with pytest.raises(ap.StateError, match="too large"):
            await sched.graph_compute(graph, one, state=state)
        await state.reset()
        assert np.asarray(await sched.graph_compute(graph, one, state=state)).tolist() == [1, 1]


async def test_an_abort_marks_the_state() -> None:  # S25
    cluster = Cluster(4, compute=True, split_cost_s=1.0)
    graph = chain(4)
    async with await scheduler(cluster, graph) as sched:
        state = zeros(4)
        await sched.graph_compute(graph, array(1), state=state)
        sched.set_eval_callback(lambda tensor, ask: tensor.name == "show#5" and ask)
        with pytest.raises(ap.EvaluationAborted):
            await sched.graph_compute(graph, array(2), state=state)
        sched.set_eval_callback(None)
        with pytest.raises(ap.StateError, match="aborted") as info:
            await sched.graph_compute(graph, array(3), state=state)
        assert isinstance(info.value.__cause__, ap.EvaluationAborted)
        await state.reset()
        assert np.array_equal(await sched.graph_compute(graph, array(3), state=state), by_hand(4, [array(3)])[0])
        settled(sched)


def _unless_7(s: Any, x: Any) -> Any:
    if int(x[0]) == 7000:
        raise ArithmeticError("poisoned")
    return s + x


def beside() -> Graph:
    """Adds the input to the state, unless that is the seventh; something slow beside it, and a result of both."""
    b = GraphBuilder("beside")
    x = b.input("x", *SPEC)
    leaf = b.state("s", *SPEC)
    (other,) = b.node("other", [x], [SPEC], fn=HostOp(lambda x: x * 2, cost_s=9.0))
    (new,) = b.node("add", [leaf, x], [SPEC], fn=HostOp(_unless_7, cost_s=1.0))
    (out,) = b.node("show", [leaf, other], [SPEC], fn=SHOW)
    return b.build([out], new_state=[new])


async def test_an_evaluation_that_cannot_be_launched_behind_one_that_failed_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on the CPU, where a value that failed cannot be brought to another device."""
    transfer = SimBackend.transfer

    def reading(self: SimBackend, values: Sequence[Any]) -> Sequence[Any]:
        for value in values:
            if isinstance(value, SimValue) and value.is_ready():
                read(value)
        return transfer(self, values)

    monkeypatch.setattr(SimBackend, "transfer", reading)
    cluster = Cluster(2, compute=True)
    graph, state = beside(), zeros(1)
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [1, 0, 1])
        await sched.graph_compute(graph, array(1), state=state)
        first = await sched.graph_compute_async(graph, array(7), state=state)
        await cluster.clock.sleep(5.0)
        assert not first.done(), "it still computes the other thing"
        second = await sched.graph_compute_async(graph, array(2), state=state)
        with pytest.raises(ap.StateError) as refused:
            await second
        with pytest.raises(ap.EvaluationError, match="poisoned") as info:
            await first
        assert refused.value.__cause__ is info.value
        settled(sched)


# Cancelling --------------------------------------------------------------------------------------


async def test_cancelled_before_its_turn_it_leaves_the_state_as_it_was() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2)
    async with await scheduler(cluster, graph, n_copies=1) as sched:
        state = zeros(2)
        first = await sched.graph_compute_async(graph, array(1), state=state)
        waiting = asyncio.ensure_future(sched.graph_compute_async(graph, array(2), state=state))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await first
        third = await sched.graph_compute(graph, array(3), state=state)
        assert np.array_equal(third, by_hand(2, [array(1), array(3)])[1])


async def test_cancelled_when_all_is_launched_it_counts() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2)
    async with await scheduler(cluster, graph) as sched:
        state = zeros(2)
        await sched.plan(graph)
        first = await sched.graph_compute_async(graph, array(1), state=state)
        assert first.cancel()
        second = await sched.graph_compute(graph, array(2), state=state)
        assert np.array_equal(second, by_hand(2, [array(1), array(2)])[1])
        assert state.n_evaluations == 2


async def test_cancelled_halfway_it_marks_the_state() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2)

    async def slowly(tensor: ap.Tensor, ask: bool) -> bool:
        if not ask:
            await cluster.clock.wait_until(cluster.clock.now + 5)
        return True

    async with await scheduler(cluster, graph) as sched:
        state = zeros(2)
        await sched.graph_compute(graph, array(1), state=state)
        sched.set_eval_callback(slowly)
        evaluation = await sched.graph_compute_async(graph, array(2), state=state)
        await cluster.clock.wait_until(cluster.clock.now + 3)
        evaluation.cancel()
        sched.set_eval_callback(None)
        with pytest.raises(asyncio.CancelledError):
            await evaluation
        with pytest.raises(ap.StateError, match="halfway"):
            await sched.graph_compute(graph, array(3), state=state)
        await state.reset()
        assert np.array_equal(await sched.graph_compute(graph, array(3), state=state), by_hand(2, [array(3)])[0])


async def test_reset_and_free_wait_for_what_is_under_way() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2)
    async with await scheduler(cluster, graph) as sched:
        state = zeros(2)
        running = [await sched.graph_compute_async(graph, array(k), state=state) for k in range(3)]
        await state.reset()
        assert all(evaluation.done() for evaluation in running)
        again = [await sched.graph_compute_async(graph, array(k), state=state) for k in range(3)]
        await state.free()
        for evaluation, want in zip(again, by_hand(2, [array(k) for k in range(3)]), strict=True):
            assert evaluation.done() and np.array_equal(await evaluation, want)
        await state.free()
        for use in (state.snapshot, state.fork, state.reset):
            with pytest.raises(ap.StateError, match="was freed"):
                await use()


async def test_who_waits_beside_free_finds_it_freed() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2)
    async with await scheduler(cluster, graph) as sched:
        state = zeros(2)
        await sched.graph_compute(graph, array(1), state=state)
        taken = await state.snapshot()
        running = await sched.graph_compute_async(graph, array(2), state=state)
        freeing = asyncio.ensure_future(state.free())
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(again) for again in (state.reset(), state.restore(taken))]
        await freeing
        for each in waiting:
            with pytest.raises(ap.StateError, match="was freed"):
                await each
        assert running.done() and not state._source
