"""A language model that is spread over devices: what it computes, and many texts at once."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from llama import model, steps, weights
from llama.generator import Generator, Stream
from llama.group import Group, Request
from llama.model import Config
from llama.sampling import Sampling, single, stack

import aiopipe as ap
from aiopipe.devices.sim import Cluster
from llamas import TINY, reference, smollm2

pytestmark = pytest.mark.timeout(180)  # programs of many sizes are compiled, beside whatever else the machine does


def devices(n: int) -> list[str]:
    return [f"cpu:{i}" for i in range(n)]


def host(loaded: tuple[Config, Any]) -> tuple[Config, Any]:
    return loaded[0], jax.tree.map(np.asarray, loaded[1])


@pytest.fixture(scope="module")
def small() -> tuple[Config, Any]:
    return weights.load(TINY)


async def ids_of(stream: Stream) -> list[int]:
    return [token async for token in stream]


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(260) for _ in range(rng.randint(1, 40))] for _ in range(n)]


# The model, spread over devices -----------------------------------------------------------------------


def all_logits(params: Any, cache: Any, tokens: Any, start: Any, config: Config, n_kv: int) -> Any:
    """Scores after every token of a chunk of one text."""
    hidden, cache = model.forward(params, cache, tokens[None], None, start[None], config, n_kv)
    return model.logits(params, hidden[0]), cache


def by_layers(config: Config, backends: Sequence[ap.Backend]) -> dict[str, Any]:
    n = len(backends)
    blocks = {f"blocks/{i}/*": backends[i * n // config.n_layers] for i in range(config.n_layers)}
    return {**blocks, "embed": [backends[0], backends[-1]], "*": backends[-1]}


@pytest.mark.parametrize("kind", ["decode", "decode_one", "prefill"])
async def test_few_values_cross_a_cut_however_many_blocks_follow(small: tuple[Config, Any], kind: Any) -> None:
    async with Generator(*small, devices=devices(2), rows=2, n_ctx=64, split=[1, 3]) as generator:
        plan = await generator.scheduler.plan(generator._graphs._trace(kind, 64))
    nodes = [{i for split in plan.splits if split.backend == b for i in split.nodes} for b in range(2)]
    made = {t for i in nodes[0] for t in plan.graph.nodes[i].outputs}
    read = {t for i in nodes[1] - nodes[0] for t in plan.graph.nodes[i].inputs}
    own = {t for i in nodes[1] for t in plan.graph.nodes[i].outputs}
    assert len(made & read - own) <= 8  # of every block there were eleven once


async def chunked_logits(loaded: tuple[Config, Any], names: list[str], chunk: int, n_copies: int) -> np.ndarray:
    """The scores of the reference's 44 positions, read in chunks that follow each other without waiting."""
    config, params = loaded
    tokens, n_ctx = reference("tiny_gguf")["tokens"].astype(np.int32), 64
    async with ap.Scheduler(names, n_copies=n_copies) as sched:
        placed = await ap.place(params, by_layers(config, sched.backends))
        state = ap.State(jax.eval_shape(partial(model.new_cache, config, 1, n_ctx)))
        fn = partial(all_logits, config=config, n_kv=n_ctx)
        graph = ap.trace(fn, placed, np.zeros(chunk, np.int32), np.zeros((), np.int32), state=state)
        running = []
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            padded = np.pad(part, (0, chunk - len(part)))
            running.append(await sched.graph_compute_async(graph, padded, np.array(start, np.int32), state=state))
        parts = [np.asarray(await evaluation) for evaluation in running]
        assert len(set(state.backends.values())) == len(names)
        return np.concatenate(parts)[: len(tokens)]


@pytest.mark.parametrize("n_devices", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 7, 32, 44])
async def test_logits_equal_llama_cpp(small: Any, n_devices: int, chunk: int) -> None:
    found = [await chunked_logits(small, devices(n_devices), chunk, n_copies) for n_copies in (1, 4)]
    want = reference("tiny_gguf")["logits"]
    assert np.abs(found[0] - want).max() < 1e-4
    assert np.abs(found[0] - reference("tiny_gguf")["logits_token_by_token"]).max() < 1e-4
    assert found[0].tobytes() == found[1].tobytes()


