"""Loading a plan: compile its programs in threads, check that it fits, put its weights in place.

What comes out, `Loaded`, is all that evaluations of one graph share.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
import numpy as np

from ._threads import in_thread
from .backend import Backend, Executable, Lane
from .devices.base import Program
from .errors import AiopipeError
from .graph import Graph, Tensor
from .live_weights import LiveWeights, held_by, source_value, weight_key
from .sched.alloc import BackendSize, backend_sizes
from .sched.launch import BoundSplit
from .sched.plan import Plan, Segment, feeds_for_lanes, segments_of
from .staging import Slots, Staging

__all__ = ["Loaded", "Loader", "Prepared", "beside", "held_by", "source_value", "weights_held"]

INLINE_LAUNCH_S = 3e-4
"""An evaluation whose launches cost the caller no more than this is launched on the event loop itself.

Measured: handing it to a thread and back costs 50 to 90 µs, as much as two to six launches."""

INLINE_IN_FLIGHT = 28
"""XLA's CPU client blocks the dispatcher of the 33rd computation in flight on a device."""


class Loaded:
    """A plan that can run.

    Attributes:
        plan: what was decided, with sizes that include the compilers' temporaries.
        backends: in the plan's order.
        segments: runs of splits for one lane each.
        lanes: the lane of each segment.
        inline: every launch happens in the caller.
        depends: for each segment the segments that it comes after.
        prompt: a launch of all splits waits for nobody.
        segment_splits: for each segment its splits, bound to executables and weights.
        sinks: (backend, its splits) whose end is the end of the evaluation.
        constants: values of outputs that are weights.
        captures_inline: `Staging.captures_inline`.
        noted: what a `Recorder` keeps of it.
    """

    def __init__(
        self,
        plan: Plan,
        backends: Sequence[Backend],
        executables: Sequence[Executable],
        weights: Sequence[dict[int, Any]],
        lane_for: Callable[[Backend, bool, bool], Lane],
        n_copies: int,
        slots: Slots,
        live: LiveWeights,
    ) -> None:
        self.plan = plan
        self.backends = tuple(backends)
        self.uploads: list[_Upload] = []
        self.inline = _launches_inline(plan, backends, executables, n_copies)
        lanes, lane_of = _lanes(plan, backends, executables, lane_for, inline=self.inline)
        feeds = feeds_for_lanes(plan, lane_of)
        bound = [
            BoundSplit(split, feed, executable, backends[split.backend], weights[split.backend])
            for split, feed, executable in zip(plan.splits, feeds, executables, strict=True)
        ]
        self.splits = tuple(bound)
        self.segments: tuple[Segment, ...] = segments_of(plan.splits, lane_of)
        self.lanes = tuple(lanes[segment.lane] for segment in self.segments)
        self.depends = tuple(segment.depends for segment in self.segments)
        self.prompt = self.inline and len(self.segments) == 1
        self.segment_splits = tuple(tuple(bound[i] for i in segment.splits) for segment in self.segments)
        groups: dict[int, list[int]] = {}
        for sink in plan.sinks:
            groups.setdefault(plan.splits[sink].backend, []).append(sink)
        self.sinks = tuple((backends[b], tuple(indices)) for b, indices in groups.items())
        self.constants = {
            tid: next(w[tid] for w in weights if tid in w) for kind, tid in plan.results if kind == "weight"
        }
        tensors = plan.graph.tensors
        live.bind(
            [
                (tensors[tid], split.backend, split.template, position)
                for split, feed in zip(bound, plan.launch_lists, strict=True)
                for position, tid in feed.weights
            ]
            + [
                (tensors[tid], next(b for b, w in zip(backends, weights, strict=True) if tid in w), self.constants, tid)
                for tid in self.constants
            ]
        )
        self._live = live  # the weights' buffers, which tell it when they are set, hold it only weakly
        self._staging = Staging(plan, backends, slots)
        self.captures_inline = self._staging.captures_inline
        self.returned = self._staging.returned
        self.noted: Any = None
        self._kept: dict[int, Any] | None = None

    def capture(self, copy_id: int, values: Sequence[Any], slots: list[Any]) -> None:
        """`Staging.capture` of an evaluation's inputs."""
        self._staging.capture(copy_id, values, slots)

    def keeping(self, kept: dict[int, Any]) -> Loaded:
        """The same for one evaluation whose outputs are also put into `kept`, by tensor id."""
        other = copy.copy(self)
        other._kept = kept
        return other

    def result(self, slots: Sequence[Any]) -> Any:
        """What the graph returns, from an evaluation's environment."""
        results = self.plan.results
        if len(results) == 1 and results[0][0] == "env" and self._kept is None:
            return self.plan.graph.unflatten_outputs([slots[results[0][1]]])
        values = [self.constants[i] if kind == "weight" else slots[i] for kind, i in results]
        if self._kept is not None:
            self._kept.update(zip((t.id for t in self.plan.graph.outputs), values, strict=True))
        return self.plan.graph.unflatten_outputs(values)


