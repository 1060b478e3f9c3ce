"""What the run state is told (stimuli) and what it says (instructions): plain values."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import NamedTuple

__all__ = [
    "Admit",
    "Begin",
    "Cancel",
    "Captured",
    "Completed",
    "Failed",
    "Instruction",
    "Launch",
    "Launched",
    "Outcome",
    "Release",
    "Resolve",
    "Stimulus",
    "Submit",
    "Watch",
]


class Outcome(enum.Enum):
    """How an evaluation ends for its caller."""

    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ABORTED = "aborted"

    __hash__ = object.__hash__  # members are single; Enum hashes their names, in Python, at each count


class Submit(NamedTuple):
    """A caller asks for an evaluation; `depends[i]` are the segments that segment i comes after.

    Evaluations with equal `state` launch in the order in which they are submitted. One that is `prompt` has one segment
    and no state, and neither its capture nor its launch has to wait for anything.
    """

    evaluation: int
    depends: Sequence[tuple[int, ...]]
    state: Hashable = None
    prompt: bool = False


class Captured(NamedTuple):
    """The inputs are copied: the caller may reuse its own."""

    evaluation: int


class Launched(NamedTuple):
    """Every split of a segment has been launched."""

    evaluation: int
    segment: int


class Failed(NamedTuple):
    """Capturing (segment -1) or launching a segment failed, or somebody watching it aborts the evaluation.

    Nothing of it is still being launched.
    """

    evaluation: int
    segment: int
    error: BaseException
    outcome: Outcome = Outcome.FAILED


class Completed(NamedTuple):
    """The devices are done with everything that was launched; `error` if a split failed there."""

    evaluation: int
    error: BaseException | None = None


class Cancel(NamedTuple):
    """Nobody waits for the result any more: the caller does not want it, or, with an error, it has not come in time."""

    evaluation: int
    error: BaseException | None = None


Stimulus = Submit | Captured | Launched | Failed | Completed | Cancel


class Admit(NamedTuple):
    """Give the evaluation this slot and capture its inputs; answer `Captured` or `Failed`."""

    evaluation: int
    copy_id: int


class Begin(NamedTuple):
    """Give the prompt evaluation this slot, capture its inputs, launch its segment and wait for that, all at once.

    What `Admit`, `Launch` and `Watch` ask for one by one; answer `Completed` or `Failed`.
    """

    evaluation: int
    copy_id: int


class Launch(NamedTuple):
    """Launch a segment; answer `Launched` or `Failed`."""

    evaluation: int
    segment: int


class Watch(NamedTuple):
    """Wait for what was launched; answer `Completed`."""

    evaluation: int


class Resolve(NamedTuple):
    """Tell the caller how it ended."""

    evaluation: int
    outcome: Outcome
    error: BaseException | None = None


class Release(NamedTuple):
    """The evaluation is gone; its slot (-1: it never had one) is free."""

    evaluation: int
    copy_id: int


Instruction = Admit | Begin | Launch | Watch | Resolve | Release