async def test_every_number_of_copies_gives_the_same_bits(small: Any) -> None:
    found = [await chunked_logits(small, devices(2), 7, n_copies) for n_copies in (1, 2, 3, 8)]
    assert len({scores.tobytes() for scores in found}) == 1


@pytest.mark.parametrize("n_devices", [1, 2, 4])
async def test_greedy_tokens_equal_llama_cpp(small: Any, n_devices: int) -> None:
    want = reference("tiny_gguf")
    async with Generator(*small, devices=devices(n_devices), rows=2, n_ctx=64, chunk=16) as gen:
        assert await ids_of(gen.submit(want["tokens"].tolist(), max_tokens=16)) == want["greedy"].tolist()


async def test_smollm2s_logits_equal_llama_cpps_on_two_devices() -> None:
    want = reference("smollm2_llamacpp")
    config, params = host(smollm2())
    async with ap.Scheduler(devices(2)) as sched:
        placed = await ap.place(params, by_layers(config, sched.backends))
        state = ap.State(jax.eval_shape(partial(model.new_cache, config, 1, 16)))
        ids = want["ids"].astype(np.int32)
        fn = partial(all_logits, config=config, n_kv=16)
        graph = ap.trace(fn, placed, ids, np.zeros((), np.int32), state=state)
        found = np.asarray(await sched.graph_compute(graph, ids, np.array(0, np.int32), state=state))
        assert np.abs(found - want["logits_f32"]).max() < 1e-3
        assert len(set(state.backends.values())) == 2


async def test_smollm2_equals_llama_cpp_on_two_devices() -> None:
    want = reference("smollm2_llamacpp")
    config, params = host(smollm2())
    prompt, greedy = want["ids"].tolist(), want["greedy_f32"].tolist()[5:]  # which begins with the prompt
    async with Generator(config, params, devices=devices(2), rows=1, n_ctx=64, chunk=8, split="auto") as gen:
        assert await ids_of(gen.submit(prompt, max_tokens=20)) == greedy
        assert len(set(gen.states[0].backends.values())) == 2


# Many texts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_devices", [1, 2, 4])
async def test_sixteen_texts_at_once_are_what_each_is_alone(small: Any, n_devices: int) -> None:
    given = prompts(16)
    async with Generator(*small, devices=devices(n_devices), rows=4, n_ctx=64, chunk=8) as gen:
        alone = [await ids_of(gen.submit(prompt, max_tokens=12)) for prompt in given[:6]]
        streams = [gen.submit(prompt, max_tokens=12) for prompt in given]
        together = await asyncio.gather(*map(ids_of, streams))
        assert together[:6] == alone
        assert [stream.finish_reason for stream in streams] == ["length"] * 16


async def test_whatever_joins_leaves_and_is_cancelled_beside_it(small: Any) -> None:  # S26
    rng = random.Random(5)
    given = prompts(40, seed=1)
    async with Generator(*small, devices=devices(2), rows=3, groups=2, n_ctx=64, chunk=8) as gen:
        wanted = {i: await ids_of(gen.submit(given[i], max_tokens=10)) for i in range(0, 40, 5)}
        drawn = Sampling(temperature=1.5, top_k=40, repetition_penalty=1.3, seed=11)
        want_drawn = await ids_of(gen.submit(given[0], max_tokens=10, sampling=drawn))

        async def reader(i: int) -> None:
            await asyncio.sleep(rng.random() * 0.05)
            n_tokens = 0
            stream = gen.submit(given[i], max_tokens=10)
            if i in wanted:
                assert await ids_of(stream) == wanted[i]
                return
            async for _ in stream:
                n_tokens += 1
                if rng.random() < 0.3:
                    break  # and nobody says so: the stream is dropped
            assert n_tokens <= 10

        async def cancelled(i: int) -> None:
            task = asyncio.create_task(ids_of(gen.submit(given[i], max_tokens=10)))
            await asyncio.sleep(rng.random() * 0.1)
            task.cancel()
            await asyncio.wait([task])

        async with asyncio.TaskGroup() as tasks:
            for i in range(40):
                tasks.create_task(reader(i))
                tasks.create_task(cancelled(i))
            drawing = tasks.create_task(ids_of(gen.submit(given[0], max_tokens=10, sampling=drawn)))
        assert drawing.result() == want_drawn
        assert sum(group.n_free for group in gen._groups) <= 6
        gc.collect()
        last = gen.submit(given[0], max_tokens=2)
        await ids_of(last)
        async with asyncio.timeout(30):
            while not all(row is None for group in gen._groups for row in group._rows):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)


