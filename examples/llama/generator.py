"""`Generator`: many texts at once by one model that is spread over several devices."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiopipe as ap

from .graphs import Graphs, Kind, Split
from .group import END, Group, Request
from .model import Config, Params
from .sampling import Sampling

__all__ = ["Counts", "Generator", "Stream"]


@dataclass(frozen=True, slots=True)
class Counts:
    """What a generator has done.

    Attributes:
        prompt_tokens: tokens of prompts that were read.
        tokens: tokens that were written, the one that ended a text included.
        decode_steps: steps that wrote a token of every active row of a group.
        compiled_steps: steps that were traced and compiled.
        writing: texts that have a row now.
        waiting: texts that wait for one now.
        scheduler: of the scheduler: evaluations, and with ``timeline=True`` how busy each device was.
    """

    prompt_tokens: int
    tokens: int
    decode_steps: int
    compiled_steps: int
    writing: int
    waiting: int
    scheduler: ap.Statistics


class Stream:
    """A text that is being written: ``async for token in stream``. Dropping it, or `cancel`, gives its row to others.

    However slowly it is read, nothing else waits for it. If several tasks read it, each token goes to one of them, and
    all of them hear of its end, or of the error that ended it.

    Attributes:
        prompt_tokens: how many tokens the prompt has.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.prompt_tokens = len(request.prompt)

    @property
    def finish_reason(self) -> str | None:
        """``"stop"``, ``"length"`` (of the text, or of the context), ``"left"`` or ``"error"``; None until then."""
        return self._request.reason

    @property
    def n_tokens(self) -> int:
        """How many tokens have been written, taken or not."""
        return self._request.n_tokens

    @property
    def first_token_s(self) -> float | None:
        """Seconds from submitting it to its first token, once that is there."""
        return self._request.first_s - self._request.submitted_s if self._request.first_s else None

    @property
    def decode_s(self) -> float:
        """Seconds from its first token to its newest."""
        return self._request.last_s - self._request.first_s

    def cancel(self) -> None:
        """Write no more of it. Tokens that are there can still be taken."""
        self._request.leave()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> int:
        request = self._request
        token = await request.tokens.get()
        if token is END:
            request.tokens.put_nowait(END)  # for whoever else reads it, or asks again
            if request.error is not None:
                raise request.error
            raise StopAsyncIteration
        return token

    def __del__(self) -> None:
        self._request.left = True  # a caller who has broken off the loop


