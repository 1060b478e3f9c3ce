"""The pure run state, driven by hand: no loop, no threads, no arrays."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from aiopipe.sched.state import Phase, RunState, _Run
from aiopipe.sched.stimuli import (
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

ONE = ((),)
"""One segment."""
CHAIN = ((), (0,), (1,))
"""Three segments, one after the other."""
DIAMOND = ((), (0,), (0,), (1, 2))


def run(state: RunState, *stimuli: Stimulus) -> list[Instruction]:
    out: list[Instruction] = []
    for stimulus in stimuli:
        out += state.handle(stimulus)
        state.validate()
    return out


def test_one_evaluation_from_submit_to_release() -> None:
    state = RunState(2)
    assert run(state, Submit(0, ONE)) == [Admit(0, 0)]
    assert run(state, Captured(0)) == [Launch(0, 0)]
    assert run(state, Launched(0, 0)) == [Watch(0)]
    assert run(state, Completed(0)) == [Resolve(0, Outcome.SUCCESS), Release(0, 0)]
    assert state.in_flight == state.waiting == 0
    assert state.counts[Outcome.SUCCESS] == 1
    assert state.n_admitted == 1


def test_a_prompt_evaluation_begins_in_one_go() -> None:
    state = RunState(1)
    assert run(state, Submit(0, ONE, None, True)) == [Begin(0, 0)]
    assert run(state, Submit(1, ONE, None, True)) == []
    assert (state.phase(0), state.phase(1)) == (Phase.DRAINING, Phase.WAITING)
    assert run(state, Completed(0)) == [Resolve(0, Outcome.SUCCESS), Release(0, 0), Begin(1, 0)]
    assert run(state, Completed(1, BOOM)) == [Resolve(1, Outcome.FAILED, BOOM), Release(1, 0)]


@pytest.mark.parametrize("segment", [-1, 0])
def test_a_prompt_evaluation_that_cannot_begin_drains_what_it_has_launched(segment: int) -> None:
    state = RunState(1)
    run(state, Submit(0, ONE, None, True), Submit(1, ONE))
    assert run(state, Failed(0, segment, BOOM)) == [Resolve(0, Outcome.FAILED, BOOM), Watch(0)]
    assert run(state, Completed(0)) == [Release(0, 0), Admit(1, 0)]


def test_a_prompt_evaluation_is_cancelled() -> None:
    state = RunState(1)
    run(state, Submit(0, ONE, None, True), Submit(1, ONE, None, True), Submit(2, ONE, None, True))
    assert run(state, Cancel(1)) == [Resolve(1, Outcome.CANCELLED), Release(1, -1)]
    assert run(state, Cancel(0)) == [Resolve(0, Outcome.CANCELLED)]
    assert run(state, Failed(0, 0, BOOM)) == [Watch(0)]  # which came behind it
    assert run(state, Completed(0)) == [Release(0, 0), Begin(2, 0)]


def test_an_evaluation_goes_through_its_phases() -> None:
    state, seen = RunState(1), []
    assert state.phase(1) is None
    for stimulus in (Submit(0, ONE), Submit(1, ONE), Captured(0), Launched(0, 0), Completed(0)):
        run(state, stimulus)
        seen.append((state.phase(0), state.phase(1), state.n_admitted))
    assert seen == [
        (Phase.CAPTURING, None, 1),
        (Phase.CAPTURING, Phase.WAITING, 1),
        (Phase.RUNNING, Phase.WAITING, 1),
        (Phase.DRAINING, Phase.WAITING, 1),
        (None, Phase.CAPTURING, 2),
    ]


def test_fewer_slots_wait_until_those_beyond_are_given_back() -> None:
    state = RunState(3)
    run(state, *(Submit(i, ONE) for i in range(4)))
    run(state, *(stimulus for i in range(3) for stimulus in (Captured(i), Launched(i, 0))))
    state.shrink(1)
    assert (state.n_copies, state.cur_copy, state.in_flight) == (1, 0, 3)
    assert run(state, Completed(0)) == [Resolve(0, Outcome.SUCCESS), Release(0, 0)]
    assert run(state, Completed(1)) == [Resolve(1, Outcome.SUCCESS), Release(1, 1)]
    assert run(state, Completed(2))[1:] == [Release(2, 2), Admit(3, 0)]
    assert run(state, Submit(4, ONE)) == []
    for n in (0, 2):
        with pytest.raises(ValueError, match=f"n_copies is {n}, expected 1 to 1"):
            state.shrink(n)


def test_slots_rotate_and_a_full_pipeline_makes_submitters_wait() -> None:
    state = RunState(2)
    assert run(state, Submit(0, ONE), Submit(1, ONE), Submit(2, ONE)) == [Admit(0, 0), Admit(1, 1)]
    assert (state.in_flight, state.waiting, state.cur_copy) == (2, 1, 0)
    run(state, Captured(1), Launched(1, 0))
    # Evaluation 2 takes slot 0 and no other: slot 1 coming back first does not help it.
    assert run(state, Completed(1)) == [Resolve(1, Outcome.SUCCESS), Release(1, 1)]
    run(state, Captured(0), Launched(0, 0))
    assert run(state, Completed(0)) == [Resolve(0, Outcome.SUCCESS), Release(0, 0), Admit(2, 0)]


def test_a_slot_for_which_devices_still_work_in_vain_is_passed_over() -> None:
    state, late = RunState(3), TimeoutError("late")
    run(state, *(Submit(i, ONE) for i in range(5)), *(Captured(i) for i in range(3)))
    run(state, Launched(0, 0), Launched(1, 0), Launched(2, 0), Completed(2))
    assert (state.waiting, state.cur_copy) == (2, 0)
    assert run(state, Cancel(0, late)) == [Resolve(0, Outcome.FAILED, late)]
    assert (state.waiting, state.cur_copy) == (2, 1)  # evaluation 1 will be done, so its slot is waited for
    assert run(state, Completed(1)) == [Resolve(1, Outcome.SUCCESS), Release(1, 1), Admit(3, 1), Admit(4, 2)]
    assert (state.in_flight, state.cur_copy) == (3, 1)
    run(state, Captured(3), Launched(3, 0), Completed(3), Submit(5, ONE), Submit(6, ONE), Submit(7, ONE))
    assert state.waiting == 2
    assert run(state, Completed(0)) == [Release(0, 0)]  # slot 2 has its turn
    assert run(state, Captured(4), Launched(4, 0))[-1] == Watch(4)
    assert run(state, Completed(4))[1:] == [Release(4, 2), Admit(6, 2), Admit(7, 0)]


def test_who_waits_takes_over_as_soon_as_the_turn_passes_a_slot() -> None:
    state = RunState(2)
    run(state, Submit(0, ONE), Submit(1, ONE), Captured(0), Captured(1), Launched(1, 0), Completed(1), Submit(2, ONE))
    assert state.waiting == 1
    assert run(state, Cancel(0)) == [Resolve(0, Outcome.CANCELLED), Admit(2, 1)]
    boom = RuntimeError("boom")
    run(state, Launched(0, 0), Submit(3, ONE), Captured(2))
    assert run(state, Failed(2, 0, boom)) == [Resolve(2, Outcome.FAILED, boom), Watch(2)]
    assert state.waiting == 1  # every slot is held
    assert run(state, Completed(2)) == [Release(2, 1), Admit(3, 1)]


def test_overdue_while_waiting_is_gone() -> None:
    state, late = RunState(1), TimeoutError("late")
    run(state, Submit(0, ONE), Submit(1, ONE))
    assert run(state, Cancel(1, late)) == [Resolve(1, Outcome.FAILED, late), Release(1, -1)]
    assert (state.counts[Outcome.FAILED], state.counts[Outcome.CANCELLED], state.waiting) == (1, 0, 0)


def test_an_abort_ends_an_evaluation_like_a_failure() -> None:
    state, stop = RunState(1), RuntimeError("stop")
    run(state, Submit(0, CHAIN), Captured(0), Launched(0, 0))
    aborted = Failed(0, 1, stop, Outcome.ABORTED)
    assert run(state, aborted) == [Resolve(0, Outcome.ABORTED, stop), Watch(0)]
    assert run(state, Completed(0)) == [Release(0, 0)]
    assert (state.counts[Outcome.ABORTED], state.counts[Outcome.FAILED]) == (1, 0)


def test_segments_launch_after_what_they_depend_on() -> None:
    state = RunState(1)
    run(state, Submit(0, DIAMOND))
    assert run(state, Captured(0)) == [Launch(0, 0)]
    assert run(state, Launched(0, 0)) == [Launch(0, 1), Launch(0, 2)]
    assert run(state, Launched(0, 2)) == []
    assert run(state, Launched(0, 1)) == [Launch(0, 3)]
    assert run(state, Launched(0, 3)) == [Watch(0)]


def test_a_graph_without_segments_is_watched_at_once() -> None:
    state = RunState(1)
    run(state, Submit(0, ()))
    assert run(state, Captured(0)) == [Watch(0)]


def test_cancelled_while_waiting_is_gone_and_keeps_its_place_free() -> None:
    state = RunState(1)
    run(state, Submit(0, ONE), Submit(1, ONE), Submit(2, ONE))
    assert run(state, Cancel(1)) == [Resolve(1, Outcome.CANCELLED), Release(1, -1)]
    assert state.waiting == 1
    run(state, Captured(0), Launched(0, 0))
    assert run(state, Completed(0))[-1] == Admit(2, 0)


def test_cancelled_while_capturing_launches_nothing() -> None:
    state = RunState(1)
    run(state, Submit(0, CHAIN))
    assert run(state, Cancel(0)) == [Resolve(0, Outcome.CANCELLED)]
    assert state.in_flight == 1  # somebody still writes into the slot
    assert run(state, Captured(0)) == [Watch(0)]
    assert run(state, Completed(0)) == [Release(0, 0)]


def test_cancelled_while_running_launches_nothing_more_and_returns_its_slot_after_draining() -> None:
    state = RunState(1)
    run(state, Submit(0, CHAIN), Submit(1, ONE), Captured(0))
    assert run(state, Cancel(0)) == [Resolve(0, Outcome.CANCELLED)]
    assert run(state, Launched(0, 0)) == [Watch(0)]
    assert state.phase(0) is Phase.DRAINING
    assert run(state, Completed(0)) == [Release(0, 0), Admit(1, 0)]
    assert run(state, Cancel(0)) == []  # too late: it is gone


def test_cancelling_twice_or_after_success_does_nothing() -> None:
    state = RunState(1)
    run(state, Submit(0, ONE))
    run(state, Cancel(0))
    assert run(state, Cancel(0)) == []


def test_a_failed_launch_tells_the_caller_at_once_and_drains() -> None:
    state = RunState(1)
    boom = RuntimeError("boom")
    run(state, Submit(0, DIAMOND), Captured(0), Launched(0, 0))
    assert run(state, Failed(0, 1, boom)) == [Resolve(0, Outcome.FAILED, boom)]  # segment 2 is being launched
    assert run(state, Launched(0, 2)) == [Watch(0)]
    assert run(state, Completed(0)) == [Release(0, 0)]


def test_only_the_first_failure_counts() -> None:
    state = RunState(1)
    first, second = RuntimeError("first"), RuntimeError("second")
    run(state, Submit(0, DIAMOND), Captured(0), Launched(0, 0))
    run(state, Failed(0, 2, first))
    assert run(state, Failed(0, 1, second)) == [Watch(0)]
    assert run(state, Completed(0, second)) == [Release(0, 0)]


def test_a_failed_capture() -> None:
    state = RunState(1)
    boom = ValueError("boom")
    run(state, Submit(0, ONE))
    assert run(state, Failed(0, -1, boom)) == [Resolve(0, Outcome.FAILED, boom), Watch(0)]


def test_an_error_on_the_device_fails_that_evaluation_alone() -> None:
    state = RunState(2)
    boom = RuntimeError("boom")
    run(state, Submit(0, ONE), Submit(1, ONE), Captured(0), Captured(1), Launched(0, 0), Launched(1, 0))
    assert run(state, Completed(0, boom)) == [Resolve(0, Outcome.FAILED, boom), Release(0, 0)]
    assert run(state, Completed(1)) == [Resolve(1, Outcome.SUCCESS), Release(1, 1)]


BOOM = RuntimeError("boom")


@pytest.mark.parametrize(
    ("stimulus", "message"),
    [
        (Captured(7), "Captured(evaluation=7): no such evaluation is under way"),
        (Submit(0, ONE), f"{Submit(0, ONE)}: that evaluation is under way already"),
        (Launched(0, 0), "Launched(evaluation=0, segment=0): the evaluation is capturing, expected running"),
        (Completed(0), "Completed(evaluation=0, error=None): the evaluation is capturing, expected draining"),
        (Failed(0, 0, BOOM), f"{Failed(0, 0, BOOM)}: the evaluation is capturing, expected running"),
        (Captured(1), "Captured(evaluation=1): the evaluation is running, expected capturing"),
        (Failed(1, -1, BOOM), f"{Failed(1, -1, BOOM)}: the evaluation is running, expected capturing"),
        (Captured(2), "Captured(evaluation=2): the evaluation is waiting, expected capturing"),
    ],
)
def test_a_stimulus_that_makes_no_sense_is_refused(stimulus: Stimulus, message: str) -> None:
    state = RunState(2)
    run(state, Submit(0, ONE), Submit(1, ONE), Submit(2, ONE), Captured(1))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        state.handle(stimulus)
    state.validate()
    assert [state.phase(i) for i in range(3)] == [Phase.CAPTURING, Phase.RUNNING, Phase.WAITING]
    assert not any(state.counts.values()), "it ended all the same"


def test_n_copies_must_be_positive() -> None:
    with pytest.raises(ValueError, match="n_copies is 0"):
        RunState(0)


# The checker of invariants -----------------------------------------------------------------------


def broken_slots(state: RunState) -> None:
    state._holders[1] = state._holders[0]


def broken_holder(state: RunState) -> None:
    del state._runs[1]


def broken_copy_id(state: RunState) -> None:
    state._holders.reverse()


def broken_phase(state: RunState) -> None:
    state._runs[2].phase = Phase.RUNNING


def broken_launching(state: RunState) -> None:
    state._runs[0].launching = -1


def broken_unlaunched(state: RunState) -> None:
    state._runs[0].unlaunched = 0


def broken_order(state: RunState) -> None:
    state._turns["a"].rotate(1)


def broken_turn(state: RunState) -> None:
    state._turns["b"] = state._turns.pop("a")


def broken_member(state: RunState) -> None:
    state._turns["a"].append(_Run(9, ONE, "a"))


def broken_drain(state: RunState) -> None:
    state._runs[1].phase = Phase.DRAINING


def broken_launches(state: RunState) -> None:
    state._runs[1].launching = state._runs[1].unlaunched = 1


def broken_waiting(state: RunState) -> None:
    del state._runs[0], state._runs[1]
    state._turns.clear()
    state._holders = [None, None]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken_slots, "a run holds two slots"),
        (broken_holder, "a slot's holder is gone"),
        (broken_copy_id, "a slot's holder is gone"),
        (broken_phase, "phase and slot disagree"),
        (broken_launching, "launches do not add up"),
        (broken_unlaunched, "launches do not add up"),
        (broken_order, "turns are out of order"),
        (broken_turn, "somebody gone has a turn"),
        (broken_member, "somebody gone has a turn"),
        (broken_drain, "who launches nothing more keeps others waiting"),
        (broken_launches, "two launch on one state"),
        (broken_waiting, "somebody waits beside a free slot"),
    ],
)
def test_a_broken_invariant_is_noticed(damage: Callable[[RunState], None], message: str) -> None:
    state = RunState(2)
    run(state, Submit(0, ONE, "a"), Submit(1, ONE, "a"), Submit(2, ONE), Captured(0), Captured(1))
    damage(state)
    with pytest.raises(AssertionError, match=f"^{message}(\\n|$)"):
        state.validate()


# Shared state ------------------------------------------------------------------------------------


def test_who_shares_a_state_launches_when_the_one_before_will_launch_nothing_more() -> None:
    state = RunState(4)
    run(state, Submit(0, CHAIN, "a"), Submit(1, ONE, "a"), Submit(2, ONE, "b"), Submit(3, ONE, "a"))
    assert run(state, Captured(1)) == []
    assert run(state, Captured(2)) == [Launch(2, 0)]
    assert run(state, Captured(0)) == [Launch(0, 0)]
    assert run(state, Launched(0, 0)) == [Launch(0, 1)]
    assert run(state, Launched(0, 1)) == [Launch(0, 2)]
    assert run(state, Launched(0, 2)) == [Watch(0), Launch(1, 0)]  # 0 has not ended on its devices
    assert run(state, Launched(1, 0)) == [Watch(1)]  # 3 is not captured yet
    assert run(state, Captured(3)) == [Launch(3, 0)]


def test_a_turn_is_passed_on_by_who_is_cancelled_or_fails() -> None:
    state = RunState(2)
    run(state, *(Submit(i, CHAIN, "a") for i in range(4)), Captured(0), Captured(1))
    assert run(state, Cancel(2)) == [Resolve(2, Outcome.CANCELLED), Release(2, -1)]
    assert run(state, Cancel(1)) == [Resolve(1, Outcome.CANCELLED), Watch(1)]
    boom = RuntimeError("boom")
    assert run(state, Failed(0, 0, boom)) == [Resolve(0, Outcome.FAILED, boom), Watch(0)]
    assert run(state, Completed(1)) == [Release(1, 1), Admit(3, 1)]
    assert run(state, Completed(0)) == [Release(0, 0)]
    assert run(state, Captured(3)) == [Launch(3, 0)]


def test_cancelled_while_it_launches_it_passes_its_turn_on_when_that_is_done() -> None:
    state = RunState(2)
    run(state, Submit(0, CHAIN, "a"), Submit(1, ONE, "a"), Captured(0), Captured(1))
    assert run(state, Cancel(0)) == [Resolve(0, Outcome.CANCELLED)]
    assert run(state, Launched(0, 0)) == [Watch(0), Launch(1, 0)]


def step(state: RunState, rng: random.Random, open_answers: list[Stimulus], submitted: int) -> int:
    """One random stimulus: an answer that is due, a submission or a cancellation."""
    choice = rng.random()
    if open_answers and choice < 0.6:
        stimulus = open_answers.pop(rng.randrange(len(open_answers)))
    elif choice < 0.85:
        depends = rng.choice([ONE, CHAIN, DIAMOND, ((), ()), ()])
        stimulus, submitted = Submit(submitted, depends, rng.choice([None, "a", "b"])), submitted + 1
    else:
        stimulus = Cancel(rng.randrange(max(submitted, 1)))
    answer(state, rng, stimulus, open_answers)
    return submitted


def answer(state: RunState, rng: random.Random, stimulus: Stimulus, open_answers: list[Stimulus]) -> None:
    for instruction in state.handle(stimulus):
        match instruction:
            case Admit(evaluation, _):
                failed = rng.random() < 0.05
                open_answers.append(Failed(evaluation, -1, ValueError()) if failed else Captured(evaluation))
            case Launch(evaluation, segment):
                failed = rng.random() < 0.1
                open_answers.append(
                    Failed(evaluation, segment, RuntimeError()) if failed else Launched(evaluation, segment)
                )
            case Watch(evaluation):
                open_answers.append(Completed(evaluation, RuntimeError() if rng.random() < 0.1 else None))
    state.validate()


@pytest.mark.parametrize("n_copies", [1, 2, 3, 8])
def test_random_walks_conserve_slots_and_end_every_evaluation_once(n_copies: int) -> None:
    """S26: slots are conserved whatever the order of submissions, answers and cancellations."""
    for seed in range(60):
        rng = random.Random(seed)
        state = RunState(n_copies)
        resolved: dict[int, int] = {}
        handle = state.handle

        def counting(stimulus: Stimulus) -> list[Instruction]:
            out = handle(stimulus)  # noqa: B023  # called in this round only
            for instruction in out:
                if isinstance(instruction, Resolve):
                    resolved[instruction.evaluation] = resolved.get(instruction.evaluation, 0) + 1  # noqa: B023
            return out

        state.handle = counting  # type: ignore[method-assign]
        answers: list[Stimulus] = []
        submitted = 0
        for _ in range(200):
            submitted = step(state, rng, answers, submitted)
        while answers:
            answer(state, rng, answers.pop(rng.randrange(len(answers))), answers)
        assert state.in_flight == state.waiting == 0
        assert resolved == dict.fromkeys(range(submitted), 1)
        assert sum(state.counts.values()) == submitted