async def test_a_slow_reader_keeps_nobody_waiting(small: Any) -> None:
    async with Generator(*small, devices=devices(2), rows=2, groups=1, n_ctx=64, chunk=8) as gen:
        slow = gen.submit([1, 2, 3], max_tokens=20)
        assert len(await ids_of(gen.submit([4, 5], max_tokens=30))) == 30
        assert slow.n_tokens == 20  # written, though nobody has taken one
        assert len(await ids_of(slow)) == 20


async def test_leaving_early_frees_the_row(small: Any) -> None:
    async with Generator(*small, devices=devices(1), rows=1, groups=1, n_ctx=128, chunk=8) as gen:
        first = gen.submit([1, 2, 3], max_tokens=100)
        second = gen.submit([1, 2, 3], max_tokens=3)
        async for _ in first:
            first.cancel()
            break
        assert len(await ids_of(second)) == 3
        assert first.finish_reason == "left" and first.n_tokens < 100


async def test_whoever_reads_a_text_hears_of_its_end(small: Any) -> None:
    async with Generator(*small, devices=devices(1), rows=1, groups=1, n_ctx=64, chunk=8) as gen:
        alone = await ids_of(gen.submit([1, 2, 3], max_tokens=8))
        stream = gen.submit([1, 2, 3], max_tokens=8)
        shares = await asyncio.gather(*[asyncio.create_task(ids_of(stream)) for _ in range(3)])
        assert sorted(token for share in shares for token in share) == sorted(alone)
        assert await ids_of(stream) == []


async def test_who_leaves_while_waiting_is_gone_at_once(small: Any) -> None:
    async with Generator(*small, devices=devices(1), rows=1, groups=1, n_ctx=128, chunk=8) as gen:
        first = gen.submit([1, 2, 3], max_tokens=100)
        await anext(aiter(first))
        waiting = [gen.submit([1, 2, 3]) for _ in range(3)]
        assert (gen.statistics().writing, gen.statistics().waiting) == (1, 3)
        waiting[1].cancel()
        assert waiting[1].finish_reason == "left" and await ids_of(waiting[1]) == []
        assert gen.statistics().waiting == 2
        for _ in range(50):  # whoever comes and goes does not pile up
            gen.submit([1, 2, 3]).cancel()
        assert len(gen._waiting) <= 4
        for stream in (first, waiting[0]):
            stream.cancel()
        assert len(await ids_of(waiting[2])) == 126  # 128 tokens are read at most


async def test_stop_tokens_and_the_end_of_the_context(small: Any) -> None:
    want = reference("tiny_gguf")
    prompt, greedy = want["tokens"].tolist(), want["greedy"].tolist()
    async with Generator(*small, devices=devices(2), rows=2, n_ctx=48, chunk=16) as gen:
        stream = gen.submit(prompt, max_tokens=16, stop=[greedy[2]])
        assert await ids_of(stream) == greedy[:2] and stream.finish_reason == "stop"
        stream = gen.submit(prompt, max_tokens=1000)
        assert await ids_of(stream) == greedy[:5] and stream.finish_reason == "length"  # 44 + 4 read, and one more
        for wrong, message in (
            ([], "at least one"),
            ([0] * 48, r"fewer than the context of 48 tokens \(n_ctx\)"),
            ([1, 260], "the token 260, but the vocabulary has 260"),
        ):
            with pytest.raises(ValueError, match=message):
                gen.submit(wrong)
        with pytest.raises(ValueError, match="max_tokens is 0"):
            gen.submit([1], max_tokens=0)
    with pytest.raises(RuntimeError, match="not open"):
        gen.submit([1])
    with pytest.raises(ValueError, match="trained for at most"):
        Generator(*small, devices=devices(1), n_ctx=10**6)
    with pytest.raises(ValueError, match="rows is 0"):
        Generator(*small, devices=devices(1), rows=0)


