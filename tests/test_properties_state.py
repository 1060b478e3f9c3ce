"""The pure run state under every order of stimuli that hypothesis can think of, against rules of its own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiopipe.sched.state import RunState
from aiopipe.sched.stimuli import (
    Admit,
    Cancel,
    Captured,
    Completed,
    Failed,
    Launch,
    Launched,
    Outcome,
    Release,
    Resolve,
    Stimulus,
    Submit,
    Watch,
)


@st.composite
def segments(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """What each segment comes after: any acyclic order of none to six."""
    n = draw(st.integers(0, 6))
    return tuple(
        tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else () for i in range(n)
    )


class Told:
    """What was seen of one evaluation."""

    def __init__(self, submitted: Submit) -> None:
        self.submitted = submitted
        self.slot: int | None = None
        self.captured = self.watched = self.released = False
        self.asked: set[int] = set()
        self.launched: set[int] = set()
        self.ended_as: Outcome | None = None


class RunStateMachine(RuleBasedStateMachine):
    """Stimuli as a shell gives them: what was asked for is answered once, sooner or later, well or badly."""

    @initialize(n_copies=st.integers(1, 4))
    def begin(self, n_copies: int) -> None:
        self.state = RunState(n_copies)
        self.told: dict[int, Told] = {}
        self.due: list[Admit | Launch | Watch] = []
        self.admitted: list[int] = []
        self.shrunk = False

    # -- stimuli --------------------------------------------------------------------------------

    @rule(depends=segments(), shared=st.sampled_from([None, None, "a", "b"]))
    def submit(self, depends: Any, shared: str | None) -> None:
        stimulus = Submit(len(self.told), depends, shared)
        self.told[stimulus.evaluation] = Told(stimulus)
        self.give(stimulus)

    @precondition(lambda self: self.due)
    @rule(data=st.data(), fails=st.booleans())
    def answer(self, data: st.DataObject, fails: bool) -> None:
        self.answer_one(data.draw(st.integers(0, len(self.due) - 1)), fails)

    @precondition(lambda self: self.due)
    @rule(n=st.integers(1, 12))
    def answer_several(self, n: int) -> None:
        for _ in range(min(n, len(self.due))):
            self.answer_one(0, fails=False)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), overdue=st.booleans())
    def cancel(self, data: st.DataObject, overdue: bool) -> None:
        evaluation = data.draw(st.integers(0, len(self.told) - 1))
        before = self.told[evaluation].ended_as
        self.give(Cancel(evaluation, RuntimeError("too late") if overdue else None))
        assert self.told[evaluation].ended_as is (before or (Outcome.FAILED if overdue else Outcome.CANCELLED))

    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, self.state.n_copies))
        self.shrunk = self.shrunk or n < self.state.n_copies
        self.state.shrink(n)
        self.state.validate()

    @rule(evaluation=st.integers(0, 20), kind=st.sampled_from([Captured, Completed, Submit, Failed]))
    def nonsense(self, evaluation: int, kind: Any) -> None:
        """What nobody was asked for is refused, and nothing comes of it."""
        if kind is Submit:
            if evaluation not in self.told or self.told[evaluation].released:
                return
            stimulus: Stimulus = Submit(evaluation, ())
        else:
            answered = Admit if kind is Captured else Watch
            if any(d.evaluation == evaluation and isinstance(d, answered) for d in self.due):
                return
            stimulus = Failed(999, 0, ValueError()) if kind is Failed else kind(evaluation)
        with pytest.raises(ValueError, match="evaluation"):
            self.state.handle(stimulus)

    # -- the shell ------------------------------------------------------------------------------

    def answer_one(self, index: int, fails: bool) -> None:
        due = self.due.pop(index)
        told, error = self.told[due.evaluation], RuntimeError("boom")
        stimulus: Stimulus
        if isinstance(due, Watch):
            stimulus = Completed(due.evaluation, error if fails else None)
        elif isinstance(due, Admit):
            told.captured = True
            stimulus = Failed(due.evaluation, -1, error) if fails else Captured(due.evaluation)
        else:
            told.launched.add(due.segment)
            outcome = Outcome.ABORTED if due.segment % 2 else Outcome.FAILED
            stimulus = Failed(*due, error, outcome) if fails else Launched(*due)
        self.give(stimulus)

    def give(self, stimulus: Stimulus) -> None:
        for instruction in self.state.handle(stimulus):
            told = self.told[instruction.evaluation]
            assert not told.released, "it is gone"
            if isinstance(instruction, Admit):
                assert told.slot is None and told.ended_as is None
                assert not self.admitted or self.admitted[-1] < instruction.evaluation, "in order of submission"
                held = {t.slot: t for t in self.told.values() if t.slot is not None and not t.released}
                assert instruction.copy_id not in held and len(held) < self.state.n_copies
                if not self.shrunk:
                    passed = (self.admitted and self.told[self.admitted[-1]].slot + 1) or 0
                    while passed % self.state.n_copies != instruction.copy_id:  # they go round, but for those
                        assert held[passed % self.state.n_copies].ended_as is not None
                        passed += 1
                self.admitted.append(instruction.evaluation)
                told.slot = instruction.copy_id
                self.due.append(instruction)
            elif isinstance(instruction, Launch):
                assert told.captured and told.ended_as is None and instruction.segment not in told.asked
                assert told.launched.issuperset(told.submitted.depends[instruction.segment])
                for other in self.told.values():  # whoever is before it on its state launches nothing more
                    if told.submitted.state is not None and other.submitted.state == told.submitted.state:
                        before = other.submitted.evaluation < instruction.evaluation
                        assert not before or other.watched or other.released
                told.asked.add(instruction.segment)
                self.due.append(instruction)
            elif isinstance(instruction, Watch):
                assert told.captured and not told.watched and told.asked == told.launched
                assert told.ended_as is not None or len(told.launched) == len(told.submitted.depends)
                told.watched = True
                self.due.append(instruction)
            elif isinstance(instruction, Resolve):
                assert told.ended_as is None
                assert (instruction.error is None) == (instruction.outcome in (Outcome.SUCCESS, Outcome.CANCELLED))
                told.ended_as = instruction.outcome
            else:
                assert isinstance(instruction, Release) and told.ended_as is not None
                assert told.watched if told.slot is not None else told.ended_as is not None
                assert instruction.copy_id == (-1 if told.slot is None else told.slot)
                told.released = True
        self.state.validate()

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "state"):
            return
        told = self.told.values()
        assert self.state.in_flight == sum(t.slot is not None and not t.released for t in told)
        assert self.state.waiting == sum(t.slot is None and not t.released for t in told)
        for outcome, count in self.state.counts.items():
            assert count == sum(t.ended_as is outcome for t in told)

    @invariant()
    def somebody_is_always_asked_for_something(self) -> None:
        if hasattr(self, "state") and not self.due:
            assert self.state.in_flight == self.state.waiting == 0, "everybody waits for everybody"

    def teardown(self) -> None:
        if hasattr(self, "state"):
            while self.due:
                self.answer_one(0, fails=False)
            assert all(t.released for t in self.told.values())
            assert not self.state._runs and not self.state._turns


TestRunState = RunStateMachine.TestCase
