"""Simulated devices, without a scheduler."""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.backend import InlineLane
from aiopipe.devices.base import DeviceType, Program
from aiopipe.devices.sim import Cluster, HostOp, SimValue, default_cluster, fail, open_sim, sleep
from aiopipe.errors import AllocationError, BackendClosedError, BackendLostError, PlacementError, TensorError
from aiopipe.graph import Op, Tensor
from aiopipe.graph_builder import GraphBuilder

SHAPE, DTYPE, NBYTES = (4,), "float32", 16
SPEC = (SHAPE, DTYPE, NBYTES)
watchdog = pytest.mark.timeout(60)


def program(*ops: Op, n_inputs: int = 1, donate: tuple[int, ...] = (), name: str = "p") -> Program:
    """A chain: the first op reads all inputs, each other one its predecessor."""
    b = GraphBuilder(name)
    values = [b.input(f"x{i}", *SPEC) for i in range(n_inputs)]
    for op in ops:
        values = b.node("op", values, [SPEC], fn=op)
    g = b.build(values)
    return Program(name, g.nodes, g.inputs, g.outputs, donate=donate)


def array(value: float = 0.0) -> np.ndarray[Any, Any]:
    return np.full(SHAPE, value, DTYPE)


def weight() -> Tensor:
    b = GraphBuilder()
    b.weight("w", *SPEC)
    return b.build([]).weights[0]


async def notified(cluster: Cluster, index: int, values: Sequence[Any]) -> tuple[float, BaseException | None]:
    """When and with what `notify` calls back."""
    future: asyncio.Future[tuple[float, BaseException | None]] = asyncio.get_running_loop().create_future()
    cluster.backends[index].notify(values, lambda error: future.set_result((cluster.clock.now, error)))
    return await future


# --------------------------------------------------------------------------------------- queues and links


async def test_a_device_runs_one_launch_after_the_other() -> None:
    cluster = Cluster(2, record=True)
    a, b = cluster.backends
    run = a.load(program(sleep(2.0), sleep(1.0)))
    x = a.transfer([array()])
    first, second = run.call(*x)[0], run.call(*x)[0]
    assert (first.ready_at, second.ready_at) == (3.0, 6.0)
    moved = b.transfer([second])[0]
    other = b.load(program(sleep(1.0))).call(moved)[0]
    assert other.ready_at == 7.0  # waits for its argument
    assert cluster.busy_s(0) == 6.0 and cluster.busy_s(1) == 1.0
    launches = [r for r in cluster.log if r.kind == "launch"]
    assert [(r.backend.name, r.start_s, r.end_s) for r in launches] == [
        ("sim:0", 0.0, 3.0),
        ("sim:0", 3.0, 6.0),
        ("sim:1", 6.0, 7.0),
    ]
    assert await notified(cluster, 1, [other]) == (7.0, None)
    late = run.call(*x)[0]
    assert late.ready_at == 10.0  # an idle device starts now, not when it became free


async def test_a_link_carries_one_value_after_the_other() -> None:
    cluster = Cluster(3, latency_s=0.5, link_bytes_per_s=16.0, host_bytes_per_s=8.0, record=True)
    a, b, c = cluster.backends
    x, y = a.transfer([array(), array()])
    assert (x.ready_at, y.ready_at) == (2.5, 4.5)  # 16 bytes each, at 8 bytes per second, then 0.5 s
    first, second = b.transfer([x, y])
    assert (first.ready_at, second.ready_at) == (2.5 + 1.5, 4.5 + 1.5)
    again = b.transfer([x])[0]
    assert again.ready_at == 5.5 + 1.0 + 0.5  # the link is busy until 5.5
    assert c.transfer([x])[0].ready_at == 4.0  # another link is not
    assert a.transfer([x])[0] is x
    copy = cluster.log[2]
    assert (copy.kind, copy.src, copy.dst, copy.start_s, copy.end_s, copy.nbytes) == ("copy", a, b, 2.5, 4.0, 16)
    assert cluster.log[0].src is None
    cluster.link(0, 2, latency_s=7.0)
    assert c.transfer([x])[0].ready_at == 3.5 + 1.0 + 7.0
    cluster.link(None, 2, bytes_per_s=16.0, latency_s=0.0)
    assert c.transfer([array()])[0].ready_at == 1.0
    await c.synchronize()
    assert cluster.clock.now == 11.5