async def test_longer_texts_move_on_to_larger_steps(small: Any) -> None:
    """Beyond 128 positions attention reads 256; what is written is the same as in one large step."""
    config, params = small
    prompt = [random.Random(3).randrange(260) for _ in range(120)]
    async with Generator(config, params, devices=devices(2), rows=1, groups=1, n_ctx=256, chunk=32) as gen:
        long = await ids_of(gen.submit(prompt, max_tokens=40))
        assert {n for _, n in gen._graphs._graphs} == {128, 256}
    state = steps.new_state(config, 1, 256)
    token, state = steps.prefill(
        params, state, np.pad(np.array(prompt, np.int32), (0, 8)), np.int32(0), np.int32(0), np.int32(120),
        single(Sampling()), config, 256,
    )  # fmt: skip
    want = [int(token)]
    decode = jax.jit(steps.decode, static_argnames=("config", "n_kv"))
    for i in range(39):
        args = np.array([want[-1]], np.int32), np.array([120 + i], np.int32), np.array([True])
        tokens, state = decode(params, state, *args, stack([Sampling()]), config=config, n_kv=256)
        want.append(int(tokens[0]))
    assert long == want


async def test_nothing_is_compiled_or_kept_after_the_warm_up(small: Any) -> None:
    given = prompts(8, seed=2)
    async with Generator(*small, devices=devices(2), rows=2, n_ctx=64, chunk=8) as gen:
        await gen.prepare()
        assert all(state.is_allocated for state in gen.states)
        await asyncio.gather(*(ids_of(gen.submit(prompt, max_tokens=8)) for prompt in given))
        before, compiled = gen.statistics(), gen.statistics().scheduler.compiled
        gc.collect()
        n_arrays = len(jax.live_arrays())
        for _ in range(5):
            await asyncio.gather(*(ids_of(gen.submit(prompt, max_tokens=8)) for prompt in given))
        after = gen.statistics()
        assert after.decode_steps > before.decode_steps
        assert (after.scheduler.compiled, after.compiled_steps) == (compiled, before.compiled_steps)
        assert after.scheduler.replanned == 0
        gc.collect()
        assert len(jax.live_arrays()) <= n_arrays


@pytest.mark.parametrize("split", ["auto", "layers", (3, 1)])
async def test_every_split_writes_the_same(small: Any, split: Any) -> None:
    want = reference("tiny_gguf")
    async with Generator(*small, devices=devices(2), rows=1, n_ctx=64, chunk=16, split=split) as gen:
        assert await ids_of(gen.submit(want["tokens"].tolist(), max_tokens=16)) == want["greedy"].tolist()
        caches = [b for name, b in gen.states[0].backends.items() if name.endswith("/k")]
        if split == "layers":
            assert caches == ["cpu:0", "cpu:0", "cpu:1", "cpu:1"]
        if split == (3, 1):
            assert caches.count("cpu:0") > caches.count("cpu:1")


# What goes wrong --------------------------------------------------------------------------------------


async def test_an_abort_ends_the_texts_of_its_group_and_the_next_begin_anew(small: Any) -> None:  # S25
    want = reference("tiny_gguf")
    async with Generator(*small, devices=devices(2), rows=2, groups=1, n_ctx=64, chunk=16) as gen:
        stream = gen.submit(want["tokens"].tolist(), max_tokens=18)
        it = aiter(stream)
        assert [await anext(it) for _ in range(3)] == want["greedy"].tolist()[:3]
        n_asked = itertools.count()
        gen.scheduler.set_eval_callback(lambda tensor, ask: ask and next(n_asked) > 40)
        with pytest.raises(ap.EvaluationAborted):
            while True:
                await anext(it)
        gen.scheduler.set_eval_callback(None)
        assert stream.finish_reason == "error"
        again = await ids_of(gen.submit(want["tokens"].tolist(), max_tokens=16))
        assert again == want["greedy"].tolist()


def group_of_one(step: Callable[[Group], Awaitable[None]] = Group._step) -> tuple[Group, deque[Request]]:
    """A group with a single row, which nothing is compiled for, and what waits for it."""
    graphs: Any = SimpleNamespace(rows=1)
    group = Group(ap.State({"x": np.zeros(1, np.float32)}), graphs, waiting := deque[Request]())
    group._step = partial(step, group)  # type: ignore[method-assign]
    return group, waiting


def text() -> tuple[Request, Stream]:
    request = Request([1], Sampling(), 3, frozenset())
    return request, Stream(request)


async def test_who_waits_behind_one_that_left_before_it_began_is_next() -> None:
    group, waiting = group_of_one()
    (gone, stream), (wanted, kept) = text(), text()
    group.give(gone)
    waiting.append(wanted)
    stream.cancel()  # before the group had a turn
    group._take_in()
    assert group.n_writing == 1 and not waiting and kept.finish_reason is None


