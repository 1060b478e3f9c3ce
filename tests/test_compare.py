"""Comparing two backends node by node, and copying a graph to one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.backend import Executable
from aiopipe.comparison import array_difference
from aiopipe.devices.base import Program
from aiopipe.devices.sim import Cluster
from aiopipe.devices.xla import XlaBackend, XlaDevice, xla_devices
from aiopipe.graph import Graph, Node
from models import assert_close, batch, mlp, mlp_params, oracle
from simgraphs import array, chain


class WrongBackend(XlaBackend):
    """A device that computes one op wrongly: its first result gets `delta` added, in its first element alone."""

    def __init__(self, device: XlaDevice, op: str, delta: float) -> None:
        super().__init__(device)
        self.op, self.delta = op, delta

    def load(self, program: Program) -> Executable:
        right = super().load(program)
        if all(node.op != self.op for node in program.nodes):
            return right

        def call(*args: Any) -> Sequence[Any]:
            first, *rest = right.call(*args)
            return [first.at[(0,) * first.ndim].add(self.delta), *rest]

        return replace(right, call=call)


class PoorDevice(XlaDevice):
    """A device without some ops."""

    def __init__(self, device: jax.Device, lacks: Collection[str]) -> None:
        super().__init__(device)
        self.lacks = lacks

    def supports_op(self, node: Node) -> bool:
        return node.op not in self.lacks and super().supports_op(node)


@pytest.fixture
async def cpus() -> AsyncIterator[list[ap.Backend]]:
    backends = ap.open_backends("cpu:0", "cpu:1")
    yield backends
    for backend in backends:
        await backend.aclose()


def traced(n_layers: int = 3) -> tuple[Graph, np.ndarray[Any, Any]]:
    x = batch()
    return ap.trace(mlp, mlp_params(n_layers), x), x


def nodes_of(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


async def test_two_good_backends_agree(cpus: list[ap.Backend]) -> None:
    graph, x = traced()
    report = await ap.compare_backends(graph, *cpus, inputs=(x,))
    assert [(n.index, n.node, n.op, n.source) for n in report.nodes] == [
        (n.index, n.name, n.op, n.source) for n in graph.nodes
    ]
    assert all("models.py" in node.source for node in report.nodes)
    assert report.max_abs_difference == 0.0 and not report.above(0.0) and not report.stopped
    assert (report.graph, report.a, report.b, report.n_nodes) == ("mlp", "cpu:0", "cpu:1", len(graph.nodes))
    assert str(report) == f"'mlp' on cpu:0 and cpu:1: {report.n_nodes} of {report.n_nodes} nodes compared, " + (
        "largest difference 0"
    )


async def test_a_wrong_op_is_found_by_name(cpus: list[ap.Backend]) -> None:
    """Only the wrong nodes differ: what comes after them starts from the good backend's results again."""
    graph, x = traced()
    async with WrongBackend(xla_devices("cpu")[1], "tanh", 0.25) as wrong:
        report = await ap.compare_backends(graph, cpus[0], wrong, inputs=(x,))
    tanhs = nodes_of(graph, "tanh")
    assert [node.node for node in report.above(1e-3)] == [node.name for node in tanhs]
    assert report.largest is not None
    assert report.largest.op == "tanh" and report.largest.source == tanhs[0].source
    assert all(node.max_abs_difference == pytest.approx(0.25, rel=1e-5) for node in report.above(1e-3))
    assert f"tanh#{tanhs[0].index} at {tanhs[0].source}: differs by 0.25" in str(report)


async def test_every_value_goes_to_the_callback(cpus: list[ap.Backend]) -> None:
    graph, x = traced(2)
    seen: list[tuple[int, str, Any, Any, float]] = []

    def callback(index: int, node: Node, a: Any, b: Any, difference: float) -> bool:
        seen.append((index, node.name, a, b, difference))
        return True

    async with WrongBackend(xla_devices("cpu")[1], "dot_general", -1.0) as wrong:
        report = await ap.compare_backends(graph, cpus[0], wrong, callback, inputs=(x,))
    assert [(index, name) for index, name, *_ in seen] == [(node.index, node.name) for node in graph.nodes]
    assert_close(seen[-1][2], oracle(mlp, mlp_params(2), x))
    for (_, _, a, b, difference), node in zip(seen, report.nodes, strict=True):
        assert type(a) is type(b) is np.ndarray
        assert difference == np.abs(a.astype(np.float64) - b).max() == node.max_abs_difference
        assert node.max_abs_value == np.abs(a).max()
        assert node.relative_difference == difference / np.abs(a).max()


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_callback_can_stop(cpus: list[ap.Backend], is_async: bool) -> None:
    graph, x = traced()
    stop_at = graph.nodes[2].index

    def plain(index: int, *_: Any) -> bool:
        return index != stop_at

    async def slow(index: int, *_: Any) -> bool:
        await asyncio.sleep(0)
        return index != stop_at

    report = await ap.compare_backends(graph, *cpus, slow if is_async else plain, inputs=(x,))
    assert report.stopped and len(report.nodes) == 3 < report.n_nodes
    assert "3 of 6 nodes compared" in str(report) and "stopped" in str(report)