async def test_overlap_is_exact() -> None:  # S7
    n_devices, n_evaluations = 4, 10
    cluster = Cluster(n_devices, split_cost_s=1.0)
    calls = [b.load(program(sleep(5.0))).call for b in cluster.backends]
    for _ in range(n_evaluations):
        value: Sequence[Any] = [array()]
        for backend, call in zip(cluster.backends, calls, strict=True):
            value = call(*backend.transfer(value))
    assert await notified(cluster, 3, value) == (n_devices + n_evaluations - 1.0, None)


def test_costs() -> None:
    b = GraphBuilder()
    x = b.input("x", *SPEC)
    y = b.node("dot", [x], [SPEC], fn=HostOp(np.negative), flops=100.0, nbytes=10.0)
    y = b.node("add", y, [SPEC], fn=HostOp(np.negative), flops=1.0, nbytes=40.0)
    y = b.node("own", y, [SPEC], fn=HostOp(np.negative, cost_s=0.25))
    g = b.build(y)
    p = Program("p", g.nodes, g.inputs, g.outputs)

    def cost(cluster: Cluster, index: int = 0) -> float:
        return cluster.program_cost_s(p, cluster.backends[index].device)

    assert cost(Cluster(1, flops_per_s=100.0, bytes_per_s=[10.0])) == 1.0 + 4.0 + 0.25
    assert cost(Cluster(1, node_cost_s=1.0)) == 2.25
    assert cost(Cluster(2, node_cost_s=lambda node, device: device.index + len(node.op)), 1) == 8.25
    assert cost(Cluster(1, split_cost_s=3.0)) == 3.0
    assert cost(Cluster(2, split_cost_s=lambda program, device: device.index), 1) == 1.0


async def test_notify_answers_in_the_order_of_asking_and_after_results() -> None:
    cluster = Cluster(2, compute=True)
    a, b = cluster.backends
    x = a.transfer([array()])
    slow, fast = a.load(program(sleep(2.0))).call(*x), b.load(program(sleep(1.0))).call(*b.transfer([array()]))
    seen: list[tuple[float, str]] = []
    for name, values in (("slow", slow), ("fast", fast), ("none", ())):
        a.notify(values, lambda _, name=name: seen.append((cluster.clock.now, name)))  # type: ignore[misc]
    b.notify(slow, lambda _: seen.append((cluster.clock.now, f"ready={a.all_ready(slow)}")))
    assert not a.all_ready(slow) and not b.all_ready(fast)
    await cluster.clock.sleep(1.0)
    assert b.all_ready(fast) and not seen
    await cluster.clock.sleep(1.0)
    assert seen == [(2.0, "slow"), (2.0, "fast"), (2.0, "none"), (2.0, "ready=True")]


async def test_a_million_launches() -> None:
    n = 1000
    cluster = Cluster(n, split_cost_s=2.0**-10)
    calls = [b.load(program(sleep(1.0))).call for b in cluster.backends]
    x = array()
    for _ in range(n):
        value: Sequence[Any] = [x]
        for backend, call in zip(cluster.backends, calls, strict=True):
            value = call(*backend.transfer(value))
    await cluster.backends[-1].synchronize()
    assert cluster.clock.now == (2 * n - 1) * 2.0**-10
    assert sum(cluster.busy_s(i) for i in range(n)) == n * n * 2.0**-10
    assert len(cluster.log) == 0


# ---------------------------------------------------------------------------------------------- failing


