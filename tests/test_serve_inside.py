"""The server in this process: while a device works, when one fails, when clients do not read."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import jax
import numpy as np
import pytest
import uvicorn
from minilm.text import load_tokenizer
from serve import live
from serve.answers import Events, while_there
from serve.app import Service
from serve.errors import ApiError
from serve.limits import Limits
from serve.metrics import Metrics
from serve.models import Models
from serve.schema import CompletionRequest
from serve.server import EMBED_NAME, Server
from serve.texts import Texts
from starlette.requests import ClientDisconnect

import aiopipe as ap


@asynccontextmanager
async def listening(server: uvicorn.Server) -> AsyncIterator[str]:
    """The server on a free port; its address."""
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def embedding(compute: Callable[[Any], Any]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that embeds by a callback on the host, (rows, length) -> (rows,)."""

    def model(_: Any, ids: Any, mask: Any) -> Any:
        shape = jax.ShapeDtypeStruct(ids.shape[:1], np.float32)
        return jax.pure_callback(compute, shape, ids)[:, None] + mask[:, :1] * 0.0

    like = (np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32))
    async with (
        ap.Pipeline(model, None, devices=["cpu:0"], n_copies=1) as pipe,
        ap.Batcher(pipe, max_batch=1, lengths=[8], like=like) as batcher,
    ):
        models = Models(pipe=pipe, batcher=batcher, embed_tokenizer=load_tokenizer(), width=1, max_input=8)
        service = Service(models, chat_name="none", embed_name=EMBED_NAME, limits=Limits(grace_s=1.0))
        async with listening(Server(service, "127.0.0.1", 0)) as url, httpx.AsyncClient(base_url=url) as client:
            yield client


def ask(client: httpx.AsyncClient, text: str = "hello") -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/v1/embeddings", json={"model": EMBED_NAME, "input": text}))


async def test_health_answers_while_an_evaluation_runs() -> None:  # S29
    begun, end = threading.Event(), threading.Event()

    def compute(ids: Any) -> Any:
        begun.set()
        assert end.wait(30)
        return np.asarray(ids).sum(1).astype(np.float32)

    async with embedding(compute) as client:
        call = ask(client)
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(20):
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert "aiopipe_embeddings_waiting" in (await client.get("/metrics")).text
        assert not call.done()  # all that was answered while the device was at it
        end.set()
        found = (await call).json()["data"][0]["embedding"]
        assert found == [sum(load_tokenizer().encode("hello").ids)]


async def test_a_failing_device_is_the_servers_fault(capsys: pytest.CaptureFixture[str]) -> None:
    bad = load_tokenizer().encode("bad").ids[1]

    def compute(ids: Any) -> Any:
        if bad in np.asarray(ids):
            raise RuntimeError("a secret of the server's")
        return np.zeros(len(ids), np.float32)

    async with embedding(compute) as client:
        answer = await ask(client, "bad")
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "EvaluationError" in answer.text and "secret" not in answer.text
        assert (await ask(client, "good")).status_code == 200
        assert 'status="500"' in (await client.get("/metrics")).text
    assert "a secret of the server's" in capsys.readouterr().err  # whoever runs it is told everything


async def test_who_leaves_while_embedding_is_forgotten() -> None:
    begun, end = threading.Event(), threading.Event()

    def compute(ids: Any) -> Any:
        begun.set()
        assert end.wait(30)
        return np.asarray(ids).sum(1).astype(np.float32)

    async with embedding(compute) as client:
        calls = [ask(client, text) for text in ("a", "b", "c")]
        await asyncio.to_thread(begun.wait, 30)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        waiting = "aiopipe_embeddings_waiting 0.0"
        while waiting not in (await client.get("/metrics")).text:  # noqa: ASYNC110 - nor has this
            await asyncio.sleep(0.005)
        end.set()
        assert (await ask(client, "d")).status_code == 200


# Answers ---------------------------------------------------------------------------------------------