def _launches_inline(
    plan: Plan, backends: Sequence[Backend], executables: Sequence[Executable], n_copies: int
) -> bool:
    used = Counter(split.backend for split in plan.splits)
    per_backend = max(used.values(), default=0)
    return (
        all(backends[b].dispatch == "auto" for b in used)
        and len({backends[b].device.props.client for b in used}) <= 1
        and not any(executable.blocks for executable in executables)
        and sum(executable.launch_s for executable in executables) <= INLINE_LAUNCH_S
        and n_copies * per_backend <= INLINE_IN_FLIGHT
    )


def _lanes(
    plan: Plan,
    backends: Sequence[Backend],
    executables: Sequence[Executable],
    lane_for: Callable[[Backend, bool, bool], Lane],
    *,
    inline: bool,
) -> tuple[list[Lane], list[int]]:
    """The lanes in use and the index of each backend's. A backend whose launches can block gets its own."""
    client = [backend.device.props.client for backend in backends]
    own = [backend.dispatch == "own" for backend in backends]
    for split, executable in zip(plan.splits, executables, strict=True):
        crosses = any(c.src >= 0 and client[c.src] != client[split.backend] for c in split.copies)
        if backends[split.backend].dispatch == "auto" and (executable.blocks or crosses):
            own[split.backend] = True
    lanes: list[Lane] = []
    known: dict[int, int] = {}
    lane_of = []
    for backend, alone in zip(backends, own, strict=True):
        lane = lane_for(backend, alone, inline)
        if id(lane) not in known:
            known[id(lane)] = len(lanes)
            lanes.append(lane)
        lane_of.append(known[id(lane)])
    return lanes, lane_of


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A plan that is compiled, so that its sizes are known, but holds no memory on its backends."""

    plan: Plan
    executables: Sequence[Executable]


class _Upload:
    """A weight that the loader put on a backend; lives as long as a plan that uses it."""

    __slots__ = ("__weakref__", "source", "value")

    def __init__(self, source: Any, value: Any) -> None:
        self.source = source  # kept so that nothing else gets its id meanwhile
        self.value = value


class Loader:
    """Compiles and uploads for one scheduler; what several plans share is there once.

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

    async def prepare(self, plan: Plan, backends: Sequence[Backend]) -> Prepared:
        """Compile a plan, so that its sizes are known; allocates nothing on the backends.

        Args:
            plan: from `make_plan`.
            backends: in the plan's order.
        """
        executables = await self._compile(plan, backends)
        sizes = backend_sizes(
            plan.graph,
            plan.splits,
            [backend.device.props for backend in backends],
            weights=plan.weights,
            donate=[program.donate for program in plan.programs],
            state_homes=plan.state_homes,
            memory=[e.memory for e in executables],
        )
        return Prepared(replace(plan, sizes=sizes), executables)

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
        uploads: list[_Upload] = []
        tensors = plan.graph.tensors
        live = LiveWeights([[tensors[tid] for tid in sorted(ids)] for ids in plan.weights], backends)
        weights = [
            await self._place(plan, backend, ids, uploads) for backend, ids in zip(backends, plan.weights, strict=True)
        ]
        loaded = Loaded(plan, backends, prepared.executables, weights, lane_for, n_copies, self.slots, live)
        loaded.uploads = uploads
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

    async def _compile(self, plan: Plan, backends: Sequence[Backend]) -> list[Executable]:
        wanted = [(p.key, backends[s.backend].name) for p, s in zip(plan.programs, plan.splits, strict=True)]
        found: dict[tuple[Hashable, str], Executable] = {}
        missing: dict[tuple[Hashable, str], tuple[Program, Backend]] = {}
        for key, program, split in zip(wanted, plan.programs, plan.splits, strict=True):
            executable = self._executables.get(key)
            if executable is not None:
                found[key] = executable
            else:
                missing.setdefault(key, (program, backends[split.backend]))
        n_known, total = len(found), len(missing)

        async def compile_one(key: tuple[Hashable, str]) -> None:
            found[key] = await self.compile(*missing[key])
            if self._on_progress is not None:
                self._on_progress(len(found) - n_known, total)

        try:
            async with anyio.create_task_group() as group:
                for key in missing:
                    group.start_soon(compile_one, key)
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return [found[key] for key in wanted]

    async def _place(
        self, plan: Plan, backend: Backend, ids: frozenset[int], uploads: list[_Upload]
    ) -> dict[int, Any]:
        """Values of weights on a backend; uploads what it does not hold, once for all plans."""
        held: dict[int, Any] = {}
        missing: list[tuple[Tensor, Any]] = []
        for tid in sorted(ids):
            tensor = plan.graph.tensors[tid]
            value = source_value(tensor, backend)
            if held_by(tensor, [backend]):
                held[tid] = value
                continue
            # A NumPy array that may change is not the same weight the next time.
            changeable = isinstance(value, np.ndarray) and value.flags.writeable
            known = None if changeable else self._uploads.get((id(value), backend.name))
            if known is not None:
                held[tid] = known.value
                uploads.append(known)
            else:
                missing.append((tensor, value))

        def upload() -> list[Any]:
            uploaded = []
            for tensor, source in missing:
                with backend.asking_for(tensor):
                    uploaded.append(backend.upload(source, tensor))
            return uploaded

        if missing:
            for (tensor, source), value in zip(missing, await in_thread(upload, "upload"), strict=True):
                upload_of = self._uploads[id(source), backend.name] = _Upload(source, value)
                uploads.append(upload_of)
                self.copied_weights_nbytes += tensor.nbytes
                held[tensor.id] = value
        return held