@pytest.mark.parametrize("compute", [False, True])
async def test_a_failure_comes_at_the_virtual_end_and_is_inherited(compute: bool) -> None:  # S8
    cluster = Cluster(2, node_cost_s=1.0, compute=compute)
    a, b = cluster.backends
    bad = a.load(program(fail("broken", ZeroDivisionError))).call(*a.transfer([array()]))
    after = b.load(program(sleep(2.0))).call(*b.transfer(bad))
    good = a.load(program(sleep(1.0))).call(*a.transfer([array(3.0)]))
    assert not a.all_ready(bad) and a.error_of(bad) is None
    when, error = await notified(cluster, 0, bad)
    assert when == 1.0 and isinstance(error, ZeroDivisionError) and str(error) == "broken"
    assert a.all_ready(bad) and a.error_of(bad) is error
    assert await notified(cluster, 1, after) == (3.0, error)
    assert await notified(cluster, 0, good) == (3.0, None)
    with pytest.raises(ZeroDivisionError, match="broken"):
        b.download(after[0])
    np.testing.assert_array_equal(a.download(good[0]), array(3.0 if compute else 0.0))


@pytest.mark.parametrize("compute", [False, True])
async def test_fail_can_choose_its_launches(compute: bool) -> None:
    cluster = Cluster(1, node_cost_s=1.0, compute=compute)
    a = cluster.backends[0]
    run = a.load(program(fail(launches={1})))
    x = a.transfer([array()])
    outcomes = [run.call(*x) for _ in range(3)]
    await a.synchronize()
    assert [a.error_of(values) is None for values in outcomes] == [True, False, True]


async def test_ops_tell_themselves_apart() -> None:
    assert sleep(1.0).signature() == sleep(1.0).signature() != sleep(2.0).signature()
    assert fail("a").signature() == fail("a").signature() != fail("b").signature()
    one, two = fail(launches=[0]), fail(launches=[0])
    assert one.signature() != two.signature()
    assert HostOp(np.add).signature() == HostOp(np.add).signature() != HostOp(np.add, cost_s=1.0).signature()


@pytest.mark.parametrize(
    ("op", "error", "match"),
    [
        (HostOp(lambda x: x / 0 if False else [x, x]), TensorError, "returned 2 values, expected 1"),
        (HostOp(lambda x: x[:2]), TensorError, r"float32\[2\]"),
        (HostOp(lambda x: x.astype("int32")), TensorError, r"int32\[4\]"),
        (HostOp(lambda x: x.sort()), ValueError, "read-only"),
    ],
)
async def test_an_op_that_misbehaves_fails_its_launch(op: Op, error: type[Exception], match: str) -> None:
    cluster = Cluster(1, compute=True)
    a = cluster.backends[0]
    y = a.load(program(op)).call(*a.transfer([array()]))
    _, got = await notified(cluster, 0, y)
    with pytest.raises(error, match=match):
        raise got or AssertionError("no error")


async def test_an_allocation_fails_on_request_once() -> None:
    cluster = Cluster(2, memory_nbytes=[100, None])
    a = cluster.backends[0]
    cluster.fail_next_allocation(0)
    cluster.backends[1].load(program(sleep(1.0)))
    with pytest.raises(AllocationError, match="sim:0 has no room") as caught:
        a.load(program(sleep(1.0)))
    assert (caught.value.backend, caught.value.asked_nbytes, caught.value.available_nbytes) == ("sim:0", 16, 100)
    a.load(program(sleep(1.0)))
    cluster.fail_next_allocation(0)
    with pytest.raises(AllocationError):
        a.upload(array(), weight())
    a.upload(array(), weight())


# ------------------------------------------------------------------------------------------ real values


async def test_a_launch_computes_its_nodes() -> None:
    cluster = Cluster(2, compute=True, node_cost_s=1.0)
    a, b = cluster.backends
    w = a.upload(array(10.0), weight())
    double = HostOp(lambda x: x * np.float32(2), cost_s=0.5)
    y = a.load(program(HostOp(np.add), double, n_inputs=2)).call(w, *a.transfer([array(1.0)]))
    z = b.load(program(double)).call(*b.transfer(y))[0]
    assert z.ready_at == 2.0
    with pytest.raises(TensorError, match="not there yet"):
        np.asarray(z)
    with pytest.raises(TensorError, match="not there yet"):
        b.download(z)  # on the loop's thread nothing could make it ready
    assert await notified(cluster, 1, [z]) == (2.0, None)
    np.testing.assert_array_equal(b.download(z), array(44.0))
    assert np.asarray(z).dtype == np.float32 and np.asarray(z, np.float64).dtype == np.float64
    assert not np.asarray(z).flags.writeable and np.array(z).flags.writeable


