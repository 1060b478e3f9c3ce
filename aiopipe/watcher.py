"""`Watcher`: how evaluations end that will launch nothing more, and which split is to blame."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .completion import Post, blamed, failure, first_failure, launched, overdue, unfinished, when_ready
from .errors import DeadlineExceeded, StateError
from .recorder import Recorder
from .run import Run
from .sched.launch import LaunchError
from .sched.stimuli import Completed

__all__ = ["Watcher", "of_the_evaluation", "seconds_of"]


class Watcher:
    """Waits for the devices, on one event loop, and finds out what went wrong there.

    Args:
        runs: the evaluations that are under way, by their ids, in the order of submission.
        post: has the loop call something; from any thread.
        feed: told `Completed` where that comes later.
        recorder: told when evaluations have ended, if somebody wants to know.
    """

    def __init__(
        self, runs: dict[int, Run], post: Post, feed: Callable[[Completed], None], recorder: Recorder | None = None
    ) -> None:
        self._runs = runs
        self._post = post
        self._feed = feed
        self._recorder = recorder

    def launch_failed(self, run: Run, error: LaunchError, then: Callable[[BaseException], None]) -> None:
        """Call ``then(what the caller gets)`` of an evaluation of which a split could not be launched.

        What it would have read may come from an evaluation that is not known to have failed yet.
        """
        run.broken = True

        def tell(refused: StateError | None) -> None:
            if refused is None:
                guilty = blamed(run.loaded.splits, run.env.markers, error)
                then(failure(run.loaded.plan, run.evaluation.id, *guilty))
            else:
                then(refused)

        self.after_earlier(run, tell)

    def overdue(self, run: Run, deadline_s: float) -> DeadlineExceeded:
        """What the caller gets of an evaluation that is not done in time."""
        split, why = -1, "its inputs are still being captured"
        if run.captured:
            split, why = unfinished(run.loaded.splits, run.env.markers)
        elif run.evaluation.copy_id < 0:
            holders = [i for i, other in self._runs.items() if other.evaluation.copy_id >= 0]
            why = f"it still waits for a slot; those are held by the evaluations {', '.join(map(str, holders))}"
        return overdue(run.loaded.plan, run.evaluation.id, deadline_s, split, why)

    def watch(self, run: Run) -> Completed | None:
        """Look whether it has ended: the answer, or None when that comes later."""
        if run.state is not None:
            run.return_state()
        try:
            return self._look(run)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return Completed(run.evaluation.id, self._unknowable(run, error))

    def _look(self, run: Run) -> Completed | None:
        if not run.loaded.splits and (refused := run.inherited()) is not None:  # it never took it
            return Completed(run.evaluation.id, refused)
        env, loaded = run.env, run.loaded
        markers, groups, is_whole = env.markers, [], not env.strays
        # Loops, no comprehensions: this is asked in every evaluation.
        if run.observation is None:
            for backend, indices in loaded.sinks:
                group = []
                for i in indices:
                    marker = markers[i]
                    group.append(marker)
                    if marker is None:
                        is_whole = False
                groups.append((backend, group))
        else:  # in pieces: one of them may be done after the splits that read another of the same split
            is_whole = is_whole and all(marker is not None for marker in markers)
            groups += [(split.backend, [markers[split.index]]) for split in loaded.splits]
        if not is_whole:
            return self._drain(run)  # not everything was launched
        if loaded.returned and run.captured and not run.dropped:  # a caller's array may not be ready yet
            groups.append((loaded.backends[-1], [env.slots[i] for i in loaded.returned]))
        for backend, group in groups:
            if not backend.all_ready(group) or backend.error_of(group) is not None:
                break
        else:
            return Completed(run.evaluation.id)
        post = self._post if self._recorder is None or run.times is None else self._recorder.ending(run, self._post)
        when_ready(groups, post, partial(self._completed, run))
        return None

    def _drain(self, run: Run) -> Completed | None:
        """Wait for whatever was launched of an evaluation that will launch no more."""
        groups = launched(run.loaded.splits, run.env)
        if all(backend.all_ready(group) for backend, group in groups):
            return Completed(run.evaluation.id)
        when_ready(groups, self._post, lambda _: self._feed(Completed(run.evaluation.id)))
        return None

    def _completed(self, run: Run, error: BaseException | None) -> None:
        if error is None or not run.loaded.splits:
            self._feed(Completed(run.evaluation.id, error))
            return
        self.after_earlier(run, lambda refused: self._failed(run, error, refused))

    def _failed(self, run: Run, error: BaseException, refused: StateError | None) -> None:
        def tell(split: int, cause: BaseException) -> None:
            self._feed(Completed(run.evaluation.id, run.blame(split, cause)))

        if refused is not None:
            self._feed(Completed(run.evaluation.id, refused))
            return
        try:
            first_failure(run.loaded.splits, run.env.markers, error, self._post, tell)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:
            self._feed(Completed(run.evaluation.id, self._unknowable(run, raised)))

    @staticmethod
    def _unknowable(run: Run, error: BaseException) -> BaseException:
        """A backend raised where it was asked whether it is done: nobody can wait for it any more."""
        return run.blame(run.loaded.splits[-1].index, error) if run.loaded.splits else error

    def after_earlier(self, run: Run, then: Callable[[StateError | None], None]) -> None:
        """Call ``then(run.inherited())`` when those before it on its state, which may be to blame, have ended."""
        me, sharing = run.evaluation.id, [r for r in self._runs.values() if r.state is run.state]
        earlier = [r for r in sharing if r.evaluation.id < me and r.state is not None]
        if earlier:
            earlier[-1].end().add_callback(lambda _: self.after_earlier(run, then))
        else:
            then(run.inherited())


def of_the_evaluation(error: BaseException | None) -> BaseException | None:
    """What was raised on the loop's thread, unless it is to end the program: that is raised again."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    return error


def seconds_of(deadline: float | None) -> float | None:
    """A deadline as a caller gives it: seconds; None for none.

    Raises:
        ValueError: it is negative or not a number.
    """
    if deadline is not None and not deadline >= 0:
        raise ValueError(f"deadline is {deadline!r}: expected seconds, at least 0 (math.inf for no limit)")
    return deadline
