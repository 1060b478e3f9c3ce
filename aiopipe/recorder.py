"""`Recorder`: writes down what happens when, while it happens. `notes.py` makes sense of it later.

It adds a note where something happens anyway and wakes nobody, with one exception: the end of a split on a device
that works asynchronously has to be waited for. Ends of evaluations are waited for anyway; other splits are watched
as long as that is seldom enough to cost next to nothing, and `notes.py` infers the ends of the rest.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import _threads
from .backend import Backend, Told
from .completion import Post
from .loaded import Loaded
from .notes import (
    ADMITTED,
    CAPTURED,
    COPIED,
    ENDED,
    EVALUATED,
    LAUNCHED,
    QUICK,
    RAN,
    Note,
    PlanInfo,
    SplitInfo,
    spans_of,
)
from .run import Run
from .sched.launch import BoundSplit
from .sched.split import HOST
from .spans import HOST_TRACK, Span

__all__ = ["CAPACITY", "Recorder", "Watching"]

CAPACITY = 1 << 15
"""About so many spans are kept."""

WATCH_S = 5e-3
"""Splits of a backend are watched as long as there are fewer than one in so many seconds.

Measured: one costs 20 to 90 µs of two busy cores, mostly for waking a thread twice."""

BURST = 8
"""So many are watched in a row, for only what follows a split that was watched is known from begin to end."""

QUICK_S = 2.5e-4
"""Evaluations that end as they are launched, and sooner than this, are noted only now and then.