@pytest.mark.parametrize("early", [True, False])
async def test_a_staging_buffer_reused_too_early_shows(early: bool) -> None:  # S1, S4
    cluster = Cluster(1, compute=True, latency_s=1.0)
    a = cluster.backends[0]
    staging = a.host_buffer(cluster_input())
    staging[...] = 1.0
    y = a.load(program(HostOp(np.negative, cost_s=1.0))).call(*a.transfer([staging]))
    if early:
        await cluster.clock.sleep(0.5)
        staging[...] = 5.0
    else:
        await cluster.clock.sleep(1.0)
        staging[...] = 5.0
    await a.synchronize()
    np.testing.assert_array_equal(a.download(y[0]), array(-5.0 if early else -1.0))


def cluster_input(dtype: str = DTYPE) -> Tensor:
    b = GraphBuilder()
    b.input("x", SHAPE, dtype, NBYTES)
    return b.build([]).inputs[0]


async def test_a_copy_without_duration_still_reads_after_the_host_had_its_turn() -> None:
    cluster = Cluster(1, compute=True)
    a = cluster.backends[0]
    staging = array(1.0)
    x = a.transfer([staging])
    assert x[0].ready_at == 0.0 and not a.all_ready(x)
    staging[...] = 2.0
    assert await notified(cluster, 0, x) == (0.0, None)
    assert a.all_ready(x)
    np.testing.assert_array_equal(a.download(x[0]), array(2.0))


async def test_a_launch_without_inputs() -> None:  # S5
    cluster = Cluster(1, compute=True)
    a = cluster.backends[0]
    y = a.load(program(HostOp(lambda: array(7.0), cost_s=1.0), n_inputs=0)).call()
    await a.synchronize()
    np.testing.assert_array_equal(a.download(y[0]), array(7.0))


async def test_a_donated_value_is_gone() -> None:  # S22
    cluster = Cluster(2, compute=True, latency_s=1.0)
    a, b = cluster.backends
    x = a.transfer([array(1.0)])
    copied = b.transfer(x)  # posted before the donation, so it still sees the value
    run = a.load(program(HostOp(np.negative), donate=(0,)))
    y = run.call(*x)
    assert x[0].is_deleted() and x[0].backend is None and "donated" in repr(x[0])
    with pytest.raises(TensorError, match="took its memory"):
        run.call(*x)
    with pytest.raises(TensorError, match="took its memory"):
        b.transfer(x)
    with pytest.raises(TensorError, match="took its memory"):
        a.download(x[0])
    assert not a.accepts(x[0])
    await b.synchronize()
    np.testing.assert_array_equal(a.download(y[0]), array(-1.0))
    np.testing.assert_array_equal(b.download(copied[0]), array(1.0))


@watchdog
async def test_a_thread_can_wait_for_a_download() -> None:
    cluster = Cluster(1, compute=True)
    a = cluster.backends[0]
    y = a.load(program(HostOp(np.negative, cost_s=3.0))).call(*a.transfer([array(1.0)]))
    np.testing.assert_array_equal(await asyncio.to_thread(a.download, y[0]), array(-1.0))
    assert cluster.clock.now == 3.0


async def test_results_and_errors_keep_no_value_alive() -> None:
    cluster = Cluster(1, compute=True)
    a = cluster.backends[0]

    def explode(x: Any) -> Any:
        raise RuntimeError("no")

    x = a.transfer([array(1.0)])
    y = a.load(program(HostOp(explode))).call(*x)
    z = a.load(program(HostOp(np.negative))).call(*x)
    await a.synchronize()
    error = a.error_of(y)
    assert error is not None
    refs = [weakref.ref(v) for v in (*x, *y, *z)]
    gc.disable()
    try:
        del x, y, z
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


