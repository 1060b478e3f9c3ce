"""The server around the application: it opens the models, listens, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

import aiopipe as ap

from .app import Service
from .limits import Limits
from .models import Models, Sizes, open_embeddings, open_generator

__all__ = ["CHAT_NAME", "EMBED_NAME", "Server", "open_service"]

CHAT_NAME = "smollm2-135m-instruct"
EMBED_NAME = "all-minilm-l6-v2"


class Server(uvicorn.Server):
    """Ends in order: SIGTERM or Ctrl-C stop it from accepting, what has begun may end, and after a while is cut.

    A second Ctrl-C ends it at once.

    Args:
        service: what is served.
        host, port: where; port 0 takes a free one.
        on_ready: called when it listens.
    """

    def __init__(
        self, service: Service, host: str, port: int, on_ready: Callable[[Server], None] = lambda _: None
    ) -> None:
        self._service = service
        self._on_ready = on_ready
        grace_s = service.limits.grace_s
        super().__init__(
            uvicorn.Config(
                service.app,
                host=host,
                port=port,
                http="h11",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                # Cutting ends answers in order; this is for those whose clients do not read them.
                timeout_graceful_shutdown=int(grace_s) + 5,
            )
        )

    @property
    def address(self) -> str:
        """Where it listens, once it does."""
        found: socket.socket = self.servers[0].sockets[0]
        host, port = found.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it is to listen."""
        await super().startup(sockets)
        self._on_ready(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it is to end."""
        self._service.close()
        timer = asyncio.get_running_loop().call_later(self._service.limits.grace_s, self._service.cut)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Without raising them again at the end, as uvicorn does: an end in order is no failure."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@asynccontextmanager
async def open_service(
    devices: Sequence[str],
    *,
    model: Path | None = None,
    chat_name: str = CHAT_NAME,
    split: Any = "auto",
    sizes: Sizes | None = None,
    limits: Limits | None = None,
    embeddings: bool = True,
    encoder: Any = None,
) -> AsyncIterator[Service]:
    """Everything that is served, its models ready on the same devices.

    Args:
        devices: specs, in the order of the models' parts.
        model: a GGUF file; the installed SmolLM2 when None.
        chat_name: what clients call it.
        split: how it is spread; as for `llama.generator.Generator`.
        sizes: how much is written and embedded at the same time.
        limits: what clients may ask for.
        embeddings: whether texts are embedded, too.
        encoder: configuration and weights of the sentence encoder; the installed MiniLM when None.
    """
    sizes, limits = sizes or Sizes(), limits or Limits()
    async with AsyncExitStack() as stack:
        backends = ap.open_backends(*devices)
        for backend in backends:
            stack.push_async_callback(backend.aclose)
        generator, tokenizer = await stack.enter_async_context(open_generator(model, backends, sizes, split))
        models = Models()
        if embeddings:
            models = await stack.enter_async_context(open_embeddings(encoder, backends, sizes, limits.rows))
        models = replace(models, generator=generator, tokenizer=tokenizer)
        yield Service(models, chat_name=chat_name, embed_name=EMBED_NAME, limits=limits)