class Generator:
    """Writes texts, as many at once as there are rows.

    The rows are parted into groups. A group's rows take a step together, and while one group's step is on the last
    device, another's is on the first: with at least as many groups as devices none of them waits for the round trip
    of a token. Texts join and leave between steps, and what a text becomes does not depend on its neighbours.

    Args:
        config: shape of the model.
        params: as `llama.weights.load` returns them.
        devices: specs or backends, in the order of the model's parts.
        rows: texts in a group.
        groups: how many; as many as devices when None.
        n_ctx: tokens of a text, prompt included, at most.
        chunk: tokens of a prompt that one step reads.
        n_copies: evaluations in flight at most; enough for all groups when None.
        split: ``"auto"`` balances the estimated time, ``"layers"`` the number of blocks, numbers are the shares.
        memory_limit: bytes for each device; see `aiopipe.Scheduler`.
        timeline: record how busy the devices are.
        on_progress: called with (compiled, to compile) while a step is compiled.

    Raises:
        ValueError: a size makes no sense.
    """

    def __init__(
        self,
        config: Config,
        params: Params,
        *,
        devices: Sequence[str | ap.Backend],
        rows: int = 8,
        groups: int | None = None,
        n_ctx: int = 512,
        chunk: int = 64,
        n_copies: int | None = None,
        split: Split = "auto",
        memory_limit: Any = None,
        timeline: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        groups = len(devices) if groups is None else groups
        for what, value in (("rows", rows), ("groups", groups), ("chunk", chunk), ("n_ctx", n_ctx)):
            if value < 1:
                raise ValueError(f"{what} is {value}, but must be at least 1")
        if n_ctx > config.n_ctx:
            raise ValueError(f"n_ctx is {n_ctx}, but the model was trained for at most {config.n_ctx} tokens")
        self.config = config
        self.n_ctx = n_ctx
        self._scheduler = ap.Scheduler(
            devices,
            n_copies=groups + len(devices) if n_copies is None else n_copies,
            memory_limit=memory_limit,
            timeline=timeline,
            on_progress=on_progress,
        )
        self._graphs = Graphs(
            self._scheduler,
            config,
            params,
            rows=rows,
            n_ctx=n_ctx,
            chunk=min(chunk, n_ctx),
            split=split,
            n_devices=len(devices),
        )
        self._n_groups = groups
        self._groups: list[Group] = []
        self._waiting: deque[Request] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def scheduler(self) -> ap.Scheduler:
        """The scheduler underneath."""
        return self._scheduler

    @property
    def n_rows(self) -> int:
        """How many texts can be written at the same time."""
        return self._graphs.rows * self._n_groups

    @property
    def states(self) -> list[ap.State]:
        """The state of each group."""
        return [group.state for group in self._groups]

    def submit(
        self,
        prompt: Sequence[int],
        *,
        sampling: Sampling | None = None,
        max_tokens: int = 128,
        stop: Iterable[int] = (),
    ) -> Stream:
        """Begin a text; it waits for a free row.

        Args:
            prompt: token ids.
            sampling: how its tokens are chosen; the best one each time by default.
            max_tokens: how many at most.
            stop: ids that end it.

        Raises:
            ValueError: the prompt is empty or fills the context, or an id is none of the vocabulary.
            RuntimeError: the generator is not open.
        """
        if self._closed or not self._groups:
            raise RuntimeError("the generator is not open: use it inside `async with Generator(...) as generator:`")
        if not 0 < len(prompt) < self.n_ctx:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; it must have at least one, and fewer than the context of "
                f"{self.n_ctx} tokens (n_ctx), for the text is written behind it"
            )
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}, but must be at least 1")
        wrong = next((t for t in prompt if not 0 <= t < self.config.n_vocab), None)
        if wrong is not None:
            raise ValueError(f"the prompt has the token {wrong}, but the vocabulary has {self.config.n_vocab} tokens")
        request = Request(prompt, sampling or Sampling(), max_tokens, frozenset(stop))
        group = max(self._groups, key=lambda group: group.n_free)
        if group.n_free > 0:
            group.give(request)
        else:
            for gone in [waiting for waiting in self._waiting if waiting.left]:
                self._waiting.remove(gone)  # or those who come and go would pile up while all rows are busy
            self._waiting.append(request)
        return Stream(request)

    async def prepare(
        self,
        kinds: Sequence[Kind] = ("chunk", "prefill", "decode_one", "decode"),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile every step for every length and make room for every group now, so that no text has to wait later.

        Args:
            kinds: which steps.
            on_progress: called with (compiled, to compile) before each step and at the end.
        """
        steps = [(kind, size) for size in self._graphs.sizes for kind in kinds]
        for done, (kind, size) in enumerate(steps):
            if on_progress is not None:
                on_progress(done, len(steps))
            await asyncio.shield(self._graphs.get(kind, size))
        if steps:
            graph = await asyncio.shield(self._graphs.get(*steps[0]))
            for state in self.states:
                await self._scheduler.alloc_graph(graph, state=state)
        if on_progress is not None:
            on_progress(len(steps), len(steps))

    def statistics(self) -> Counts:
        """What has been done so far."""
        return Counts(
            prompt_tokens=sum(group.n_prompt_tokens for group in self._groups),
            tokens=sum(group.n_tokens for group in self._groups),
            decode_steps=sum(group.n_steps for group in self._groups),
            compiled_steps=self._graphs.n_made,
            writing=sum(group.n_writing for group in self._groups),
            waiting=sum(not request.left for request in self._waiting) + sum(g.n_given for g in self._groups),
            scheduler=self._scheduler.statistics(),
        )

    async def __aenter__(self) -> Generator:
        await self._scheduler.__aenter__()
        try:
            await self._graphs.place()
        except BaseException:
            await self._scheduler.aclose(cancel=True)
            raise
        states = [self._graphs.first_state, *(self._graphs.new_state(f"group {i}") for i in range(1, self._n_groups))]
        self._groups = [Group(state, self._graphs, self._waiting) for state in states]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(group.run(), name=f"write {i}") for i, group in enumerate(self._groups)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all texts and close the devices. Idempotent."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        try:
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._graphs.aclose()
        finally:
            error = ap.BackendClosedError("the generator was closed before this text was complete")
            for group in self._groups:
                group.close(error)
            for request in self._waiting:
                request.end("error", error)
            self._waiting.clear()
            await self._scheduler.aclose(cancel=True)
