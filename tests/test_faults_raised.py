"""Whatever somebody's code raises, wherever it is called: one evaluation fails, nothing hangs, and the rest goes on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.sim import Cluster, HostOp
from aiopipe.graph_builder import GraphBuilder
from hanging import Later
from models import assert_close, batch, mlp, mlp_params, oracle
from simgraphs import SPEC, TOTAL, array, assert_equal, chain, settled, step, unsplit

ENDING = (KeyboardInterrupt, SystemExit)
RAISED: tuple[type[BaseException], ...] = (ValueError, asyncio.CancelledError, GeneratorExit, StopIteration, *ENDING)


class Armed:
    """Raises while it is armed, else passes its argument on."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.on = False

    def __call__(self, value: Any) -> Any:
        if self.on:
            raise self.error("by the user")
        return value


# A backend's own calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", RAISED)
async def test_in_a_computation_that_a_lane_waits_for(error: type[BaseException]) -> None:
    """The thread of the lane goes on, whatever is raised there."""
    armed, backends = Armed(error), [Later(i, blocks=True) for i in range(2)]
    graph = chain([step(0), HostOp(lambda x: armed(x) * 3), step(2)])
    async with ap.Scheduler([*backends, "cpu:0"], n_copies=2) as sched:
        sched.set_cut(graph, [0, 1, 0])
        for k in range(3):
            assert_equal((await sched.graph_compute(graph, array(k))).array, unsplit(graph, array(k)))
            armed.on = True
            with pytest.raises(ap.EvaluationError, match=r"split 1 on 'later:1'.*stage 1.*by the user") as caught:
                await sched.graph_compute(graph, array(k))
            assert type(caught.value.__cause__) is error
            armed.on = False
        settled(sched)


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("where", ["call", "at the end", "all_ready", "error_of", "notify"])
async def test_in_calls_on_the_event_loop(
    error: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, graph = Later(), chain(1)
    async with ap.Scheduler([backend, "cpu:0"], n_copies=2) as sched:
        await sched.plan(graph)
        for k in range(3):
            if where == "call":
                backend.fails = error("by the user")
            elif where == "at the end":
                backend.fails_later = error("by the user")
            else:
                def broken(*_: Any) -> Any:
                    raise error("by the user")

                backend.hangs = where == "notify"
                monkeypatch.setattr(backend, where, broken)
            evaluation = await sched.graph_compute_async(graph, array(k))
            monkeypatch.undo()
            with pytest.raises(ap.EvaluationError, match="split 0 on 'later:0'") as caught:
                await evaluation
            assert type(caught.value.__cause__) is error
            backend.let_go()
            assert_equal((await sched.graph_compute(graph, array(k))).array, unsplit(graph, array(k)))
        settled(sched)


@pytest.mark.parametrize("error", ENDING)
def test_what_is_to_end_the_program_does_so_from_the_event_loop(error: type[BaseException]) -> None:
    async def main() -> None:
        backend, graph = Later(), chain(1)
        sched = ap.Scheduler([backend, "cpu:0"])
        await sched.plan(graph)
        backend.fails = error("by the user")
        try:
            await sched.graph_compute(graph, array(1))
        finally:
            await sched.aclose(timeout_s=0.01)

    with pytest.raises(error, match="by the user"):
        asyncio.run(main())


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, GeneratorExit])
async def test_in_a_simulated_computation(error: type[BaseException]) -> None:
    armed, cluster = Armed(error), Cluster(2, compute=True)
    graph = chain([step(0), HostOp(lambda x: armed(x) * 3)])
    async with ap.Scheduler(cluster.backends) as sched:
        sched.set_cut(graph, [0, 1])
        armed.on = True
        with pytest.raises(ap.EvaluationError, match="split 1 on 'sim:1'") as caught:
            await sched.graph_compute(graph, array(1))
        assert type(caught.value.__cause__) is error
        armed.on = False
        assert_equal(await sched.graph_compute(graph, array(1)), unsplit(graph, array(1)))


