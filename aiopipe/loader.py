"""Loading a plan: compile its programs in threads, check that it fits, put its weights in place.

What comes out, `Loaded`, is all that evaluations of one graph share.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np

from ._threads import in_thread
from .backend import Backend, Executable, Lane
from .devices.base import Program
from .errors import AiopipeError, TensorError
from .graph import Graph, Tensor
from .sched.alloc import BackendSize, backend_sizes, check_memory
from .sched.launch import BoundSplit
from .sched.plan import Plan, Segment, feeds_for_lanes, segments_of

__all__ = ["Loaded", "Loader", "beside", "held_by", "source_value", "weights_held"]

INLINE_LAUNCH_S = 3e-4
"""An evaluation whose launches cost the caller no more than this is launched on the event loop itself.

Measured: handing it to a thread and back costs 50 to 90 µs, as much as two to six launches."""

INLINE_IN_FLIGHT = 28
"""XLA's CPU client blocks the dispatcher of the 33rd computation in flight on a device."""

INLINE_CAPTURE_NBYTES = 1 << 19
"""Inputs up to this size are copied on the event loop: it takes less than handing them over."""


_NUMBERS = (bool, int, float, complex, np.generic)


def held_by(tensor: Tensor, backends: Sequence[Backend]) -> tuple[int, ...]:
    """Indices of the backends that hold a weight already: those of its buffers, or of a committed array."""
    if tensor.buffers:
        return tuple(i for i, backend in enumerate(backends) if any(b.backend is backend for b in tensor.buffers))
    return tuple(i for i, backend in enumerate(backends) if backend.holds(tensor.source))


def source_value(tensor: Tensor, backend: Backend) -> Any:
    """The weight's value to give to `backend`: the one that it has itself, or else any."""
    for buffer in tensor.buffers:
        if buffer.backend is backend:
            return buffer.value
    return tensor.buffers[0].value if tensor.buffers else tensor.source


