"""How long planning takes, without compiling: assign, split, size, lower; and automatic placement.

    python benchmarks/planning.py [--nodes 1000,10000,100000] [--kinds layers,zigzag,wide,shredded,unlike]

Graphs built by hand, over four devices that hold the weights:

- layers: blocks of ten nodes, a quarter of them on each device,
- zigzag: the same, but each block is on another device than the one before,
- wide: a thousand branches side by side, that meet at the end,
- shredded: a chain whose every node is a split, all of them alike, so that they share their programs,
- unlike: the same with another op in each split, the worst that there is.

Planning is one thread's work, so seconds are of processor time: the best of the repetitions, with the
garbage collector at work as ever. `growth` is the time for each node, over that in the graph of a tenth
of the size: 1 means linear. Memory is what planning allocates at its peak, by tracemalloc. Tracing, most
of which is JAX's own time, is reported beside it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
import tracemalloc
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from _common import Check, finish, progress

import aiopipe as ap
from aiopipe.devices.base import Device
from aiopipe.devices.sim import Cluster
from aiopipe.graph import Graph
from aiopipe.graph_builder import GraphBuilder
from aiopipe.sched.partition import partition
from aiopipe.sched.plan import Plan, make_plan

N_DEVICES = 4
NARROW, WIDE, MATRIX = 1 << 10, 1 << 12, 1 << 20

Placed = tuple[Graph, Mapping[int, tuple[int, ...]]]
"""A graph, and for each weight the backends that hold it."""


class Named:
    """An op that is known by its name alone: nothing here is run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        raise NotImplementedError

    def signature(self) -> Hashable:
        return self.name


@functools.cache
def named(name: str) -> Named:
    return Named(name)


class Draft(GraphBuilder):
    """Vectors of bytes; the backend of each weight is noted in `held`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.held: dict[int, tuple[int, ...]] = {}

    def w(self, backend: int, nbytes: int = MATRIX) -> int:
        tid = self.weight(f"w{len(self.held)}", (nbytes,), "int8", nbytes)
        self.held[tid] = (backend,)
        return tid

    def op(self, op: str, *inputs: int, nbytes: int = NARROW) -> int:
        flops = 2e6 if op.startswith("dot_general") else 1e3
        made = [((nbytes,), "int8", nbytes)]
        return self.node(op, inputs, made, fn=named(op), source="model.py:1", flops=flops)[0]


def blocks(name: str, n_nodes: int, home: Callable[[int, int], int]) -> Placed:
    """Blocks like a transformer's, ten nodes each, narrow where they meet; ``home(i, n)`` is the backend of block i."""
    b = Draft(name)
    h = b.input("x", (NARROW,), "int8", NARROW)
    n_blocks = n_nodes // 10
    for i in range(n_blocks):
        here = home(i, n_blocks)
        n = b.op("norm", h, b.w(here, NARROW))
        q, k, v = (b.op("dot_general", n, b.w(here), nbytes=WIDE) for _ in range(3))
        probs = b.op("softmax", b.op("dot_general", q, k, nbytes=WIDE), nbytes=WIDE)
        mixed = b.op("dot_general", probs, v, nbytes=WIDE)
        up = b.op("relu", b.op("dot_general", mixed, b.w(here), nbytes=WIDE), nbytes=WIDE)
        h = b.op("add", h, up)
    return b.build([h]), b.held


