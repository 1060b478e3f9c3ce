"""A group of texts that are written together: one state, one loop of steps, joined and left between steps."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import aiopipe as ap

from .graphs import Graphs, Kind
from .sampling import Sampling, single, stack

__all__ = ["Group", "Request"]

END = None
"""What stands behind a text's last token in its queue."""


class Request:
    """A text to be written.

    Attributes:
        prompt: token ids, at least one.
        sampling: how its tokens are chosen.
        max_tokens: how many at most.
        stop: ids that end it; they are not part of it.
        tokens: what has been written and not been taken yet; `END` behind the last.
        left: nobody wants it any more.
        reason: why it has ended: ``"stop"``, ``"length"``, ``"left"`` or ``"error"``.
        error: what went wrong.
        submitted_s, first_s, last_s: when it was submitted, and its first and newest token came; `time.monotonic`.
        n_tokens: how many have been written.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop: frozenset[int]) -> None:
        self.prompt = np.asarray(prompt, np.int32)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop = stop
        self.tokens: asyncio.Queue[int | None] = asyncio.Queue()
        self.left = False
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.submitted_s = time.monotonic()
        self.first_s = self.last_s = 0.0
        self.n_tokens = 0

    def push(self, token: int) -> bool:
        """Take the next token; whether another one is wanted."""
        if self.reason is not None:
            return False
        if token in self.stop:
            return self.end("stop")
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        self.n_tokens += 1
        self.tokens.put_nowait(token)
        return True if self.n_tokens < self.max_tokens else self.end("length")

    def leave(self) -> None:
        """Nobody wants it any more. It ends here and now; a row that it has is free after the next step."""
        self.left = True
        self.end("left")

    def end(self, reason: str, error: BaseException | None = None) -> bool:
        """No more tokens will come."""
        if self.reason is None:
            self.reason, self.error = reason, error
            self.tokens.put_nowait(END)
        return False


class _Row:
    """A row of the state that a text is written in."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.n_read = 0  # tokens of the text that the cache holds
        self.token = -1  # the newest, which it does not hold yet

    @property
    def reads_prompt(self) -> bool:
        return self.n_read < len(self.request.prompt)


