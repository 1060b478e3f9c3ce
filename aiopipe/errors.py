"""The exception tree: every error that aiopipe raises on purpose.

Three questions a caller asks are answered by the class alone: *did I call it wrongly?*
(`TensorError`, `TraceError`, `PlacementError`, `ReplanError`, `WrongLoopError`, `ForkedError`), *is there no room?*
(`AllocationError`; for now: `OverloadedError`), *did the evaluation not end well?* (`EvaluationError`,
`EvaluationAborted`, `BackendLostError`, `BackendClosedError`). `OutOfMemoryError` answers both of the last.

Cancellation is `asyncio.CancelledError` and is never wrapped.
"""

from __future__ import annotations

__all__ = [
    "AiopipeError",
    "AllocationError",
    "BackendClosedError",
    "BackendLostError",
    "DeadlineExceeded",
    "EvaluationAborted",
    "EvaluationError",
    "ForkedError",
    "OutOfMemoryError",
    "OverloadedError",
    "PlacementError",
    "ReplanError",
    "StateError",
    "TensorError",
    "TraceError",
    "WrongLoopError",
    "says_no_room",
]


class AiopipeError(Exception):
    """The root of the tree."""


class TensorError(AiopipeError, ValueError):
    """A value does not fit its tensor: unset, unallocated, out of bounds, other shape, dtype or tree."""


class TraceError(AiopipeError, TypeError):
    """A function cannot become a graph: it has an effect that cannot be ordered across devices."""


class PlacementError(AiopipeError, ValueError):
    """No backend can hold a tensor or run an op, or a placement names none."""


class ReplanError(AiopipeError, RuntimeError):
    """A graph would have to be planned where ``Scheduler(forbid_replan=True)`` promises that none is."""


class AllocationError(AiopipeError, MemoryError):
    """A backend has no room (ggml's ALLOC_FAILED).

    Attributes:
        backend: name of the backend that refused.
        asked_nbytes: bytes that were needed there.
        available_nbytes: bytes that it may use.
        fits_n_copies: the largest `n_copies` that would fit; 0 where none would, or none was asked for.
    """

    def __init__(
        self, message: str, *, backend: str, asked_nbytes: int, available_nbytes: int, fits_n_copies: int = 0
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.asked_nbytes = asked_nbytes
        self.available_nbytes = available_nbytes
        self.fits_n_copies = fits_n_copies


class OverloadedError(AiopipeError, RuntimeError):
    """More is waiting already than may wait; later there will be room.

    Attributes:
        waiting: rows that wait.
        max_queue: rows that may wait.
        retry_after_s: a guess of when what waits now will have been taken, in seconds.
    """

    def __init__(self, message: str, *, waiting: int, max_queue: int, retry_after_s: float) -> None:
        super().__init__(message)
        self.waiting = waiting
        self.max_queue = max_queue
        self.retry_after_s = retry_after_s


class EvaluationError(AiopipeError, RuntimeError):
    """A split of an evaluation failed (ggml's FAILED); `__cause__` is the device's own error.

    Attributes:
        split: index of the split in its plan.
        backend: name of the backend that ran it.
        node: name of the split's first node.
        source: the user's source line of that node.
    """

    def __init__(self, message: str, *, split: int, backend: str, node: str, source: str) -> None:
        super().__init__(message)
        self.split = split
        self.backend = backend
        self.node = node
        self.source = source


class DeadlineExceeded(EvaluationError, TimeoutError):
    """An evaluation was not done in time. Its slot is held until the devices are done with what was launched.

    Attributes:
        split: index of the split that was not done; -1 where the evaluation had not got that far.
        backend, node, source: of that split, as in `EvaluationError`; empty where there is none.
    """


class OutOfMemoryError(EvaluationError, AllocationError):
    """A device had no memory left for a split of an evaluation; `__cause__` is the device's own error.

    Attributes:
        asked_nbytes: bytes that its plan needs on that backend for one evaluation, as far as known before it ran.
    """

    def __init__(
        self,
        message: str,
        *,
        split: int,
        backend: str,
        node: str,
        source: str,
        asked_nbytes: int,
        available_nbytes: int,
    ) -> None:
        sizes = {"asked_nbytes": asked_nbytes, "available_nbytes": available_nbytes}
        AllocationError.__init__(self, message, backend=backend, **sizes)
        self.split = split
        self.node = node
        self.source = source


class StateError(AiopipeError, RuntimeError):
    """A state was left in between by an evaluation that failed, was freed, or does not fit its graph or scheduler."""


class EvaluationAborted(AiopipeError):
    """The eval callback asked to stop the evaluation (ggml's ABORTED)."""


class BackendClosedError(AiopipeError, RuntimeError):
    """A backend, scheduler or pipeline was used after it was closed."""


class BackendLostError(AiopipeError, ConnectionError):
    """A backend died; everything that was in flight on it is lost."""


class WrongLoopError(AiopipeError, RuntimeError):
    """A scheduler was used from another event loop than the one that it belongs to."""


class ForkedError(AiopipeError, RuntimeError):
    """Something that was opened before this process was forked was used in the child."""


def first_error(*errors: BaseException | None) -> BaseException | None:
    """The first that is an error. Not asked for its truth, for somebody's exception may be false, or have no length."""
    return next((error for error in errors if error is not None), None)


def said_by(error: BaseException) -> str:
    """What an error says; of one that cannot even be made a text of, its type."""
    try:
        return str(error)
    except Exception as raised:
        return f"{type(error).__name__}, whose text cannot be had ({type(raised).__name__})"


def says_no_room(error: BaseException) -> bool:
    """Whether a device or the host says by this error that its memory is full. XLA has no type of its own for it."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said_by(error)
