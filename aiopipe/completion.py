"""Waiting for what was launched, and finding out which split is to blame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .backend import Backend
from .errors import BackendLostError, EvaluationError
from .sched.launch import BoundSplit, LaunchError
from .sched.plan import Plan

__all__ = ["blamed", "failure", "first_failure", "launched", "when_ready"]

Post = Callable[..., None]
"""Has the loop call a function with arguments; from any thread."""

Group = tuple[Backend, Sequence[Any]]


def launched(splits: Sequence[BoundSplit], markers: Sequence[Any]) -> list[Group]:
    """The markers of the splits that were launched, for each backend."""
    groups: dict[str, tuple[Backend, list[Any]]] = {}
    for split, marker in zip(splits, markers, strict=True):
        if marker is not None:
            groups.setdefault(split.backend.name, (split.backend, []))[1].append(marker)
    return list(groups.values())


def when_ready(groups: Sequence[Group], post: Post, then: Callable[[BaseException | None], None]) -> None:
    """Call ``then(first error)`` on the loop when every group is ready. There is at least one."""
    if len(groups) == 1:
        [(backend, group)] = groups
        backend.notify(group, lambda error: post(then, error))
        return
    left = len(groups)
    first: BaseException | None = None

    def one_is_ready(error: BaseException | None) -> None:  # on the loop, so never two at once
        nonlocal left, first
        left -= 1
        first = first or error
        if not left:
            then(first)

    for backend, group in groups:
        backend.notify(group, lambda error: post(one_is_ready, error))


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
    assert isinstance(error.__cause__, Exception)
    for split in splits[: error.split]:
        marker = (markers[split.index],)
        try:
            if marker[0] is not None and split.backend.all_ready(marker):
                cause = split.backend.error_of(marker)
                if cause is not None:
                    return split.index, cause
        except Exception as raised:  # a backend that cannot even say whether it is done
            return split.index, raised
    return error.split, error.__cause__


def failure(plan: Plan, evaluation: int, split: int, cause: BaseException) -> EvaluationError | BackendLostError:
    """The error that the caller of an evaluation gets: where its backend is gone, that one says so itself."""
    node = plan.graph.nodes[plan.splits[split].nodes[0]]
    backend = plan.devices[plan.splits[split].backend].name
    if isinstance(cause, BackendLostError):
        lost = BackendLostError(f"evaluation {evaluation} of {plan.graph.name!r} is lost: {cause}")
        lost.__cause__ = cause.with_traceback(None)
        return lost
    error = EvaluationError(
        f"evaluation {evaluation} of {plan.graph.name!r} failed in split {split} on {backend!r}, "
        f"which begins with {node.op!r} at {node.source or 'an unknown line'}: {cause}",
        split=split,
        backend=backend,
        node=node.name,
        source=node.source,
    )
    # Without its traceback: those frames are ours, and would keep the evaluation's arrays alive.
    error.__cause__ = cause.with_traceback(None)
    return error