async def test_a_backend_that_dies_in_the_midst() -> None:
    """Whoever waits for it hears of it; evaluations that do without it notice nothing."""
    backends = [Later(0), Later(1)]
    both, other = chain(2, name="both"), chain(1, name="other")
    async with ap.Scheduler([*backends, "cpu:0"], n_copies=4) as sched:
        sched.set_cut(both, [0, 1])
        sched.set_cut(other, [1])
        await sched.plan(both)
        await sched.plan(other)
        backends[0].hangs = True
        lost = [await sched.graph_compute_async(both, array(k)) for k in range(3)]
        backends[0].die()
        for evaluation in lost:
            with pytest.raises(ap.BackendLostError, match=r"evaluation \d of 'both' is lost: later:0 is") as caught:
                await evaluation
            assert caught.value.__cause__ is backends[0].lost
        for k in range(5):
            with pytest.raises(ap.BackendLostError):
                await sched.graph_compute(both, array(k))
            assert_equal((await sched.graph_compute(other, array(k))).array, unsplit(other, array(k)))
        settled(sched)


# Host callbacks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", RAISED)
async def test_in_a_pure_callback(error: type[BaseException]) -> None:
    armed = Armed(error)

    def model(w: Any, x: Any) -> Any:
        y = jax.pure_callback(lambda v: armed(np.asarray(v)), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jnp.tanh(y @ w[0])

    async with ap.Pipeline(model, mlp_params(1), devices=["cpu:0", "cpu:1"], n_copies=2) as pipe:
        for k in range(2):
            assert_close(await pipe(batch(seed=k)), oracle(mlp, mlp_params(1), batch(seed=k)))
            armed.on = True
            with pytest.raises(ap.EvaluationError, match=r"(?s)'pure_callback' at test_faults_raised.py.*by the user"):
                await pipe(batch(seed=k))
            armed.on = False
        await pipe.scheduler.synchronize()
        settled(pipe.scheduler)


# Eval and progress callbacks ---------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("asking", [True, False])
@pytest.mark.parametrize("error", [ValueError, GeneratorExit, StopIteration])
async def test_in_an_eval_callback(error: type[BaseException], asking: bool, asynchronous: bool) -> None:
    def seen(tensor: ap.Tensor, ask: bool) -> bool:
        if ask == asking:
            raise error("by the user")
        return True

    async def seen_later(tensor: ap.Tensor, ask: bool) -> bool:
        await asyncio.sleep(0)
        return seen(tensor, ask)

    graph = chain(2)
    async with ap.Scheduler([Later(), "cpu:0"], n_copies=2) as sched:
        sched.set_eval_callback(seen_later if asynchronous else seen)
        with pytest.raises(ap.EvaluationError, match=r"the eval callback raised \w+ .ask=") as caught:
            await sched.graph_compute(graph, array(1))
        cause = caught.value.__cause__
        wrapped = asynchronous and error is StopIteration  # by Python: no coroutine can raise one
        assert type(cause) is (RuntimeError if wrapped else error)
        sched.set_eval_callback(None)
        assert_equal((await sched.graph_compute(graph, array(2))).array, unsplit(graph, array(2)))
        settled(sched)


async def test_an_eval_callback_that_raises_cancelled_error_cancels() -> None:
    def seen(tensor: ap.Tensor, ask: bool) -> bool:
        raise asyncio.CancelledError

    async with ap.Scheduler([Later(), "cpu:0"], n_copies=2) as sched:
        graph = chain(2)
        sched.set_eval_callback(seen)
        evaluation = await sched.graph_compute_async(graph, array(1))
        with pytest.raises(asyncio.CancelledError):
            await evaluation
        assert evaluation.cancelled()
        sched.set_eval_callback(None)
        await sched.graph_compute(graph, array(2))


@pytest.mark.parametrize("kind", ["scheduler", "pipeline"])
async def test_in_a_progress_callback(kind: str) -> None:
    """The plan is not loaded; the next who asks for it loads it."""
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == 1:
            raise ValueError("by the user")

    x, params = batch(), mlp_params(4)
    if kind == "pipeline":
        async with ap.Pipeline(mlp, params, devices=["cpu:0", "cpu:1"], on_progress=progress) as pipe:
            with pytest.raises(ValueError, match="by the user"):
                await pipe(x)
            assert_close(await pipe(x), oracle(mlp, params, x))
            settled(pipe.scheduler)
    else:
        async with ap.Scheduler(["cpu:0", "cpu:1"], on_progress=progress) as sched:
            graph = ap.trace(mlp, params, x)
            with pytest.raises(ValueError, match="by the user"):
                await sched.graph_compute(graph, x)
            assert_close(await sched.graph_compute(graph, x), oracle(mlp, params, x))
            settled(sched)


# What a stream reads from ------------------------------------------------------------------------


def batches(n: int, end: Callable[[], None]) -> Iterator[np.ndarray]:
    for k in range(n):
        yield array(k)
    end()


async def async_batches(n: int, end: Callable[[], None]) -> AsyncIterator[np.ndarray]:
    for k in range(n):
        await asyncio.sleep(0)
        yield array(k)
    end()


@pytest.mark.parametrize("source", [batches, async_batches])
@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, GeneratorExit, ap.TensorError])
async def test_in_the_batches_of_a_stream(source: Any, error: type[BaseException]) -> None:
    """What was yielded before has its results, the error follows, and nothing is left in flight."""

    def end() -> None:
        raise error("by the user")

    graph = chain(1)
    async with ap.Scheduler([Later(), "cpu:0"], n_copies=2) as sched:
        results = []
        with pytest.raises(error, match="by the user"):
            async for y in sched.stream(graph, source(5, end)):
                results.append(y.array)
        assert len(results) >= 3  # two are in flight when a plain iterator raises
        for k, y in enumerate(results):
            assert_equal(y, unsplit(graph, array(k)))
        await sched.synchronize()
        settled(sched)
        assert len([y async for y in sched.stream(graph, source(5, lambda: None))]) == 5


