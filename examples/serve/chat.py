"""``/v1/chat/completions`` and ``/v1/completions``: what is sent to clients while a text is written, and at its end."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from .answers import Events, event, while_there
from .errors import ApiError
from .limits import Limits, read
from .schema import ChatRequest, CompletionRequest, TextRequest
from .texts import Texts, Writing

__all__ = ["Chat"]

DEFAULT_MAX_TOKENS = 16
"""Of a completion whose request does not say; for a chat the limit counts."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How an answer looks; chats and completions differ in this alone."""

    id: str
    created: int
    model: str
    chat: bool

    def whole(self, text: str, writing: Writing) -> dict[str, Any]:
        """The answer in one piece."""
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        return self._answer("chat.completion", content, writing.finish_reason) | {"usage": writing.usage}

    def piece(self, text: str) -> dict[str, Any]:
        """A part of a stream."""
        return self._part({"content": text}, text, None)

    def begin(self) -> dict[str, Any]:
        """What a stream of a chat begins with."""
        return self._part({"role": "assistant", "content": "", "refusal": None}, "", None)

    def end(self, writing: Writing) -> dict[str, Any]:
        """What a stream ends with."""
        return self._part({}, "", writing.finish_reason)

    def usage(self, writing: Writing) -> dict[str, Any]:
        """What it cost, behind the end."""
        return self._part({}, "", None) | {"choices": [], "usage": writing.usage}

    def _part(self, delta: dict[str, Any], text: str, reason: str | None) -> dict[str, Any]:
        return self._answer("chat.completion.chunk", {"delta": delta} if self.chat else {"text": text}, reason)

    def _answer(self, chat_object: str, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": chat_object if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason}],
        }


class Chat:
    """The two addresses.

    Args:
        texts: writes them.
        model: the name that clients ask for.
        limits: what they may ask for.
    """

    def __init__(self, texts: Texts, model: str, limits: Limits) -> None:
        self._texts = texts
        self._model = model
        self._limits = limits

    async def chat(self, request: Request) -> Any:
        """``POST /v1/chat/completions``"""
        asked = await read(request, ChatRequest, self._limits)
        return await self._answer(request, asked, asked.max_completion_tokens or asked.max_tokens)

    async def completion(self, request: Request) -> Any:
        """``POST /v1/completions``"""
        asked = await read(request, CompletionRequest, self._limits)
        return await self._answer(request, asked, asked.max_tokens or DEFAULT_MAX_TOKENS)

    async def _answer(
        self, request: Request, asked: ChatRequest | CompletionRequest, max_tokens: int | None
    ) -> Events | JSONResponse:
        self._check_model(asked.model)
        ids = await self._texts.prompt(asked)
        writing = self._texts.begin(ids, asked, max_tokens)
        is_chat = isinstance(asked, ChatRequest)
        id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        form = _Form(id, int(time.time()), self._model, is_chat)
        if asked.stream:
            # A client that reads slowly gets half as much time again as the text itself.
            return Events(self._events(form, writing, asked), self._limits.text_s * 1.5)
        async with while_there(request.receive), aclosing(self._texts.pieces(writing)) as pieces:
            text = "".join([piece async for piece in pieces])
        return JSONResponse(form.whole(text, writing))

    async def _events(self, form: _Form, writing: Writing, asked: TextRequest) -> AsyncGenerator[bytes, None]:
        begun = False
        # OpenAI's streams say in each event that its usage is not known yet, if they will end with it.
        unknown = {"usage": None} if asked.wants_usage else {}
        async with aclosing(self._texts.pieces(writing)) as pieces:
            try:
                async for piece in pieces:
                    if not begun and form.chat:
                        yield event(form.begin() | unknown)
                    begun = True
                    yield event(form.piece(piece) | unknown)
            except ApiError as error:
                if not begun:
                    raise
                yield event(error.body())
                return
        if not begun and form.chat:
            yield event(form.begin() | unknown)
        yield event(form.end(writing) | unknown)
        if asked.wants_usage:
            yield event(form.usage(writing))
        yield b"data: [DONE]\n\n"

    def _check_model(self, name: str) -> None:
        if name != self._model:
            message = f"The model '{name}' does not exist, or does not write texts. This server has '{self._model}'."
            raise ApiError(404, message, param="model", code="model_not_found")
