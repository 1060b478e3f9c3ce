"""Faults planted in aiopipe: some seed finds each of them, and finds it again.

So what `tests/test_schedules.py` does not find is not there for want of looking.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from aiopipe import mailbox, runner, watcher
from aiopipe.lanes import ThreadLane
from aiopipe.sched.state import Phase, RunState
from aiopipe.sched.stimuli import Admit, Completed, Stimulus
from seededprograms import run
from worlds import Kind, World

Patch = pytest.MonkeyPatch
PLANTS: dict[str, Plant] = {}


class Plant(NamedTuple):
    """A fault: what it does, the program that meets it, and what is said of it."""

    plant: Callable[[Patch, World], None]
    program: str
    kind: Kind
    match: str  # found in other ways, too


def plant(program: str, kind: Kind, match: str) -> Callable[[Callable[[Patch, World], None]], None]:
    def known(fn: Callable[[Patch, World], None]) -> None:
        PLANTS[fn.__name__] = Plant(fn, program, kind, match)

    return known


# Slots -------------------------------------------------------------------------------------------


@plant("submitting", "inline", "slot . was rewritten: the end of")
def a_slot_is_given_away_while_it_is_in_use(patch: Patch, world: World) -> None:
    admit = RunState._admit

    def hasty(self: RunState, out: list[Any]) -> None:
        self._holders[self.cur_copy] = None
        admit(self, out)

    patch.setattr(RunState, "_admit", hasty)


@plant("cancelling", "lanes", "slot . was rewritten: the end of")
def nobody_waits_for_what_a_cancelled_evaluation_has_launched(patch: Patch, world: World) -> None:
    patch.setattr(watcher.Watcher, "_drain", lambda self, run: Completed(run.evaluation.id))


@plant("submitting", "lanes", "reads slot . before it is written|Not equal")
def a_submitter_goes_on_before_its_inputs_are_copied(patch: Patch, world: World) -> None:
    world.inline_capture_nbytes = 0

    def admit(self: runner.Runner, instruction: Any) -> Stimulus:
        run = self._runs[instruction.evaluation]
        run.evaluation.copy_id = instruction.copy_id
        self.lanes.capture.post(run.capture)
        return self._captured(run, None)

    patch.setitem(runner.Runner._carry_out, Admit, admit)


# Turns and threads -------------------------------------------------------------------------------


@plant("sharing_states", "lanes", "not ordered by anything")
def a_turn_on_a_state_is_not_waited_for(patch: Patch, world: World) -> None:
    def captured(self: RunState, run: Any, out: list[Any]) -> None:
        run.phase = Phase.RUNNING
        run.unlaunched = len(run.depends)
        self._start(run, out)

    patch.setattr(RunState, "_captured", captured)


@plant("submitting", "lanes", "not ordered by anything|from another thread than the loop's")
def a_completion_thread_goes_on_by_itself(patch: Patch, world: World) -> None:
    when_ready = watcher.when_ready
    patch.setattr(
        watcher, "when_ready", lambda groups, post, then: when_ready(groups, lambda action, *args: action(*args), then)
    )


@plant("posting", "lanes", "nothing could happen|started once")
def two_start_the_thread_of_a_lane(patch: Patch, world: World) -> None:
    lanes: list[ThreadLane] = []
    post = ThreadLane.post

    class NoLock:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *exc: object) -> None:
            pass

    def posting(self: ThreadLane, job: Any) -> None:
        if self not in lanes:
            lanes.append(self)
            self._lock = NoLock()  # type: ignore[assignment]
        post(self, job)

    patch.setattr(ThreadLane, "post", posting)
    world.schedule.rescues.append(lambda: [lane._jobs.put(None) for lane in lanes if lane._closed])


# Wake-ups ----------------------------------------------------------------------------------------


class Boxes:
    """Mailboxes whose messages can be read at last, where the fault is that nobody is told of them."""

    def __init__(self, patch: Patch, world: World) -> None:
        world.schedule.files |= {__file__}
        self.known: list[mailbox.Mailbox] = []
        bind = mailbox.Mailbox.bind

        def binding(box: mailbox.Mailbox, loop: Any) -> None:
            self.known.append(box)
            bind(box, loop)

        patch.setattr(mailbox.Mailbox, "bind", binding)
        world.schedule.rescues.append(self.read)

    def read(self) -> None:
        for box in self.known:
            if box._messages and box.loop is not None:
                box.loop.call_soon_threadsafe(box._read)


@plant("mailing", "lanes", "nothing could happen")
def the_flag_is_lowered_behind_the_last_look(patch: Patch, world: World) -> None:
    Boxes(patch, world)

    def read(self: mailbox.Mailbox) -> None:
        messages = self._messages
        while messages:
            action, args = messages.popleft()
            action(*args)
        self._awake = False

    patch.setattr(mailbox.Mailbox, "_read", read)


@plant("mailing", "lanes", "nothing could happen")
def the_loop_is_woken_before_the_message_is_there(patch: Patch, world: World) -> None:
    Boxes(patch, world)

    def post(self: mailbox.Mailbox, action: Any, *args: Any) -> None:
        if not self._awake:
            self._awake = True
            self._wake()
        self._messages.append((action, args))

    patch.setattr(mailbox.Mailbox, "post", post)


# -------------------------------------------------------------------------------------------------


def found(name: str, seed: int) -> str:
    """What is found under a seed; nothing, or what is wrong."""
    fault = PLANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        try:
            schedule = run(fault.program, fault.kind, seed, lambda world: fault.plant(patch, world))
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    return f"nothing could happen {schedule.n_rescued} times" if schedule.n_rescued else ""


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found_by_some_seed_and_again_by_the_same(name: str) -> None:
    fault = PLANTS[name]
    seed = next((seed for seed in range(300) if re.search(fault.match, found(name, seed))), None)
    assert seed is not None, "no seed finds it"
    assert found(name, seed) == found(name, seed)
    run(fault.program, fault.kind, seed)  # which finds nothing where nothing is planted