class Group:
    """One state and what is written in it.

    Args:
        state: what its texts are written in.
        graphs: the steps.
        waiting: texts that have no row yet, shared by all groups.

    Attributes:
        n_steps: decode steps so far.
        n_prompt_tokens: tokens of prompts that were read.
        n_tokens: tokens that were written.
    """

    def __init__(self, state: ap.State, graphs: Graphs, waiting: deque[Request]) -> None:
        self.state = state
        self.n_steps = 0
        self.n_prompt_tokens = 0
        self.n_tokens = 0
        self._graphs = graphs
        self._waiting = waiting
        self._given: deque[Request] = deque()
        self._rows: list[_Row | None] = [None] * graphs.rows
        self._wake = asyncio.Event()
        self._chunks: list[ap.Evaluation] = []  # of prompts, that nobody awaits
        self._sampling: tuple[list[Sampling], dict[str, Any]] | None = None

    @property
    def n_writing(self) -> int:
        """Texts that have a row."""
        return sum(row is not None and not row.request.left for row in self._rows)

    @property
    def n_given(self) -> int:
        """Texts that are about to take one."""
        return sum(not request.left for request in self._given)

    @property
    def n_free(self) -> int:
        """Rows that nobody has, less the texts that are about to take one."""
        return sum(row is None for row in self._rows) - len(self._given)

    def give(self, request: Request) -> None:
        """Have this group write a text; it has a free row."""
        self._given.append(request)
        self._wake.set()

    async def run(self) -> None:
        """Write for ever. What goes wrong ends the texts of this group, and the next ones begin with a new state."""
        task = asyncio.current_task()
        assert task is not None
        while True:
            try:
                await self._step()
            except (Exception, asyncio.CancelledError) as error:  # whatever it is, somebody waits for these texts
                if task.cancelling():
                    raise
                self.fail(self._cause(error))
                with suppress(ap.StateError):  # whoever freed it; the next texts are told so, too
                    await self.state.reset()

    def _cause(self, error: BaseException) -> BaseException:
        """Why a step has failed: perhaps a chunk that nobody awaited did before."""
        chunks, self._chunks = self._chunks, []
        failed = (e.exception() for e in chunks if e.done() and not e.cancelled())
        first = next((e for e in failed if e is not None), error)
        if isinstance(first, asyncio.CancelledError):  # which would look as if the reader had been cancelled
            return ap.BackendClosedError("a step of this text was cancelled: its scheduler has been closed")
        return first

    def close(self, error: BaseException) -> None:
        """End every text of this group, also those that have not begun."""
        self.fail(error)
        while self._given:
            self._given.popleft().end("error", error)

    def fail(self, error: BaseException) -> None:
        """End every text that is being written."""
        for i, row in enumerate(self._rows):
            if row is not None:
                row.request.end("error", error)
                self._rows[i] = None

    async def _step(self) -> None:
        """One token of every row whose prompt has been read, and one chunk of every other's."""
        self._take_in()
        rows = [(i, row) for i, row in enumerate(self._rows) if row is not None]
        if not rows:
            self._wake.clear()
            await self._wake.wait()
            return
        ends: list[tuple[int, _Row, ap.Evaluation]] = []
        for i, row in rows:
            if row.reads_prompt:
                evaluation = await self._read_chunk(i, row)
                if not row.reads_prompt:
                    ends.append((i, row, evaluation))
        writing = [(i, row) for i, row in rows if row.token >= 0]
        step = await self._decode(writing) if writing else None
        # A chunk that another one follows is not waited for: the next goes behind it, from device to device.
        for i, row, evaluation in ends:
            self._push(i, row, int(np.asarray(await evaluation)))
        if ends:
            self._chunks = [e for e in self._chunks if not e.done()]
        if step is not None:
            chosen = np.asarray(await step).tolist()
            one_of_one = len(chosen) == 1 and len(writing) == 1
            for i, row in writing:
                row.n_read += 1
                self._push(i, row, chosen[0 if one_of_one else i])
            self.n_steps += 1

    def _take_in(self) -> None:
        """Rows of texts that ended, or that nobody wants any more, go to those that wait."""
        for i, row in enumerate(self._rows):
            if row is not None and row.request.left:
                row.request.end("left")
                row = self._rows[i] = None
            if row is None and (request := self._next()) is not None:
                self._rows[i] = _Row(request)

    def _next(self) -> Request | None:
        """Whose turn it is; those whom nobody wants any more are passed over."""
        while queue := self._given or self._waiting:
            request = queue.popleft()
            if not request.left:
                return request
            request.end("left")
        return None

    def _push(self, i: int, row: _Row, token: int) -> None:
        row.token = token
        self.n_tokens += 1
        if not row.request.push(token):
            self._rows[i] = None
        elif row.n_read >= self._graphs.n_ctx:
            row.request.end("length")
            self._rows[i] = None

    async def _graph(self, kind: Kind, length: int) -> ap.Graph:
        """The step that covers so many positions. The next size is compiled before it is needed."""
        graphs = self._graphs
        size = graphs.bucket(length)
        if length > size * 3 // 4 and size < graphs.n_ctx:
            graphs.get(kind, graphs.bucket(size + 1))
        task = graphs.get(kind, size)
        return task.result() if task.done() else await asyncio.shield(task)

    async def _read_chunk(self, i: int, row: _Row) -> ap.Evaluation:
        size, prompt, start = self._graphs.chunk, row.request.prompt, row.n_read
        part = prompt[start : start + size]
        tokens = np.zeros(size, np.int32)
        tokens[: len(part)] = part
        row.n_read += len(part)
        self.n_prompt_tokens += len(part)
        graph = await self._graph("chunk" if row.reads_prompt else "prefill", row.n_read)
        where = [np.array(n, np.int32) for n in (i, start, len(part))]
        submit = self._graphs.scheduler.graph_compute_async
        evaluation = await submit(graph, tokens, *where, single(row.request.sampling), state=self.state)
        if row.reads_prompt:
            self._chunks.append(evaluation)
        return evaluation

    async def _decode(self, writing: Sequence[tuple[int, _Row]]) -> ap.Evaluation:
        length = max(row.n_read for _, row in writing) + 1
        submit = self._graphs.scheduler.graph_compute_async
        if len(writing) == 1 and self._graphs.rows > 1:
            i, row = writing[0]
            graph = await self._graph("decode_one", length)
            token, index, position = (np.array([n], np.int32) for n in (row.token, i, row.n_read))
            return await submit(graph, token, index, position, self._stack([row.request.sampling]), state=self.state)
        graph = await self._graph("decode", length)
        tokens, positions = np.zeros((2, self._graphs.rows), np.int32)
        active = np.zeros(self._graphs.rows, np.bool_)
        sampling = [Sampling()] * self._graphs.rows
        for i, row in writing:
            tokens[i], positions[i], active[i], sampling[i] = row.token, row.n_read, True, row.request.sampling
        return await submit(graph, tokens, positions, active, self._stack(sampling), state=self.state)

    def _stack(self, sampling: list[Sampling]) -> dict[str, Any]:
        """As arrays; made anew only when somebody has joined or left."""
        if self._sampling is None or self._sampling[0] != sampling:
            self._sampling = sampling, stack(sampling)
        return self._sampling[1]