@pytest.mark.parametrize("source", [batches, async_batches])
@pytest.mark.parametrize("error", ENDING)
def test_what_is_to_end_the_program_in_the_batches_of_a_stream(source: Any, error: type[BaseException]) -> None:
    def end() -> None:
        raise error("by the user")

    async def main() -> None:
        async with ap.Scheduler([Later(), "cpu:0"], n_copies=2) as sched:
            async for _ in sched.stream(chain(1), source(3, end)):
                pass

    with pytest.raises(error, match="by the user"):
        asyncio.run(main())


class Closing:
    """Batches whose `aclose` raises."""

    def __init__(self, n: int) -> None:
        self.inner = async_batches(n, lambda: None)
        self.closed = 0

    async def generate(self) -> AsyncIterator[np.ndarray]:
        try:
            async for x in self.inner:
                yield x
        finally:
            self.closed += 1
            raise OSError("cannot close")


@pytest.mark.parametrize("leave", ["at the end", "early", "by an error"])
async def test_in_the_closing_of_batches(leave: str) -> None:
    graph, source = chain(1), Closing(5)
    async with ap.Scheduler([Later(), "cpu:0"], n_copies=2) as sched:
        stream = sched.stream(graph, source.generate())
        with pytest.raises(OSError, match="cannot close"):
            if leave == "at the end":
                assert len([y async for y in stream]) == 5
            elif leave == "early":
                await anext(stream)
                await stream.aclose()
            else:
                await anext(stream)
                await stream.athrow(ValueError("the consumer's own"))
        assert source.closed == 1
        await sched.synchronize()
        settled(sched)
        gc.collect()  # no task says that its error was never retrieved


# Values and trees --------------------------------------------------------------------------------


