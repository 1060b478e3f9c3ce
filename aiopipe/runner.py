"""`Runner`: carries out what the pure run state decides, on one event loop.

It holds what the state does not know: arrays, lanes, futures. The state changes on the loop's
thread alone, never halfway through an ``await``; other threads leave a message and wake the loop,
once for however many messages.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from .backend import InlineLane
from .completion import blamed, failure, first_failure, launched, when_ready
from .errors import BackendClosedError, EvaluationAborted, WrongLoopError
from .evaluation import Evaluation
from .events import Event
from .lane_pool import LanePool
from .loader import Loaded
from .mailbox import Mailbox
from .observe import EvalCallback, Observation, Pieces
from .recorder import Recorder
from .run import Run
from .sched.launch import LaunchError
from .sched.state import (
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
    RunState,
    Stimulus,
    Submit,
    Watch,
)
from .state import State

__all__ = ["Runner"]

YIELD_S = 5e-4
"""Let other tasks of the loop run after this long of evaluations that never had to wait."""


class Runner:
    """Runs evaluations of loaded plans, at most `n_copies` at the same time.

    Args:
        n_copies: how many slots there are.
        pieces: compiles what is observed.
        recorder: told what happens when, if somebody wants to know.

    Attributes:
        eval_callback: observes the evaluations that are submitted from now on.
    """

    def __init__(self, n_copies: int, pieces: Pieces, recorder: Recorder | None = None) -> None:
        self.state = RunState(n_copies)
        self.lanes = LanePool()
        self.eval_callback: EvalCallback | None = None
        self.n_submitted = 0
        self.closed = False
        self._pieces = pieces
        self._recorder = recorder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runs: dict[int, Run] = {}
        self._mailbox = Mailbox()
        self._post = self._mailbox.post
        self._stimuli: deque[Stimulus] = deque()
        self._feeding = False
        self._burst_began = -1.0

    # -- callers ------------------------------------------------------------------------------

    def enter(self) -> asyncio.AbstractEventLoop:
        """Bind to the running loop.

        Raises:
            BackendClosedError: closed already.
            WrongLoopError: bound to another loop.
        """
        if self.closed:
            raise BackendClosedError("this scheduler is closed: make a new one")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._mailbox.bind(loop)
        elif self._loop is not loop:
            raise WrongLoopError("this scheduler belongs to another event loop: make one scheduler for each loop")
        return loop

    @property
    def entered(self) -> bool:
        """Whether it has been bound to a loop."""
        return self._loop is not None

    @property
    def idle(self) -> bool:
        """Whether no evaluation is under way."""
        return not self._runs

    async def submit(
        self, loaded: Loaded, values: Sequence[Any], state: State | None = None, *, observed: bool = True
    ) -> Evaluation:
        """Submit an evaluation and wait until it has a slot and its inputs are captured."""
        loop = self.enter()
        for backend in loaded.backends:
            backend.check_open()
        of = loaded.plan.graph.name, loop, self.cancel, self.split_events, len(loaded.splits)
        evaluation = Evaluation(self.n_submitted, *of)
        self.n_submitted += 1
        run = self._runs[evaluation.id] = Run(evaluation, loaded, values, state)
        if self._recorder is not None:
            self._recorder.submitted(run)
        depends = self._to_observe(run) if observed and self.eval_callback is not None else loaded.depends
        self._feed(Submit(evaluation.id, depends, None if state is None else id(state)))
        if not run.captured:
            run.admitted = loop.create_future()
            try:
                await run.admitted
            except asyncio.CancelledError:
                evaluation.cancel()
                raise
        elif evaluation._done:
            await self._share_the_loop(loop)
        return evaluation

    async def _share_the_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Evaluations that end at once would never let another task run: step back now and then."""
        now = time.monotonic()
        if self._burst_began < 0:
            self._burst_began = now
            loop.call_soon(self._end_burst)
        elif now - self._burst_began > YIELD_S:
            await asyncio.sleep(0)

    def _end_burst(self) -> None:
        self._burst_began = -1.0

    def cancel(self, evaluation: int) -> bool:
        """Cancel an evaluation; False when it is done already."""
        run = self._runs.get(evaluation)
        if run is None or run.evaluation._done:
            return False
        self._feed(Cancel(evaluation))
        return True

    def cancel_all(self) -> None:
        """Cancel whatever is not done."""
        for evaluation in list(self._runs):
            self.cancel(evaluation)

    def split_events(self, evaluation: int) -> Sequence[Event] | None:
        """One event for each split of an evaluation; None when it is gone, so that all have happened."""
        run = self._runs.get(evaluation)
        return None if run is None else run.split_events(self._post)

    async def synchronize(self) -> None:
        """Wait until everything that was submitted so far has finished on its devices."""
        ends = [run.end() for run in self._runs.values()]
        for end in ends:  # all made before the first wait: a run that ends meanwhile tells its event
            await end.wait()

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
                    answer = carry_out[type(instruction)](self, instruction)
                    if answer is not None:
                        stimuli.append(answer)
        finally:
            self._feeding = False

    # -- instructions; each returns the answer, or None when it comes later ---------------------

    def _admit(self, instruction: Admit) -> Stimulus | None:
        run = self._runs[instruction.evaluation]
        run.evaluation.copy_id = instruction.copy_id
        if self._recorder is not None and run.admitted is not None and run.times:  # somebody waits for it
            self._recorder.admitted(run)
        if run.loaded.captures_inline(run.values):
            return self._captured(run, self._capture(run))

        def job() -> None:
            error = self._capture(run)
            if self._recorder is not None and run.times:
                self._recorder.captured(run)
            self._post(lambda: self._feed(self._captured(run, error)))

        self.lanes.capture.post(job)
        return None

    @staticmethod
    def _capture(run: Run) -> Exception | None:
        try:
            run.loaded.capture(run.evaluation.copy_id, run.values, run.env.slots)
        except Exception as error:
            return error
        return None

    @staticmethod
    def _captured(run: Run, error: Exception | None) -> Stimulus:
        run.captured = True
        run.values = ()
        if run.admitted is not None and not run.admitted.done():
            run.admitted.set_result(None)
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
            error = self._launch_segment(run, segment)
            return self._launched(run, segment, error)

        def job() -> None:
            error = self._launch_segment(run, segment)
            self._post(lambda: self._feed(self._launched(run, segment, error)))

        lane.post(job)
        return None

    def _launch_segment(self, run: Run, segment: int) -> LaunchError | None:
        if run.dropped:  # cancelled or failed while this waited for its lane
            return None
        try:
            if self._recorder is None or run.times is None:
                run.launch(segment)
            else:
                self._recorder.launch(run, segment)
        except LaunchError as error:
            return error
        return None

    def _launched(self, run: Run, segment: int, error: LaunchError | None) -> Stimulus:
        if run.events is not None:
            for split in run.loaded.segment_splits[segment]:
                if run.env.markers[split.index] is not None:
                    run.watch_split(split.index, self._post)
        if error is not None:
            run.broken = True
            if run.taken and run.state is not None and run.state.error is not None:
                return Failed(run.evaluation.id, segment, run.state.refusal())  # its arrays came from one that failed
            guilty = blamed(run.loaded.splits, run.env.markers, error)
            return Failed(run.evaluation.id, segment, failure(run.loaded.plan, run.evaluation.id, *guilty))
        return Launched(run.evaluation.id, segment)

    def _watch(self, instruction: Watch) -> Stimulus | None:
        run = self._runs[instruction.evaluation]
        run.return_state()
        try:
            return self._look(run)
        except Exception as error:
            return Completed(run.evaluation.id, run.unknowable(error))

    def _look(self, run: Run) -> Stimulus | None:
        if not run.loaded.splits and run.state is not None and run.state.error is not None:  # it never took it
            return Completed(run.evaluation.id, run.state.refusal())
        markers = run.env.markers
        groups = [(backend, [markers[i] for i in indices]) for backend, indices in run.loaded.sinks]
        if run.loaded.returned and run.captured and not run.dropped:  # a caller's array may not be ready yet
            groups.append((run.loaded.backends[-1], [run.env.slots[i] for i in run.loaded.returned]))
        if any(marker is None for _, group in groups for marker in group):
            return self._drain(run)  # not everything was launched
        if all(backend.all_ready(group) and backend.error_of(group) is None for backend, group in groups):
            return Completed(run.evaluation.id)
        post = self._post if self._recorder is None or run.times is None else self._recorder.ending(run, self._post)
        when_ready(groups, post, lambda error: self._completed(run, error))
        return None

    def _drain(self, run: Run) -> Stimulus | None:
        """Wait for whatever was launched of an evaluation that will launch no more."""
        groups = launched(run.loaded.splits, run.env.markers)
        if not groups:
            return Completed(run.evaluation.id)
        when_ready(groups, self._post, lambda _: self._feed(Completed(run.evaluation.id)))
        return None

    def _completed(self, run: Run, error: BaseException | None) -> None:
        if error is None or not run.loaded.splits:
            self._feed(Completed(run.evaluation.id, error))
            return
        earlier = self._earlier(run)
        if earlier is not None:  # which may be to blame
            earlier.end().add_callback(lambda _: self._completed(run, error))
            return
        if run.taken and run.state is not None and run.state.error is not None:
            self._feed(Completed(run.evaluation.id, run.state.refusal()))  # its arrays came from one that failed
            return

        def blame(split: int, cause: BaseException) -> None:
            why = failure(run.loaded.plan, run.evaluation.id, split, cause)
            if run.taken and run.state is not None:
                run.state.mark(why)
            self._feed(Completed(run.evaluation.id, why))

        try:
            first_failure(run.loaded.splits, run.env.markers, error, self._post, blame)
        except Exception as raised:
            self._feed(Completed(run.evaluation.id, run.unknowable(raised)))

    def _earlier(self, run: Run) -> Run | None:
        """The evaluation that was submitted last before `run` on the same state and is still under way."""
        state, me = run.state, run.evaluation.id
        earlier = (r for i, r in reversed(self._runs.items()) if r.state is state and i < me)
        return None if state is None else next(earlier, None)

    def _resolve(self, instruction: Resolve) -> None:
        run = self._runs[instruction.evaluation]
        if run.admitted is not None and not run.admitted.done():
            run.admitted.set_result(None)  # cancelled from elsewhere: awaiting the evaluation will say so
        if instruction.outcome is Outcome.SUCCESS:
            try:
                result = run.loaded.result(run.env.slots)
            except Exception as error:  # the user's own pytree node may raise
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
        else:
            outcome = Outcome.ABORTED if isinstance(error, EvaluationAborted) else Outcome.FAILED
            self._feed(Failed(run.evaluation.id, 0, error, outcome))
