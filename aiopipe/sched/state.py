"""The run state: which evaluations wait, run, drain. Pure: stimuli in, instructions out.

One mutating method, `RunState.handle`. It decides; the scheduler's shell carries out and reports
back. No clock, no loop, no thread, no array: its tests drive it by hand. The shape follows
dask/distributed's `WorkerState.handle_stimulus`.

Life of an evaluation::

    WAITING --a slot is free--> CAPTURING --inputs captured--> RUNNING --all launched--> DRAINING --> (gone)

One that is prompt skips the two in the middle: whoever begins it captures and launches at once.

A cancelled, failed, overdue or aborted evaluation launches nothing more and goes to DRAINING as soon as no
launch is under way: launched work cannot be recalled, so its slot comes back only when the devices are
done with it, exactly once. Until then the others take turns with the slots that are left.

Evaluations that share a state take turns: one launches when those before it will launch nothing more.
They need not have ended, for the devices keep the order of what has been launched.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .stimuli import (
    Admit,
    Begin,
    Cancel,
    Captured,
    Completed,
    Failed,
    Instruction,
    Launch,
    Launched,
    Outcome,
    Release,
    Resolve,
    Stimulus,
    Submit,
    Watch,
)

__all__ = ["Phase", "RunState"]


class Phase(enum.Enum):
    """Where an evaluation is in its life."""

    WAITING = "waiting"
    CAPTURING = "capturing"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class _Run:
    id: int
    depends: Sequence[tuple[int, ...]]
    state: Hashable = None
    prompt: bool = False
    phase: Phase = Phase.WAITING
    copy_id: int = -1
    outcome: Outcome | None = None
    unlaunched: int = 0
    launching: int = 0
    missing: list[int] | None = None  # by segment: how many it still comes after; None where there is but one
    followers: list[list[int]] | None = None


class RunState:
    """Which evaluation holds which slot, and what happens next.

    Args:
        n_copies: how many slots there are, so how many evaluations are in flight at most.
            The k-th admitted evaluation takes slot ``k % n_copies``, as long as nobody calls `shrink` and
            none ends before its devices are done.
    """

    def __init__(self, n_copies: int) -> None:
        if n_copies < 1:
            raise ValueError(f"n_copies is {n_copies}, expected at least 1 (1 means no pipelining)")
        self.n_copies = n_copies
        self.n_admitted = 0
        self.counts = dict.fromkeys(Outcome, 0)
        self._runs: dict[int, _Run] = {}
        self._waiting: OrderedDict[int, _Run] = OrderedDict()
        self._holders: list[_Run | None] = [None] * n_copies
        self._turns: dict[Hashable, deque[_Run]] = {}  # by state: who may still launch something, in order
        self._next = 0

    @property
    def cur_copy(self) -> int:
        """The slot that the next evaluation will take.

        Those that devices still work for, though nobody waits for the result any more, are passed over: a
        device that hangs holds up no evaluation that does without it.
        """
        holders, slot = self._holders, self._next
        for _ in range(self.n_copies):
            holder = holders[slot]
            if holder is None or holder.outcome is None:
                return slot
            slot = slot + 1 if slot + 1 < self.n_copies else 0
        return slot

    @property
    def in_flight(self) -> int:
        """Evaluations that hold a slot."""
        return sum(h is not None for h in self._holders)

    @property
    def waiting(self) -> int:
        """Evaluations that wait for a slot."""
        return len(self._waiting)

    def shrink(self, n_copies: int) -> None:
        """Have fewer slots from now on. Those that hold one beyond keep it to their end; until then nobody is admitted.

        Args:
            n_copies: at least 1, at most as many as there are.
        """
        if not 1 <= n_copies <= self.n_copies:
            raise ValueError(f"n_copies is {n_copies}, expected 1 to {self.n_copies}")
        self.n_copies = n_copies
        self._next %= n_copies
        self._trim()

    def _trim(self) -> None:
        holders = self._holders
        while len(holders) > self.n_copies and holders[-1] is None:
            holders.pop()

    def phase(self, evaluation: int) -> Phase | None:
        """Where an evaluation is, or None when it is gone."""
        run = self._runs.get(evaluation)
        return run.phase if run is not None else None

    def handle(self, stimulus: Stimulus) -> list[Instruction]:
        """Take in what happened; return what to do, in order.

        Raises:
            ValueError: the stimulus makes no sense now (a fault of the shell).
        """
        out: list[Instruction] = []
        kind = type(stimulus)
        if kind is Submit:
            self._submit(stimulus, out)  # type: ignore[arg-type]  # `kind` narrows it, mypy cannot see that
            return out
        run = self._runs.get(stimulus.evaluation)
        if kind is Cancel:
            if run is not None and run.outcome is None:
                error = stimulus.error  # type: ignore[union-attr]  # as above
                self._end(run, Outcome.CANCELLED if error is None else Outcome.FAILED, error, out)
                self._settle(run, out)
                self._admit(out)
            return out
        if run is None:
            raise ValueError(f"{stimulus}: no such evaluation is under way")
        if kind is Completed:
            self._completed(run, stimulus, out)  # type: ignore[arg-type]  # as above
        elif kind is Launched:
            self._expect(run, Phase.RUNNING, stimulus)
            self._launched(run, stimulus.segment, out)  # type: ignore[union-attr]  # as above
        elif kind is Captured:
            self._expect(run, Phase.CAPTURING, stimulus)
            self._captured(run, out)
        else:
            self._failed(run, stimulus, out)  # type: ignore[arg-type]  # as above
        return out

    def _submit(self, stimulus: Submit, out: list[Instruction]) -> None:
        if stimulus.evaluation in self._runs:
            raise ValueError(f"{stimulus}: that evaluation is under way already")
        run = _Run(*stimulus)
        self._runs[run.id] = run
        if run.state is not None:
            self._turns.setdefault(run.state, deque()).append(run)
        self._waiting[run.id] = run
        self._admit(out)

    def _admit(self, out: list[Instruction]) -> None:
        while self._waiting:
            slot = self.cur_copy
            if self._holders[slot] is not None or len(self._holders) > self.n_copies:
                return
            _, run = self._waiting.popitem(last=False)
            self.n_admitted += 1
            self._next = slot + 1 if slot + 1 < self.n_copies else 0
            self._holders[slot] = run
            run.copy_id = slot
            if run.prompt:
                run.phase = Phase.DRAINING
                out.append(Begin(run.id, slot))
            else:
                run.phase = Phase.CAPTURING
                out.append(Admit(run.id, slot))

    def _captured(self, run: _Run, out: list[Instruction]) -> None:
        run.phase = Phase.RUNNING
        run.unlaunched = len(run.depends)
        if run.state is None or self._turns[run.state][0] is run:
            self._start(run, out)
        else:
            self._settle(run, out)

    def _start(self, run: _Run, out: list[Instruction]) -> None:
        """Launch what comes after nothing."""
        depends = run.depends
        if run.outcome is None:
            if len(depends) == 1:
                run.launching = 1
                out.append(Launch(run.id, 0))
                return
            missing = [len(d) for d in depends]
            followers: list[list[int]] = [[] for _ in depends]
            run.missing, run.followers = missing, followers
            for segment, before in enumerate(depends):
                for d in before:
                    followers[d].append(segment)
            for segment, n_missing in enumerate(missing):
                if not n_missing:
                    run.launching += 1
                    out.append(Launch(run.id, segment))
        self._settle(run, out)

    def _launched(self, run: _Run, segment: int, out: list[Instruction]) -> None:
        run.launching -= 1
        run.unlaunched -= 1
        missing, followers = run.missing, run.followers
        if missing is not None and followers is not None and run.outcome is None:
            for follower in followers[segment]:
                missing[follower] -= 1
                if not missing[follower]:
                    run.launching += 1
                    out.append(Launch(run.id, follower))
        self._settle(run, out)

    def _failed(self, run: _Run, stimulus: Failed, out: list[Instruction]) -> None:
        capturing = stimulus.segment < 0
        expected = Phase.DRAINING if run.prompt else Phase.CAPTURING if capturing else Phase.RUNNING
        self._expect(run, expected, stimulus)
        if run.outcome is None:
            self._end(run, stimulus.outcome, stimulus.error, out)
        if run.prompt:  # what it has launched, if anything, has to be waited for all the same
            out.append(Watch(run.id))
        elif capturing:
            run.phase = Phase.RUNNING
        else:
            run.launching -= 1
        self._settle(run, out)
        self._admit(out)

    def _completed(self, run: _Run, stimulus: Completed, out: list[Instruction]) -> None:
        if run.phase is not Phase.DRAINING:
            self._expect(run, Phase.DRAINING, stimulus)
        if run.outcome is None:
            self._end(run, Outcome.SUCCESS if stimulus.error is None else Outcome.FAILED, stimulus.error, out)
        self._release(run, out)

    def _settle(self, run: _Run, out: list[Instruction]) -> None:
        """Let go of a waiting run that ended; drain a running one that will launch nothing more."""
        if run.phase is Phase.WAITING:
            del self._runs[run.id], self._waiting[run.id]
            out.append(Release(run.id, -1))
            self._pass_on(run, out)
        elif run.phase is Phase.RUNNING and not run.launching and (run.outcome is not None or not run.unlaunched):
            run.phase = Phase.DRAINING
            out.append(Watch(run.id))
            self._pass_on(run, out)

    def _pass_on(self, run: _Run, out: list[Instruction]) -> None:
        """It will launch nothing more: the next one that shares its state may."""
        if run.state is None:
            return
        turns = self._turns[run.state]
        was_first = turns[0] is run
        turns.remove(run)
        if not turns:
            del self._turns[run.state]
        elif was_first and turns[0].phase is Phase.RUNNING:
            self._start(turns[0], out)

    def _end(self, run: _Run, outcome: Outcome, error: BaseException | None, out: list[Instruction]) -> None:
        run.outcome = outcome
        self.counts[outcome] += 1
        out.append(Resolve(run.id, outcome, error))

    def _release(self, run: _Run, out: list[Instruction]) -> None:
        del self._runs[run.id]
        self._holders[run.copy_id] = None
        if len(self._holders) > self.n_copies:
            self._trim()
        out.append(Release(run.id, run.copy_id))
        if self._waiting:
            self._admit(out)

    @staticmethod
    def _expect(run: _Run, phase: Phase, stimulus: Stimulus) -> None:
        if run.phase is not phase:
            raise ValueError(f"{stimulus}: the evaluation is {run.phase.value}, expected {phase.value}")

    def validate(self) -> None:
        """Check the invariants; for tests.

        Raises:
            AssertionError: one is broken.
        """
        held = [run for run in self._holders if run is not None]
        assert len({id(run) for run in held}) == len(held), "a run holds two slots"
        for slot, run in enumerate(self._holders):
            assert run is None or (run.copy_id == slot and self._runs.get(run.id) is run), "a slot's holder is gone"
        for run in self._runs.values():
            assert (run.phase is Phase.WAITING) == (run.copy_id < 0), "phase and slot disagree"
            assert run.launching >= 0 and run.unlaunched >= run.launching, "launches do not add up"
        for state, turns in self._turns.items():
            ids = [run.id for run in turns]
            assert ids == sorted(ids), "turns are out of order"
            for i, run in enumerate(turns):
                assert run.state == state and self._runs.get(run.id) is run, "somebody gone has a turn"
                assert run.phase is not Phase.DRAINING, "who launches nothing more keeps others waiting"
                assert not i or not run.launching, "two launch on one state"
        shrinking = len(self._holders) > self.n_copies
        waits = bool(self._waiting) and not shrinking
        assert not waits or self._holders[self.cur_copy] is not None, "somebody waits beside a free slot"
