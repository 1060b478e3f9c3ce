"""Loading a plan: compile its programs in threads, see how large it is, put its weights in place."""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import anyio

from ._threads import in_thread
from .backend import Backend, Executable, Lane
from .devices.base import Program
from .errors import AiopipeError
from .loaded import Candidate, Loaded, Prepared
from .placing import Placing, Source, Upload
from .sched.alloc import backend_sizes
from .sched.plan import Plan
from .staging import Slots

__all__ = ["Loader"]

T = TypeVar("T")


FEW = 50
"""A graph of no more nodes and weights is gone through on the event loop: it takes less than handing it to a thread."""


class InThread(Protocol):
    """`_threads.in_thread`, or what counts its calls."""

    def __call__(self, call: Callable[[], T], name: str) -> Awaitable[T]: ...


class Loader:
    """Compiles and uploads for one scheduler; what several plans share is there once.

    Whatever goes over all splits or all weights does so in a thread: there may be thousands.

    Args:
        on_progress: called on the loop with (compiled, to compile) of the plan being loaded.

    Attributes:
        in_thread: calls something in a thread; whoever closes the scheduler may want to wait for these.
    """

    def __init__(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        self._executables: weakref.WeakValueDictionary[tuple[Hashable, str], Executable] = weakref.WeakValueDictionary()
        self._uploads: weakref.WeakValueDictionary[Source, Upload] = weakref.WeakValueDictionary()
        self.slots = Slots()
        self.in_thread: InThread = in_thread
        self._on_progress = on_progress
        self._limiter = anyio.CapacityLimiter(max(2, os.cpu_count() or 1))
        self.n_compiled = 0
        self.copied_weights_nbytes = 0

    async def prepare(self, candidate: Candidate, backends: Sequence[Backend]) -> Prepared:
        """Compile a plan, so that its sizes are known; allocates nothing on the backends.

        Args:
            candidate: a plan from `make_plan`.
            backends: in the plan's order.
        """
        plan = candidate.plan
        known, missing = await self._aside(plan, lambda: self._look_up(plan, backends), "lower")
        if missing:
            known.update(await self._compile(missing))

        def finish() -> Prepared:
            programs = plan.programs
            executables = [known[id(program)] for program in programs]
            sizes = backend_sizes(
                plan.graph,
                plan.splits,
                [backend.device.props for backend in backends],
                weights=plan.weights,
                donate=[program.donate for program in programs],
                state_homes=plan.state_homes,
                memory=[e.memory for e in executables],
            )
            return Prepared.of(replace(plan, sizes=sizes), candidate.origins, executables, backends)

        return await self._aside(plan, finish, "size")

    async def load(
        self,
        prepared: Prepared,
        backends: Sequence[Backend],
        *,
        n_copies: int,
        lane_for: Callable[[Backend, bool, bool], Lane],
    ) -> Loaded:
        """Put the weights of a prepared plan in place: it can run.

        Raises:
            AllocationError: a backend found no room; what had been put in place is let go.
        """
        plan = prepared.plan
        inline = n_copies <= prepared.in_caller
        lanes = [lane_for(backend, own, inline) for backend, own in zip(backends, prepared.own, strict=True)]
        placing = await self._aside(plan, lambda: Placing(plan, backends, self._uploads), "place")
        if placing.missing:
            try:
                await self.in_thread(placing.upload, "upload")
            finally:
                placing.ended = True  # also where nobody waits for it any more
            self.copied_weights_nbytes += placing.copied_nbytes

        def bind() -> Loaded:
            loaded = Loaded(
                prepared, backends, placing.weights, lanes, inline=inline, slots=self.slots, live=placing.live
            )
            loaded.uploads = placing.uploads
            return loaded

        return await self._aside(plan, bind, "bind")

    async def compile(self, program: Program, backend: Backend) -> Executable:
        """The executable of one program: compiled in a thread, unless there is one already."""
        return self._executables.get((program.key, backend.name)) or await self._make(program, backend)

    async def _make(self, program: Program, backend: Backend) -> Executable:
        def make() -> Executable:
            executable = self._executables[program.key, backend.name] = backend.load(program)
            return executable

        async with self._limiter:
            executable = await self.in_thread(make, "compile")
        self.n_compiled += 1
        return executable

    async def _aside(self, plan: Plan, call: Callable[[], T], name: str) -> T:
        """``call()``, in a thread where it goes through many weights, splits, or operations (a key is of these)."""
        if len(plan.graph.nodes) + sum(map(len, plan.weights)) <= FEW:
            return call()
        return await self.in_thread(call, name)

    def _look_up(
        self, plan: Plan, backends: Sequence[Backend]
    ) -> tuple[dict[int, Executable], list[tuple[Program, Backend]]]:
        """The executables that there are for a plan, by the identity of their programs, and what is to be compiled.

        By identity, as equal programs of one backend are one, and their keys may be long.
        """
        distinct = {id(p): (p, backends[s.backend]) for p, s in zip(plan.programs, plan.splits, strict=True)}
        known: dict[int, Executable] = {}
        missing: list[tuple[Program, Backend]] = []
        for program, backend in distinct.values():
            executable = self._executables.get((program.key, backend.name))
            if executable is not None:
                known[id(program)] = executable
            else:
                missing.append((program, backend))
        return known, missing

    async def _compile(self, missing: Sequence[tuple[Program, Backend]]) -> dict[int, Executable]:
        """Compile programs, several at a time."""
        made: dict[int, Executable] = {}
        waiting = iter(missing)

        async def compile_on() -> None:
            for program, backend in waiting:
                made[id(program)] = await self._make(program, backend)
                if self._on_progress is not None:
                    self._on_progress(len(made), len(missing))

        try:
            async with anyio.create_task_group() as group:
                for _ in range(min(len(missing), int(self._limiter.total_tokens))):
                    group.start_soon(compile_on)
        except BaseExceptionGroup as errors:
            error = _first(errors)
            raise error from error.__cause__
        return made


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a caller can act on: one of ours if there is one, else the first."""
    leaves: list[BaseException] = []
    queue: list[BaseException] = [errors]
    while queue:
        error = queue.pop()
        if isinstance(error, BaseExceptionGroup):
            queue.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, AiopipeError)), leaves[0])