async def test_a_callback_that_only_looks_does_not_stop(cpus: list[ap.Backend]) -> None:
    graph, x = traced(1)
    report = await ap.compare_backends(graph, *cpus, lambda *_: None, inputs=(x,))  # type: ignore[arg-type, return-value]
    assert not report.stopped and len(report.nodes) == len(graph.nodes)


async def test_an_error_of_the_callback_reaches_the_caller(cpus: list[ap.Backend]) -> None:
    graph, x = traced(1)

    def callback(*_: Any) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await ap.compare_backends(graph, *cpus, callback, inputs=(x,))


async def test_cancelling_leaves_no_thread_behind(cpus: list[ap.Backend]) -> None:
    graph, x = traced()
    reached = asyncio.Event()

    async def callback(*_: Any) -> bool:
        reached.set()
        await asyncio.Event().wait()
        return True

    task = asyncio.create_task(ap.compare_backends(graph, *cpus, callback, inputs=(x,)))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nodes_of_several_results_give_tuples(cpus: list[ap.Backend]) -> None:
    def top(_: Any, x: Any) -> Any:
        return jax.lax.top_k(x, 2)

    x = batch()
    values: list[Any] = []
    graph = ap.trace(top, None, x)
    report = await ap.compare_backends(graph, *cpus, lambda i, n, a, b, d: values.append(a) or True, inputs=(x,))
    (found,) = [v for v, node in zip(values, graph.nodes, strict=True) if node.op == "top_k"]
    assert_close(found, tuple(oracle(top, None, x)))
    assert report.max_abs_difference == 0.0


async def test_an_op_that_the_second_lacks_is_reported(cpus: list[ap.Backend]) -> None:
    graph, x = traced(2)
    async with XlaBackend(PoorDevice(jax.devices("cpu")[2], {"tanh"})) as poor:
        seen: list[str] = []
        report = await ap.compare_backends(
            graph, cpus[0], poor, lambda i, node, *_: seen.append(node.op) or True, inputs=(x,)
        )
        assert [node.op for node in report.unsupported] == ["tanh", "tanh"] and "tanh" not in seen
        assert len(report.nodes) == len(graph.nodes) and "not supported" in str(report)
        with pytest.raises(ap.PlacementError, match=r"'cpu:2' has no 'tanh'.*models\.py"):
            await ap.compare_backends(graph, poor, cpus[0], inputs=(x,))


async def test_a_node_that_fails_is_named(cpus: list[ap.Backend]) -> None:
    class Failing(XlaBackend):
        def load(self, program: Program) -> Executable:
            def call(*args: Any) -> Sequence[Any]:
                raise RuntimeError("no such instruction")

            right = super().load(program)
            return replace(right, call=call) if program.nodes[0].op == "tanh" else right

    graph, x = traced(2)
    first = nodes_of(graph, "tanh")[0]
    async with Failing(xla_devices("cpu")[1]) as failing:
        with pytest.raises(ap.EvaluationError, match="no such instruction") as caught:
            await ap.compare_backends(graph, cpus[0], failing, inputs=(x,))
    error = caught.value
    assert (error.split, error.backend, error.node) == (first.index, "cpu:1", first.name)
    assert error.source == first.source and isinstance(error.__cause__, RuntimeError)


async def test_loops_keys_constants_and_literals(cpus: list[ap.Backend]) -> None:
    table = jnp.arange(8.0)

    def fn(w: Any, x: Any, key: Any) -> Any:
        noise = jax.random.normal(jax.random.split(key)[1], x.shape)
        total = jax.lax.fori_loop(0, 3, lambda _, y: y @ w, x + noise * table)
        return total.astype(jnp.bfloat16), total > 0, 7

    w, x, key = mlp_params(1)[0], batch(), jax.random.key(3)
    report = await ap.compare_backends(ap.trace(fn, w, x, key), *cpus, inputs=(x, key))
    assert report.max_abs_difference == 0.0 and not report.unsupported


