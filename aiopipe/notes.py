"""Notes: what is written down while evaluations run, and how spans are worked out from it later. Pure.

A note is a tuple of numbers (and names), so that the garbage collector forgets about it. Writing one takes a
fraction of a microsecond; everything that takes longer happens here, when somebody looks.

What a device that works asynchronously did is not known in full: the host knows when it launched a split, and of
some splits when it saw the end. The rest follows from how devices work:

- a split begins when it is launched, when what it depends on has ended, and when what was launched on the same
  backend before it has ended: the latest of these;
- one whose end was not seen takes as long as it usually does (the median of those whose begin and end are known),
  but ends before whatever comes after it has to begin in order to end when it was seen to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .spans import HOST_TRACK, Span, in_order

__all__ = [
    "ADMITTED",
    "CAPTURED",
    "COPIED",
    "ENDED",
    "EVALUATED",
    "LAUNCHED",
    "QUICK",
    "RAN",
    "Note",
    "PlanInfo",
    "SplitInfo",
    "spans_of",
]

Note = tuple[Any, ...]
"""One of the kinds below, then its fields."""

ADMITTED = 0
"""(evaluation, when): it had to wait for a slot, and has one."""

CAPTURED = 1
"""(evaluation, when): its inputs are captured. Without this they were when launching began."""

ENDED = 2
"""(evaluation, split, when): the end of a split was seen."""

EVALUATED = 3
"""(evaluation, plan, slot, released, times): it is gone. Slot -1: it never had one.

`times` are: when it was submitted; when launching began; then for each split of the first segment, if it brings
values over, when these had been asked for, and when the call had returned. Shorter where not everything was launched,
or by other means."""

QUICK = 4
"""(evaluation, plan, slot, skipped, times): the same, for an evaluation that was over when it was launched.

So many of the same plan before it are not noted: all that there were after the last one that is."""

LAUNCHED = 5
"""(evaluation, plan, segment, times): another segment was launched; `times` as above, but for the first.

