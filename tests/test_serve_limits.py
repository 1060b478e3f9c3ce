"""The server, over HTTP: who leaves, who is turned away, what makes no sense, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving import CHAT, EMBED, HELLO, Host, Running, events_of, held, serving

pytestmark = pytest.mark.timeout(120)  # the process with the models compiles them first

AS_JSON = {"content-type": "application/json"}

# Leaving -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_leaves_frees_its_row(serve_host: Host, stream: bool, begun: bool) -> None:  # S28
    async with serving(serve_host) as server:
        with held(serve_host):
            calls = [asyncio.create_task(server.chat(stream=stream)) for _ in range(6)]
            await server.until('aiopipe_texts{state="waiting"}', 6)
            if begun:
                serve_host.tell(hold=False)
                await server.until('aiopipe_texts{state="waiting"}', 0)
                serve_host.tell(hold=True)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            await server.quiet()  # though not one step was made since
        assert (await server.chat(max_tokens=3)).status_code == 200
        if not begun:
            assert await server.metric('aiopipe_tokens_total{kind="written"}') == 3
            assert await server.metric('aiopipe_requests_total{path="/v1/chat/completions",status="499"}') == 6


# Overload ----------------------------------------------------------------------------------------------


async def test_a_full_queue(serve_host: Host) -> None:
    async with serving(serve_host, queue=2) as server:
        with held(serve_host):
            calls = [asyncio.create_task(server.chat(max_tokens=5)) for _ in range(6)]  # four rows, and two wait
            await server.until('aiopipe_texts{state="waiting"}', 6)
            refused = await server.chat(stream=True)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            with pytest.raises(openai.RateLimitError, match="2 texts are waiting already"):
                await server.openai.chat.completions.create(model=CHAT, messages=HELLO)
            assert (await server.http.get("/health")).json() == {"status": "ok"}
        assert {(await call).status_code for call in calls} == {200}
        assert (await server.chat(max_tokens=5)).status_code == 200
        assert await server.metric('aiopipe_refused_total{what="texts"}') == 2


async def test_a_text_that_waits_too_long(serve_host: Host) -> None:
    async with serving(serve_host, wait_s=0.05) as server:
        with held(serve_host):
            for stream in (True, False):
                answer = await server.chat(stream=stream)
                assert answer.status_code == 503 and answer.headers["retry-after"]
                assert answer.json()["error"]["code"] == "waited_too_long"
        await server.quiet()


async def test_a_text_that_takes_too_long(serve_host: Host) -> None:
    async with serving(serve_host, text_s=0.2) as server:
        async with server.http.stream("POST", "/v1/completions", json=long_text()) as answer:
            events = answer.aiter_text()
            first = await anext(events)
            with held(serve_host):
                found = events_of(first + "".join([text async for text in events]))
        assert found[-1] == "[DONE]" and found[-2]["choices"][0]["finish_reason"] == "length"
        await server.quiet()


def long_text() -> dict[str, Any]:
    return {"model": CHAT, "prompt": "a", "max_tokens": 120, "stream": True, "temperature": 0}


@pytest.mark.parametrize(
    ("limits", "body", "message"),
    [
        ({"max_tokens": 10}, {"max_tokens": 11}, "max_tokens is too large: 11. This server writes at most 10"),
        ({}, {"model": "gpt-9"}, "The model 'gpt-9' does not exist"),
        ({}, {"n": 3}, "ask 3 times"),
        ({"body_nbytes": 300}, {"user": "x" * 300}, "larger than 300 bytes"),
    ],
)
async def test_too_much_is_asked_for(serve_host: Host, limits: Any, body: Any, message: str) -> None:
    async with serving(serve_host, **limits) as server:
        answer = await server.chat(**body)
        assert answer.status_code in (400, 404, 413) and message in answer.json()["error"]["message"]
        assert (await server.chat(max_tokens=1)).status_code == 200


async def raw(server: Running, sent: bytes, more: bytes = b"") -> bytes:
    """What is answered to these bytes, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(sent)
        await writer.drain()
        found = await reader.read(15)
        if more:
            writer.write(more)
        return found + await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def test_bodies_that_do_not_come(serve_host: Host) -> None:
    async with serving(serve_host, body_s=0.1, body_nbytes=1000) as server:
        slow = await raw(server, HEAD + b"Content-Length: 100\r\n\r\n{")
        assert slow.startswith(b"HTTP/1.1 408 ") and b"not complete after 0.1 seconds" in slow
        large = await raw(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"3e9\r\n" + b"x" * 1001 + b"\r\n")
        assert large.startswith(b"HTTP/1.1 413 ") and b"connection: close" in large.lower()
        for nonsense in (b"\x00\xff\r\n\r\n", b"GET  HTTP\r\n\r\n", HEAD + b"Content-Length: -1\r\n\r\n"):
            assert (await raw(server, nonsense)).startswith(b"HTTP/1.1 400 ")
        assert (await server.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "message"),
    [
        ("POST", "/v1/completions", {"content": b"{}"}, 415, "expected 'application/json'"),
        ("POST", "/v1/completions", {"content": b'{"a":', "headers": AS_JSON}, 400, "The request is no JSON"),
        ("POST", "/v1/completions", {"json": {}}, 400, "Missing required parameter: 'model'"),
        ("GET", "/v1/completions", {}, 405, "another method"),
        ("GET", "/v1/nothing", {}, 404, "nothing at this address"),
        ("GET", "/v1/models/gpt-9", {}, 404, "does not exist"),
        ("GET", "/static/..%2fapp.py", {}, 404, "nothing at this address"),
    ],
)
async def test_errors(serve_host: Host, method: str, path: str, options: Any, status: int, message: str) -> None:
    async with serving(serve_host) as server:
        answer = await server.http.request(method, path, **options)
        assert answer.status_code == status and message in answer.json()["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    "model messages prompt input stream stream_options temperature top_p seed stop n max_tokens logit_bias user".split()
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_no_body_is_the_servers_fault(serve_host: Host, path: str) -> None:
    async with serving(serve_host) as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:

            @settings(max_examples=60, suppress_health_check=list(HealthCheck))
            @given(JSON | st.dictionaries(FIELDS, JSON, min_size=1, max_size=3))
            def check(body: Any) -> None:
                base = {"/v1/chat/completions": {"messages": HELLO, "max_tokens": 1}, "/v1/embeddings": {"input": "a"}}
                if isinstance(body, dict):
                    default = {"model": EMBED if path.endswith("embeddings") else CHAT}
                    body = default | base.get(path, {"prompt": "a", "max_tokens": 1}) | body
                answer = client.post(path, content=json.dumps(body), headers=AS_JSON)
                assert answer.status_code in (200, 400, 404), answer.text
                assert answer.status_code == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}

            check()