def test_work_of_a_dead_loop_is_lost_and_says_so() -> None:
    cluster = Cluster(1, compute=True)
    a = cluster.backends[0]
    run = a.load(program(HostOp(np.negative, cost_s=1.0)))

    async def launch() -> list[Any]:
        return list(run.call(*a.transfer([array(1.0)])))

    async def use(values: list[Any]) -> None:
        _, error = await notified(cluster, 0, run.call(*values))
        assert isinstance(error, BackendLostError)
        y = run.call(*a.transfer([array(1.0)]))
        assert (await notified(cluster, 0, y))[1] is None

    asyncio.run(use(asyncio.run(launch())))


async def test_traced_jax_functions_run_as_they_are() -> None:
    jnp = pytest.importorskip("jax.numpy")
    cluster = Cluster(1, compute=True)
    a = cluster.backends[0]
    y = a.load(program(HostOp(functools.partial(jnp.multiply, 2)))).call(*a.transfer([array(2.0)]))
    await a.synchronize()
    assert isinstance(a.download(y[0]), np.ndarray)
    np.testing.assert_array_equal(a.download(y[0]), array(4.0))


# ----------------------------------------------------------------------------------- backends and values


async def test_what_a_device_says_of_itself() -> None:
    cluster = Cluster(3, memory_nbytes=1000, unsupported_ops={0: {"op"}}, temp_nbytes=lambda p: 5 * len(p.nodes))
    a, b, c = cluster.backends
    assert [x.name for x in cluster.backends] == ["sim:0", "sim:1", "sim:2"]
    props = a.device.props
    assert props.type is DeviceType.SIM and props.is_async and not props.aliases_host and props.memory_nbytes == 1000
    assert props.client == c.device.props.client != Cluster(1).backends[0].device.props.client
    assert all(x.device.is_host_cpu for x in cluster.backends)
    assert isinstance(a.make_lane(own=True), InlineLane) and a.make_lane(own=True) is b.make_lane(own=False)
    p = program(sleep(1.0), sleep(1.0))
    assert not a.device.supports_op(p.nodes[0]) and b.device.supports_op(p.nodes[0])
    with pytest.raises(PlacementError, match="sim:0 does not support op#0"):
        a.load(p)
    run = b.load(p)
    assert (run.memory.temp_nbytes, run.memory.argument_nbytes, run.memory.output_nbytes) == (10, 16, 16)
    assert not run.blocks
    assert not Cluster(1, unsupported_ops={"op"}).backends[0].device.supports_op(p.nodes[0])


async def test_values_describe_themselves() -> None:
    cluster = Cluster(2, latency_s=0.5)
    a, b = cluster.backends
    x = a.transfer([array(1.0)])[0]
    assert isinstance(x, SimValue)
    assert (x.shape, x.dtype, x.nbytes, x.backend) == (SHAPE, np.float32, NBYTES, a)
    assert repr(x) == "<SimValue float32[4] on sim:0, ready at 0.5 s>"
    assert a.accepts(x) and b.accepts(x) and a.holds(x) and not b.holds(x)
    assert not a.accepts(array()) and not Cluster(1).backends[0].accepts(x)
    assert a.now() == 0.0 and not x.is_ready()
    await a.synchronize()
    assert a.now() == 0.5 and x.is_ready()
    np.testing.assert_array_equal(np.asarray(x), array(0.0))  # nothing was computed
    w = a.upload(None, weight())
    assert a.upload(w, weight()) is w and w.ready_at == 0.0
    assert b.upload(w, weight()).backend is b
    scalar = a.transfer([3])[0]
    assert scalar.shape == () and scalar.nbytes == 8


async def test_what_was_not_computed_and_has_no_numpy_form_cannot_be_read() -> None:
    graph = ap.trace(lambda w, seed: jax.random.key(seed), (), 1)
    cluster = Cluster(1)
    async with ap.Scheduler(cluster.backends) as sched:
        key = await sched.graph_compute(graph, 1)
        with pytest.raises(TensorError, match="has no NumPy form; give the cluster compute=True"):
            cluster.backends[0].download(key)


