"""Graphs for simulated devices, their values computed without any scheduler, and a checker of what the devices did."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

import aiopipe as ap
from aiopipe.devices.sim import Cluster, HostOp, Record
from aiopipe.graph import Graph, Op
from aiopipe.graph_builder import GraphBuilder
from aiopipe.sched.plan import Plan
from happens_before import captures_watched

WIDTH = 4
SPEC = ((WIDTH,), "int64", 8 * WIDTH)
"""Integers: they wrap around, so that results are equal to the last bit whatever was computed where."""


def array(value: int = 0) -> np.ndarray[Any, Any]:
    """A value that tells which evaluation it belongs to."""
    return np.arange(WIDTH, dtype=np.int64) + 1000 * value


@functools.cache
def step(i: int) -> Op:
    """``x * 3 + i``: steps of another number, or in another order, give another result."""
    return HostOp(lambda x: x * 3 + i)


TOTAL: Op = HostOp(lambda *xs: functools.reduce(lambda a, b: a * 5 + b, xs))
"""Of any number of operands; depends on their order, too."""


def chain(ops: int | Sequence[Op], *, name: str = "chain") -> Graph:
    """x -> op -> ... -> op; the source line of node i says ``stage i``."""
    b = GraphBuilder(name)
    x = b.input("x", *SPEC)
    for i, op in enumerate([step(i) for i in range(ops)] if isinstance(ops, int) else ops):
        (x,) = b.node("step", [x], [SPEC], fn=op, source=f"model.py:{10 + i} (stage {i})")
    return b.build([x])


def unsplit(graph: Graph, *inputs: Any) -> Any:
    """What the graph returns, node after node in its own order."""
    values: dict[int, Any] = {t.id: np.array(v) for t, v in zip(graph.inputs, inputs, strict=True)}
    values.update((t.id, t.source) for t in graph.weights)
    for node in graph.nodes:
        values.update(zip(node.outputs, node.fn(*(values[t] for t in node.inputs)), strict=True))
    return graph.unflatten_outputs([values[t.id] for t in graph.outputs])


def assert_equal(got: Any, want: Any) -> None:
    """Equal to the last bit; tuples one by one."""
    for a, b in zip(*((v,) if not isinstance(v, tuple) else v for v in (got, want)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def random_dag(rng: random.Random, n_nodes: int) -> Graph:
    """Inputs, weights, nodes of several operands and of several outputs, values that nobody reads."""
    b = GraphBuilder("random")
    tensors = [b.input(f"x{i}", *SPEC) for i in range(rng.randint(1, 4))]
    tensors += [b.weight(f"w{i}", *SPEC, source=array(rng.randint(1, 99))) for i in range(rng.randint(0, 3))]
    for i in range(n_nodes):
        cost_s = rng.choice([0.0, 0.5, 1.0, 3.0])
        inputs = rng.choices(tensors[-10:] if rng.random() < 0.7 else tensors, k=rng.choice([0, 1, 1, 2, 2, 3]))
        if rng.random() < 0.2:
            fn = HostOp(lambda *xs, i=i: (sum(xs, array(i)), sum(xs, array(-i)) * 7), cost_s=cost_s)
            tensors += b.node("pair", inputs, [SPEC, SPEC], fn=fn)
        else:
            fn = HostOp(lambda *xs, i=i: functools.reduce(lambda a, c: a * 5 + c, xs, array(i)), cost_s=cost_s)
            tensors += b.node("mix", inputs, [SPEC], fn=fn)
    return b.build(rng.sample(tensors, k=min(len(tensors), rng.randint(2, 4))))


class Capture(NamedTuple):
    """In a cluster's log: the host wrote the inputs of an evaluation into a slot's staging buffers."""

    at_s: float
    copy_id: int


@contextmanager
def captures_logged(cluster: Cluster) -> Iterator[None]:
    """Have the log say, between the records of the devices, when the host wrote into which slot."""
    log: list[Any] = cluster.log
    with captures_watched(lambda loaded, copy_id: log.append(Capture(cluster.clock.now, copy_id))):
        yield


def check_happens_before(cluster: Cluster, plan: Plan, n_copies: int) -> int:
    """Assert from the log that nothing happened before what it depends on; return how many evaluations there were.

    - a slot's staging buffers are rewritten only after everybody has read them, and its evaluation has ended,
    - a split begins after the splits that it depends on, and after the copies to its device,
    - a device runs one launch at a time, in order.

    Everything is launched on one lane, so the records of an evaluation stand together, in the order of
    its splits, each after its copies.
    """
    evaluations: list[tuple[Capture, list[Record]]] = []
    for entry in cluster.log:
        if isinstance(entry, Capture):
            evaluations.append((entry, []))
        elif evaluations:
            evaluations[-1][1].append(entry)
    slot_free_s = [0.0] * n_copies
    device_free_s: dict[str, float] = {}
    for number, (capture, records) in enumerate(evaluations):
        assert capture.copy_id == number % n_copies, "slots go round"
        assert capture.at_s >= slot_free_s[capture.copy_id], f"evaluation {number} rewrote a slot in use"
        ends: list[float] = []
        arrived: list[float] = []
        for record in records:
            if record.kind == "copy":
                arrived.append(record.end_s)
                continue
            split = plan.splits[len(ends)]
            assert len(arrived) <= len(split.copies), f"a value came to split {split.index} that it did not ask for"
            free = device_free_s.get(record.backend.name, 0.0)
            earliest = max([free, *arrived, *(ends[d] for d in split.depends)])
            assert record.start_s >= earliest, f"split {split.index} of evaluation {number} began too early"
            device_free_s[record.backend.name] = record.end_s
            ends.append(record.end_s)
            arrived.clear()
        assert len(ends) == plan.n_splits and not arrived, "an evaluation launches every split once"
        slot_free_s[capture.copy_id] = max((r.end_s for r in records), default=capture.at_s)
    return len(evaluations)


def settled(sched: ap.Scheduler) -> None:
    """Nobody holds a slot, nobody waits, and every evaluation ended exactly once."""
    s = sched.statistics()
    assert (s.in_flight, s.waiting) == (0, 0)
    assert s.succeeded + s.failed + s.cancelled + s.aborted == s.submitted
    sched._runner.state.validate()
    assert not sched._runner._runs


async def results_of(
    sched: ap.Scheduler, graph: Graph, inputs: Sequence[Sequence[Any]], between: Callable[[], Any] = lambda: None
) -> list[Any]:
    """Submit all, one straight after the other; then their results."""
    evaluations = []
    for values in inputs:
        evaluations.append(await sched.graph_compute_async(graph, *values))
        between()
    return [await evaluation for evaluation in evaluations]


def lower_bound_s(costs_s: Sequence[float], n_evaluations: int) -> float:
    """No chain over these devices can be faster: the slowest is always busy but for the first and last trip."""
    return max(costs_s) * (n_evaluations - 1) + sum(costs_s)


def by_device(costs_s: Sequence[float]) -> Mapping[str, Any]:
    """`Cluster` arguments for a cost that depends on the device alone."""
    return {"split_cost_s": lambda program, device: costs_s[device.index]}
