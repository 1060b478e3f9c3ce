"""The eval callback: what it is asked, what it sees, and that it changes nothing."""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.backend import Executable
from aiopipe.devices.base import Program
from aiopipe.devices.sim import Cluster, fail
from aiopipe.devices.xla import XlaBackend
from aiopipe.graph import Graph
from aiopipe.graph_builder import GraphBuilder
from models import assert_close, batch, mlp, mlp_params, oracle
from simgraphs import SPEC, array, assert_equal, chain, random_dag, results_of, settled, step, unsplit

N_COPIES = [1, 2, 3, 4]


class Watcher:
    """Wants the tensors for which `wants` says so; keeps what it was asked and what it saw."""

    def __init__(self, wants: Callable[[ap.Tensor], bool] = lambda tensor: True) -> None:
        self.wants = wants
        self.asked: list[str] = []
        self.calls: list[tuple[str, bool]] = []
        self.seen: list[tuple[ap.Tensor, np.ndarray[Any, Any]]] = []

    def __call__(self, tensor: ap.Tensor, ask: bool) -> bool:
        self.calls.append((tensor.name, ask))
        if ask:
            assert tensor.buffers == ()
            self.asked.append(tensor.name)
            return self.wants(tensor)
        (buffer,) = tensor.buffers
        self.seen.append((tensor, np.asarray(buffer.value)))
        return True


def only(*names: str) -> Callable[[ap.Tensor], bool]:
    return lambda tensor: tensor.name in names


def every_value(graph: Graph, *inputs: Any) -> dict[int, Any]:
    """The value of every tensor, node after node in the graph's own order."""
    values: dict[int, Any] = {t.id: np.array(v) for t, v in zip(graph.inputs, inputs, strict=True)}
    values.update((t.id, t.source) for t in graph.weights)
    for node in graph.nodes:
        values.update(zip(node.outputs, node.fn(*(values[t] for t in node.inputs)), strict=True))
    return values


def launched(cluster: Cluster) -> list[list[int]]:
    """The nodes of each launch, in order."""
    return [[node.index for node in r.program.nodes] for r in cluster.log if r.program is not None]


# What it is asked --------------------------------------------------------------------------------


async def test_it_is_asked_in_order_and_told_what_it_wants() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(4)
    watcher = Watcher(only("step#1", "step#2"))
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 0, 1, 1])
        sched.set_eval_callback(watcher)
        await sched.graph_compute(graph, array(1))
    assert watcher.calls == [
        ("step#0", True),
        ("step#1", True),
        ("step#1", False),
        ("step#2", True),
        ("step#2", False),
        ("step#3", True),
    ]


async def test_what_nobody_wants_runs_together_with_what_somebody_does() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0, record=True)
    graph = chain(7)
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 0, 0, 0, 1, 1, 1])
        await sched.plan(graph)
        sched.set_eval_callback(Watcher(only("step#1", "step#3", "step#5")))
        cluster.log.clear()
        assert_equal(await sched.graph_compute(graph, array(1)), unsplit(graph, array(1)))
        assert launched(cluster) == [[0, 1], [2, 3], [4, 5], [6]]
        cluster.log.clear()
        sched.set_eval_callback(Watcher(lambda tensor: False))
        assert_equal(await sched.graph_compute(graph, array(1)), unsplit(graph, array(1)))
        assert launched(cluster) == [[0, 1, 2, 3], [4, 5, 6]]


async def test_each_piece_is_compiled_once() -> None:
    cluster = Cluster(2, compute=True)
    graph = chain(6)
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 0, 0, 1, 1, 1])
        await sched.plan(graph)
        compiled = sched.statistics().compiled
        sched.set_eval_callback(Watcher(lambda tensor: False))
        await sched.graph_compute(graph, array())
        assert sched.statistics().compiled == compiled  # whole splits are there already
        sched.set_eval_callback(Watcher(only("step#2", "step#5")))
        await sched.graph_compute(graph, array())
        assert sched.statistics().compiled == compiled  # and so are pieces that are whole splits
        sched.set_eval_callback(Watcher())
        await results_of(sched, graph, [(array(k),) for k in range(8)])
        assert sched.statistics().compiled == compiled + 6
        sched.set_eval_callback(Watcher(only("step#1")))
        await results_of(sched, graph, [(array(k),) for k in range(8)])
        assert sched.statistics().compiled == compiled + 6 + 1  # 0 and 1; 2 is there, and so is 3 to 5


