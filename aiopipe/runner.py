"""`Runner`: carries out what the pure run state decides, on one event loop.

It holds what the state does not know: arrays, lanes, futures. The state changes on the loop's
thread alone, never halfway through an ``await``; other threads leave a message and wake the loop,
once for however many messages.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ._loops import Turns
from .backend import InlineLane
from .errors import BackendClosedError, EvaluationAborted
from .evaluation import Evaluation
from .events import Event
from .lane_pool import LanePool
from .loaded import Loaded
from .mailbox import Mailbox
from .observe import EvalCallback, Observation, Pieces
from .recorder import Recorder
from .run import Run
from .sched.launch import LaunchError
from .sched.state import RunState
from .sched.stimuli import (
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
from .state import State
from .watcher import Watcher, of_the_evaluation

__all__ = ["Runner"]


class Runner:
    """Runs evaluations of loaded plans, at most `n_copies` at the same time.

    Args:
        n_copies: how many slots there are.
        pieces: compiles what is observed.
        recorder: told what happens when, if somebody wants to know.

    Attributes:
        eval_callback: observes the evaluations that are submitted from now on.
        closed: nothing more can be submitted.
        deadline: seconds that an evaluation may take, where `submit` is told nothing else.
    """

    def __init__(self, n_copies: int, pieces: Pieces, recorder: Recorder | None = None) -> None:
        self.state = RunState(n_copies)
        self.lanes = LanePool()
        self.eval_callback: EvalCallback | None = None
        self.deadline: float | None = None
        self.n_submitted = 0
        self.closed = False
        self._pieces = pieces
        self._recorder = recorder
        self._noting = None if recorder is None else recorder.launch
        self._runs: dict[int, Run] = {}
        self._mailbox = Mailbox()
        self.origin = self._mailbox.origin
        self._post = self._mailbox.post
        self._watcher = Watcher(self._runs, self._post, self._feed, recorder)
        self._stimuli: deque[Stimulus] = deque()
        self._feeding = False
        self._turns = Turns()

    # -- callers ------------------------------------------------------------------------------

    def enter(self) -> asyncio.AbstractEventLoop:
        """Bind to the running loop.

        Raises:
            BackendClosedError: closed already.
            WrongLoopError: bound to another loop, or none runs here.
        """
        if self.closed:
            raise BackendClosedError("this scheduler is closed: make a new one")
        return self._mailbox.enter()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that it is bound to; None in a child of the process that it is open in."""
        return None if self.origin.forked else self._mailbox.loop

    @property
    def idle(self) -> bool:
        """Whether no evaluation is under way."""
        return not self._runs

    async def submit(
        self,
        loaded: Loaded,
        values: Sequence[Any],
        state: State | None = None,
        *,
        observed: bool = True,
        deadline: float | None = None,
    ) -> Evaluation:
        """Submit an evaluation and wait until it has a slot and its inputs are captured.

        It fails if it is not done `deadline` seconds from now (None: `self.deadline`).
        """
        loop = self._mailbox.loop
        if loop is None or self.closed or asyncio._get_running_loop() is not loop:
            loop = self.enter()
        for backend in loaded.backends:
            backend.check_open()
        observed = observed and self.eval_callback is not None
        # Before it is under way: a backend that raises where it is asked about an input has refused it.
        prompt = loaded.prompt and state is None and not observed and loaded.captures_inline(values)
        of = loaded.plan.graph.name, loop, self.cancel, self.split_events, len(loaded.splits)
        evaluation = Evaluation(self.n_submitted, *of)
        self.n_submitted += 1
        run = self._runs[evaluation.id] = Run(evaluation, loaded, values, state)
        if self._recorder is not None:
            self._recorder.submitted(run)
        depends = self._to_observe(run) if observed else loaded.depends
        self._feed(Submit(evaluation.id, depends, None if state is None else id(state), prompt))
        if deadline is None:
            deadline = self.deadline
        if deadline is not None and deadline < math.inf and not evaluation._done:
            run.timer = loop.call_later(deadline, self._expire, run, deadline)
        if not run.captured:
            run.admitted = loop.create_future()
            try:
                await run.admitted
            except asyncio.CancelledError:
                evaluation.cancel()
                raise
        elif evaluation._done:
            await self._turns.step_back()
        return evaluation

    def cancel(self, evaluation: int) -> bool:
        """Cancel an evaluation; False when it is done already."""
        run = self._runs.get(evaluation)
        if run is None or run.evaluation._done or self.origin.forked:
            return False
        self._feed(Cancel(evaluation))
        return True

    def _expire(self, run: Run, deadline_s: float) -> None:
        """A deadline has come. Whether what it has launched will count, its caller cannot know: its state is marked."""
        error = self._watcher.overdue(run, deadline_s)
        if run.taken and run.state is not None:
            run.state.mark(error, run.evaluation.id)
        self._feed(Cancel(run.evaluation.id, error))

    def cancel_all(self) -> None:
        """Cancel whatever is not done."""
        for evaluation in list(self._runs):
            self.cancel(evaluation)

    def split_events(self, evaluation: int) -> Sequence[Event] | None:
        """One event for each split of an evaluation; None when it is gone, so that all have happened."""
        run = self._runs.get(evaluation)
        return None if run is None else run.split_events(self._post)

    async def synchronize(self) -> None:
        """Wait until everything that was submitted so far has finished on its devices.

        Raises:
            WrongLoopError: bound to another loop, or none runs here.
        """
        self._mailbox.enter()
        ends = [run.end() for run in self._runs.values()]
        for end in ends:  # all made before the first wait: a run that ends meanwhile tells its event
            await end.wait()

    def move(self) -> bool:
        """Belong to the running loop, if its own has ended: what was under way there is lost. Whether that is so.

        Raises:
            WrongLoopError: its own has not ended.
        """
        moved = self._mailbox.move()
        if moved:
            self._runs.clear()
        return moved

    def hang_up(self) -> None:
        """It is closed: what other threads have to say still arrives, but not as fast."""
        self._mailbox.close()

    async def settle(self, state: State) -> None:
        """Wait until no evaluation that uses a state is under way."""
        while busy := [run for run in self._runs.values() if run.state is state]:
            await busy[-1].end().wait()

    async def end_observing(self, timeout_s: float | None = None) -> None:
        """Wait for the tasks of observed evaluations that were cancelled: a callback may take its time to notice."""
        tasks = [run.observation.task for run in self._runs.values() if run.observation and run.observation.task]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    # -- the door to the state ----------------------------------------------------------------

    def _feed(self, stimulus: Stimulus) -> None:
        """Give the state a stimulus and carry out what follows, until nothing follows.

        A stimulus that comes while instructions are carried out (somebody's callback cancels)
        takes its turn.
        """
        stimuli = self._stimuli
        stimuli.append(stimulus)
        if self._feeding:
            return
        self._feeding = True
        handle, carry_out = self.state.handle, self._carry_out
        try:
            while stimuli:
                for instruction in handle(stimuli.popleft()):
                    try:
                        answer = carry_out[type(instruction)](self, instruction)
                    except (KeyboardInterrupt, SystemExit):
                        raise
                    except BaseException as error:
                        answer = self._broke(instruction, error)
                    if answer is not None:
                        stimuli.append(answer)
        finally:
            self._feeding = False

    def _broke(self, instruction: Instruction, error: BaseException) -> Stimulus | None:
        """A backend raised where nothing was to: that is the end of one evaluation, and nobody else's affair."""
        run = self._runs.get(instruction.evaluation)
        if run is not None and isinstance(instruction, Admit | Begin):
            return self._captured(run, error)
        if run is not None and isinstance(instruction, Launch):
            splits = run.loaded.segment_splits[instruction.segment] or run.loaded.splits
            return Failed(run.evaluation.id, instruction.segment, run.blame(splits[0].index, error))
        if run is not None and isinstance(instruction, Watch):
            return Completed(run.evaluation.id, error)
        assert self._mailbox.loop is not None
        message = f"aiopipe: evaluation {instruction.evaluation} has ended, but {type(instruction).__name__} raised"
        self._mailbox.loop.call_exception_handler({"message": message, "exception": error})
        return None

    # -- instructions; each returns the answer, or None when it comes later ---------------------

    def _admit(self, instruction: Admit) -> Stimulus | None:
        run = self._admitted(instruction)
        if run.loaded.captures_inline(run.values):
            return self._captured(run, of_the_evaluation(run.capture()))

        def job() -> None:
            error = run.capture()
            if self._recorder is not None and run.times:
                self._recorder.captured(run)
            self._post(lambda: self._feed(self._captured(run, error)))

        self.lanes.capture.post(job)
        return None

    def _begin(self, instruction: Begin) -> Stimulus | None:
        run = self._admitted(instruction)
        error = run.capture()
        if error is not None:
            return self._captured(run, of_the_evaluation(error))
        run.end_capture()
        failed = run.launch_segment(0, self._noting)
        if failed is not None:
            of_the_evaluation(failed.__cause__)
            return self._launched(run, 0, failed)
        if run.events is not None:
            run.watch_splits(run.loaded.splits, self._post)
        return self._watcher.watch(run)

    def _admitted(self, instruction: Admit | Begin) -> Run:
        """The evaluation that has a slot now."""
        run = self._runs[instruction.evaluation]
        run.evaluation.copy_id = instruction.copy_id
        if self._recorder is not None and run.admitted is not None and run.times:  # somebody waits for it
            self._recorder.admitted(run)
        return run

    @staticmethod
    def _captured(run: Run, error: BaseException | None) -> Stimulus:
        run.end_capture()
        if error is not None:
            return Failed(run.evaluation.id, -1, error)
        return Captured(run.evaluation.id)

    def _launch(self, instruction: Launch) -> Stimulus | None:
        run = self._runs[instruction.evaluation]
        segment = instruction.segment
        refused = run.take_state()
        if refused is not None:
            return Failed(run.evaluation.id, segment, refused)
        if run.observation is not None:
            run.observation.start(lambda error: self._observed(run, error))
            return None
        lane = run.loaded.lanes[segment]
        if type(lane) is InlineLane:
            error = run.launch_segment(segment, self._noting)
            if error is not None:
                of_the_evaluation(error.__cause__)
            return self._launched(run, segment, error)

        def job() -> None:
            error = run.launch_segment(segment, self._noting)
            self._post(self._launched_elsewhere, run, segment, error)

        lane.post(job)
        return None

    def _launched_elsewhere(self, run: Run, segment: int, error: LaunchError | None) -> None:
        stimulus = self._launched(run, segment, error)
        if stimulus is not None:
            self._feed(stimulus)

    def _launched(self, run: Run, segment: int, error: LaunchError | None) -> Stimulus | None:
        if run.events is not None:
            run.watch_splits(run.loaded.segment_splits[segment], self._post)
        if error is None:
            return Launched(run.evaluation.id, segment)
        self._watcher.launch_failed(run, error, lambda why: self._feed(Failed(run.evaluation.id, segment, why)))
        return None

    def _watch(self, instruction: Watch) -> Stimulus | None:
        return self._watcher.watch(self._runs[instruction.evaluation])

    def _resolve(self, instruction: Resolve) -> None:
        run = self._runs[instruction.evaluation]
        if run.timer is not None:
            run.timer.cancel()
        if run.admitted is not None and not run.admitted.done():
            run.admitted.set_result(None)  # cancelled from elsewhere: awaiting the evaluation will say so
        if instruction.outcome is Outcome.SUCCESS:
            try:
                result = run.loaded.result(run.env.slots)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # the user's own pytree node may raise
                run.evaluation._settle(error=error)
            else:
                run.evaluation._settle(result=result)
            return
        run.dropped = True
        if run.observation is not None:
            run.observation.cancel()
        cancelled = instruction.outcome is Outcome.CANCELLED
        run.evaluation._settle(error=instruction.error, cancelled=cancelled)

    def _release(self, instruction: Release) -> None:
        run = self._runs.pop(instruction.evaluation)
        if self._recorder is not None and run.times:
            self._recorder.released(run)
        run.release()

    _carry_out: ClassVar[dict[type, Callable[[Runner, Any], Stimulus | None]]] = {
        Admit: _admit,
        Begin: _begin,
        Launch: _launch,
        Watch: _watch,
        Resolve: _resolve,
        Release: _release,
    }

    # -- parts --------------------------------------------------------------------------------

    def _to_observe(self, run: Run) -> Sequence[tuple[int, ...]]:
        """Have a run observed: all of it is one segment, so that the callback is called in order."""
        assert self.eval_callback is not None
        run.observation = Observation(run, self.eval_callback, self._pieces, self.lanes, self._post, self._recorder)
        return ((),)

    def _observed(self, run: Run, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._feed(Cancel(run.evaluation.id))  # by the callback itself, or the end of the loop
            error = None
        if error is None:
            self._feed(Launched(run.evaluation.id, 0))
        elif run.observation.failed:  # on a device, not in the callback
            self._watcher.after_earlier(run, lambda refused: self._feed(Failed(run.evaluation.id, 0, refused or error)))
        else:
            outcome = Outcome.ABORTED if isinstance(error, EvaluationAborted) else Outcome.FAILED
            self._feed(Failed(run.evaluation.id, 0, error, outcome))
