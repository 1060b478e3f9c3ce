"""``/v1/embeddings``: requests that come at the same time share batches."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse

import aiopipe as ap

from .answers import while_there
from .errors import ApiError, busy, closing, wrong
from .limits import Limits, off_loop, read
from .metrics import Metrics
from .schema import EmbeddingRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Embeddings"]


class Embeddings:
    """The address.

    Args:
        batcher: computes ``embed(ids, mask)``, each (rows, length), its `lengths` as long as texts may be.
        tokenizer: of the model, without padding and truncation.
        width: of an embedding.
        max_tokens: of a text.
        model: the name that clients ask for.
        limits: what they may ask for.
        metrics: counts what is refused.
    """

    def __init__(
        self,
        batcher: ap.Batcher,
        tokenizer: Tokenizer,
        *,
        width: int,
        max_tokens: int,
        model: str,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self.batcher = batcher
        self._tokenizer = tokenizer
        self._width = width
        self._max_tokens = max_tokens
        self._model = model
        self._limits = limits
        self._metrics = metrics
        self._closing = False

    async def embeddings(self, request: Request) -> JSONResponse:
        """``POST /v1/embeddings``"""
        asked = await read(request, EmbeddingRequest, self._limits)
        if asked.model != self._model:
            message = f"The model '{asked.model}' does not exist, or does not embed. This server has '{self._model}'."
            raise ApiError(404, message, param="model", code="model_not_found")
        if asked.dimensions not in (None, self._width):
            raise wrong(f"This model's embeddings have {self._width} dimensions.", "dimensions")
        if len(asked.input) > self._limits.inputs:
            message = f"got {len(asked.input)} inputs, but this server takes {self._limits.inputs} at once."
            raise wrong(message, "input")
        tokens = await self._tokens(asked.input)
        async with while_there(request.receive):
            found = await self._embed(tokens)
        body = partial(_body, found, self._model, sum(map(len, tokens)), asked.encoding_format == "base64")
        return JSONResponse(await off_loop(body, found.size))

    def close(self) -> None:
        """Let nobody in any more."""
        self._closing = True

    async def _tokens(self, inputs: Sequence[str | list[int]]) -> list[list[int]]:
        texts = [text for text in inputs if isinstance(text, str)]
        encode = partial(self._tokenizer.encode_batch_fast, texts)
        encoded = iter(await off_loop(encode, sum(map(len, texts))) if texts else [])
        tokens = [next(encoded).ids if isinstance(text, str) else text for text in inputs]
        n_vocab = self._tokenizer.get_vocab_size()
        for i, ids in enumerate(tokens):
            if len(ids) > self._max_tokens:
                message = f"Input {i} has {len(ids)} tokens, but this model reads at most {self._max_tokens}. Cut it."
                raise wrong(message, "input", "context_length_exceeded")
            unknown = next((token for token in ids if not 0 <= token < n_vocab), None)
            if unknown is not None:
                raise wrong(f"There is no token {unknown}; they go from 0 to {n_vocab - 1}.", "input")
        return tokens

    async def _embed(self, tokens: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
        """(texts, width). All of them together: where one is refused, none is computed."""
        if self._closing:
            raise closing()
        rows = [np.asarray(ids, np.int32) for ids in tokens]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.batcher.single(ids, np.ones_like(ids))) for ids in rows]
        except* ap.OverloadedError as errors:
            first = errors.exceptions[0]
            assert isinstance(first, ap.OverloadedError)
            self._metrics.refused.labels("embeddings").inc()
            raise busy(f"{first.waiting} texts are waiting already. Try again later.", first.retry_after_s) from None
        except* ap.BackendClosedError:
            raise closing() from None
        return np.stack([task.result() for task in tasks])


def _body(found: np.ndarray[Any, Any], model: str, n_tokens: int, packed: bool) -> dict[str, Any]:
    """The answer's JSON."""

    def shown(row: np.ndarray[Any, Any]) -> str | list[float]:
        return base64.b64encode(row.astype("<f4").tobytes()).decode() if packed else row.tolist()

    data = [{"object": "embedding", "index": i, "embedding": shown(row)} for i, row in enumerate(found)]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