async def test_inputs_that_were_set_before_use_the_same_pieces() -> None:
    cluster = Cluster(2, compute=True)
    graph = chain(4)
    watcher = Watcher(only("step#0", "step#2"))
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 0, 1, 1])
        sched.set_eval_callback(watcher)
        await sched.tensor_set(graph.inputs[0], array(3))
        await (await sched.graph_compute_async(graph))
        compiled = sched.statistics().compiled
        for _ in range(3):
            await (await sched.graph_compute_async(graph))
        assert_equal(await sched.tensor_get(graph.outputs[0]), unsplit(graph, array(3)))
        assert sched.statistics().compiled == compiled
        await sched.graph_compute(graph, array(4))
        assert sched.statistics().compiled == compiled
    assert len(watcher.seen) == 5 * 2


async def test_a_tensor_that_two_splits_compute_is_asked_about_once() -> None:
    b = GraphBuilder("shared")
    x = b.input("x", (2,), "int64", 16)
    (wide,) = b.node("broadcast_in_dim", [x], [((4, 2), "int64", 64)], fn=Wide())
    outs = [b.node("step", [wide], [((4, 2), "int64", 64)], fn=step(i))[0] for i in range(2)]
    graph = b.build(outs)
    cluster = Cluster(2, compute=True)
    watcher = Watcher()
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 0, 1])
        plan = await sched.plan(graph)
        assert [i for split in plan.splits for i in split.nodes].count(0) == 2
        sched.set_eval_callback(watcher)
        value = np.array([3, 4])
        assert_equal(await sched.graph_compute(graph, value), unsplit(graph, value))
    assert sorted(watcher.asked) == ["broadcast_in_dim#0", "step#1", "step#2"]


class Wide:
    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return (np.broadcast_to(inputs[0], (4, 2)).copy(),)

    def signature(self) -> str:
        return "wide"


async def test_it_holds_for_what_is_submitted_afterwards() -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(2)
    first, second = Watcher(), Watcher()
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, range(2))
        unobserved = await sched.graph_compute_async(graph, array(0))
        sched.set_eval_callback(first)
        observed = await sched.graph_compute_async(graph, array(1))
        sched.set_eval_callback(second)
        other = await sched.graph_compute_async(graph, array(2))
        sched.set_eval_callback(None)
        last = await sched.graph_compute_async(graph, array(3))
        for k, run in enumerate([unobserved, observed, other, last]):
            assert_equal(await run, unsplit(graph, array(k)))
        settled(sched)
    for watcher, k in ((first, 1), (second, 2)):
        assert watcher.asked == ["step#0", "step#1"]
        assert_equal(watcher.seen[1][1], unsplit(graph, array(k)))


async def test_what_is_no_function_is_refused() -> None:
    async with ap.Scheduler(Cluster(1).backends) as sched:
        with pytest.raises(TypeError, match="eval callback is 'print': expected a function"):
            sched.set_eval_callback("print")  # type: ignore[arg-type]


# What it sees ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(12))
async def test_random_graphs_are_the_same_and_show_their_values(seed: int, share: float) -> None:
    rng = random.Random(seed)
    n_devices, n_copies = rng.randint(1, 4), rng.choice(N_COPIES)
    graph = random_dag(rng, rng.randint(1, 40))
    cluster = Cluster(n_devices, compute=True, latency_s=rng.choice([0.0, 0.25, 2.0]))
    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, [rng.randrange(n_devices) for _ in graph.nodes])
        plan = await sched.plan(graph)
        wanted = {t.id for t in graph.tensors if rng.random() < share}
        runs, watchers = [], []
        inputs = [[array(rng.randint(0, 99)) for _ in graph.inputs] for _ in range(2 * n_copies + 1)]
        for values in inputs:
            watchers.append(Watcher(lambda tensor: tensor.id in wanted))
            sched.set_eval_callback(watchers[-1])
            runs.append(await sched.graph_compute_async(graph, *values))
        for run, values, watcher in zip(runs, inputs, watchers, strict=True):
            assert_equal(await run, unsplit(graph, *values))
            made = list(
                dict.fromkeys(t for split in plan.splits for i in split.nodes for t in graph.nodes[i].outputs)
            )
            assert watcher.asked == [graph.tensors[t].name for t in made]
            assert [tensor.id for tensor, _ in watcher.seen] == [t for t in made if t in wanted]
            want = every_value(graph, *values)
            for tensor, value in watcher.seen:
                assert_equal(value, want[tensor.id])
        await sched.synchronize()
        settled(sched)


