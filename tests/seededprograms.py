"""Programs for `schedules.play`: each does one kind of thing, on any kind of devices, and checks itself."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import aiopipe as ap
from aiopipe import _loops, _threads, staging
from aiopipe.backend import Backend
from aiopipe.devices.sim import HostOp
from aiopipe.graph import Graph
from aiopipe.graph_builder import GraphBuilder
from aiopipe.lanes import ThreadLane
from aiopipe.mailbox import Mailbox
from schedules import Schedule, play
from simgraphs import WIDTH, array, assert_equal, chain, random_dag, step, unsplit
from simplay import Play
from simprograms import bad, build, random_spec
from worlds import KINDS, Kind, World

Program = Callable[[World], Coroutine[Any, Any, None]]
PROGRAMS: dict[str, Program] = {}
PLAYED: list[tuple[str, Kind]] = []
"""Programs, and the kinds of devices that each is for."""


def program(*kinds: Kind) -> Callable[[Program], Program]:
    def known(fn: Program) -> Program:
        PROGRAMS[fn.__name__] = fn
        PLAYED.extend((fn.__name__, kind) for kind in kinds or KINDS)
        return fn

    return known


def run(name: str, kind: Kind, seed: int, prepare: Callable[[World], None] = lambda world: None) -> Schedule:
    """Play one program under one seed.

    Raises:
        Exception: whatever it found.
    """
    schedule = Schedule(seed)

    async def main(schedule: Schedule) -> None:
        world = World(schedule, kind)
        patch.setattr(staging, "INLINE_CAPTURE_NBYTES", world.inline_capture_nbytes)
        prepare(world)
        await PROGRAMS[name](world)

    bad.clear()
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_loops, "YIELD_S", schedule.rng.choice((-1.0, math.inf)))  # it looks at the real clock
        play(main, schedule)
    return schedule


# What is computed --------------------------------------------------------------------------------


@functools.cache
def _straight(n: int) -> Graph:
    return chain(n)


@functools.cache
def _drawn(seed: int) -> Graph:
    return random_dag(random.Random(seed), 8)


def _poisoned(x: Any) -> None:
    if int(x[0]) in bad:
        raise ArithmeticError("poisoned")


def _checked(h: Any, x: Any) -> Any:
    _poisoned(x)
    return np.asarray(h) + 1


def _calling_back(h: Any, x: Any) -> Any:
    return jax.pure_callback(_checked, jax.ShapeDtypeStruct(h.shape, h.dtype), h, x)


@functools.cache
def _breakable(kind: Kind) -> Graph:
    """Of four stages the second and the last fail where the input is `bad`.

    In 32 bits, for XLA's threads do not know that JAX has been told of more, so that callbacks get and give no more.
    """
    spec = ((WIDTH,), "int32", 4 * WIDTH)
    b = GraphBuilder("breakable")
    h = x = b.input("x", *spec)
    fails = HostOp(_calling_back if kind == "xla" else _checked)
    for i in range(4):
        if i % 2:
            (h,) = b.node("pure_callback", [h, x], [spec], fn=fails, source=f"model.py:{i} (check)")
        else:
            (h,) = b.node("step", [h], [spec], fn=step(i), source=f"model.py:{i} (step)")
    return b.build([h])


def unbroken(x: Any) -> Any:
    return ((x * 3 + 1) * 3 + 2) + 1


async def graph_on(world: World, sched: ap.Scheduler, n_devices: int) -> Graph:
    """Some graph, cut somehow."""
    rng = world.rng
    graph = world.of(_straight(3) if rng.random() < 0.5 else _drawn(rng.randrange(4)))
    somewhere = rng.random() < 0.3
    sched.set_cut(graph, [rng.randrange(n_devices) if somewhere else i % n_devices for i in range(len(graph.nodes))])
    if rng.random() < 0.5:
        await sched.plan(graph)
    return graph


def scheduler(world: World, n_devices: int, **options: Any) -> ap.Scheduler:
    n_copies = world.rng.choice((1, 2, 3))
    return ap.Scheduler(world.devices(n_devices), n_copies=n_copies, timeline=world.rng.random() < 0.3, **options)


def inputs_of(graph: Graph, k: int) -> list[Any]:
    return [array(10 * k + i).astype(tensor.dtype) for i, tensor in enumerate(graph.inputs)]


async def compute(sched: ap.Scheduler, graph: Graph, k: int, **options: Any) -> ap.Evaluation:
    """Submit, and overwrite the inputs as soon as that has returned."""
    values = inputs_of(graph, k)
    try:
        return await sched.graph_compute_async(graph, *values, **options)
    finally:
        for x in values:
            x[:] = -1


def check(graph: Graph, k: int, got: Any) -> None:
    assert_equal(got, unsplit(graph, *inputs_of(graph, k)))


async def all_of(tasks: list[Awaitable[None]]) -> None:
    await asyncio.gather(*tasks)


# Programs ----------------------------------------------------------------------------------------


@program()
async def submitting(w: World) -> None:
    """Clients that come and go; one awaits twice, one its events first."""
    n = w.rng.randint(1, 3)
    sched = scheduler(w, n)
    graph = await graph_on(w, sched, n)

    async def client(k: int, how: str) -> None:
        await w.arrival()
        run = await compute(sched, graph, k)
        await w.arrivals(w.rng.randint(0, 1))
        if how == "events":
            for event in [*run.events, run.event]:
                await event
        if how == "twice":
            for result in await asyncio.gather(asyncio.wait_for(run, None), asyncio.wait_for(run, None)):
                check(graph, k, result)
        check(graph, k, await run)

    hows = [w.rng.choice(("once", "once", "twice", "events")) for _ in range(6)]
    await all_of([client(k, how) for k, how in enumerate(hows)])
    assert sched.statistics().succeeded == 6
    await w.close(sched)


@program()
async def cancelling(w: World) -> None:
    """Evaluations and tasks that are cancelled at any step; the others never notice."""
    n = w.rng.randint(1, 3)
    sched = scheduler(w, n)
    graph = await graph_on(w, sched, n)

    async def client(k: int) -> None:
        await w.arrival()
        check(graph, k, await (await compute(sched, graph, k)))

    async def cancelled(k: int) -> None:
        await w.arrival()
        running = asyncio.ensure_future(client(k))
        await w.arrivals(w.rng.randint(0, 3))
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()

    async def dropped(k: int) -> None:
        await w.arrival()
        run = await compute(sched, graph, k)
        await w.arrivals(w.rng.randint(0, 2))
        was_done = run.done()
        assert run.cancel() is not was_done
        if was_done:
            check(graph, k, await run)
        else:
            assert run.cancelled()
        if w.rng.random() < 0.5:
            await run.event.wait()

    kinds = [w.rng.choice((client, cancelled, dropped)) for _ in range(7)]
    await all_of([kind(k) for k, kind in enumerate(kinds)])
    await w.close(sched)


@program()
async def hurrying(w: World) -> None:
    """Some have a deadline: they are done in time, or told that they are not."""
    n = w.rng.randint(1, 3)
    sched = scheduler(w, n)
    graph = await graph_on(w, sched, n)

    async def client(k: int, deadline: float) -> None:
        await w.arrival()
        run = await compute(sched, graph, k, deadline=deadline)
        await w.arrivals(w.rng.randint(0, 1))
        try:
            check(graph, k, await run)
        except ap.DeadlineExceeded:
            assert deadline < 1 and run.failed

    await all_of([client(k, w.rng.choice((0.0, 0.1, 0.5, math.inf))) for k in range(7)])
    await w.close(sched)


@program()
async def failing(w: World) -> None:
    """Splits that fail fail their own evaluation, and the first one is named."""
    n = w.rng.randint(1, 3)
    sched = scheduler(w, n)
    graph = w.of(_breakable(w.kind))
    sched.set_cut(graph, [i % n for i in range(4)])
    plan = await sched.plan(graph)
    guilty = next(split.index for split in plan.splits if 1 in split.nodes)

    async def client(k: int, fails: bool, leaves: bool) -> None:
        await w.arrival()
        if fails:
            bad.add(1000 * 10 * k)
        run = await compute(sched, graph, k)
        await w.arrivals(w.rng.randint(0, 1))
        if leaves:
            await run.event.wait()
            run.exception()
            return
        try:
            result = await run
        except ap.EvaluationError as error:
            assert fails and error.split == guilty and "poisoned" in str(error.__cause__), error
        else:
            assert not fails
            assert_equal(result, unbroken(*inputs_of(graph, k)))

    fails = [w.rng.random() < 0.5 for _ in range(5)]
    await all_of([client(k, fails[k], w.rng.random() < 0.2) for k in range(5)])
    assert (sched.statistics().failed, sched.statistics().succeeded) == (sum(fails), 5 - sum(fails))
    await w.close(sched)


@program()
async def aborting(w: World) -> None:
    """Some are observed, by callbacks that look, wait, say no, and raise."""
    n = w.rng.randint(1, 2)
    sched = scheduler(w, n)
    graph = w.of(_straight(3))
    sched.set_cut(graph, [i % n for i in range(3)])
    await sched.plan(graph)
    rng = random.Random(w.rng.random())

    def answer(tensor: ap.Tensor, ask: bool) -> bool:
        if rng.random() < 0.05:
            raise KeyError("the callback's own")
        if not ask:
            (buffer,) = tensor.buffers
            np.asarray(buffer.value)
        return rng.random() < (0.5 if ask else 0.8)

    async def slowly(tensor: ap.Tensor, ask: bool) -> bool:
        await w.arrivals(rng.randint(0, 1))
        return answer(tensor, ask)

    async def client(k: int, callback: Any) -> None:
        await w.arrival()
        sched.set_eval_callback(callback)
        run = await compute(sched, graph, k)
        if w.rng.random() < 0.3:
            await w.arrival()
            run.cancel()
        try:
            check(graph, k, await run)
        except ap.EvaluationAborted:
            assert run.failed
        except ap.EvaluationError as error:
            assert isinstance(error.__cause__, KeyError)
        except asyncio.CancelledError:
            assert run.cancelled()

    await all_of([client(k, w.rng.choice((None, answer, slowly))) for k in range(5)])
    await w.close(sched)


@program()
async def sharing_states(w: World) -> None:
    """States, snapshots, forks, resets; with all that may happen to what uses them."""
    rng = w.rng
    source = random.Random(rng.randrange(3)) if w.kind == "xla" else rng
    n_leaves, n_devices = source.randint(0, 2), source.randint(1, 3)
    fails = w.kind != "xla"
    specs = [random_spec(source, n_leaves=n_leaves, n_nodes=6, fails=fails) for _ in range(2)]
    graphs = [w.of(build(spec)) for spec in specs]
    sched = scheduler(w, n_devices)
    for graph, spec in zip(graphs, specs, strict=True):
        sched.set_cut(graph, [c % n_devices for c in spec.cut])
    game = Play(w.cluster, sched, graphs, rng.randint(1, 2))
    kinds = ["submit"] * 8 + ["cancel", "cancel", "snapshot", "fork", "reset", "restore", "watch", "unwatch"]
    steps: list[Any] = []
    for kind in rng.choices(kinds, k=12):
        numbers: tuple[Any, ...] = (rng.randint(0, 9), rng.randint(0, 9), fails and rng.random() < 0.25)
        if kind == "watch":
            numbers = ([rng.random() < 0.6 for _ in range(3)], rng.choice(("", "async", "raise")))
        elif kind == "cancel":
            numbers = (rng.randint(0, 5), rng.random() < 0.5)
        steps.append((kind, *numbers))

    async def between() -> None:
        await w.arrivals(rng.choice((0, 0, 1)))

    await game.run(steps, between)
    await sched.synchronize()
    game.check()
    w.schedule.errors.clear()  # of evaluations that nobody awaited to their end
    await w.close(sched)


@program()
async def closing(w: World) -> None:
    """`aclose` in the midst of all, from several tasks, one of which is cancelled."""
    n = w.rng.randint(1, 3)
    sched = scheduler(w, n)
    graph = await graph_on(w, sched, n)
    cancel, interrupt = w.rng.random() < 0.4, w.rng.random() < 0.3

    async def client(k: int) -> None:
        await w.arrival()
        try:
            run = await compute(sched, graph, k)
        except ap.BackendClosedError:
            assert sched._runner.closed
            return
        except asyncio.CancelledError:
            assert sched._runner.closed and (cancel or interrupt)
            raise
        try:
            check(graph, k, await run)
        except asyncio.CancelledError:
            assert cancel or interrupt

    async def closer() -> None:
        await w.arrivals(w.rng.randint(1, 4))
        await sched.aclose(cancel=cancel)

    clients = [asyncio.ensure_future(client(k)) for k in range(6)]
    closers = [asyncio.ensure_future(closer()) for _ in range(w.rng.randint(1, 2))]
    if interrupt:
        await w.arrivals(w.rng.randint(1, 5))
        closers[0].cancel()
    await asyncio.wait([*clients, *closers])
    for task in (*clients, *closers):
        if not task.cancelled():
            task.result()
    await w.close(sched)


@program()
async def streaming(w: World) -> None:
    """Streams side by side: of what is there or arrives, read to the end, broken off, or cancelled."""
    n = w.rng.randint(1, 3)
    sched = scheduler(w, n)
    graph = w.of(_straight(3))
    sched.set_cut(graph, [i % n for i in range(3)])

    def there(which: int) -> Iterator[Any]:
        yield from (array(1000 * which + 10 * k) for k in range(6))

    async def arriving(which: int) -> Any:
        for k in range(6):
            if w.rng.random() < 0.5:
                await w.arrival()
            yield array(1000 * which + 10 * k)

    async def consumer(which: int, how: str) -> None:
        await w.arrival()
        stop, k = w.rng.randint(1, 5), 0
        batches = there(which) if w.rng.random() < 0.5 else arriving(which)
        stream = sched.stream(graph, batches)
        try:
            async for y in stream:
                check(graph, 100 * which + k, y)
                k += 1
                if how == "break" and k == stop:
                    break
                if w.rng.random() < 0.3:
                    await w.arrival()
        finally:
            await stream.aclose()
            if isinstance(batches, Iterator):
                batches.close()  # type: ignore[attr-defined]
        assert k == (stop if how == "break" else 6)

    async def cancelled(which: int) -> None:
        task = asyncio.ensure_future(consumer(which, "end"))
        await w.arrivals(w.rng.randint(1, 5))
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    hows = [w.rng.choice(("end", "break", "cancel")) for _ in range(3)]
    await all_of([cancelled(i) if how == "cancel" else consumer(i, how) for i, how in enumerate(hows)])
    await w.close(sched)


@program()
async def two_schedulers(w: World) -> None:
    """Two schedulers over the same devices evaluate the same graphs."""
    n = w.rng.randint(1, 3)
    devices = w.devices(n)
    scheds = [ap.Scheduler(devices, n_copies=w.rng.choice((1, 2))) for _ in range(2)]
    graphs = [await graph_on(w, sched, n) for sched in scheds]

    async def client(k: int) -> None:
        await w.arrival()
        sched, graph = w.rng.choice(scheds), w.rng.choice(graphs)
        run = await compute(sched, graph, k)
        if w.rng.random() < 0.2:
            await w.arrival()
            run.cancel()
        try:
            check(graph, k, await run)
        except asyncio.CancelledError:
            assert run.cancelled()

    await all_of([client(k) for k in range(7)])
    await w.close(*scheds)


@program()
async def by_hand(w: World) -> None:
    """Queues of backends: jobs in order, events that one records and another waits for, closing in the midst."""
    n = w.rng.randint(1, 3)
    devices = w.devices(n)
    graph = w.of(_straight(2))
    closes = w.rng.random() < 0.3
    ran: list[tuple[str, int]] = []

    def job(backend: Backend, k: int) -> Callable[[], None]:
        return lambda: ran.append((backend.name, k))

    async def client(k: int, how: str) -> None:
        await w.arrival()
        backend, other = w.rng.choice(devices), w.rng.choice(devices)
        try:
            if how == "graph":
                x = array(k)
                run = backend.graph_compute_async(graph, x)
                x[:] = -1
                await w.arrivals(w.rng.randint(0, 1))
                if w.rng.random() < 0.3 and run.cancel():
                    return
                assert_equal(await run, unsplit(graph, array(k)))
            elif how == "event":
                first = backend.queue.post(job(backend, k))
                event = backend.event_new()
                assert event is not None
                backend.event_record(event)
                other.event_wait(event)
                behind = other.queue.post(job(other, -k))
                await behind
                assert first.done() and event.done()
                assert ran.index((backend.name, k)) < ran.index((other.name, -k))
            else:
                await backend.synchronize()
        except ap.BackendClosedError:
            assert closes

    async def closer() -> None:
        await w.arrivals(w.rng.randint(1, 3))
        for backend in devices:
            await backend.aclose()

    hows = [w.rng.choice(("graph", "graph", "event", "event", "wait")) for _ in range(7)]
    await all_of([client(k, how) for k, how in enumerate(hows, 1)] + ([closer()] if closes else []))
    if not closes:
        for name in {name for name, _ in ran}:
            assert len(ran) == len(set(ran)), name
        for backend in devices:
            await backend.synchronize()
    await w.close()


@program("lanes")
async def mailing(w: World) -> None:
    """Threads leave messages for the loop, some wait for each to be read; all are, those of one thread in order."""
    box, got = Mailbox(), list[tuple[int, int]]()
    box.bind(asyncio.get_running_loop())
    n, each = w.rng.randint(1, 3), 5
    waits = [w.rng.random() < 0.7 for _ in range(n)]
    done = asyncio.get_running_loop().create_future()

    def read(sender: int, k: int, told: Any) -> None:
        got.append((sender, k))
        told.set()
        if len(got) == n * each:
            done.set_result(None)

    def send(sender: int) -> None:
        for k in range(each):
            told = _threads.Event()
            box.post(read, sender, k, told)
            if waits[sender]:
                told.wait()

    await all_of([_threads.in_thread(functools.partial(send, sender), f"sender {sender}") for sender in range(n)])
    await done
    for sender in range(n):
        assert [k for s, k in got if s == sender] == list(range(each))


@program("lanes")
async def posting(w: World) -> None:
    """Several threads post jobs to a lane, which some close: what was taken runs once, in the order of its thread."""
    lane, ran, taken = ThreadLane("busy"), list[tuple[int, int]](), list[tuple[int, int]]()

    def post(poster: int, n: int) -> None:
        for k in range(n):
            try:
                lane.post(lambda job=(poster, k): ran.append(job))  # type: ignore[misc]
            except ap.BackendClosedError:
                return
            taken.append((poster, k))

    async def close(after: int) -> None:
        await w.arrivals(after)
        assert await _threads.in_thread(lane.close, "closer")

    posters = [_threads.in_thread(functools.partial(post, i, w.rng.randint(1, 4)), f"poster {i}") for i in range(3)]
    await all_of([*posters, *(close(w.rng.randint(1, 8)) for _ in range(2))])
    assert sorted(ran) == sorted(taken)
    for poster in range(3):
        assert [k for p, k in ran if p == poster] == sorted(k for p, k in taken if p == poster)
