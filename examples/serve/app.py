"""The application: its addresses, what is measured of every request, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import aiopipe as ap

from .chat import Chat
from .embeddings import Embeddings
from .errors import ApiError, handlers
from .limits import Limits
from .live import Live, Source
from .metrics import Metrics, Value, Values
from .models import Models
from .texts import Texts

__all__ = ["Service"]

STATIC = Path(__file__).parent / "static"

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/health", "/metrics", "/live", "/")
"""What requests are counted under; everything else is "other", whatever clients may ask for."""

BUSY_S = 10.0
"""How far back `/metrics` looks at the devices."""

SAFE = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Service:
    """Everything that is served, over models that are ready.

    Args:
        models: what there is.
        chat_name: what clients call the language model.
        embed_name: what they call the sentence encoder.
        limits: what they may ask for.

    Attributes:
        app: the ASGI application.
        names: of the models, as clients call them.
    """

    def __init__(self, models: Models, *, chat_name: str, embed_name: str, limits: Limits) -> None:
        self.limits = limits
        self.metrics = Metrics()
        self.texts: Texts | None = None
        self.embeddings: Embeddings | None = None
        self._closing = False
        self._began_s = time.time()
        self.names: list[str] = []
        self.live = Live(*_watched(models), self._now, limits)
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
            Route("/live", self.live.live),
            Route("/", self._page),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        if models.generator is not None and models.tokenizer is not None:
            self.texts = Texts(models.generator, models.tokenizer, limits, self.metrics)
            chat = Chat(self.texts, chat_name, limits)
            routes.append(Route("/v1/chat/completions", chat.chat, methods=["POST"]))
            routes.append(Route("/v1/completions", chat.completion, methods=["POST"]))
            self.names.append(chat_name)
        if models.batcher is not None:
            self.embeddings = Embeddings(
                models.batcher,
                models.embed_tokenizer,
                width=models.width,
                max_tokens=models.max_input,
                model=embed_name,
                limits=limits,
                metrics=self.metrics,
            )
            routes.append(Route("/v1/embeddings", self.embeddings.embeddings, methods=["POST"]))
            self.names.append(embed_name)
        Values(self.metrics, self._values)
        self.app = Observed(Starlette(routes=routes, exception_handlers=handlers), self.metrics)

    def close(self) -> None:
        """Let nobody in any more; what has begun goes on."""
        self._closing = True
        for part in (self.texts, self.embeddings, self.live):
            if part is not None:
                part.close()

    def cut(self) -> None:
        """End what has not ended by itself."""
        if self.texts is not None:
            self.texts.cut()

    async def _health(self, request: Request) -> Response:
        if self._closing:
            return JSONResponse({"status": "closing"}, 503)
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._shown(name) for name in self.names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.names:
            message = f"The model '{name}' does not exist. This server has {', '.join(map(repr, self.names))}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(self._shown(name))

    def _shown(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": int(self._began_s), "owned_by": "aiopipe"}

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.show(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _page(self, request: Request) -> Response:
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html", headers=SAFE)

    def _now(self) -> dict[str, Any]:
        """What the page is told besides what ran."""
        if self.texts is None:
            return {"writing": 0, "rows": 0, "waiting": 0, "tokens": 0}
        generator = self.texts.generator
        found = generator.statistics()
        return {
            "writing": found.writing,
            "rows": generator.n_rows,
            "waiting": found.waiting,
            "tokens": found.tokens,
        }

    def _values(self) -> Iterator[Value]:
        """What there is now, for `/metrics`."""
        if self.texts is not None:
            found = self.texts.generator.statistics()
            texts = {"writing": found.writing, "waiting": found.waiting}
            yield Value("aiopipe_texts", "Texts, by what they do.", "gauge", texts, "state")
            yield Value("aiopipe_decode_steps", "Steps of all rows.", "counter", {"": found.decode_steps})
            busy = self.texts.generator.scheduler.timeline.recent(BUSY_S).utilization()
            yield Value("aiopipe_busy", "Share of ten seconds in which it wrote texts.", "gauge", busy, "device")
        if self.embeddings is not None:
            batches = self.embeddings.batcher.statistics()
            yield Value("aiopipe_embeddings_waiting", "Texts that wait to be embedded.", "gauge", {"": batches.waiting})
            yield Value("aiopipe_embeddings_rows", "Texts that were embedded.", "counter", {"": batches.rows})
            yield Value("aiopipe_embeddings_batches", "Batches of them.", "counter", {"": batches.batches})
            yield Value("aiopipe_embeddings_padding", "Share of them that is padding.", "gauge", {"": batches.padding})


def _watched(models: Models) -> tuple[list[Source], list[str]]:
    """Whose work the page shows, and the names of the devices."""
    schedulers: dict[str, ap.Scheduler] = {}
    if models.generator is not None:
        schedulers["texts"] = models.generator.scheduler
    if models.pipe is not None:
        schedulers["embeddings"] = models.pipe.scheduler
    names = dict.fromkeys(backend.name for found in schedulers.values() for backend in found.backends)
    return [Source(name, partial(_recent, found)) for name, found in schedulers.items()], list(names)


def _recent(scheduler: ap.Scheduler, seconds: float) -> Sequence[ap.Span]:
    """What it ran lately."""
    return scheduler.timeline.recent(seconds).spans


class Observed:
    """Counts every request, and how long its answer took."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        status = 499  # where nothing is answered, nobody is there

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self._metrics.answered(path, status, time.perf_counter() - began_s)