async def placed(sched: ap.Scheduler, params: list[Any], fn: Any = mlp) -> ap.Graph:
    """The model's graph, its layers on the scheduler's backends in turn."""
    n, k = len(params), len(sched.backends)
    where = {str(i): sched.backends[i * k // n] for i in range(n)}
    return ap.trace(fn, await ap.place(params, where), batch())


@pytest.mark.parametrize("wanted", [None, "dot_general", "tanh", "nothing"])
@pytest.mark.parametrize("n_copies", N_COPIES)
@pytest.mark.parametrize("n_devices", [1, 2, 3])
async def test_results_on_cpu_devices_are_those_without(n_devices: int, n_copies: int, wanted: str | None) -> None:
    params = mlp_params(6)
    async with ap.Scheduler([f"cpu:{i}" for i in range(n_devices)], n_copies=n_copies) as sched:
        graph = await placed(sched, params)
        plain = [np.asarray(y) for y in await results_of(sched, graph, [(batch(seed=s),) for s in range(6)])]
        ops = {t: node.op for node in graph.nodes for t in node.outputs}
        watcher = Watcher(lambda tensor: wanted is None or ops[tensor.id] == wanted)
        sched.set_eval_callback(watcher)
        observed = await results_of(sched, graph, [(batch(seed=s),) for s in range(6)])
        for seed, (a, b) in enumerate(zip(plain, observed, strict=True)):
            assert_close(b, oracle(mlp, params, batch(seed=seed)))
            if wanted == "nothing":
                assert np.asarray(b).tobytes() == a.tobytes()  # the very same executables ran
        n_wanted = {None: 12, "dot_general": 6, "tanh": 6, "nothing": 0}[wanted]
        assert len(watcher.seen) == 6 * n_wanted
        settled(sched)


async def test_values_of_layers_on_cpu_devices() -> None:
    params, x = mlp_params(4), batch()
    watcher = Watcher()
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = await placed(sched, params)
        sched.set_eval_callback(watcher)
        await sched.graph_compute(graph, x)
        backends = [tensor.buffers[0].backend for tensor, _ in watcher.seen]
        assert backends == [sched.backends[0]] * 4 + [sched.backends[1]] * 4
        for i, w in enumerate(params):
            y = x @ w
            x = np.tanh(y)
            assert_close([v for _, v in watcher.seen[2 * i : 2 * i + 2]], [y, x])


async def test_several_results_loops_keys_and_small_types() -> None:
    def fn(w: Any, x: Any, key: Any) -> Any:
        low, high = jnp.split(x @ w[0], 2, axis=1)
        noise = jax.random.uniform(key, low.shape)
        total, steps = jax.lax.scan(lambda c, _: (c + noise, c.sum()), low, length=3)
        half = (total * high).astype(jnp.bfloat16)
        return {"y": jnp.tanh(half.astype(jnp.float32) @ w[1]), "steps": steps, "key": key}

    params = [mlp_params(1)[0], np.ones((4, 4), np.float32)]
    x, key = batch(), jax.random.key(3)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        weights = await ap.place(params, {"0": sched.backends[0], "1": sched.backends[1]})
        graph = ap.trace(fn, weights, x, key)
        names: set[str] = set()

        def callback(tensor: ap.Tensor, ask: bool) -> bool:
            names.add(tensor.name)
            if not ask:
                value = tensor.buffers[0].value
                assert value.is_ready() and value.shape == tensor.shape and str(value.dtype) == tensor.dtype
            return True

        sched.set_eval_callback(callback)
        got = await sched.graph_compute(graph, x, key)
        want = jax.jit(fn)(params, x, key)
        assert_close([got["y"], got["steps"]], [np.asarray(want["y"]), np.asarray(want["steps"])], tol=1e-2)
        assert (jax.random.key_data(got["key"]) == jax.random.key_data(key)).all()
        made = {t for split in (await sched.plan(graph)).splits for i in split.nodes for t in graph.nodes[i].outputs}
        assert names == {graph.tensors[t].name for t in made}


async def test_an_output_that_is_an_input_or_a_weight_is_not_asked_about() -> None:
    x = batch()
    watcher = Watcher()
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = ap.trace(lambda w, x: (x, w), x + 1, x)
        sched.set_eval_callback(watcher)
        assert_close(await sched.graph_compute(graph, x), (x, x + 1))
    assert watcher.calls == []


async def test_effects_run_once() -> None:
    seen: list[float] = []

    def fn(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w[0])
        jax.debug.callback(lambda v: seen.append(float(v)), y.sum())
        return jnp.tanh(y @ w[1])

    params, x = mlp_params(2), batch()
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = await placed(sched, params, fn)
        sched.set_eval_callback(Watcher())
        assert_close(await sched.graph_compute(graph, x), oracle(mlp, params, x))
        await sched.synchronize()
    assert seen == pytest.approx([float(np.tanh(x @ params[0]).sum())], rel=1e-5)


# How it is called --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_an_async_callback_may_take_its_time(n_copies: int) -> None:
    cluster = Cluster(2, compute=True, split_cost_s=1.0)
    graph = chain(4)
    seen: dict[int, list[str]] = {}
    number: contextvars.ContextVar[int] = contextvars.ContextVar("number")

    async def callback(tensor: ap.Tensor, ask: bool) -> bool:
        await cluster.clock.sleep(0.5)
        if not ask:
            seen.setdefault(number.get(), []).append(tensor.name)
        return True

    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, [0, 0, 1, 1])
        sched.set_eval_callback(callback)
        runs = []
        for k in range(5):
            number.set(k)  # the callback runs in the context of whoever submitted
            runs.append(await sched.graph_compute_async(graph, array(k)))
        for k, run in enumerate(runs):
            assert run.copy_id == k % n_copies
            assert_equal(await run, unsplit(graph, array(k)))
        settled(sched)
    assert seen == {k: [f"step#{i}" for i in range(4)] for k in range(5)}


async def test_observed_evaluations_overlap() -> None:
    """Each waits within its callback for the other: one after the other, they would wait for ever."""
    both = asyncio.Barrier(2)

    async def callback(tensor: ap.Tensor, ask: bool) -> bool:
        await both.wait()
        return True

    params = mlp_params(2)
    async with ap.Scheduler(["cpu:0", "cpu:1"], n_copies=2) as sched:
        graph = await placed(sched, params)
        sched.set_eval_callback(callback)
        runs = [await sched.graph_compute_async(graph, batch(seed=s)) for s in range(2)]
        async with asyncio.timeout(30):
            for seed, run in enumerate(runs):
                assert_close(await run, oracle(mlp, params, batch(seed=seed)))


async def test_pieces_are_never_launched_on_the_loops_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece may block its launcher (XLA runs `exp` alone in the caller) where its split would not."""
    threads: set[threading.Thread] = set()
    original = XlaBackend.load

    def load(self: XlaBackend, program: Program) -> Executable:
        executable = original(self, program)

        def call(*args: Any) -> Sequence[Any]:
            threads.add(threading.current_thread())
            return executable.call(*args)

        return replace(executable, call=call)

    monkeypatch.setattr(XlaBackend, "load", load)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = await placed(sched, mlp_params(2))
        await sched.graph_compute(graph, batch())
        assert threads == {threading.main_thread()}  # such small splits are launched inline
        threads.clear()
        sched.set_eval_callback(Watcher(only("tanh#1")))
        await sched.graph_compute(graph, batch())
        assert threads and threading.main_thread() not in threads


async def test_every_split_has_its_event() -> None:
    cluster = Cluster(3, compute=True, split_cost_s=1.0)
    graph = chain(6)
    ended: dict[int, list[int]] = {}

    def callback(tensor: ap.Tensor, ask: bool) -> bool:
        if ask:
            ended.setdefault(int(tensor.name.partition("#")[2]), [i for i, e in enumerate(run.events) if e.done()])
        return True

    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 0, 1, 1, 2, 2])
        await sched.plan(graph)
        sched.set_eval_callback(callback)
        run = await sched.graph_compute_async(graph, array())
        await run
        # In the middle of a split its event has not happened.
        assert ended == {0: [], 1: [], 2: [0], 3: [0], 4: [0, 1], 5: [0, 1]}
        for event in run.events:
            await event


async def test_busy_times_count_every_piece() -> None:
    cluster = Cluster(2, compute=True, node_cost_s=1.0)
    graph = chain(6)
    async with ap.Scheduler(cluster.backends, timeline=True) as sched:
        sched.set_cut(graph, [0, 0, 0, 1, 1, 1])
        sched.set_eval_callback(Watcher(only("step#1")))
        await sched.graph_compute(graph, array())
        await sched.synchronize()
        assert sched.statistics().busy_s == pytest.approx({"sim:0": 3.0, "sim:1": 3.0})


async def test_equal_values_for_equal_results_of_a_pipeline() -> None:
    params = mlp_params(4)
    watcher = Watcher()
    async with ap.Pipeline(mlp, params, devices=["cpu:0", "cpu:1"]) as pipe:
        pipe.scheduler.set_eval_callback(watcher)
        assert_close(await pipe(batch()), oracle(mlp, params, batch()))
        ys = [y async for y in pipe.stream(batch(seed=s) for s in range(6))]
        for seed, y in enumerate(ys):
            assert_close(y, oracle(mlp, params, batch(seed=seed)))
    assert len(watcher.seen) == 7 * 8


# What goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("when", [True, False])
@pytest.mark.parametrize("n_copies", N_COPIES)
async def test_what_the_callback_raises_fails_that_evaluation(n_copies: int, when: bool, kind: str) -> None:
    cluster = Cluster(3, compute=True, split_cost_s=1.0, record=True)
    graph = chain(3)
    raised = ZeroDivisionError("by the callback")

    def callback(tensor: ap.Tensor, ask: bool) -> bool:
        if tensor.name == "step#1" and ask == when:
            raise raised
        return True

    async def later(tensor: ap.Tensor, ask: bool) -> bool:
        await asyncio.sleep(0)
        return callback(tensor, ask)

    async with ap.Scheduler(cluster.backends, n_copies=n_copies) as sched:
        sched.set_cut(graph, range(3))
        await sched.plan(graph)
        before = await sched.graph_compute_async(graph, array(0))
        sched.set_eval_callback(callback if kind == "plain" else later)
        bad = await sched.graph_compute_async(graph, array(1))
        sched.set_eval_callback(None)
        with pytest.raises(ap.EvaluationError, match=r"callback raised ZeroDivisionError .*'step#1' int64\[4\]") as e:
            await bad
        assert e.value.__cause__ is raised
        assert (e.value.split, e.value.backend, e.value.node) == (1, "sim:1", "step#1")
        assert e.value.source == "model.py:11 (stage 1)"
        frame = raised.__traceback__
        assert frame is not None and frame.tb_frame.f_code.co_filename == __file__  # the user's, and no frame of ours
        assert_equal(await before, unsplit(graph, array(0)))
        for got, k in zip(await results_of(sched, graph, [(array(k),) for k in range(8)]), range(8), strict=True):
            assert_equal(got, unsplit(graph, array(k)))
        settled(sched)
        assert sched.statistics().failed == 1


@pytest.mark.parametrize("answer", [None, 1, np.ones(3), jnp.float32(1)])
async def test_an_answer_that_is_neither_true_nor_false(answer: Any) -> None:
    graph = chain(1)
    async with ap.Scheduler(Cluster(1, compute=True).backends) as sched:
        sched.set_eval_callback(lambda tensor, ask: True if ask else answer)
        with pytest.raises(ap.EvaluationError, match="expected True or False") as caught:
            await sched.graph_compute(graph, array())
        assert type(caught.value.__cause__) is TypeError
        sched.set_eval_callback(lambda tensor, ask: np.bool_(True))  # type: ignore[arg-type,return-value]
        assert_equal(await sched.graph_compute(graph, array()), unsplit(graph, array()))


@pytest.mark.parametrize("compute", [True, False])
@pytest.mark.parametrize("wanted", [[3], [1], [2], [], [0, 1, 2, 3]])
async def test_a_failure_on_a_device_is_blamed_on_its_split(wanted: Collection[int], compute: bool) -> None:
    """Also where it is noticed at a split that has only inherited it."""
    cluster = Cluster(4, compute=compute, split_cost_s=1.0)
    graph = chain([step(0), fail("broken", OSError, launches={0}), step(2), step(3)])
    watcher = Watcher(only(*(f"step#{i}" for i in wanted)))
    async with ap.Scheduler(cluster.backends, n_copies=2) as sched:
        sched.set_cut(graph, range(4))
        sched.set_eval_callback(watcher)
        with pytest.raises(ap.EvaluationError, match=r"split 1 .*broken") as caught:
            await sched.graph_compute(graph, array())
        assert (caught.value.split, caught.value.backend) == (1, "sim:1")
        assert type(caught.value.__cause__) is OSError
        assert [tensor.name for tensor, _ in watcher.seen] == [f"step#{i}" for i in wanted if i == 0]
        await sched.graph_compute(graph, array())  # it fails once
        settled(sched)


async def test_a_piece_that_cannot_be_launched_or_loaded() -> None:
    cluster = Cluster(2, compute=True)
    graph = chain(4)
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 0, 1, 1])
        await sched.plan(graph)
        sched.set_eval_callback(Watcher(only("step#2")))
        cluster.fail_next_allocation(1)
        with pytest.raises(ap.AllocationError, match="sim:1"):
            await sched.graph_compute(graph, array())
        assert_equal(await sched.graph_compute(graph, array()), unsplit(graph, array()))

        def close(tensor: ap.Tensor, ask: bool) -> bool:
            cluster.backends[1].closed = True  # under the evaluation, which was let in
            return not ask

        sched.set_eval_callback(close)
        with pytest.raises(ap.EvaluationError, match="split 1 on 'sim:1'"):
            await sched.graph_compute(graph, array())
        cluster.backends[1].closed = False
        sched.set_eval_callback(Watcher(only("step#2")))
        assert_equal(await sched.graph_compute(graph, array()), unsplit(graph, array()))
        await sched.synchronize()
        settled(sched)


async def test_an_xla_failure_in_a_piece() -> None:
    def picky(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if np.isnan(x).any():
            raise ValueError("a NaN came in")
        return np.asarray(x)

    def fn(w: list[Any], x: Any) -> Any:
        x = jnp.tanh(x @ w[0])
        x = jax.pure_callback(picky, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jnp.tanh(x @ w[1])

    params, bad = mlp_params(2), np.full_like(batch(), np.nan)
    async with ap.Scheduler(["cpu:0", "cpu:1"]) as sched:
        graph = await placed(sched, params, fn)
        sched.set_eval_callback(Watcher())
        with pytest.raises(ap.EvaluationError, match="a NaN came in") as caught:
            await sched.graph_compute(graph, bad)
        assert "test_eval_callback.py" in caught.value.source
        assert_close(await sched.graph_compute(graph, batch()), oracle(fn, params, batch()))
        await sched.synchronize()
        settled(sched)


async def test_a_graph_without_nodes_for_a_token() -> None:
    """A split of nothing but an effect returns a token; in pieces, too."""
    b = GraphBuilder("effects")
    x = b.input("x", *SPEC)
    (y,) = b.node("step", [x], [SPEC], fn=step(1))
    b.node("print", [y], [], fn=Nothing(), has_effect=True)
    graph = b.build([y])
    for wanted in (True, False):
        async with ap.Scheduler(Cluster(2, compute=True).backends) as sched:
            sched.set_cut(graph, [0, 1])
            sched.set_eval_callback(Watcher(lambda tensor, wanted=wanted: wanted))
            assert_equal(await sched.graph_compute(graph, array()), unsplit(graph, array()))


class Nothing:
    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return ()

    def signature(self) -> str:
        return "nothing"


@pytest.mark.parametrize("n_copies", [1, 2, 3])
async def test_evaluations_from_within_a_callback_are_as_many_as_other_slots(n_copies: int) -> None:
    async with ap.Scheduler(["cpu:0"], n_copies=n_copies) as sched:
        observed, other = ap.trace(mlp, mlp_params(1), batch()), ap.trace(mlp, mlp_params(2), batch())
        await sched.plan(other)
        n_done, waiting = 0, list[asyncio.Task[Any]]()

        async def callback(_: ap.Tensor, ask: bool) -> bool:
            nonlocal n_done
            if not ask and not waiting:
                sched.set_eval_callback(None)
                for _ in range(n_copies - 1):
                    await sched.graph_compute(other, batch())
                    n_done += 1
                waiting.append(asyncio.ensure_future(sched.graph_compute(other, batch())))
                await asyncio.sleep(0)
                assert sched.statistics().waiting == 1  # for the slot of the observed one
            return True

        sched.set_eval_callback(callback)
        await sched.graph_compute(observed, batch())
        await waiting[0]
        assert n_done == n_copies - 1