async def test_an_effect_happens_on_both(cpus: list[ap.Backend]) -> None:
    told: list[float] = []

    def fn(_: Any, x: Any) -> Any:
        jax.debug.callback(lambda v: told.append(float(v)), x.sum())
        return x + 1

    x = np.ones(3, np.float32)
    report = await ap.compare_backends(ap.trace(fn, None, x), *cpus, inputs=(x,))
    for cpu in cpus:
        await cpu.synchronize()
    assert told == [3.0, 3.0]
    assert len(report.nodes) == report.n_nodes and report.max_abs_difference == 0.0


async def test_weights_on_other_backends_are_fetched(cpus: list[ap.Backend]) -> None:
    params, x = mlp_params(2), batch()
    async with ap.open_backend("cpu:2") as elsewhere:
        weights = await ap.place(params, {"0": elsewhere, "*": cpus[0]})
        report = await ap.compare_backends(ap.trace(mlp, weights, x), *cpus, inputs=(x,))
    assert len(report.nodes) == report.n_nodes and report.max_abs_difference == 0.0


async def test_a_state_is_read_on_both_and_changed_on_neither(cpus: list[ap.Backend]) -> None:
    def step(w: Any, state: Any, x: Any) -> tuple[Any, Any]:
        state = state + x @ w
        return jnp.tanh(state), state

    (w,), x, begin = mlp_params(1), batch(), np.full((2, 8), 3, np.float32)
    graph = ap.trace(step, w, x, state=begin)
    async with WrongBackend(xla_devices("cpu")[2], "tanh", 0.5) as wrong:
        report = await ap.compare_backends(graph, cpus[0], wrong, inputs=(x,), state=begin)
    assert len(report.nodes) == report.n_nodes
    assert [node.op for node in report.above(1e-5)] == ["tanh"]
    np.testing.assert_array_equal(begin, np.full((2, 8), 3, np.float32))
    with pytest.raises(ap.StateError, match=r"takes state 'state' float32\[2,8\], but .* has float32\[3\]"):
        await ap.compare_backends(graph, *cpus, inputs=(x,), state=np.zeros(3, np.float32))


async def test_a_long_report_shows_the_worst_and_counts_the_rest() -> None:
    graph, real, pretended = chain(9), Cluster(1, compute=True), Cluster(1)
    report = await ap.compare_backends(graph, real.backends[0], pretended.backends[0], inputs=(array(1),))
    lines = str(report).splitlines()
    assert len(lines) == 1 + 5 + 1 and lines[-1] == "  and 4 more"
    assert ["stage 8" in lines[1], "stage 4" in lines[5]] == [True, True]


async def test_simulated_backends() -> None:
    """The first computes, the second only pretends to: it answers with zeros."""
    graph, real, pretended = chain(3), Cluster(1, compute=True), Cluster(1)
    report = await ap.compare_backends(graph, real.backends[0], pretended.backends[0], inputs=(array(1),))
    (y,) = (await ap.compare_backends(graph, real.backends[0], real.backends[0], inputs=(array(1),)),)
    assert y.max_abs_difference == 0.0
    want, value = [], array(1)
    for i in range(3):
        value = value * 3 + i
        want.append(float(value.max()))
    assert [node.max_abs_difference for node in report.nodes] == want
    assert report.largest is not None and report.largest.source == "model.py:12 (stage 2)"


async def test_keys_on_simulated_backends() -> None:
    def fn(seed: Any, key: Any) -> Any:
        return jax.random.split(key)[0], jax.random.key(seed)

    graph, cluster = ap.trace(fn, 1, jax.random.key(3)), Cluster(2, compute=True)
    report = await ap.compare_backends(graph, *cluster.backends, inputs=(jax.random.key(3),))
    assert report.max_abs_difference == 0.0 and len(report.nodes) == report.n_nodes


async def test_what_is_given_is_checked(cpus: list[ap.Backend]) -> None:
    graph, x = traced(1)
    with pytest.raises(ap.TensorError, match=r"inputs=\(x,\)"):
        await ap.compare_backends(graph, *cpus, inputs=x)
    with pytest.raises(ap.TensorError, match="argument"):
        await ap.compare_backends(graph, *cpus, inputs=(x, x))
    shapes = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in mlp_params(1)]
    empty = ap.trace(mlp, shapes, x)
    with pytest.raises(ap.TensorError, match=r"'0' float32\[8,8\].* has no value"):
        await ap.compare_backends(empty, *cpus, inputs=(x,))
    with pytest.raises(ap.TensorError, match="has no value"):
        await ap.graph_copy(empty, cpus[0])
    region = cpus[0].alloc_buffer(1 << 10, usage=ap.BufferUsage.WEIGHTS)
    unset = ap.trace(mlp, [region.alloc((8, 8), "float32", "w")], x)
    with pytest.raises(ap.TensorError, match=r"'0' float32\[8,8\].* has no value"):
        await ap.compare_backends(unset, *cpus, inputs=(x,))
    await cpus[1].aclose()
    with pytest.raises(ap.BackendClosedError):
        await ap.compare_backends(graph, *cpus, inputs=(x,))
    with pytest.raises(ap.BackendClosedError):
        await ap.graph_copy(graph, cpus[1])