class Loaded:
    """A plan that can run.

    Attributes:
        plan: what was decided, with sizes that include the compilers' temporaries.
        backends: in the plan's order.
        segments: runs of splits for one lane each.
        lanes: the lane of each segment.
        inline: every launch happens in the caller.
        depends: for each segment the segments that it comes after.
        segment_splits: for each segment its splits, bound to executables and weights.
        sinks: (backend, its splits) whose end is the end of the evaluation.
        constants: values of outputs that are weights.
        capture_inline: the inputs are small enough to be copied on the event loop.
    """

    def __init__(
        self,
        plan: Plan,
        backends: Sequence[Backend],
        executables: Sequence[Executable],
        weights: Sequence[dict[int, Any]],
        lane_for: Callable[[Backend, bool, bool], Lane],
        n_copies: int,
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
        self.segment_splits = tuple(tuple(bound[i] for i in segment.splits) for segment in self.segments)
        groups: dict[int, list[int]] = {}
        for sink in plan.sinks:
            groups.setdefault(plan.splits[sink].backend, []).append(sink)
        self.sinks = tuple((backends[b], tuple(indices)) for b, indices in groups.items())
        self.constants = {
            tid: next(w[tid] for w in weights if tid in w) for kind, tid in plan.results if kind == "weight"
        }
        self._host_backends = _first_readers(plan, backends)
        self._staging: list[list[Any] | None] = [None] * n_copies
        self.returned = tuple(dict.fromkeys(slot for kind, slot in plan.results if kind == "input"))
        tensors = [plan.graph.inputs[i] for i in plan.used_inputs]
        self._input_nbytes = [t.nbytes for t in tensors]

    def captures_inline(self, values: Sequence[Any]) -> bool:
        """Whether `capture` takes so little time that the loop can do it: small, and nothing to wait for."""
        copied = 0
        for position, backend, nbytes in zip(
            self.plan.used_inputs, self._host_backends, self._input_nbytes, strict=True
        ):
            value = values[position]
            if backend.accepts(value):
                continue  # taken as it is, whatever its size
            if type(value) is not np.ndarray and not isinstance(value, _NUMBERS):
                return False  # some other library's or another client's array: reading it may wait
            copied += nbytes
        return copied <= INLINE_CAPTURE_NBYTES

    def capture(self, copy_id: int, values: Sequence[Any], slots: list[Any]) -> None:
        """Copy the inputs into the slot's own buffers, so that the caller may change its arrays.

        Immutable arrays are taken as they are. Runs on the loop or, for large inputs, in a thread.
        """
        staging = self._staging[copy_id]
        if staging is None:
            inputs = self.plan.graph.inputs
            staging = self._staging[copy_id] = [
                backend.host_buffer(inputs[position])
                for position, backend in zip(self.plan.used_inputs, self._host_backends, strict=True)
            ]
        for slot, position in enumerate(self.plan.used_inputs):
            value = values[position]
            backend = self._host_backends[slot]
            if backend.accepts(value):
                slots[slot] = value
                continue
            tensor, buffer = self.plan.graph.inputs[position], staging[slot]
            try:
                if slot in self.returned:  # the caller will hold it: it cannot be the slot's
                    slots[slot] = backend.upload(value, tensor)
                else:
                    np.copyto(buffer, value, casting="same_kind")
                    slots[slot] = buffer
            except Exception as error:  # whatever the library that made the value raises
                # Without the frames, which would keep the caller's arrays alive.
                cause = error.with_traceback(None)
                raise TensorError(f"input {tensor.describe()} cannot be read: {error}") from cause

    def result(self, slots: Sequence[Any]) -> Any:
        """What the graph returns, from an evaluation's environment."""
        results = self.plan.results
        if len(results) == 1 and results[0][0] == "env":
            return self.plan.graph.unflatten_outputs([slots[results[0][1]]])
        return self.plan.graph.unflatten_outputs(
            [self.constants[i] if kind == "weight" else slots[i] for kind, i in results]
        )


def _first_readers(plan: Plan, backends: Sequence[Backend]) -> list[Backend]:
    """For each used input the backend that reads it first, or the host where none does."""
    readers: dict[int, Backend] = {}
    for split in plan.splits:
        for t in split.inputs:
            readers.setdefault(t, backends[split.backend])
    inputs = plan.graph.inputs
    return [readers.get(inputs[position].id, backends[-1]) for position in plan.used_inputs]


def _launches_inline(
    plan: Plan, backends: Sequence[Backend], executables: Sequence[Executable], n_copies: int
) -> bool:
    used = {split.backend for split in plan.splits}
    per_backend = max((sum(s.backend == b for s in plan.splits) for b in used), default=0)
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
        self._on_progress = on_progress
        self._limiter = anyio.CapacityLimiter(max(2, os.cpu_count() or 1))
        self.n_compiled = 0
        self.copied_weights_nbytes = 0

    async def load(
        self,
        plan: Plan,
        backends: Sequence[Backend],
        *,
        limits: Sequence[int | None],
        n_copies: int,
        lane_for: Callable[[Backend, bool, bool], Lane],
        others: Sequence[Loaded] = (),
    ) -> Loaded:
        """Make a plan ready to run, beside others that are loaded.

        Raises:
            AllocationError: it does not fit; nothing has been allocated.
        """
        names = [backend.name for backend in backends]
        check_memory(beside(plan.sizes, plan, backends, others), names, limits, n_copies)
        executables = await self._compile(plan, backends)
        sizes = backend_sizes(
            plan.graph, plan.splits, len(backends), weights=plan.weights, memory=[e.memory for e in executables]
        )
        check_memory(beside(sizes, plan, backends, others), names, limits, n_copies)
        uploads: list[_Upload] = []
        weights = [
            await self._place(plan, backend, ids, uploads) for backend, ids in zip(backends, plan.weights, strict=True)
        ]
        for kind, tid in plan.results:
            if kind == "weight" and not any(tid in held for held in weights):
                weights[-1].update(await self._place(plan, backends[-1], frozenset({tid}), uploads))
        loaded = Loaded(replace(plan, sizes=sizes), backends, executables, weights, lane_for, n_copies)
        loaded.uploads = uploads
        return loaded

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
        total = len(missing)

        async def compile_one(key: tuple[Hashable, str]) -> None:
            program, backend = missing[key]
            async with self._limiter:
                executable = await in_thread(lambda: backend.load(program), "compile")
            found[key] = self._executables[key] = executable
            self.n_compiled += 1
            if self._on_progress is not None:
                self._on_progress(len(found) - (len(set(wanted)) - total), total)

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
        missing: list[Tensor] = []
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
                missing.append(tensor)

        for tensor in missing:
            if source_value(tensor, backend) is None:
                raise TensorError(
                    f"weight {tensor.describe()} of graph {plan.graph.name!r} has no value: it was traced from a "
                    "jax.ShapeDtypeStruct; trace with the arrays, or `place` them first"
                )

        def upload() -> list[Any]:
            return [backend.upload(source_value(tensor, backend), tensor) for tensor in missing]

        if missing:
            for tensor, value in zip(missing, await in_thread(upload, "upload"), strict=True):
                source = source_value(tensor, backend)
                upload_of = self._uploads[id(source), backend.name] = _Upload(source, value)
                uploads.append(upload_of)
                self.copied_weights_nbytes += tensor.nbytes
                held[tensor.id] = value
        return held


def beside(
    sizes: Sequence[BackendSize], plan: Plan, backends: Sequence[Backend], loaded: Sequence[Loaded]
) -> list[BackendSize]:
    """Sizes of a plan together with those that are loaded: each weight once, the largest of the rest."""
    result = []
    for b, (size, backend) in enumerate(zip(sizes, backends, strict=True)):
        weights: dict[int, int] = {}
        for p in (plan, *(other.plan for other in loaded)):
            for tid in p.weights[b]:
                tensor = p.graph.tensors[tid]
                weights[id(source_value(tensor, backend))] = tensor.nbytes
        others = [other.plan.sizes[b] for other in loaded]
        copy = max([size.copy_nbytes, *(s.copy_nbytes for s in others)])
        temp = max([size.temp_nbytes, *(s.temp_nbytes for s in others)])
        result.append(BackendSize(sum(weights.values()), copy, temp))
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