For ``~split`` in place of a segment: this split was launched by itself."""

RAN = 6
"""(evaluation, plan, split, begin, end): this is known exactly."""

COPIED = 7
"""(evaluation, plan, split, source, begin, end, nbytes): and this."""


class SplitInfo(NamedTuple):
    """What there is to know of a split.

    Attributes:
        backend: name of its backend.
        program: name of what it was compiled to.
        depends: indices of the splits whose values it uses.
        source: who has the values that it brings over, ``""`` where it brings none.
        nbytes: how many these are.
        instant: launching it takes until it has ended, where what it depends on has.
    """

    backend: str
    program: str
    depends: tuple[int, ...]
    source: str
    nbytes: int
    instant: bool


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """What there is to know of a plan.

    Attributes:
        graph: name of what is evaluated.
        splits: in launch order.
        segments: for each segment the indices of its splits.
    """

    graph: str
    splits: tuple[SplitInfo, ...]
    segments: tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class _Launch:
    """A split that was launched, and what is known of it so far."""

    evaluation: int
    plan: int
    index: int
    info: SplitInfo
    asked: float
    moved: float
    called: float
    end: float = math.nan
    """When it was seen to have ended; not a number where nobody looked."""
    begin: float = math.nan
    limit: float = math.inf
    """It had ended by then, for certain."""
    usual: float = math.nan
    wish: float = math.inf
    """By when it should have ended, for what came after it to take its usual time."""

    @property
    def seen(self) -> bool:
        return not math.isnan(self.end)


def spans_of(notes: Iterable[Note], plans: Mapping[int, PlanInfo]) -> list[Span]:
    """The spans of all evaluations that are gone, ordered by their begin.

    Args:
        notes: in the order in which they were written; the oldest may be missing.
        plans: by the numbers in the notes; those that are missing are passed over.
    """
    told: dict[int, list[Note]] = {kind: [] for kind in range(ADMITTED, COPIED + 1)}
    for note in notes:
        if note[0] < EVALUATED or note[2] in plans:
            told[note[0]].append(note)
    ends = {(evaluation, split): when for _, evaluation, split, when in reversed(told[ENDED])}
    whole = {note[1]: note for note in told[EVALUATED]}
    for _, evaluation, number, slot, _, times in told[QUICK]:
        # It was not over, after all, where an input of the caller's was not ready yet.
        over = max([times[-1], *(ends.get((evaluation, i), 0.0) for i in range(len(plans[number].splits)))])
        whole[evaluation] = (EVALUATED, evaluation, number, slot, over, times)
    launches: list[_Launch] = []
    for _, evaluation, number, _, released, times in whole.values():
        if len(times) > 2:
            launches += _launches((evaluation, number, 0, times[1:]), plans[number], ends, released)
    for _, evaluation, number, *rest in told[LAUNCHED]:
        if evaluation in whole:
            launches += _launches((evaluation, number, *rest), plans[number], ends, whole[evaluation][4])
    launches.sort(key=lambda launch: launch.called)
    _sharpen(launches)
    admitted = {evaluation: when for _, evaluation, when in told[ADMITTED]}
    captured = {evaluation: when for _, evaluation, when in told[CAPTURED]}
    spans: list[Span] = []
    for note in whole.values():
        spans += _of_evaluation(note, admitted.get(note[1]), captured.get(note[1]))
    for launch in launches:
        spans += _of_launch(launch, whole[launch.evaluation][3])
    spans += _passed_over(told[QUICK], plans, whole)
    for note in (*told[RAN], *told[COPIED]):
        if note[1] in whole:
            spans.append(_known(note, plans[note[2]], whole[note[1]][3]))
    return in_order(spans)


# What is known ------------------------------------------------------------------------------------


def _launches(
    note: Note, plan: PlanInfo, ends: Mapping[tuple[int, int], float], released: float
) -> list[_Launch]:
    """The splits of a segment that were launched."""
    evaluation, number, which, times = note
    found: list[_Launch] = []
    clock = iter(times)
    asked = next(clock)
    for index in plan.segments[which] if which >= 0 else (~which,):
        info = plan.splits[index]
        moved = next(clock, None) if info.source else asked
        called = next(clock, None)
        if moved is None or called is None:
            break  # launching failed here
        launch = _Launch(evaluation, number, index, info, asked, moved, called, limit=released)
        end = ends.get((evaluation, index), called if info.instant else math.nan)
        launch.end = min(end, released) if end == end else end
        found.append(launch)
        asked = called
    return found


def _of_evaluation(note: Note, admitted: float | None, captured: float | None) -> Iterable[Span]:
    _, evaluation, _, slot, released, (submitted, *launching) = note
    if slot < 0:
        yield Span("wait", HOST_TRACK, evaluation, -1, slot, submitted, released, "wait", submitted)
        return
    if admitted is not None:
        yield Span("wait", HOST_TRACK, evaluation, -1, slot, submitted, admitted, "wait", submitted)
    began = submitted if admitted is None else admitted
    ended = captured if captured is not None else launching[0] if launching else began
    if ended > began:
        yield Span("capture", HOST_TRACK, evaluation, -1, slot, began, ended, "capture", began)


def _of_launch(launch: _Launch, slot: int) -> Iterable[Span]:
    info = launch.info
    if info.source:
        yield Span(
            "copy", info.backend, launch.evaluation, launch.index, slot, launch.asked, launch.moved,
            f"copy from {info.source}", launch.asked, source=info.source, nbytes=info.nbytes,
        )  # fmt: skip
    end = launch.end if launch.seen else launch.limit
    yield Span(
        "compute", info.backend, launch.evaluation, launch.index, slot, launch.begin, end,
        info.program, launch.moved, launch.seen,
    )  # fmt: skip


def _known(note: Note, plan: PlanInfo, slot: int) -> Span:
    kind, evaluation, _, index, *rest = note
    info = plan.splits[index]
    if kind == RAN:
        begin, end = rest
        return Span("compute", info.backend, evaluation, index, slot, begin, end, info.program, begin)
    source, begin, end, nbytes = rest
    name = f"copy from {source}"
    return Span("copy", info.backend, evaluation, index, slot, begin, end, name, begin, source=source, nbytes=nbytes)


def _passed_over(notes: Iterable[Note], plans: Mapping[int, PlanInfo], whole: Mapping[int, Note]) -> Iterable[Span]:
    """What evaluations did that are not noted: the same as the next one that is, spread evenly over the time before."""
    before: dict[int, Note] = {}
    for note in notes:
        _, evaluation, number, _, skipped, times = note
        last = before.get(number)
        before[number] = note
        if last is None or not skipped:
            continue
        missing = [i for i in range(last[1] + 1, evaluation) if i not in whole][-skipped:]
        first, each = last[5][-1], (times[0] - last[5][-1]) / skipped
        scale = min(1.0, each / (times[-1] - times[0])) if times[-1] > times[0] else 1.0
        for n, i in enumerate(missing):
            moved = [first + n * each + (when - times[0]) * scale for when in times]
            for launch in _launches((i, number, 0, moved[1:]), plans[number], {}, math.inf):
                launch.begin = launch.moved
                yield from (span._replace(seen=False) for span in _of_launch(launch, -1))


# What follows from it -----------------------------------------------------------------------------


def _sharpen(launches: Sequence[_Launch]) -> None:
    """Fill in when each began, and for those whose end was not seen (in `limit`) when they ended."""
    usual = _usual(launches)
    for launch in launches:
        launch.usual = usual.get((launch.plan, launch.index), math.nan)
    _hurry(launches)
    last: dict[str, float] = {}
    ended: dict[tuple[int, int], float] = {}
    for launch in launches:
        ready = _ready(launch, last, ended)
        if launch.seen:
            end = launch.end
            launch.begin = min(ready, end)
        else:
            launch.begin = min(ready, launch.limit)
            # Where nothing like it was ever seen, it is taken to have lasted as long as it can have.
            takes = math.inf if math.isnan(launch.usual) else launch.usual
            end = launch.limit = max(launch.begin, min(launch.wish, launch.begin + takes))
        last[launch.info.backend] = ended[launch.evaluation, launch.index] = end


def _ready(launch: _Launch, last: Mapping[str, float], ended: Mapping[tuple[int, int], float]) -> float:
    """When a split can have begun."""
    when = max(launch.moved, last.get(launch.info.backend, -math.inf))
    for d in launch.info.depends:
        when = max(when, ended.get((launch.evaluation, d), -math.inf))
    return when


def _usual(launches: Sequence[_Launch]) -> dict[tuple[int, int], float]:
    """(plan, split) -> how long it takes: the median of those of which begin and end are known."""
    last: dict[str, _Launch] = {}
    ended: dict[tuple[int, int], float] = {}
    found: dict[tuple[int, int], list[float]] = {}
    for launch in launches:
        before = last.get(launch.info.backend)
        last[launch.info.backend] = launch
        if not launch.seen:
            continue
        ended[launch.evaluation, launch.index] = launch.end
        begin = launch.moved
        if before is not None and before.limit > launch.moved:  # which is when its evaluation had ended for sure
            if not before.seen:
                continue
            begin = max(begin, before.end)
        if any((launch.evaluation, d) not in ended for d in launch.info.depends):
            continue
        begin = max([begin, *(ended[launch.evaluation, d] for d in launch.info.depends)])
        found.setdefault((launch.plan, launch.index), []).append(max(0.0, launch.end - begin))
    return {key: statistics.median(values) for key, values in found.items()}


def _hurry(launches: Sequence[_Launch]) -> None:
    """Backwards: by when each must have ended, so that what comes after it could end when it was seen to.

    An end that was seen, perhaps late, is only moved to the end of what came after it. One that was not seen
    leaves what came after it the time that that usually takes.
    """
    never = (math.inf, math.inf)
    following: dict[str, tuple[float, float]] = {}  # by backend: the next one's end, and its latest usual begin
    wanted: dict[tuple[int, int], tuple[float, float]] = {}  # the same of those that depend on a split
    for launch in reversed(launches):
        next_end, next_begin = following.get(launch.info.backend, never)
        reader_end, reader_begin = wanted.get((launch.evaluation, launch.index), never)
        surely = min(launch.limit, next_end, reader_end)
        if launch.seen:
            end = surely = launch.end = min(launch.end, surely)
        else:
            launch.limit = surely
            end = launch.wish = min(surely, next_begin, reader_begin)
        begin = end if math.isnan(launch.usual) else end - launch.usual
        following[launch.info.backend] = surely, begin
        for d in launch.info.depends:
            known_end, known_begin = wanted.get((launch.evaluation, d), never)
            wanted[launch.evaluation, d] = min(known_end, surely), min(known_begin, begin)