async def test_a_report_is_frozen(cpus: list[ap.Backend]) -> None:
    graph, x = traced(1)
    report = await ap.compare_backends(graph, *cpus, inputs=(x,))
    with pytest.raises(FrozenInstanceError):
        report.stopped = True  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        report.nodes[0].index = 1  # type: ignore[misc]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "dtype", "want"),
    [
        ([1, NAN, 3], [1, NAN, 3.5], "float32", (0.5, 3.0, 0)),
        ([1, NAN], [1, 2], "float32", (INF, 1.0, 1)),
        ([NAN, 2], [NAN, NAN], "float64", (INF, 2.0, 1)),
        ([NAN], [NAN], "float32", (0.0, 0.0, 0)),
        ([INF, -INF, 1], [INF, -INF, 1], "float32", (0.0, 1.0, 0)),
        ([INF, 1], [-INF, 1], "float32", (INF, 1.0, 0)),
        ([INF], [5], "float32", (INF, 0.0, 0)),
        ([True, False], [True, True], "bool", (1.0, 1.0, 0)),
        ([2**63 - 1, 0], [-(2**63), 0], "int64", (float(2**64 - 1), float(2**63), 0)),
        ([2**64 - 1], [2**64 - 2], "uint64", (1.0, float(2**64), 0)),
        ([-128], [127], "int8", (255.0, 128.0, 0)),
        ([1, 2], [1, 2.5], ml_dtypes.bfloat16, (0.5, 2.0, 0)),
        ([3 + 4j], [0], "complex64", (5.0, 5.0, 0)),
        ([complex(0, NAN)], [complex(NAN, 0)], "complex64", (0.0, 0.0, 0)),
        ([], [], "float32", (0.0, 0.0, 0)),
    ],
)
def test_differences(a: Any, b: Any, dtype: Any, want: tuple[float, float, int]) -> None:
    assert array_difference(np.array(a, dtype), np.array(b, dtype)) == want


def test_other_shapes_or_types_differ() -> None:
    assert array_difference(np.zeros(2), np.zeros((2, 1)))[0] == INF
    assert array_difference(np.zeros(2), np.zeros(2, np.float32))[0] == INF


# graph_copy ---------------------------------------------------------------------------------------


async def test_a_copied_graph_runs_on_its_backend(cpus: list[ap.Backend]) -> None:
    params, x = mlp_params(3), batch()
    graph = ap.trace(mlp, params, x)
    before = [(t.source, t.buffers) for t in graph.tensors]
    copy = await ap.graph_copy(graph, cpus[1])
    assert [(t.source, t.buffers) for t in graph.tensors] == before
    assert all([b.backend for b in t.buffers] == [cpus[1]] for t in copy.weights)
    assert (copy.nodes, copy.inputs, copy.name) == (graph.nodes, graph.inputs, graph.name)
    async with ap.Scheduler(cpus) as sched:
        plan = await sched.plan(copy)
        assert {plan.devices[split.backend].name for split in plan.splits} == {"cpu:1"}
        assert_close(await sched.graph_compute(copy, x), oracle(mlp, params, x))
        assert sched.statistics().copied_weights_nbytes == 0


async def test_a_copy_shares_what_is_there_and_copies_tied_weights_once(cpus: list[ap.Backend]) -> None:
    w, x = mlp_params(1)[0], batch()
    tied = await ap.graph_copy(ap.trace(mlp, [w, w], x), cpus[0])
    assert tied.weights[0].buffers[0] is tied.weights[1].buffers[0]
    placed = await ap.place([w], {"*": cpus[0]})
    again = await ap.graph_copy(ap.trace(mlp, placed, x), cpus[0])
    assert again.weights[0].buffers[0].value is placed[0].buffers[0].value
    moved = await ap.graph_copy(again, cpus[1])
    assert moved.weights[0].buffers[0].value.devices() == {jax.devices("cpu")[1]}
