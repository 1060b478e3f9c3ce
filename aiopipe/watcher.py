"""`Watcher`: how evaluations end that will launch nothing more, and which split is to blame."""

from __future__ import annotations

from collections.abc import Callable

from .completion import Post, blamed, failure, first_failure, launched, overdue, unfinished, when_ready
from .errors import DeadlineExceeded
from .run import Run
from .sched.launch import LaunchError
from .sched.stimuli import Completed

__all__ = ["Watcher"]


class Watcher:
    """Waits for the devices, on one event loop, and finds out what went wrong there.

    Args:
        runs: the evaluations that are under way, by their ids, in the order of submission.
        post: has the loop call something; from any thread.
        feed: told `Completed` where that comes later.
    """

    def __init__(self, runs: dict[int, Run], post: Post, feed: Callable[[Completed], None]) -> None:
        self._runs = runs
        self._post = post
        self._feed = feed

    def launch_failed(self, run: Run, error: LaunchError) -> BaseException:
        """What the caller gets of an evaluation of which a split could not be launched."""
        run.broken = True
        if run.taken and run.state is not None and run.state.error is not None:
            return run.state.refusal()  # its arrays came from one that failed
        guilty = blamed(run.loaded.splits, run.env.markers, error)
        return failure(run.loaded.plan, run.evaluation.id, *guilty)

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
        run.return_state()
        try:
            return self._look(run)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return self._unknowable(run, error)

    def _look(self, run: Run) -> Completed | None:
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
        when_ready(groups, self._post, lambda error: self._completed(run, error))
        return None

    def _drain(self, run: Run) -> Completed | None:
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
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:
            self._feed(self._unknowable(run, raised))

    @staticmethod
    def _unknowable(run: Run, error: BaseException) -> Completed:
        """A backend raised where it was asked whether it is done: nobody can wait for it any more."""
        why: BaseException = error
        if run.loaded.splits:
            why = failure(run.loaded.plan, run.evaluation.id, run.loaded.splits[-1].index, error)
        if run.taken and run.state is not None:
            run.state.mark(why)
        return Completed(run.evaluation.id, why)

    def _earlier(self, run: Run) -> Run | None:
        """The evaluation that was submitted last before `run` on the same state and is still under way."""
        state, me = run.state, run.evaluation.id
        earlier = (r for i, r in reversed(self._runs.items()) if r.state is state and i < me)
        return None if state is None else next(earlier, None)