# The end ---------------------------------------------------------------------------------------------


async def test_what_has_begun_ends_and_nobody_new_is_let_in(serve_host: Host) -> None:
    async with serving(serve_host) as server:
        text = (await server.http.post("/v1/completions", json=long_text() | {"stream": False})).json()["choices"][0]
        async with server.http.stream("POST", "/v1/completions", json=long_text()) as answer:
            events = answer.aiter_text()
            first = await anext(events)
            with held(serve_host):
                serve_host.tell(close=server.url)
                with pytest.raises(httpx.ConnectError):
                    async with asyncio.timeout(30):
                        while True:
                            # Who connects in the moment of closing is let in by the kernel, and hung up on.
                            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                                async with httpx.AsyncClient(base_url=server.url) as late:
                                    await late.get("/health")
            found = events_of(first + "".join([text async for text in events]))
        assert found[-1] == "[DONE]" and "".join(c["choices"][0]["text"] for c in found[:-1]) == text["text"]


async def test_what_does_not_end_is_cut(serve_host: Host) -> None:
    async with serving(serve_host, grace_s=0.2) as server:
        async with server.http.stream("POST", "/v1/completions", json=long_text()) as answer:
            events = answer.aiter_text()
            first = await anext(events)
            with held(serve_host):
                waiting = asyncio.create_task(server.chat())
                await server.until('aiopipe_texts{state="waiting"}', 1)
                serve_host.tell(close=server.url)
                found = events_of(first + "".join([text async for text in events]))
                assert found[-1]["error"]["code"] == "shutting_down"
                cut = await waiting
                assert cut.status_code == 503 and cut.json()["error"]["code"] == "shutting_down"
                assert cut.headers["retry-after"] == "5"


# Looking on ------------------------------------------------------------------------------------------


async def test_metrics(serve_host: Host) -> None:
    async with serving(serve_host) as server:
        await server.chat(max_tokens=4)
        await server.http.get("/wp-login.php")
        shown = (await server.http.get("/metrics")).text
        for line in (
            'aiopipe_requests_total{path="/v1/chat/completions",status="200"} 1.0',
            'aiopipe_requests_total{path="other",status="404"} 1.0',
            'aiopipe_tokens_total{kind="written"} 4.0',
            "aiopipe_first_token_seconds_count 1.0",
            'aiopipe_texts{state="waiting"} 0.0',
        ):
            assert line in shown.splitlines()
        assert "wp-login" not in shown


