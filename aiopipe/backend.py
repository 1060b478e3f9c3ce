"""Backends: running actors on devices, their dispatch lanes, and the registry that opens them.

A backend's queue is ordered. What goes into it is launched by its *lane*: a thread of its own,
one shared with other backends of the same client, or the caller itself where a launch cannot
block. Results are waited for by `notify`, never by the event loop.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal

from ._threads import close_at_exit
from .devices.base import BufferType, BufferUsage, Device, MemoryStats, Program
from .errors import BackendClosedError, PlacementError
from .graph import Tensor

__all__ = [
    "Backend",
    "Buffer",
    "Dispatch",
    "Executable",
    "InlineLane",
    "Lane",
    "ThreadLane",
    "check_distinct",
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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
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
                close_at_exit(self)
            self._jobs.append(job)
        self._wake.release()

    def close(self, timeout_s: float | None = None) -> bool:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.append(None)
                self._wake.release()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        jobs, wake = self._jobs, self._wake
        while True:
            wake.acquire()
            job = jobs.popleft()
            if job is None:
                return
            job()
            del job  # an idle thread must not keep the last evaluation alive


class Backend(ABC):
    """A running actor on a device.

    Args:
        name: e.g. ``"cpu:0"``; unique among the backends of a scheduler.
        device: what it computes on.
        dispatch: which lane launches on it: ``"own"`` thread, one ``"shared"`` with the other
            backends of the client, or ``"auto"``: inline where no launch can block, else shared,
            and its own where its splits can block their dispatcher.

    The methods without ``async`` are what a kind of backend implements. `load`, `upload` and
    `download` may block and are called off the event loop; `transfer` and `Executable.call` are
    called on the backend's lane.
    """

    def __init__(self, name: str, device: Device, *, dispatch: Dispatch = "auto") -> None:
        if dispatch not in ("auto", "shared", "own"):
            raise PlacementError(f"dispatch={dispatch!r} for {name}: expected 'auto', 'shared' or 'own'")
        self.name = name
        self.device = device
        self.dispatch: Dispatch = dispatch
        self.closed = False
        # By launching thread, a result of what it launched last: order holds for each thread alone (XLA's
        # CPU client, `cpu_client.cc`). Whoever launches sets it.
        self.newest: dict[int, Any] = {}

    @abstractmethod
    def load(self, program: Program) -> Executable:
        """Compile a program for this device. Blocks; called from compile threads, several at once."""

    @abstractmethod
    def upload(self, value: Any, tensor: Tensor) -> Any:
        """Put a value (NumPy, or another backend's handle) here to stay; return this backend's handle. Blocks.

        The value is copied: the caller may change a NumPy array afterwards.
        """

    @abstractmethod
    def transfer(self, values: Sequence[Any]) -> Sequence[Any]:
        """Bring values of the host or of other backends here, in one go, for this backend's next launch.

        Called on the lane. Does not wait within one client; between clients it may block.
        """

    @abstractmethod
    def all_ready(self, values: Sequence[Any]) -> bool:
        """Whether none of the values is still being computed. Never blocks; a failed value is ready."""

    @abstractmethod
    def error_of(self, values: Sequence[Any]) -> BaseException | None:
        """The first error among values that are ready. Never blocks."""

    def now(self) -> float:
        """This backend's clock, in seconds."""
        return time.monotonic()

    @abstractmethod
    def notify(self, values: Sequence[Any], callback: Callable[[BaseException | None], None]) -> None:
        """Call ``callback(error)`` once all values are there (or the first error is). Never blocks.

        The callback runs on any thread, takes little time and does not raise. Calls for one
        backend come back in the order in which they were asked for.
        """

    @abstractmethod
    def download(self, value: Any) -> Any:
        """The value as a NumPy array. Blocks until it is ready."""

    def host_buffer(self, tensor: Tensor) -> Any:
        """A new buffer on the host, to capture a user's input into before it is transferred.

        An empty NumPy array of the tensor's shape and dtype, aligned so that the device can read
        it in place if it can at all; or None when such values cannot be captured by NumPy.
        """
        return None

    def accepts(self, value: Any) -> bool:
        """Whether the value is an immutable handle that `transfer` takes as it is (so capturing it copies nothing)."""
        return False

    def holds(self, value: Any) -> bool:
        """Whether the value lives here already, so that `upload` would copy nothing."""
        return False

    @abstractmethod
    def make_lane(self, *, own: bool) -> Lane:
        """A lane that may block: of its own, or one that every backend of the same client can use."""

    def check_open(self) -> None:
        """Raise `BackendClosedError` after `aclose`."""
        if self.closed:
            raise BackendClosedError(f"backend {self.name!r} is closed: open it again, open_backend({self.name!r})")

    @abstractmethod
    async def synchronize(self) -> None:
        """Wait until everything that was launched here has finished."""

    @abstractmethod
    async def aclose(self) -> None:
        """Finish what is running, then end the threads. Idempotent."""

    async def __aenter__(self) -> Backend:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{' closed' if self.closed else ''}>"


Factory = Callable[..., Backend]
_ENTRY_POINTS = "aiopipe.backends"


@dataclass(frozen=True, slots=True)
class _Registration:
    factory: Factory
    devices: Callable[[], Sequence[Device]]


_registry: dict[str, _Registration] = {}


def register_backend(name: str, factory: Factory, *, devices: Callable[[], Sequence[Device]] = tuple) -> None:
    """Make ``open_backend("name:params")`` call ``factory(params, dispatch=...)``.

    Args:
        name: what comes before the colon.
        factory: called with what comes after the colon (``""`` without one).
        devices: lists the devices that it can open, for `devices()`.

    Third parties declare an entry point in the group ``aiopipe.backends`` instead: its name is the
    backend's, its object the factory.
    """
    if not name or ":" in name:
        raise PlacementError(f"backend name {name!r}: expected a word without a colon")
    _registry[name] = _Registration(factory, devices)


def _lookup(name: str) -> _Registration | None:
    if name not in _registry:
        for entry in entry_points(group=_ENTRY_POINTS, name=name):
            register_backend(name, entry.load())
    return _registry.get(name)


def open_backend(spec: str, *, dispatch: Dispatch = "auto") -> Backend:
    """Open the backend that a spec names, such as ``"cpu:0"`` or ``"gpu:1"``.

    Raises:
        PlacementError: nobody registered that name, or it has no such device.
    """
    name, _, params = spec.partition(":")
    found = _lookup(name)
    if found is None:
        known = sorted(set(_registry) | {e.name for e in entry_points(group=_ENTRY_POINTS)})
        raise PlacementError(f"unknown device {spec!r}: expected one of the backends {', '.join(known)}, as in 'cpu:0'")
    return found.factory(params, dispatch=dispatch)


def open_backends(*specs: str) -> list[Backend]:
    """Open several backends; their order is their priority.

    Raises:
        PlacementError: a spec names no device, or two specs name one.
    """
    backends = [open_backend(spec) for spec in specs]
    check_distinct(backends)
    return backends


def check_distinct(backends: Sequence[Backend]) -> None:
    """Raise `PlacementError` when a device is given twice, or none at all."""
    if not backends:
        raise PlacementError("no backends: give at least one device, as in devices=['cpu:0']")
    seen: set[str] = set()
    for backend in backends:
        if backend.name in seen:
            raise PlacementError(f"device {backend.name!r} is given twice: each device can be one backend only")
        seen.add(backend.name)


def devices() -> tuple[Device, ...]:
    """Every device that a registered backend can open."""
    return tuple(device for registration in _registry.values() for device in registration.devices())