def beside(
    sizes: Sequence[BackendSize],
    plan: Plan,
    backends: Sequence[Backend],
    loaded: Sequence[Loaded],
    states: Sequence[int] | None = None,
) -> list[BackendSize]:
    """Sizes of a plan together with those that are loaded: each weight once, the largest of the rest.

    `states` are the bytes of all states on each backend. Where there are none yet, the plan's own counts.
    """
    result = []
    for b, (size, backend) in enumerate(zip(sizes, backends, strict=True)):
        weights: dict[Hashable, int] = {}
        for p in (plan, *(other.plan for other in loaded)):
            for tid in p.weights[b]:
                tensor = p.graph.tensors[tid]
                weights[weight_key(tensor, backend)] = tensor.nbytes
        others = [other.plan.sizes[b] for other in loaded]
        copy = max([size.copy_nbytes, *(s.copy_nbytes for s in others)])
        temp = max([size.temp_nbytes, *(s.temp_nbytes for s in others)])
        state = (states[b] if states else 0) or size.state_nbytes
        result.append(BackendSize(sum(weights.values()), copy, temp, state))
    return result


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


def weights_held(graph: Graph, backends: Sequence[Backend]) -> Mapping[int, tuple[int, ...]]:
    """Tensor id -> indices of the backends that hold that weight, for those that some backend holds."""
    found = {tensor.id: held_by(tensor, backends) for tensor in graph.weights}
    return {tid: held for tid, held in found.items() if held}