Measured: a note of one takes 2 µs, which is 3 % of an evaluation of two splits that compute next to nothing."""

SKIPPED = 15
"""So many of them are passed over after each one that is noted."""


class Watching:
    """Decides which splits of a backend are watched: `BURST` in a row, then none until that many are due again."""

    __slots__ = ("_at", "_due", "_pausing")

    def __init__(self) -> None:
        self._due = float(BURST)
        self._at = 0.0
        self._pausing = False

    def wants(self, now: float) -> bool:
        """Whether to watch a split that is launched now."""
        self._due = min(float(BURST), self._due + (now - self._at) / WATCH_S)
        self._at = now
        if self._pausing and self._due < BURST:
            return False
        self._pausing = self._due < 1.0
        if self._pausing:
            return False
        self._due -= 1.0
        return True


@dataclass(slots=True, eq=False, weakref_slot=True)
class Noted:
    """What the recorder keeps with a loaded plan.

    Attributes:
        number: of the plan.
        told: for each segment whether its devices say themselves when they did what.
        late: for each segment the splits that may end after their launch has returned.
        sink: the split whose end is the evaluation's, and is waited for anyway; -1 where there is no such one.
        at_once: launching takes until everything has ended.
        skipped: how many evaluations are passed over between the last one that was noted and the next.
        to_skip: how many of these are to come.
    """

    number: int
    told: tuple[bool, ...]
    late: tuple[tuple[BoundSplit, ...], ...]
    sink: int
    at_once: bool
    skipped: int = 0
    to_skip: int = 0


class Recorder:
    """Notes of one scheduler.

    Args:
        backends: of the scheduler. Where one has a clock of its own (simulated devices), that is the timeline's.
        capacity: about how many spans are kept: the newest.
    """

    def __init__(self, backends: Sequence[Backend], capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"timeline={capacity}: expected True, False, or how many spans to keep")
        self.names = tuple(backend.name for backend in backends)
        self.clock: Callable[[], float] = next((b.now for b in backends if b.tells_times), time.perf_counter)
        self._capacity = capacity
        self._log: deque[Note] = deque(maxlen=capacity)
        self._plans: dict[int, PlanInfo] = {}
        self._loaded: weakref.WeakValueDictionary[int, Noted] = weakref.WeakValueDictionary()
        self._n_plans = 0
        self._lock = _threads.Lock()
        self._watching = {name: Watching() for name in self.names}

    # -- reading --------------------------------------------------------------------------------

    def spans(self) -> list[Span]:
        """Spans of the evaluations that are gone, ordered by their begin."""
        return spans_of(*self.noted())

    def noted(self) -> tuple[list[Note], Mapping[int, PlanInfo]]:
        """What has been noted so far, the oldest first, and the plans that it is of."""
        return list(self._log.copy()), self._plans

    def clear(self) -> None:
        """Forget what has been noted so far."""
        self._log.clear()

    # -- the life of an evaluation; without `Run.times` it is passed over --------------------------

    def submitted(self, run: Run) -> None:
        """It was submitted."""
        noted = run.loaded.noted
        if noted is not None and noted.to_skip:
            noted.to_skip -= 1
        else:
            run.times = [self.clock()]

    def admitted(self, run: Run) -> None:
        """It has a slot, for which it had to wait."""
        self._log.append((ADMITTED, run.evaluation.id, self.clock()))

    def captured(self, run: Run) -> None:
        """Its inputs are captured, which took a thread."""
        self._log.append((CAPTURED, run.evaluation.id, self.clock()))

    def released(self, run: Run) -> None:
        """The devices are done with it."""
        noted, evaluation = self._noted(run.loaded), run.evaluation
        self._log.append((EVALUATED, evaluation.id, noted.number, evaluation.copy_id, self.clock(), tuple(run.times)))

    # -- launching; on whatever thread the lane is --------------------------------------------------

    def launch(self, run: Run, segment: int) -> None:
        """Launch the splits of a segment, and note it.

        Raises:
            LaunchError: one could not be launched; the ones before it are.
        """
        loaded, clock = run.loaded, self.clock
        noted, splits = loaded.noted or self._noted(loaded), loaded.segment_splits[segment]
        times = [] if segment else run.times
        times.append(clock())
        if noted.at_once:
            run.launch(splits, times, clock)
            self._over(run, noted)
            return
        if noted.told[segment]:
            for split in splits:
                self._told(run, split, partial(run.launch, (split,)))
            return
        try:
            run.launch(splits, times, clock)
        finally:
            if segment:
                self._log.append((LAUNCHED, run.evaluation.id, noted.number, segment, tuple(times)))
        if noted.late[segment]:
            self._watch(run, noted.late[segment])

    def _over(self, run: Run, noted: Noted) -> None:
        """An evaluation was over when it was launched."""
        times, evaluation = run.times, run.evaluation
        run.times = ()  # there is nothing more to note
        self._log.append((QUICK, evaluation.id, noted.number, evaluation.copy_id, noted.skipped, tuple(times)))
        noted.skipped = noted.to_skip = SKIPPED if times[-1] - times[0] < QUICK_S else 0

    def launch_one(self, run: Run, split: BoundSplit) -> None:
        """Launch a split by itself, and note it; as `launch`."""
        times = [self._began(run)]
        if split.backend.tells_times:
            self._told(run, split, partial(run.launch, (split,)))
            return
        try:
            run.launch((split,), times, self.clock)
        finally:
            number = self._noted(run.loaded).number
            self._log.append((LAUNCHED, run.evaluation.id, number, ~split.index, tuple(times)))
        self._watch(run, (split,))

    def launch_part(self, run: Run, split: BoundSplit, launch: Callable[[], Any]) -> None:
        """Launch a part of a split: call `launch`, which returns one of its results; note when that is there."""
        backend, number, began = split.backend, self._noted(run.loaded).number, self._began(run)
        if backend.tells_times:
            self._told(run, split, launch)
            return
        marker = launch()

        def ended(_: BaseException | None) -> None:
            self._log.append((RAN, run.evaluation.id, number, split.index, began, self.clock()))

        with suppress(Exception):  # as in `_watch`
            backend.notify((marker,), ended)

    def _began(self, run: Run) -> float:
        """Now, when an evaluation that is launched split by split launches something: perhaps the first."""
        now = self.clock()
        if len(run.times) == 1:
            run.times.append(now)
        return now

    def _told(self, run: Run, split: BoundSplit, launch: Callable[[], Any]) -> None:
        """Launch something, and note what the backend says of it."""
        which = run.evaluation.id, self._noted(run.loaded).number, split.index
        told: list[Told] = []
        split.backend.told = told
        try:
            launch()
        finally:
            split.backend.told = None
            for did in told:
                if did.source is None:
                    self._log.append((RAN, *which, did.begin_s, did.end_s))
                else:
                    self._log.append((COPIED, *which, did.source or HOST_TRACK, did.begin_s, did.end_s, did.nbytes))

    # -- ends -------------------------------------------------------------------------------------

    def ending(self, run: Run, post: Post) -> Post:
        """The same as `post`, which is called when what an evaluation waits for has ended; notes that it has."""
        split, log, clock = self._noted(run.loaded).sink, self._log, self.clock
        if split < 0 or run.observation is not None:  # whose splits are noted one by one
            return post

        def noting(action: Callable[..., None], *args: Any) -> None:
            log.append((ENDED, run.evaluation.id, split, clock()))
            post(action, *args)

        return noting

    def _watch(self, run: Run, splits: Sequence[BoundSplit]) -> None:
        now = self.clock()
        for split in splits:
            if self._watching[split.backend.name].wants(now):
                ended = partial(self._ended, run.evaluation.id, split.index)
                with suppress(Exception):  # then the timeline does not know its end, which is no reason to fail
                    split.backend.notify((run.env.markers[split.index],), ended)

    def _ended(self, evaluation: int, split: int, _: BaseException | None) -> None:
        self._log.append((ENDED, evaluation, split, self.clock()))

    # -- plans ------------------------------------------------------------------------------------

    def _noted(self, loaded: Loaded) -> Noted:
        """What is kept of a plan; a new one gets a number."""
        noted: Noted | None = loaded.noted
        return self._number(loaded) if noted is None else noted

    def _number(self, loaded: Loaded) -> Noted:
        with self._lock:  # two lanes may launch of a plan for the first time at once
            noted: Noted | None = loaded.noted
            if noted is not None:
                return noted
            number, self._n_plans = self._n_plans, self._n_plans + 1
            info = plan_info(loaded)
            # Those that are loaded can be evaluated again, though nothing of theirs may be noted just now.
            named = {note[2] for note in self._log.copy() if note[0] >= EVALUATED} | set(self._loaded.keys())
            self._plans = {n: plan for n, plan in self._plans.items() if n in named} | {number: info}
            noted = loaded.noted = self._loaded[number] = _noted(number, loaded, info)
            if not all(noted.told):  # a note of a segment holds the times of all its splits
                n_segments, n_splits = len(info.segments), len(info.splits)
                enough = max(64, self._capacity * (n_segments + 2) // (2 * n_splits + 2))
                if enough < (self._log.maxlen or 0):
                    self._log = deque(self._log, maxlen=enough)
        return noted


def _noted(number: int, loaded: Loaded, info: PlanInfo) -> Noted:
    sink = -1
    if len(loaded.sinks) == 1 and not loaded.returned and not loaded.sinks[0][0].tells_times:
        sink = loaded.sinks[0][1][-1]
    late = tuple(
        tuple(split for split in splits if split.index != sink and not info.splits[split.index].instant)
        for splits in loaded.segment_splits
    )
    told = tuple(all(split.backend.tells_times for split in splits) for splits in loaded.segment_splits)
    at_once = loaded.inline and len(late) == 1 and all(split.instant for split in info.splits)
    return Noted(number, told, late, sink, at_once)


def plan_info(loaded: Loaded) -> PlanInfo:
    """What the notes of a plan refer to."""
    plan = loaded.plan
    names = [backend.name for backend in loaded.backends]
    made: list[SplitInfo] = []
    for split, bound, program in zip(plan.splits, loaded.splits, plan.programs, strict=True):
        sources = dict.fromkeys(HOST_TRACK if src == HOST else names[src] for _, src, _ in split.brings)
        view = bound.backend.device.props.view_nbytes
        in_place = all(src == HOST or nbytes <= view for _, src, nbytes in split.brings)
        instant = bound.executable.instant and in_place and all(made[d].instant for d in split.depends)
        made.append(
            SplitInfo(
                backend=names[split.backend],
                program=program.name,
                depends=split.depends,
                source=", ".join(sources),
                nbytes=sum(nbytes for _, _, nbytes in split.brings),
                instant=instant and not plan.state,
            )
        )
    return PlanInfo(plan.graph.name, tuple(made), tuple(segment.splits for segment in loaded.segments))
