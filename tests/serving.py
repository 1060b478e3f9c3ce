"""What the tests of examples/serve share: servers over small models, in a process of their own, and clients of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

CHAT, EMBED = "smollm2-135m-instruct", "all-minilm-l6-v2"
HELLO: Any = [{"role": "user", "content": "Hi"}]
HOST = Path(__file__).parent / "serve_host.py"


class Host:
    """The process: `tests/serve_host.py`.

    Attributes:
        complaints: what it had to complain of at its end.
    """

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(HOST)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._errors: list[str] = []
        assert self._process.stderr is not None
        # Somebody has to read it, or the process stops when the pipe is full.
        self._reader = threading.Thread(target=self._errors.extend, args=(self._process.stderr,))
        self._reader.start()

    def answer(self) -> dict[str, Any]:
        """Its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the servers has ended:\n{''.join(self._errors)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, **order: Any) -> dict[str, Any]:
        """Give it an order; its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """End it."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            self.complaints = self.answer()["complaints"]
        self._reader.join()
        expected = ("compiling ", "WARNING:  Invalid HTTP request received.")
        self.complaints += [line for line in self._errors if not line.startswith(expected)]


@contextmanager
def hosting() -> Iterator[Host]:
    """A process that opens servers; what it complains of fails the test."""
    host = Host()
    try:
        assert host.answer() == {"ready": True}
        yield host
    finally:
        host.close()
    assert not host.complaints, "\n".join(host.complaints)


class Running:
    """A server, and clients of it.

    Attributes:
        url: where it is.
        http: a plain client.
        openai: the official one, which does not try again by itself.
    """

    def __init__(self, host: Host, url: str, http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
        self.host = host
        self.url = url
        self.http = http
        self.openai = client

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def chat(self, content: str = "Hi", **more: Any) -> httpx.Response:
        body = {"model": CHAT, "messages": [{"role": "user", "content": content}], "temperature": 0, **more}
        return await self.http.post("/v1/chat/completions", json=body)

    async def metric(self, name: str) -> float:
        """A value of `/metrics`, such as ``aiopipe_texts{state="writing"}``; 0 where it is not there yet."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)

    async def until(self, name: str, value: float) -> None:
        """Until a value of `/metrics` is so."""
        async with asyncio.timeout(30):
            while await self.metric(name) != value:  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(0.01)

    async def quiet(self) -> None:
        """Until nothing is written and nothing waits."""
        await self.until('aiopipe_texts{state="writing"}', 0)
        await self.until('aiopipe_texts{state="waiting"}', 0)


@contextmanager
def held(host: Host) -> Iterator[None]:
    """Inside, no text is written on."""
    host.tell(hold=True)
    try:
        yield
    finally:
        host.tell(hold=False)


@asynccontextmanager
async def serving(host: Host, **limits: Any) -> AsyncIterator[Running]:
    """A server with such limits, and clients of it."""
    url = host.tell(open={"grace_s": 5.0, **limits})["url"]
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
        ):
            yield Running(host, url, http, client)
    finally:
        host.tell(close=url)
        await asyncio.to_thread(host.tell, ended=url)


def events_of(body: str) -> list[Any]:
    """The data of a stream of events; ``"[DONE]"`` as it is."""
    parts = [part.removeprefix("data: ") for part in body.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]
