"""What the evaluations of a graph share, from its plan to what can run: `Candidate`, `Prepared`, `Loaded`.

Making one goes over all splits, or all weights, of a graph that may have thousands: in a thread, not on the event loop.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .backend import Backend, Executable, Lane
from .buffer import Buffer, array_id
from .graph import Graph, Tensor
from .live_weights import LiveWeights, held_by, source_buffer
from .sched.alloc import BackendSize
from .sched.launch import BoundSplit
from .sched.plan import Plan, Segment, feeds_for_lanes, segments_of
from .staging import Slots, Staging

__all__ = ["Candidate", "Loaded", "Prepared", "beside", "weights_held"]

INLINE_LAUNCH_S = 3e-4
"""An evaluation whose launches cost the caller no more than this is launched on the event loop itself.

Measured: handing it to a thread and back costs 50 to 90 µs, as much as two to six launches."""

INLINE_IN_FLIGHT = 28
"""XLA's CPU client blocks the dispatcher of the 33rd computation in flight on a device."""


Origins = Mapping[int, tuple[Any, int]]
"""The buffers or arrays that weights come from, and their bytes, by their identity."""


class Candidate:
    """A plan of which it has to be seen whether it fits.

    Attributes:
        plan: what was decided.
        origins: of the weights on each backend. Plans of one model share them, and each is there once.
    """

    __slots__ = ("origins", "plan")

    def __init__(self, plan: Plan, backends: Sequence[Backend]) -> None:
        self.plan = plan
        tensors = plan.graph.tensors
        self.origins: Sequence[Origins] = [
            {id(origin): (origin, nbytes) for origin, nbytes in (_origin(tensors[tid], backend) for tid in ids)}
            for ids, backend in zip(plan.weights, backends, strict=True)
        ]


def _origin(tensor: Tensor, backend: Backend) -> tuple[Any, int]:
    buffer = source_buffer(tensor, backend)
    return tensor.source if buffer is None else buffer, tensor.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A plan that is compiled, so that its sizes are known, but holds no memory on its backends.

    Attributes:
        plan: with sizes that include the compilers' temporaries.
        origins: `Candidate.origins`.
        executables: of each split.
        own: for each backend whether it needs a lane of its own, as its launches can block.
        in_caller: every launch may happen in the caller, with so many slots or fewer; 0 for never.
    """

    plan: Plan
    origins: Sequence[Origins]
    executables: Sequence[Executable]
    own: Sequence[bool]
    in_caller: int

    @classmethod
    def of(
        cls,
        plan: Plan,
        origins: Sequence[Origins],
        executables: Sequence[Executable],
        backends: Sequence[Backend],
    ) -> Prepared:
        """Decide how a compiled plan is launched."""
        own = _own_lanes(plan, backends, executables)
        return cls(plan, origins, executables, own, _in_caller(plan, backends, executables))


def _own_lanes(plan: Plan, backends: Sequence[Backend], executables: Sequence[Executable]) -> list[bool]:
    client = [backend.device.props.client for backend in backends]
    own = [backend.dispatch == "own" for backend in backends]
    for split, executable in zip(plan.splits, executables, strict=True):
        crosses = any(c.src >= 0 and client[c.src] != client[split.backend] for c in split.copies)
        if backends[split.backend].dispatch == "auto" and (executable.blocks or crosses):
            own[split.backend] = True
    return own


def _in_caller(plan: Plan, backends: Sequence[Backend], executables: Sequence[Executable]) -> int:
    used = Counter(split.backend for split in plan.splits)
    if (
        all(backends[b].dispatch == "auto" for b in used)
        and len({backends[b].device.props.client for b in used}) <= 1
        and not any(executable.blocks for executable in executables)
        and sum(executable.launch_s for executable in executables) <= INLINE_LAUNCH_S
    ):
        return INLINE_IN_FLIGHT // max(used.values(), default=1)
    return 0


class Loaded:
    """A plan that can run.

    Args:
        prepared: what is loaded.
        backends: in the plan's order.
        weights: for each backend the values of its weights, by tensor id.
        lanes: for each backend where its launches happen.
        inline: every launch happens in the caller.
        slots: whose staging buffers each slot has.
        live: has watched the weights since before their values were looked up.

    Attributes:
        plan: what was decided, with sizes that include the compilers' temporaries.
        origins: `Candidate.origins`.
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
        uploads: what the loader put on the backends for it.
    """

    def __init__(
        self,
        prepared: Prepared,
        backends: Sequence[Backend],
        weights: Sequence[dict[int, Any]],
        lanes: Sequence[Lane],
        *,
        inline: bool,
        slots: Slots,
        live: LiveWeights,
    ) -> None:
        self.plan = plan = prepared.plan
        self.origins = prepared.origins
        self.backends = tuple(backends)
        self.uploads: Sequence[Any] = ()
        self.inline = inline
        number: dict[int, int] = {}
        lane_of = [number.setdefault(id(lane), len(number)) for lane in lanes]
        feeds = feeds_for_lanes(plan, lane_of)
        bound = [
            BoundSplit(split, feed, executable, backends[split.backend], weights[split.backend])
            for split, feed, executable in zip(plan.splits, feeds, prepared.executables, strict=True)
        ]
        self.splits = tuple(bound)
        self.segments: tuple[Segment, ...] = segments_of(plan.splits, lane_of)
        numbered = dict(zip(lane_of, lanes, strict=True))
        self.lanes = tuple(numbered[segment.lane] for segment in self.segments)
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
                for split, feed in zip(bound, feeds, strict=True)
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


def beside(
    candidate: Candidate | Prepared | Loaded,
    loaded: Sequence[Loaded],
    states: Sequence[int] | None = None,
) -> list[BackendSize]:
    """Sizes of a plan together with those that are loaded: each weight once, the largest of the rest.

    `states` are the bytes of all states on each backend. Where there are none yet, the plan's own counts.
    """
    result = []
    for b, size in enumerate(candidate.plan.sizes):
        origins = dict(candidate.origins[b])
        for other in loaded:
            origins |= other.origins[b]
        # Two buffers may hold one array, and tomorrow another one each.
        weights = {array_id(o) if isinstance(o, Buffer) else id(o): nbytes for o, nbytes in origins.values()}
        others = [other.plan.sizes[b] for other in loaded]
        copy = max([size.copy_nbytes, *(s.copy_nbytes for s in others)])
        temp = max([size.temp_nbytes, *(s.temp_nbytes for s in others)])
        state = (states[b] if states else 0) or size.state_nbytes
        result.append(BackendSize(sum(weights.values()), copy, temp, state))
    return result


def weights_held(graph: Graph, backends: Sequence[Backend]) -> Mapping[int, tuple[int, ...]]:
    """Tensor id -> indices of the backends that hold that weight, for those that some backend holds."""
    found = {tensor.id: held_by(tensor, backends) for tensor in graph.weights}
    return {tid: held for tid, held in found.items() if held}