class Odd:
    """A pytree node that cannot be put together again when it is armed."""

    armed = Armed(ValueError)

    def __init__(self, x: Any) -> None:
        self.x = x


jax.tree_util.register_pytree_node(Odd, lambda odd: ((odd.x,), None), lambda _, xs: Odd(Odd.armed(xs[0])))


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("by_hand", [False, True])
async def test_in_a_pytree_node_of_the_results(error: type[BaseException], by_hand: bool) -> None:
    Odd.armed.error, Odd.armed.on = error, False
    graph = ap.trace(lambda w, x: Odd(x @ w), mlp_params(1)[0], batch())
    async with ap.Scheduler(["cpu:0"], n_copies=1) as sched, ap.open_backend("cpu:1") as backend:
        compute = backend.graph_compute if by_hand else sched.graph_compute
        for _ in range(2):
            assert_close((await compute(graph, batch())).x, oracle(lambda w, x: x @ w, mlp_params(1)[0], batch()))
            Odd.armed.on = True
            with pytest.raises(error, match="by the user"):
                await compute(graph, batch())
            Odd.armed.on = False
        settled(sched)


async def test_in_the_callback_of_an_event() -> None:
    """It is reported, and what the event belongs to goes on."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    graph = chain(2)

    def raises(_: ap.Event) -> None:
        raise asyncio.CancelledError("by the user")

    backend = Later()
    async with ap.Scheduler([backend, "cpu:0"], n_copies=1) as sched:
        await sched.plan(graph)
        backend.hangs = True
        evaluation = await sched.graph_compute_async(graph, array(1))
        evaluation.event.add_callback(raises)
        backend.let_go()
        await evaluation
        await sched.synchronize()
        settled(sched)
    assert ["a callback of" in context["message"] for context in reported] == [True]


@pytest.mark.parametrize("error", RAISED)
async def test_while_tracing(error: type[BaseException]) -> None:
    """A pipeline traces in a thread, `trace` where it is called."""
    armed = Armed(error)

    def model(w: Any, x: Any) -> Any:
        return mlp(w, armed(x))

    async with ap.Pipeline(model, mlp_params(1), devices=["cpu:0"]) as pipe:
        armed.on = True
        with pytest.raises(ap.TraceError, match="by the user") as caught:
            await pipe(batch())
        causes = (caught.value.__cause__, caught.value.__cause__ and caught.value.__cause__.__cause__)
        assert error in map(type, causes)
        with pytest.raises(error, match="by the user"):
            ap.trace(model, mlp_params(1), batch())
        armed.on = False
        assert_close(await pipe(batch()), oracle(mlp, mlp_params(1), batch()))


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("where", ["load", "upload", "download"])
async def test_in_calls_in_a_thread(error: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling, and putting weights in place, and reading a result: whoever asked for it is told, and nobody else."""
    b = GraphBuilder("weighed")
    w, x = b.weight("w", *SPEC, source=array(2)), b.input("x", *SPEC)
    graph = b.build(b.node("sum", [w, x], [SPEC], fn=TOTAL))
    backend, host = Later(), Later(1)
    async with ap.Scheduler([backend, host]) as sched:
        sched.set_cut(graph, [0])
        await sched.tensor_set(graph.inputs[0], array(1))
        if where == "download":
            await sched.graph_compute(graph)

        def broken(*_: Any) -> Any:
            raise error("by the user")

        monkeypatch.setattr(backend, where, broken)
        with pytest.raises((RuntimeError, error), match="by the user") as caught:
            await (sched.tensor_get(graph.outputs[0]) if where == "download" else sched.graph_compute(graph))
        assert error in (type(caught.value), type(caught.value.__cause__))
        assert isinstance(caught.value, Exception)
        monkeypatch.undo()
        assert_equal((await sched.graph_compute(graph)).array, unsplit(graph, array(1)))
        assert_equal(await sched.tensor_get(graph.outputs[0]), unsplit(graph, array(1)))
        settled(sched)