async def endless(closed: asyncio.Event) -> AsyncGenerator[bytes, None]:
    try:
        while True:
            yield b"data: " + b"x" * 100_000 + b"\n\n"
    finally:
        closed.set()


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_that_does_not_read_is_cut_off(leaves: bool) -> None:
    closed = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Events(endless(closed), None if leaves else 0.1)(scope, receive, send)

    config = uvicorn.Config(app, port=0, http="h11", ws="none", lifespan="off", log_level="critical")
    async with listening(uvicorn.Server(config)) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await writer.drain()
        if leaves:
            await asyncio.sleep(0.05)
            writer.transport.abort()
        await asyncio.wait_for(closed.wait(), 30)
        writer.close()


class Client:
    """What an application receives from one that may leave."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def test_work_ends_when_its_client_leaves() -> None:
    client = Client()
    with pytest.raises(ClientDisconnect):
        async with while_there(client.receive):
            client.left.set()
            await asyncio.sleep(30)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    async with while_there(Client().receive):
        await asyncio.sleep(0)
    with pytest.raises(KeyError):
        async with while_there(Client().receive):
            raise KeyError


async def test_being_cancelled_is_not_taken_for_a_client_that_leaves() -> None:
    async def work() -> None:
        async with while_there(Client().receive):
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    client = Client()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), while_there(client.receive):
            await asyncio.sleep(30)


async def test_a_client_that_leaves_just_when_the_work_is_done() -> None:
    client = Client()
    with pytest.raises(ClientDisconnect):
        async with while_there(client.receive):
            client.left.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)


# What the page is told -------------------------------------------------------------------------------


def told(data: bytes) -> Any:
    return json.loads(data.removeprefix(b"data: "))


async def test_everything_that_ran_is_told_once_and_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    ran: list[ap.Span] = []

    async def period(seconds: float) -> None:
        nonlocal clock
        await asyncio.sleep(0)
        clock += seconds / 2  # two watch

    monkeypatch.setattr(live, "sleep", period)
    monkeypatch.setattr(live.time, "perf_counter", lambda: clock)
    source = live.Source("texts", lambda seconds: [span for span in ran if span.end_s > clock - seconds])
    page = live.Live([source], ["cpu:0", "cpu:1"], lambda: {"writing": len(ran)}, Limits(watchers=2))
    watchers = [page._events(), page._events()]
    for watcher in watchers:
        assert told(await anext(watcher)) == {"backends": ["cpu:0", "cpu:1"], "sources": ["texts"]}
    seen: list[list[Any]] = [[], []]
    for step in range(40):
        for split in range(2):
            ran.append(ap.Span("compute", f"cpu:{split}", step, split, 0, clock - 0.1, clock))
        ran.append(ap.Span("wait", "host", step, -1, 0, clock - 0.1, clock))
        for watcher, spans in zip(watchers, seen, strict=True):
            found = told(await anext(watcher))
            assert set(found) == {"now", "spans", "writing"}
            spans += found["spans"]
    for watcher, spans in zip(watchers, seen, strict=True):
        told_of = [(evaluation, split, backend) for _, evaluation, split, backend, _, _ in spans]
        assert told_of == [(step, split, f"cpu:{split}") for step in range(len(told_of) // 2) for split in range(2)]
        assert len(told_of) > 70
        await watcher.aclose()


async def test_the_head_of_a_stream_ends_with_its_headers() -> None:
    async with embedding(lambda ids: np.zeros(len(ids), np.float32)) as client:
        answer = await client.head("/live")
        assert answer.headers["content-type"].startswith("text/event-stream") and not answer.content
        assert (await client.get("/health")).status_code == 200  # over the same connection


async def test_a_text_without_tokens_is_not_said_to_be_too_long() -> None:
    generator: Any = SimpleNamespace(n_ctx=8)
    tokenizer: Any = SimpleNamespace(n_vocab=9, encode=lambda text: [])
    texts = Texts(generator, tokenizer, Limits(), Metrics())
    with pytest.raises(ApiError, match="no tokens for this text") as info:
        await texts.prompt(CompletionRequest(model="m", prompt="\x01"))
    assert info.value.code is None and info.value.param == "prompt"


async def test_how_many_watch() -> None:
    page = live.Live([], [], dict, Limits(watchers=1))
    watcher = page._events()
    await anext(watcher)
    with pytest.raises(ApiError, match="1 pages watch already"):
        await page.live(None)  # type: ignore[arg-type]
    page.close()
    assert [event async for event in watcher] == []
