"""Backends: running actors on devices, their dispatch lanes, and the registry that opens them.

A backend's queue is ordered. What goes into it is launched by its *lane*: a thread of its own,
one shared with other backends of the same client, or the caller itself where a launch cannot
block. Results are waited for by `notify`, never by the event loop.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal

from .devices.base import BufferType, BufferUsage, Device, MemoryStats, Program
from .errors import AiopipeError, BackendClosedError, PlacementError
from .events import Event
from .graph import Tensor

__all__ = [
    "Backend",
    "Buffer",
    "Dispatch",
    "Executable",
    "InlineLane",
    "Lane",
    "ThreadLane",
    "devices",
    "open_backend",
    "open_backends",
    "register_backend",
]

Dispatch = Literal["auto", "shared", "own"]


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory on a backend that holds the value of one tensor.

    Attributes:
        backend: who holds it.
        buffer_type: which of its memories.
        usage: what it is for.
        nbytes: its size.
        value: the backend's own handle, e.g. a `jax.Array`.
    """

    backend: Backend
    buffer_type: BufferType
    usage: BufferUsage
    nbytes: int
    value: Any = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """A program, compiled for one device.

    Attributes:
        program: what it computes.
        call: launches it: takes the inputs, returns the outputs, does not wait for them.
        memory: what it needs while it runs.
        blocks: launching it may hold up the caller for as long as it runs.
        launch_s: roughly what one launch costs the caller, in seconds.
    """

    program: Program
    call: Callable[..., Sequence[Any]] = field(repr=False)
    memory: MemoryStats
    blocks: bool = False
    launch_s: float = 1e-5


class Lane(ABC):
    """Where launches happen, in the order in which they were posted."""

    name: str

    @abstractmethod
    def post(self, job: Callable[[], None]) -> None:
        """Queue a job; from any thread. The job must not raise."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is queued, then stop. Idempotent; may be called from any other thread."""


class InlineLane(Lane):
    """Runs a job in the caller, at once: for launches that cannot block."""

    def __init__(self, name: str = "inline") -> None:
        self.name = name

    def post(self, job: Callable[[], None]) -> None:
        job()

    def close(self) -> None:
        pass


class ThreadLane(Lane):
    """A daemon thread that runs jobs in order. It starts with the first job."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: deque[Callable[[], None] | None] = deque()
        self._wake = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def post(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise BackendClosedError(f"lane {self.name!r} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"aiopipe-{self.name}", daemon=True)
                self._thread.start()
            self._jobs.append(job)
        self._wake.release()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
            self._jobs.append(None)
        self._wake.release()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        jobs, wake = self._jobs, self._wake
        while True:
            wake.acquire()
            job = jobs.popleft()
            if job is None:
                return
            job()
            del job  # an idle thread must not keep the last evaluation alive
