"""What a backend makes of a program, and what a device tells of its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .devices.base import MemoryStats, Program

__all__ = ["Executable", "Told"]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Executable:
    """A program, compiled for one device.

    Attributes:
        program: what it computes.
        call: launches it: takes the inputs, returns the outputs, does not wait for them.
        memory: what it needs while it runs.
        blocks: launching it may hold up the caller for as long as it runs.
        instant: it does: where its operands are there, so are its results when the call returns.
        launch_s: roughly what one launch costs the caller, in seconds.
    """

    program: Program
    call: Callable[..., Sequence[Any]] = field(repr=False)
    memory: MemoryStats
    blocks: bool = False
    launch_s: float = 1e-5
    instant: bool = False


class Told(NamedTuple):
    """What a device says of something that it did, or will have done.

    Attributes:
        begin_s: when it began, by `Backend.now`.
        end_s: when it ended.
        source: for a copy, the name of the backend that had the value, ``""`` for the host; None for a launch.
        nbytes: for a copy, its size.
    """

    begin_s: float
    end_s: float
    source: str | None = None
    nbytes: int = 0