def layers(n_nodes: int) -> Placed:
    return blocks("layers", n_nodes, lambda i, n: i * N_DEVICES // n)


def zigzag(n_nodes: int) -> Placed:
    return blocks("zigzag", n_nodes, lambda i, n: i % N_DEVICES)


def hopping(name: str, n_nodes: int, op: Callable[[int], str]) -> Placed:
    """A chain whose every node is on another device than the one before."""
    b = Draft(name)
    h = b.input("x", (NARROW,), "int8", NARROW)
    for i in range(n_nodes):
        h = b.op(op(i), h, b.w(i % N_DEVICES))
    return b.build([h]), b.held


def shredded(n_nodes: int) -> Placed:
    return hopping("shredded", n_nodes, lambda i: "dot_general")


def unlike(n_nodes: int) -> Placed:
    return hopping("unlike", n_nodes, lambda i: f"dot_general_{i}")


def wide(n_nodes: int) -> Placed:
    b = Draft("wide")
    x = b.input("x", (NARROW,), "int8", NARROW)
    n_branches = min(1000, n_nodes // 10)
    ends = []
    for i in range(n_branches):
        h = x
        for j in range((n_nodes - 1) // n_branches):
            h = b.op("dot_general", h, b.w(i % N_DEVICES)) if j % 2 == 0 else b.op("relu", h)
        ends.append(h)
    return b.build([b.op("concatenate", *ends)]), b.held


KINDS: dict[str, Callable[[int], Placed]] = {f.__name__: f for f in (layers, zigzag, wide, shredded, unlike)}


def best_s(call: Callable[[], object], repetitions: int) -> float:
    """Seconds of processor time of the fastest call."""
    times = []
    for _ in range(repetitions):
        gc.collect()
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def peak_nbytes(call: Callable[[], object]) -> int:
    """Bytes allocated at the most, above what there was."""
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure(kind: str, n_nodes: int, devices: Sequence[Device], repetitions: int, memory: bool) -> dict[str, Any]:
    graph, held = KINDS[kind](n_nodes)
    n = len(graph.nodes)
    plans: list[Plan] = []

    def plan() -> None:
        plans[:] = [make_plan(graph, devices, weights=held)]

    plan_s = best_s(plan, repetitions)
    result = {"kind": kind, "nodes": n, "splits": plans.pop().n_splits}
    result |= {"plan_s": round(plan_s, 4), "us_per_node": round(plan_s / n * 1e6, 2)}
    if memory:
        result["peak_bytes_per_node"] = round(peak_nbytes(plan) / n)
        plans.clear()
    result["partition_s"] = round(best_s(lambda: partition(graph, devices), 1), 4)
    progress(f"{kind} of {n} nodes: planned in {plan_s:.3f} s, partitioned in {result['partition_s']:.3f} s")
    return result


def trace_s(n_nodes: int) -> dict[str, Any]:
    """Seconds that JAX takes to trace a chain, and that `aiopipe.trace` takes, JAX's part included."""
    params = {str(i): jnp.ones((4, 4)) for i in range(n_nodes // 2)}
    x = jax.ShapeDtypeStruct((1, 4), "float32")

    def model(params: Any, x: Any) -> Any:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return x

    def fresh() -> Callable[..., Any]:  # JAX keeps what it traced by the function
        return lambda params, x: model(params, x)

    jax_s = best_s(lambda: jax.make_jaxpr(fresh())(params, x), 2)
    ours_s = best_s(lambda: ap.trace(fresh(), params, x), 2)
    progress(f"traced {n_nodes} nodes in {ours_s:.3f} s, JAX alone in {jax_s:.3f} s")
    return {"nodes": n_nodes, "trace_s": round(ours_s, 4), "jax_s": round(jax_s, 4)}


def add_growth(results: Sequence[dict[str, Any]]) -> None:
    """Time per node over that of the next smaller graph of the kind."""
    previous: dict[str, dict[str, Any]] = {}
    for result in results:
        smaller = previous.get(result["kind"])
        if smaller is not None:
            result["growth"] = round(result["plan_s"] / result["nodes"] / (smaller["plan_s"] / smaller["nodes"]), 2)
        previous[result["kind"]] = result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1000,10000,100000")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--trace", default="1000,10000", help="sizes of the graphs that are traced")
    parser.add_argument("--repetitions", type=int, default=2)
    args = parser.parse_args()
    sizes = sorted(map(int, args.nodes.split(",")))
    devices = [backend.device for backend in Cluster(N_DEVICES).backends]
    results = [
        measure(kind, n, devices, args.repetitions, memory=n <= 10_000 or kind == "layers")
        for kind in args.kinds.split(",")
        for n in sizes
    ]
    add_growth(results)
    traced = [trace_s(n) for n in map(int, filter(None, args.trace.split(",")))]
    checks = []
    for r in results:
        if r["nodes"] > 0.9 * sizes[-1]:
            what = f"{r['kind']}, {r['nodes']:,} nodes, {r['splits']:,} splits"
            checks.append(Check(f"{what}: s to plan", r["plan_s"], "<=", 2.0 * sizes[-1] / 100_000))
            if "growth" in r:
                checks.append(Check(f"{what}: time per node / that of a tenth of them", r["growth"], "<=", 1.5))
    finish({"benchmark": "planning", "results": results, "traced": traced}, checks)


if __name__ == "__main__":
    main()
