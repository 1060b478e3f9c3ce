"""Waiting for what was launched, and finding out which split is to blame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict

from .backend import Backend
from .devices.base import NodeFailure
from .errors import (
    BackendLostError,
    DeadlineExceeded,
    EvaluationError,
    OutOfMemoryError,
    first_error,
    said_by,
    says_no_room,
)
from .sched.launch import BoundSplit, Environment, LaunchError
from .sched.plan import Plan

__all__ = ["blamed", "failure", "first_failure", "launched", "overdue", "unfinished", "when_ready"]

Post = Callable[..., None]
"""Has the loop call a function with arguments; from any thread."""

Group = tuple[Backend, Sequence[Any]]


class _Place(TypedDict):
    split: int
    backend: str
    node: str
    source: str


def launched(splits: Sequence[BoundSplit], env: Environment) -> list[Group]:
    """The markers of the splits that were launched, and copies that nothing reads, for each backend."""
    groups: dict[str, tuple[Backend, list[Any]]] = {}
    markers = [(split.backend, marker) for split, marker in zip(splits, env.markers, strict=True) if marker is not None]
    for backend, value in (*markers, *env.strays):
        groups.setdefault(backend.name, (backend, []))[1].append(value)
    return list(groups.values())


def when_ready(groups: Sequence[Group], post: Post, then: Callable[[BaseException | None], None]) -> None:
    """Call ``then(first error)`` on the loop when every group is ready. There is at least one."""
    if len(groups) == 1:
        [(backend, group)] = groups
        backend.notify(group, partial(post, then))
        return
    left = len(groups)
    first: BaseException | None = None

    def one_is_ready(error: BaseException | None) -> None:  # on the loop, so never two at once
        nonlocal left, first
        left -= 1
        first = first_error(first, error)
        if not left:
            then(first)

    for backend, group in groups:
        backend.notify(group, partial(post, one_is_ready))


def first_failure(
    splits: Sequence[BoundSplit],
    markers: Sequence[Any],
    error: BaseException,
    post: Post,
    then: Callable[[int, BaseException], None],
) -> None:
    """Call ``then(split, its error)`` on the loop for the first split that failed.

    Splits that read a failed value fail, too, with the same error: so every split is looked at,
    once all have ended.

    Args:
        splits: all splits of the evaluation that were launched, in order; at least one.
        markers: the markers of all splits.
        error: what is known to have gone wrong, for want of a better one.
        post: has the loop call something.
        then: told the outcome.
    """
    found: dict[int, BaseException] = {}
    left = len(splits)

    def one_is_known(split: int, error_of_split: BaseException | None) -> None:
        nonlocal left
        left -= 1
        if error_of_split is not None:
            found[split] = error_of_split
        if not left:
            guilty = min(found, default=splits[-1].index)
            then(guilty, found.get(guilty, error))

    def ask(split: BoundSplit) -> None:
        marker = (markers[split.index],)
        if split.backend.all_ready(marker):  # `notify` answers in order: after the evaluations behind this one
            one_is_known(split.index, split.backend.error_of(marker))
        else:
            split.backend.notify(marker, lambda error: post(one_is_known, split.index, error))

    for split in splits:
        ask(split)


def blamed(splits: Sequence[BoundSplit], markers: Sequence[Any], error: LaunchError) -> tuple[int, BaseException]:
    """The split to blame, and its error, where one could not be launched.

    That may be an earlier one: a value that a device of another client failed to compute cannot be read.

    Args:
        splits: all splits of the evaluation, in order.
        markers: their markers.
        error: what launching raised.
    """
    assert error.__cause__ is not None
    for split in splits[: error.split]:
        marker = (markers[split.index],)
        try:
            if marker[0] is not None and split.backend.all_ready(marker):
                cause = split.backend.error_of(marker)
                if cause is not None:
                    return split.index, cause
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:  # a backend that cannot even say whether it is done
            return split.index, raised
    return error.split, error.__cause__


def failure(plan: Plan, evaluation: int, split: int, cause: BaseException) -> EvaluationError | BackendLostError:
    """The error that the caller of an evaluation gets: where its backend is gone, that one says so itself."""
    error: EvaluationError | BackendLostError
    position = cause.position if isinstance(cause, NodeFailure) else None
    said = f"evaluation {evaluation} of {plan.graph.name!r} failed in {_named(plan, split, position)}: {said_by(cause)}"
    if isinstance(cause, BackendLostError):
        error = BackendLostError(f"evaluation {evaluation} of {plan.graph.name!r} is lost: {said_by(cause)}")
    elif says_no_room(cause):
        device, size = plan.devices[plan.splits[split].backend], plan.sizes[plan.splits[split].backend]
        error = OutOfMemoryError(
            f"{said}\n{device.name!r} has no memory left. This plan alone needs {size.fixed_nbytes} bytes there, and "
            f"{size.copy_nbytes} more for each of n_copies: take fewer copies or smaller inputs, or put less on this "
            "device. With memory_limit, what does not fit is refused before it runs",
            **_place_of(plan, split),
            asked_nbytes=size.total(1),
            available_nbytes=device.props.memory_nbytes or 0,
        )
    else:
        error = EvaluationError(said, **_place_of(plan, split, position))
    # Without its traceback: those frames are ours, and would keep the evaluation's arrays alive.
    error.__cause__ = cause.with_traceback(None)
    return error


def unfinished(splits: Sequence[BoundSplit], markers: Sequence[Any]) -> tuple[int, str]:
    """The first split that has been launched and is not ready, or else the first that has not been launched.

    Returns:
        Its index and what there is to say of it; -1 where there is none.
    """
    waiting = -1
    for split in splits:
        if markers[split.index] is None:
            waiting = split.index if waiting < 0 else waiting
        elif not _ready(split, markers[split.index]):
            return split.index, "is still running"
    if waiting >= 0:
        return waiting, "is not launched yet: launching takes that long, or it waits for its turn"
    return -1, "the devices are done with it, but have not said so, or an input that it returns is not ready"


def overdue(plan: Plan, evaluation: int, deadline_s: float, split: int, why: str) -> DeadlineExceeded:
    """The error of an evaluation that is not done in time, because of one of its splits (-1: of none)."""
    said = f"evaluation {evaluation} of {plan.graph.name!r} was not done within {deadline_s} s: "
    if split < 0:
        return DeadlineExceeded(said + why, split=-1, backend="", node="", source="")
    return DeadlineExceeded(f"{said}{_named(plan, split)}, {why}", **_place_of(plan, split))


def _ready(split: BoundSplit, marker: Any) -> bool:
    try:
        return split.backend.all_ready((marker,))
    except Exception:  # a backend that cannot say so is not done
        return False


def _named(plan: Plan, split: int, position: int | None = None) -> str:
    place = _place_of(plan, split, position)
    which = "which begins with" if position is None else "in"
    op = plan.graph.nodes[plan.splits[split].nodes[position or 0]].op
    return f"split {split} on {place['backend']!r}, {which} {op!r} at {place['source'] or 'an unknown line'}"


def _place_of(plan: Plan, split: int, position: int | None = None) -> _Place:
    """A split, and that of its nodes which is to blame, or its first."""
    node = plan.graph.nodes[plan.splits[split].nodes[position or 0]]
    backend = plan.devices[plan.splits[split].backend].name
    return {"split": split, "backend": backend, "node": node.name, "source": node.source}
