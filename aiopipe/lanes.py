"""Lanes: where launches happen, in the order in which they were posted."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from . import _threads
from .errors import BackendClosedError

__all__ = ["InlineLane", "Lane", "ThreadLane"]


class Lane(ABC):
    """Where launches happen, in the order in which they were posted."""

    name: str

    @abstractmethod
    def post(self, job: Callable[[], None]) -> None:
        """Queue a job; from any thread. The job must not raise."""

    @abstractmethod
    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what is queued, then stop. Idempotent; may be called from any other thread.

        Returns:
            Whether it has stopped within `timeout_s`.
        """


class InlineLane(Lane):
    """Runs a job in the caller, at once: for launches that cannot block."""

    def __init__(self, name: str = "inline") -> None:
        self.name = name

    def post(self, job: Callable[[], None]) -> None:
        job()

    def close(self, timeout_s: float | None = None) -> bool:
        return True


class ThreadLane(Lane):
    """A daemon thread that runs jobs in order. It starts with the first job."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Written in C: waiting for the next job takes a microsecond, and a `threading.Semaphore`, which is
        # Python, takes ten of the cores that XLA computes on.
        self._jobs: _threads.SimpleQueue[Callable[[], None] | None] = _threads.SimpleQueue()
        self._lock = _threads.Lock()
        self._thread: _threads.Thread | None = None
        self._closed = False

    def post(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise BackendClosedError(f"lane {self.name!r} is closed")
            if self._thread is None:
                self._thread = _threads.Thread(target=self._run, name=f"aiopipe-{self.name}", daemon=True)
                self._thread.start()
                _threads.close_at_exit(self)
            self._jobs.put(job)

    def close(self, timeout_s: float | None = None) -> bool:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        next_job = self._jobs.get
        while True:
            job = next_job()
            if job is None:
                return
            try:
                job()
            except BaseException as error:  # a fault of ours; all that is queued behind it must not hang
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread)))
            del job  # an idle thread must not keep the last evaluation alive