@pytest.mark.parametrize("error", [RuntimeError("no"), asyncio.CancelledError("evaluation 3 was cancelled")])
@pytest.mark.parametrize("freed", [False, True])
async def test_a_group_outlives_whatever_goes_wrong(error: BaseException, freed: bool) -> None:
    async def step(group: Group) -> None:
        group._take_in()
        if group.n_writing:
            raise error
        await group._wake.wait()
        group._wake.clear()

    group, _ = group_of_one(step)
    if freed:
        await group.state.free()
    task = asyncio.create_task(group.run())
    for _ in range(3):
        request, stream = text()
        group.give(request)
        with pytest.raises(RuntimeError if isinstance(error, RuntimeError) else ap.BackendClosedError):
            await ids_of(stream)
        assert stream.finish_reason == "error" and group.n_free == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_closing_ends_every_text(small: Any) -> None:
    async with Generator(*small, devices=devices(2), rows=1, groups=1, n_ctx=64, chunk=8) as gen:
        running = [asyncio.ensure_future(ids_of(gen.submit([1, 2], max_tokens=60))) for _ in range(3)]
        await asyncio.sleep(0)
    for task in running:
        with pytest.raises(ap.BackendClosedError, match="closed before this text was complete"):
            await task


async def test_closing_ends_a_text_that_has_not_begun(small: Any) -> None:
    async with Generator(*small, devices=devices(1), rows=1, groups=1, n_ctx=64, chunk=8) as gen:
        stream = gen.submit([1, 2])  # closed before its group had a turn
    with pytest.raises(ap.BackendClosedError, match="closed before this text was complete"):
        await ids_of(stream)


# Simulated devices ------------------------------------------------------------------------------------


def many_layers(n_layers: int) -> tuple[Config, Any]:
    """A model of equal layers, in small; its numbers do not matter."""
    config = Config(n_layers, 2, 1, 4, 8, 8, 32, 256, 4, 10000.0, 1e-5)
    zeros = partial(np.zeros, dtype=np.float32)
    block = {
        "attn": {"norm": zeros(8), "q": zeros((8, 8)), "k": zeros((4, 8)), "v": zeros((4, 8)), "out": zeros((8, 8))},
        "mlp": {"norm": zeros(8), "gate": zeros((8, 8)), "up": zeros((8, 8)), "down": zeros((8, 8))},
    }
    return config, {"embed": zeros((32, 8)), "blocks": [block] * n_layers, "norm": zeros(8)}


@pytest.mark.parametrize("n", [2, 4, 8, 16])
async def test_with_as_many_groups_as_devices_all_of_them_are_busy(n: int) -> None:
    cluster = Cluster(n, split_cost_s=1.0)
    async with Generator(
        *many_layers(n), devices=cluster.backends, rows=2, groups=n, n_ctx=256, chunk=8, split="layers"
    ) as gen:
        await gen.prepare(("prefill", "decode"))
        streams = [gen.submit([1, 2], max_tokens=250) for _ in range(2 * n)]
        for stream in streams:  # until all write
            await anext(aiter(stream))
        began = cluster.clock.now
        busy = [backend.unit.busy_s for backend in cluster.backends]
        while min(stream.n_tokens for stream in streams) < 30:
            await anext(aiter(min(streams, key=lambda stream: stream.n_tokens)))
        elapsed = cluster.clock.now - began
        for backend, before in zip(cluster.backends, busy, strict=True):
            assert (backend.unit.busy_s - before) / elapsed >= 0.95
        assert all(stream.finish_reason is None for stream in streams)


async def test_a_single_text_pays_nothing_for_copies() -> None:  # S21
    took = []
    for n_copies in (1, 4):
        cluster = Cluster(4, split_cost_s=1.0, latency_s=0.25)
        async with Generator(
            *many_layers(4), devices=cluster.backends, rows=1, groups=1, n_copies=n_copies, n_ctx=64, chunk=8,
            split="layers",
        ) as gen:  # fmt: skip
            await gen.prepare(("prefill", "decode"))
            began = cluster.clock.now
            await ids_of(gen.submit([1, 2], max_tokens=30))
            took.append(cluster.clock.now - began)
    assert took[1] <= took[0] * 1.05
