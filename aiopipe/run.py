"""`Run`: what the runner and an observer know of one evaluation that is under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from ._jax_settings import is_plain, undisturbed
from .completion import Post, failure
from .errors import StateError
from .evaluation import Evaluation
from .events import Event
from .loaded import Loaded
from .sched.launch import BoundSplit, Clock, Environment, LaunchError, launch_splits
from .state import State

__all__ = ["Run"]


class Run:
    """An evaluation under way: its values and events, and who waits for it."""

    __slots__ = (
        "admitted",
        "broken",
        "captured",
        "dropped",
        "env",
        "evaluation",
        "events",
        "loaded",
        "observation",
        "released",
        "state",
        "taken",
        "timer",
        "times",
        "values",
    )

    def __init__(
        self, evaluation: Evaluation, loaded: Loaded, values: Sequence[Any], state: State | None = None
    ) -> None:
        self.evaluation = evaluation
        self.loaded = loaded
        self.values = values
        self.state = state
        self.taken = False
        self.env = Environment(loaded.plan.n_slots, len(loaded.splits))
        self.captured = False
        self.dropped = False
        self.broken = False  # launching raised, when it may have taken over memory of the state
        self.observation: Any = None
        self.timer: asyncio.TimerHandle | None = None  # its deadline
        self.admitted: asyncio.Future[None] | None = None
        self.released: Event | None = None
        self.events: list[Event] | None = None
        self.times: Any = None  # kept by a `Recorder`, if it notes this one

    def capture(self) -> BaseException | None:
        """Capture its inputs; what was raised. On the loop or a lane, whose thread lives on."""
        try:
            self.loaded.capture(self.evaluation.copy_id, self.values, self.env.slots)
        except BaseException as error:
            return error
        return None

    def end_capture(self) -> None:
        """Its inputs are captured, or cannot be: whoever submits it goes on."""
        self.captured = True
        self.values = ()
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_result(None)

    def take_state(self) -> StateError | None:
        """Its turn has come on its state: take the arrays; or the reason why not."""
        state = self.state
        if state is None or self.taken:
            return None
        try:
            state.check_usable()
        except StateError as error:
            return error
        state.take(self.loaded.plan.state, self.env.slots)
        self.taken = True
        return None

    def return_state(self) -> None:
        """It will launch nothing more: its state goes on with what it has made, or is marked."""
        state, evaluation = self.state, self.evaluation
        if state is None or not self.taken:
            return
        launched = self.broken or any(marker is not None for marker in self.env.markers)
        untouched = self.dropped and not evaluation.failed and not launched
        whole = state.give_back(self.loaded.plan.state, self.env.slots, untouched=untouched)
        if evaluation.failed:
            assert evaluation._error is not None
            state.mark(evaluation._error, evaluation.id)
        elif not whole:
            state.mark(asyncio.CancelledError(f"evaluation {evaluation.id} was cancelled halfway"), evaluation.id)

    def blame(self, split: int, cause: BaseException) -> BaseException:
        """A split failed on its device: what the caller is told. Its state is marked."""
        why = failure(self.loaded.plan, self.evaluation.id, split, cause)
        if self.taken and self.state is not None:
            self.state.mark(why, self.evaluation.id)
        return why

    def inherited(self) -> StateError | None:
        """The refusal of its state, where one before it has left that in between: so what it made of it is nothing."""
        return None if self.state is None else self.state.refusal_for(self.evaluation.id)

    def launch(
        self, splits: Sequence[BoundSplit], times: list[float] | None = None, clock: Clock = time.perf_counter
    ) -> None:
        """Launch splits in order, on this thread; see `launch_splits`.

        JAX's settings of the moment, which may be those of any task, have no part in it.

        Raises:
            LaunchError: one could not be launched; the ones before it are.
        """
        if not is_plain():
            with undisturbed():
                launch_splits(splits, self.env, times, clock)
        else:
            launch_splits(splits, self.env, times, clock)

    def launch_segment(
        self, segment: int, noting: Callable[[Run, int], None] | None = None
    ) -> LaunchError | None:
        """Launch a segment, by way of `noting` if it is noted; what was raised. On its lane, whose thread lives on."""
        if self.dropped:  # cancelled or failed while this waited for its lane
            return None
        try:
            if noting is None or self.times is None:
                self.launch(self.loaded.segment_splits[segment])
            else:
                noting(self, segment)
        except LaunchError as error:
            return error
        except BaseException as error:  # not by a launch, but by what is asked around it
            broken = LaunchError(self.loaded.segment_splits[segment][0].index)
            broken.__cause__ = error
            return broken
        return None

    def split_events(self, post: Post) -> Sequence[Event]:
        """One event for each split; those of splits that end later are set by way of `post`."""
        if self.events is None:
            self.events = [self.evaluation._split_event(i) for i in range(len(self.loaded.splits))]
            for split, marker in enumerate(self.env.markers):
                if marker is not None:
                    self.watch_split(split, post)
        return tuple(self.events)

    def watch_splits(self, splits: Sequence[BoundSplit], post: Post) -> None:
        """`watch_split` for those that have been launched."""
        for split in splits:
            if self.env.markers[split.index] is not None:
                self.watch_split(split.index, post)

    def watch_split(self, split: int, post: Post) -> None:
        """Have a split that has been launched set its event, if anybody asked for the events."""
        if self.events is None:
            return
        event = self.events[split]
        backend = self.loaded.splits[split].backend
        marker = (self.env.markers[split],)
        try:
            if backend.all_ready(marker):  # `notify` answers in order: after the evaluations behind this one
                event.set(backend.error_of(marker))
            else:
                backend.notify(marker, lambda error: post(event.set, error))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # nobody can tell its end any more, but that of the evaluation
            event.set(error)

    def end(self) -> Event:
        """Happens when it is gone; made when somebody first asks."""
        if self.released is None:
            self.released = Event(f"end of evaluation {self.evaluation.id}")
        return self.released

    def release(self) -> None:
        """It is gone: every event that has not happened does now."""
        self.observation = None  # which refers to this
        if self.events is not None:
            error = self.evaluation._error
            if error is None and self.evaluation.cancelled():
                error = asyncio.CancelledError()
            for event in self.events:
                event.set(error)
        if self.released is not None:
            self.released.set()
