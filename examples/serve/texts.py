"""Texts that are written for clients: let in, cut, counted. What they are sent as is in `serve.chat`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from llama.generator import Generator, Stream
from llama.sampling import Sampling
from llama.tokenizer import Tokenizer

from .errors import ApiError, busy, closing, failed, too_slow, wrong
from .limits import Limits, off_loop
from .metrics import Metrics
from .schema import ChatRequest, CompletionRequest, TextRequest
from .stops import Stops

__all__ = ["Texts", "Writing"]

Cut = Literal["waited", "time", "closing"]


class Writing:
    """A text that is being written for a client.

    Args:
        stream: its tokens.
        tokenizer: turns them into text.
        stops: texts that end it.

    Attributes:
        finish_reason: ``"stop"`` or ``"length"``, at the end.
    """

    def __init__(self, stream: Stream, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.finish_reason: str | None = None
        self.began_s = time.monotonic()
        self._stream = stream
        self._detokenizer = tokenizer.detokenizer()
        self._stops = Stops(stops)
        self._cut: Cut | None = None

    @property
    def usage(self) -> dict[str, Any]:
        """How many tokens it took so far, in OpenAI's form."""
        prompt, written = self._stream.prompt_tokens, self._stream.n_tokens
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    @property
    def written(self) -> bool:
        """Whether all of it is, however much of it the client has taken."""
        return self._stream.finish_reason is not None

    @property
    def first_token_s(self) -> float | None:
        """Seconds until its first token, once that is there."""
        return self._stream.first_token_s

    def cut(self, why: Cut) -> None:
        """Write no more of it. One that has begun does not wait any more."""
        if self._cut is None and not (why == "waited" and self._stream.n_tokens):
            self._cut = why
            self._stream.cancel()

    async def pieces(self) -> AsyncIterator[str]:
        """The text, piece by piece as it is written.

        Raises:
            ApiError: it was cut, or failed.
        """
        try:
            async for token in self._stream:
                piece = self._stops.push(self._detokenizer.push(token))
                if piece:
                    yield piece
                if self._stops.found:
                    break
            else:
                self._check()
        except ApiError:
            raise
        except Exception as error:  # whatever a device may say
            raise failed(error) from error
        finally:
            self._stream.cancel()  # whoever leaves early gives the row to others
        rest = self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        if rest:
            yield rest
        self.finish_reason = "stop" if self._stops.found or self._stream.finish_reason == "stop" else "length"

    def _check(self) -> None:
        if self._stream.finish_reason != "left":
            return
        if self._cut == "closing":
            raise closing()
        if self._cut == "waited":
            waited_s = time.monotonic() - self.began_s
            raise too_slow(f"This text has waited for {waited_s:.0f} seconds and not begun. Try again later.", 10)


class Texts:
    """Lets texts in, as many as may be written or wait at the same time.

    Args:
        generator: writes them; open.
        tokenizer: of its model.
        limits: what may be asked for.
        metrics: counts them.
    """

    def __init__(self, generator: Generator, tokenizer: Tokenizer, limits: Limits, metrics: Metrics) -> None:
        self.generator = generator
        self.tokenizer = tokenizer
        self._limits = limits
        self._metrics = metrics
        self._writing: set[Writing] = set()
        self._closing = False
        self._text_s = 1.0  # a moving average

    async def prompt(self, request: ChatRequest | CompletionRequest) -> list[int]:
        """Token ids of what is asked.

        Raises:
            ApiError: there are too many, or the model cannot read it.
        """
        n_ctx = self.generator.n_ctx
        if isinstance(request, CompletionRequest):
            given, param = request.prompt, "prompt"
            ids = given if isinstance(given, list) else await off_loop(lambda: self.tokenizer.encode(given), len(given))
            wrong_id = next((token for token in ids if not 0 <= token < self.tokenizer.n_vocab), None)
            if wrong_id is not None:
                raise wrong(f"There is no token {wrong_id}; they go from 0 to {self.tokenizer.n_vocab - 1}.", param)
        else:
            param = "messages"
            roles = {"developer": "system"}
            plain = self.tokenizer.plain

            def encode() -> list[int]:
                turns = [{"role": roles.get(m.role, m.role), "content": plain(m.content)} for m in request.messages]
                return self.tokenizer.chat(turns)

            try:
                ids = await off_loop(encode, sum(len(message.content) for message in request.messages))
            except ValueError as error:
                raise wrong(f"{error}", param) from None
        if not ids:
            raise wrong("This model has no tokens for this text: a text is written behind at least one.", param)
        if len(ids) >= n_ctx:
            message = (
                f"This model's context is {n_ctx} tokens, and the text is written behind the prompt, which has "
                f"{len(ids)}. Shorten it."
            )
            raise wrong(message, param, "context_length_exceeded")
        return ids

    def begin(self, ids: Sequence[int], request: TextRequest, max_tokens: int | None) -> Writing:
        """Have a text written.

        Args:
            ids: the prompt.
            request: how its tokens are chosen, and what ends it.
            max_tokens: how many at most; as many as the limits allow when None.

        Raises:
            ApiError: too much is asked for, too many wait, or the server ends.
        """
        limit = self._limits.max_tokens
        if max_tokens is not None and max_tokens > limit:
            raise wrong(f"max_tokens is too large: {max_tokens}. This server writes at most {limit}.", "max_tokens")
        if self._closing:
            raise closing()
        rows = self.generator.n_rows
        waiting = sum(not writing.written for writing in self._writing) - rows
        if waiting >= self._limits.queue:
            self._metrics.refused.labels("texts").inc()
            raise busy(f"{waiting} texts are waiting already. Try again later.", waiting / rows * self._text_s)
        stream = self.generator.submit(
            ids, sampling=sampling_of(request), max_tokens=max_tokens or limit, stop=self.tokenizer.stop_ids
        )
        writing = Writing(stream, self.tokenizer, request.stop)
        self._writing.add(writing)
        return writing

    async def pieces(self, writing: Writing) -> AsyncIterator[str]:
        """The text, within the limits of time; it is counted, and its row comes back, however this ends."""
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(self._limits.wait_s, writing.cut, "waited"),
            loop.call_later(self._limits.text_s, writing.cut, "time"),
        ]
        source = writing.pieces()
        try:
            async for piece in source:
                yield piece
            took_s = time.monotonic() - writing.began_s
            self._text_s = 0.8 * self._text_s + 0.2 * took_s
        finally:
            await source.aclose()
            for timer in timers:
                timer.cancel()
            self._writing.discard(writing)
            self._metrics.text_ended(writing)

    def close(self) -> None:
        """Let nobody in any more."""
        self._closing = True

    def cut(self) -> None:
        """End all that is being written."""
        for writing in self._writing:
            writing.cut("closing")


def sampling_of(request: TextRequest) -> Sampling:
    """How the tokens of a text are chosen. Without a seed every text is another one."""
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    return Sampling(
        temperature=temperature if top_p > 0 else 0.0,  # of nothing but the best token there is no choice
        top_p=top_p or 1.0,
        top_k=request.top_k or 0,
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        seed=random.getrandbits(32) if request.seed is None else request.seed % 2**32,
    )
