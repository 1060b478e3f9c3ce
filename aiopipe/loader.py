"""Loading a plan: compile its programs in threads, see how large it is, put its weights in place."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np

from ._threads import in_thread
from .backend import Backend, Executable, Lane
from .devices.base import Program
from .errors import AiopipeError
from .live_weights import LiveWeights, held_by, source_value
from .loaded import Candidate, Loaded, Prepared
from .sched.alloc import backend_sizes
from .sched.plan import Plan
from .staging import Slots

__all__ = ["Loader"]


class _Upload:
    """A weight that the loader put on a backend; lives as long as a plan that uses it."""

    __slots__ = ("__weakref__", "source", "value")

    def __init__(self, source: Any, value: Any) -> None:
        self.source = source  # kept so that nothing else gets its id meanwhile
        self.value = value


class Loader:
    """Compiles and uploads for one scheduler; what several plans share is there once.

    Whatever goes over all splits or all weights does so in a thread: there may be thousands.

    Args:
        on_progress: called on the loop with (compiled, to compile) of the plan being loaded.
    """

    def __init__(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        self._executables: weakref.WeakValueDictionary[tuple[Hashable, str], Executable] = weakref.WeakValueDictionary()
        self._uploads: weakref.WeakValueDictionary[tuple[int, str], _Upload] = weakref.WeakValueDictionary()
        self.slots = Slots()
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
        known, missing = await in_thread(lambda: self._look_up(plan, backends), "lower")
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

        return await in_thread(finish, "size")

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
        inline = n_copies <= prepared.in_caller
        lanes = [lane_for(backend, own, inline) for backend, own in zip(backends, prepared.own, strict=True)]
        plan = prepared.plan

        def place() -> tuple[Loaded, int]:
            tensors = plan.graph.tensors
            live = LiveWeights([[tensors[tid] for tid in sorted(ids)] for ids in plan.weights], backends)
            placing = _Placing(plan, self._uploads)
            weights = [placing.on(backend, ids) for backend, ids in zip(backends, plan.weights, strict=True)]
            loaded = Loaded(prepared, backends, weights, lanes, inline=inline, slots=self.slots, live=live)
            loaded.uploads = placing.uploads
            return loaded, placing.copied_nbytes

        loaded, copied_nbytes = await in_thread(place, "upload")
        self.copied_weights_nbytes += copied_nbytes
        return loaded

    async def compile(self, program: Program, backend: Backend) -> Executable:
        """The executable of one program: compiled in a thread, unless there is one already."""
        key = (program.key, backend.name)
        executable = self._executables.get(key)
        if executable is None:
            async with self._limiter:
                executable = await in_thread(lambda: backend.load(program), "compile")
            self._executables[key] = executable
            self.n_compiled += 1
        return executable

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
                made[id(program)] = await self.compile(program, backend)
                if self._on_progress is not None:
                    self._on_progress(len(made), len(missing))

        try:
            async with anyio.create_task_group() as group:
                for _ in range(min(len(missing), int(self._limiter.total_tokens))):
                    group.start_soon(compile_on)
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return made


class _Placing:
    """Puts the weights of one plan where they are needed.

    Args:
        plan: whose weights.
        known: what other plans have uploaded, by source and backend.

    Attributes:
        uploads: what the plan uses of that.
        copied_nbytes: of what was not there yet.
    """

    def __init__(self, plan: Plan, known: weakref.WeakValueDictionary[tuple[int, str], _Upload]) -> None:
        self.uploads: list[_Upload] = []
        self.copied_nbytes = 0
        self._tensors = plan.graph.tensors
        self._known = known

    def on(self, backend: Backend, ids: frozenset[int]) -> dict[int, Any]:
        """Values of weights on a backend, by tensor id; uploads what it does not hold, once for all plans."""
        held: dict[int, Any] = {}
        for tid in sorted(ids):
            tensor = self._tensors[tid]
            value = source_value(tensor, backend)
            if held_by(tensor, [backend]):
                held[tid] = value
                continue
            # A NumPy array that may change is not the same weight the next time.
            changeable = isinstance(value, np.ndarray) and value.flags.writeable
            upload = None if changeable else self._known.get((id(value), backend.name))
            if upload is None:
                with backend.asking_for(tensor):
                    upload = _Upload(value, backend.upload(value, tensor))
                self._known[id(value), backend.name] = upload
                self.copied_nbytes += tensor.nbytes
            self.uploads.append(upload)
            held[tid] = upload.value
        return held


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