async def test_numbers_of_python_become_read_only_arrays() -> None:
    b = GraphBuilder("numbers")
    x = b.input("x", (3,), "int64", 24)
    graph = b.build(b.node("count", [x], [((3,), "int64", 24)], fn=HostOp(lambda x: ([1, 2, 3],))))
    cluster = Cluster(1, compute=True)
    async with ap.Scheduler(cluster.backends) as sched:
        value = cluster.backends[0].download(await sched.graph_compute(graph, np.zeros(3, np.int64)))
    np.testing.assert_array_equal(value, [1, 2, 3])
    assert not value.flags.writeable


async def test_host_buffers() -> None:
    a = Cluster(1).backends[0]
    for dtype in ("float32", "bfloat16", "int4", "float8_e4m3fn", "bool", "complex64"):
        buffer = a.host_buffer(cluster_input(dtype))
        assert buffer.shape == SHAPE and str(buffer.dtype) == dtype
        assert str(a.transfer([buffer])[0].dtype) == dtype
    assert a.host_buffer(cluster_input("key<fry>")) is None


async def test_an_uploaded_weight_is_a_copy() -> None:
    a = Cluster(1, compute=True).backends[0]
    source = array(1.0)
    w = a.upload(source, weight())
    source[...] = 2.0
    np.testing.assert_array_equal(a.download(w), array(1.0))
    with pytest.raises(TensorError, match="no value"):
        a.upload(None, weight())
    with pytest.raises(TensorError, match="shape"):
        a.upload(np.zeros(3), weight())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda a, b, call: call(), "got 0 values, expected 1"),
        (lambda a, b, call: call(array()), "got a ndarray"),
        (lambda a, b, call: call(*b.transfer([array()])), "on another device"),
        (lambda a, b, call: a.transfer(Cluster(1).backends[0].transfer([array()])), "another cluster"),
    ],
)
def test_misuse_is_explained(make: Callable[..., Any], match: str) -> None:
    a, b = Cluster(2).backends
    with pytest.raises(TensorError, match=match):
        make(a, b, a.load(program(sleep(1.0))).call)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cluster(-1),
        lambda: Cluster(1, latency_s=-1.0),
        lambda: Cluster(1, link_bytes_per_s=0.0),
        lambda: Cluster(2, memory_nbytes=[1]),
        lambda: Cluster(1, node_cost_s=math.nan).backends[0].load(program(HostOp(np.negative))),
        lambda: sleep(-1.0),
        lambda: sleep(math.inf),
    ],
)
def test_impossible_numbers_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


@watchdog
async def test_closing_waits_for_what_runs_and_then_refuses() -> None:
    cluster = Cluster(1)
    a = cluster.backends[0]
    run = a.load(program(sleep(2.0)))
    x = a.transfer([array()])
    run.call(*x)
    await a.aclose()
    await a.aclose()
    assert cluster.clock.now == 2.0 and a.closed
    for use in (lambda: run.call(*x), lambda: a.transfer([array()]), lambda: a.load(program(sleep(1.0)))):
        with pytest.raises(BackendClosedError):
            use()
    assert cluster.open(0).load(program(sleep(1.0))).call(*x)[0].ready_at == 3.0


async def test_open_sim() -> None:
    first, third = open_sim(""), open_sim("2", dispatch="own")
    assert (first.name, third.name) == ("sim:0", "sim:2") and len(default_cluster().backends) >= 3
    again = open_sim("0")
    assert again is not first and again.unit is first.unit  # one queue, closed separately
    await first.aclose()
    y = again.load(program(HostOp(np.negative))).call(*again.transfer([array(1.0)]))
    await again.synchronize()
    np.testing.assert_array_equal(again.download(y[0]), array(-1.0))  # real values
    with pytest.raises(PlacementError, match="expected a number"):
        open_sim("x")
    with pytest.raises(PlacementError, match="no simulated device 5"):
        Cluster(1).open(5)
