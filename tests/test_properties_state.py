"""The pure run state under every order of stimuli that hypothesis can think of, against rules of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiopipe.sched.state import RunState
from aiopipe.sched.stimuli import (
    Admit,
    Begin,
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

pytestmark = pytest.mark.timeout(max(60, settings.default.max_examples))  # type: ignore[union-attr]
Depends = Sequence[tuple[int, ...]]


class Told:
    """What was seen of one evaluation that is not gone."""

    def __init__(self, submitted: Submit) -> None:
        self.submitted = submitted
        self.slot: int | None = None
        self.captured = self.watched = False
        self.asked: set[int] = set()
        self.launched: set[int] = set()
        self.ended_as: Outcome | None = None


class Shell:
    """Gives stimuli as the real one does: what was asked for is answered once, sooner or later, well or badly.

    Attributes:
        due: what was asked for and is not answered yet.
        n_stimuli: how many were given.
    """

    def __init__(self, n_copies: int) -> None:
        self.state = RunState(n_copies)
        self.told: dict[int, Told] = {}
        self.due: list[Admit | Begin | Launch | Watch] = []
        self.ended: Counter[Outcome] = Counter()
        self.n_submitted = self.n_stimuli = 0
        self.last_admitted = self.last_slot = -1
        self.shrunk = False

    # -- what callers and devices do ------------------------------------------------------------

    def submit(self, depends: Depends, shared: str | None, *, prompt: bool = False) -> None:
        stimulus = Submit(self.n_submitted, depends, shared, prompt and len(depends) == 1 and shared is None)
        self.told[stimulus.evaluation] = Told(stimulus)
        self.n_submitted += 1
        self.give(stimulus)

    def answer(self, index: int, *, fails: bool) -> None:
        due = self.due.pop(index % len(self.due))
        told, error = self.told[due.evaluation], RuntimeError("boom")
        stimulus: Stimulus
        if isinstance(due, Watch):
            stimulus = Completed(due.evaluation, error if fails else None)
        elif isinstance(due, Begin) and fails and index % 3:  # capturing or launching it raised
            stimulus = Failed(due.evaluation, -(index % 2), error)
        elif isinstance(due, Begin):
            told.watched = True
            stimulus = Completed(due.evaluation, error if fails else None)
        elif isinstance(due, Admit):
            told.captured = True
            stimulus = Failed(due.evaluation, -1, error) if fails else Captured(due.evaluation)
        else:
            told.launched.add(due.segment)
            outcome = Outcome.ABORTED if due.segment % 2 else Outcome.FAILED
            stimulus = Failed(*due, error, outcome) if fails else Launched(*due)
        self.give(stimulus)

    def cancel(self, number: int, *, overdue: bool) -> None:
        """Any evaluation, also one that is gone: nobody wants it any more, or it is too late."""
        evaluation = number % self.n_submitted
        told = self.told.get(evaluation)
        outcome = Outcome.FAILED if overdue else Outcome.CANCELLED
        before, n_before = told and told.ended_as, self.ended[outcome]
        self.give(Cancel(evaluation, RuntimeError("too late") if overdue else None))
        assert told is None or told.ended_as is (before or outcome)
        assert self.ended[outcome] == n_before + (told is not None and before is None)

    def shrink(self, number: int) -> None:
        n = 1 + number % self.state.n_copies
        self.shrunk = self.shrunk or n < self.state.n_copies
        self.state.shrink(n)
        self.state.validate()

    def nonsense(self, evaluation: int, kind: Any) -> None:
        """What nobody was asked for is refused, and nothing comes of it."""
        if kind is Submit:
            if evaluation not in self.told:
                return
            stimulus: Stimulus = Submit(evaluation, ())
        else:
            answered = (Admit,) if kind is Captured else (Begin, Watch)
            if any(d.evaluation == evaluation and isinstance(d, answered) for d in self.due):
                return
            stimulus = Failed(self.n_submitted, 0, ValueError()) if kind is Failed else kind(evaluation)
        with pytest.raises(ValueError, match="evaluation"):
            self.state.handle(stimulus)

    def finish(self) -> None:
        """Answer what is due, well, until nothing is: then everybody is gone."""
        while self.due:
            self.answer(0, fails=False)
        assert not self.told
        assert sum(self.ended.values()) == self.n_submitted
        assert not self.state._runs and not self.state._turns

    # -- what it is told to do ------------------------------------------------------------------

    def give(self, stimulus: Stimulus) -> None:
        self.n_stimuli += 1
        for instruction in self.state.handle(stimulus):
            told = self.told[instruction.evaluation]  # nobody hears of one that is gone
            if isinstance(instruction, (Admit, Begin)):
                told.captured = isinstance(instruction, Begin)
                assert told.captured == told.submitted.prompt
                self.admit(told, instruction)
            elif isinstance(instruction, Launch):
                self.launch(told, instruction)
            elif isinstance(instruction, Watch):
                assert told.captured and not told.watched and told.asked == told.launched
                assert told.ended_as is not None or len(told.launched) == len(told.submitted.depends)
                told.watched = True
                self.due.append(instruction)
            elif isinstance(instruction, Resolve):
                assert told.ended_as is None
                assert (instruction.error is None) == (instruction.outcome in (Outcome.SUCCESS, Outcome.CANCELLED))
                told.ended_as = instruction.outcome
                self.ended[instruction.outcome] += 1
            else:
                assert isinstance(instruction, Release) and told.ended_as is not None
                assert told.slot is None or told.watched
                assert instruction.copy_id == (-1 if told.slot is None else told.slot)
                del self.told[instruction.evaluation]
        self.state.validate()

    def admit(self, told: Told, instruction: Admit | Begin) -> None:
        assert told.slot is None and told.ended_as is None
        assert self.last_admitted < instruction.evaluation, "in order of submission"
        held = {t.slot: t for t in self.told.values() if t.slot is not None}
        n = self.state.n_copies
        assert instruction.copy_id not in held and len(held) < n
        if not self.shrunk:
            slot = (self.last_slot + 1) % n
            while slot != instruction.copy_id:  # they go round, past those whose devices work in vain
                assert held[slot].ended_as is not None
                slot = (slot + 1) % n
        self.last_admitted, self.last_slot = instruction.evaluation, instruction.copy_id
        told.slot = instruction.copy_id
        self.due.append(instruction)

    def launch(self, told: Told, instruction: Launch) -> None:
        assert told.captured and told.ended_as is None and instruction.segment not in told.asked
        assert told.launched.issuperset(told.submitted.depends[instruction.segment])
        for other in self.told.values():  # whoever is before it on its state launches nothing more
            if told.submitted.state is not None and other.submitted.state == told.submitted.state:
                assert other.submitted.evaluation >= instruction.evaluation or other.watched
        told.asked.add(instruction.segment)
        self.due.append(instruction)

    # -- what always holds ----------------------------------------------------------------------

    def check(self) -> None:
        n_held = sum(t.slot is not None for t in self.told.values())
        assert (self.state.in_flight, self.state.waiting) == (n_held, len(self.told) - n_held), "counts do not add up"
        assert all(count == self.ended[outcome] for outcome, count in self.state.counts.items())
        assert self.due or not self.told, "everybody waits for everybody"


# Rule by rule: few stimuli, but what fails is made small and shown as a program ---------------------


@st.composite
def segments(draw: st.DrawFn) -> Depends:
    """What each segment comes after: any acyclic order of none to six."""
    n = draw(st.integers(0, 6))
    return tuple(tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else () for i in range(n))


class RunStateMachine(RuleBasedStateMachine):
    @initialize(n_copies=st.integers(1, 4))
    def begin(self, n_copies: int) -> None:
        self.shell = Shell(n_copies)

    @rule(depends=segments(), shared=st.sampled_from([None, None, "a", "b"]))
    def submit(self, depends: Depends, shared: str | None) -> None:
        self.shell.submit(depends, shared)

    @rule()
    def submit_prompt(self) -> None:
        self.shell.submit(((),), None, prompt=True)

    @precondition(lambda self: self.shell.due)
    @rule(index=st.integers(0, 9), fails=st.booleans())
    def answer(self, index: int, fails: bool) -> None:
        self.shell.answer(index, fails=fails)

    @precondition(lambda self: self.shell.due)
    @rule(n=st.integers(1, 12))
    def answer_several(self, n: int) -> None:
        for _ in range(min(n, len(self.shell.due))):
            self.shell.answer(0, fails=False)

    @precondition(lambda self: self.shell.n_submitted)
    @rule(number=st.integers(0, 99), overdue=st.booleans())
    def cancel(self, number: int, overdue: bool) -> None:
        self.shell.cancel(number, overdue=overdue)

    @rule(number=st.integers(0, 3))
    def shrink(self, number: int) -> None:
        self.shell.shrink(number)

    @rule(evaluation=st.integers(0, 20), kind=st.sampled_from([Captured, Completed, Submit, Failed]))
    def nonsense(self, evaluation: int, kind: Any) -> None:
        self.shell.nonsense(evaluation, kind)

    @invariant()
    def always(self) -> None:
        if hasattr(self, "shell"):
            self.shell.check()

    def teardown(self) -> None:
        if hasattr(self, "shell"):
            self.shell.finish()


TestRunState = RunStateMachine.TestCase
TestRunState.settings = settings(stateful_step_count=30)


# Byte by byte: many stimuli ------------------------------------------------------------------------

SHAPES: Sequence[Depends] = (
    ((),),
    (),
    ((),),
    ((), ()),
    ((), (0,)),
    ((), (0,), (1,)),
    ((), (), (0, 1)),
    ((), (0,), (0,), (1, 2)),
    ((), (), (), ()),
    ((), (0,), (1,), (2,), (3,)),
    ((), (), (0,), (0, 1), (2,), (2, 3)),
)
"""What the segments of an evaluation come after."""

KINDS = "sssaaaaaaaaafffcox-"
"""Submit, answer, fail, cancel, let be overdue, shrink, give nonsense: how often each."""


def walk(data: bytes) -> int:
    """Have a run state go where the bytes say, two for each stimulus; return how many stimuli there were."""
    shell = Shell(1 + data[0] % 4)
    for i in range(1, len(data) - 1, 2):
        kind, number = KINDS[data[i] % len(KINDS)], data[i + 1]
        if kind == "s":
            shared = (None, None, "a", "b")[number // len(SHAPES) % 4]
            shell.submit(SHAPES[number % len(SHAPES)], shared, prompt=number % 2 == 0)
        elif kind in "af" and shell.due:
            shell.answer(number, fails=kind == "f")
        elif kind in "co" and shell.n_submitted:
            shell.cancel(shell.n_submitted - 1 - number % 16, overdue=kind == "o")
        elif kind == "x" and number > 200:  # it never grows again
            shell.shrink(number)
        elif kind == "-":
            shell.nonsense(number // 4, (Captured, Completed, Submit, Failed)[number % 4])
        shell.check()
    shell.finish()
    return shell.n_stimuli


@given(st.binary(min_size=300, max_size=600))
def test_long_walks_of_the_run_state(data: bytes) -> None:
    assert walk(data) > 0
