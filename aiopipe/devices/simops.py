"""Ops for hand-built graphs: a function of arrays, one that takes its time, one that fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import numpy as np

from ..graph import Op

__all__ = ["FailOp", "HostOp", "SleepOp", "fail", "seconds_of", "sleep"]


def seconds_of(value: float, what: str) -> float:
    """The value, if it is a duration; else raise `ValueError`."""
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{what} is {value!r}: expected finite seconds, 0 or more")
    return float(value)


class HostOp:
    """A Python function of NumPy arrays as an op, so that hand-built graphs compute without JAX.

    Args:
        fn: takes the arrays of a node's inputs, which are read-only; returns one array, or a tuple of them.
        cost_s: virtual seconds that it takes on any device, or None for what the cluster says.
    """

    def __init__(self, fn: Callable[..., Any], *, cost_s: float | None = None) -> None:
        self.fn = fn
        self.cost_s = cost_s

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        result = self.fn(*inputs)
        return result if isinstance(result, tuple | list) else (result,)

    def signature(self) -> Hashable:
        return ("host", self.fn, self.cost_s)


class SleepOp:
    def __init__(self, seconds: float) -> None:
        self.cost_s = seconds

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return (inputs[0] if inputs else np.float32(0),)

    def signature(self) -> Hashable:
        return ("sleep", self.cost_s)


class FailOp:
    def __init__(self, message: str, error: type[Exception], launches: Collection[int] | None) -> None:
        self.message = message
        self.error = error
        self.launches = launches
        self._launched = 0

    def next_error(self) -> Exception | None:
        """Count a launch; return the error that it ends with."""
        number = self._launched
        self._launched += 1
        return self.error(self.message) if self.launches is None or number in self.launches else None

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        error = self.next_error()
        if error is not None:
            raise error
        return (inputs[0] if inputs else np.float32(0),)

    def signature(self) -> Hashable:
        # One that counts shares its executable with no other.
        return ("fail", self.message, self.error, None if self.launches is None else id(self))


def sleep(seconds: float) -> Op:
    """An op, for nodes named ``"sleep"``, that takes that much virtual time and returns its first operand.

    Without operands it returns a float32 scalar, 0.
    """
    return SleepOp(seconds_of(seconds, "sleep"))


def fail(
    message: str = "simulated failure",
    error: type[Exception] = RuntimeError,
    *,
    launches: Collection[int] | None = None,
) -> Op:
    """An op, for nodes named ``"fail"``, that is launched well and ends with ``error(message)``.

    Everything that depends on it inherits the error. With `launches`, only those launches of the op
    fail (counted from 0, on all devices together); the others return the first operand, as `sleep`
    does. It costs what the cluster says.
    """
    return FailOp(message, error, launches)
