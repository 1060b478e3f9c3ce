"""Launching: what a lane does with a segment. Straight-line code over prepared lists.

Runs on whatever thread the lane is. Holds no lock: segments that are launched at the same time
write different slots, and let go of none that the other reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..backend import Backend, Executable
from .launch_lists import LaunchList
from .split import Split

__all__ = ["BoundSplit", "Clock", "Environment", "LaunchError", "launch_splits"]

Clock = Callable[[], float]
"""Says what time it is, in seconds."""


class LaunchError(Exception):
    """Launching a split raised; `__cause__` is what it raised.

    Attributes:
        split: index of the split.
    """

    def __init__(self, split: int) -> None:
        super().__init__(split)
        self.split = split


class Environment:
    """The values of one evaluation.

    Attributes:
        slots: captured inputs, then values that cross a split boundary.
        markers: for each split one of its results, kept to the end: the split's event.
        strays: copies that were begun for a split which was not launched, or not all of it, with its backend.
    """

    __slots__ = ("markers", "slots", "strays")

    def __init__(self, n_slots: int, n_splits: int) -> None:
        self.slots: list[Any] = [None] * n_slots
        self.markers: list[Any] = [None] * n_splits
        self.strays: list[tuple[Backend, Any]] = []

    def leave(self, split: BoundSplit) -> None:
        """Nothing will read, so that nothing will tell the end of, some of what was brought over for a split."""
        for _, fill in split.moves:
            value = self.slots[fill]
            try:
                if split.backend.holds(value):
                    self.strays.append((split.backend, value))
            except Exception:  # it has failed already, and nobody can wait for what its backend knows nothing of
                continue


class BoundSplit:
    """A split with its executable and weights: all that does not change between evaluations."""

    __slots__ = ("backend", "call", "executable", "feeds", "frees", "index", "marker", "moves", "outputs", "template")

    def __init__(
        self, split: Split, feed: LaunchList, executable: Executable, backend: Backend, weights: Mapping[int, Any]
    ) -> None:
        self.index = split.index
        self.backend = backend
        self.executable = executable
        self.call = executable.call
        self.template: list[Any] = [None] * len(split.inputs)
        for position, tensor in feed.weights:
            self.template[position] = weights[tensor]
        self.feeds = feed.gather
        self.moves = feed.moves
        self.outputs = feed.outputs
        self.frees = feed.frees
        self.marker = feed.marker


def launch_splits(
    splits: Sequence[BoundSplit],
    env: Environment,
    times: list[float] | None = None,
    clock: Clock = time.perf_counter,
) -> None:
    """Launch splits in order; their results appear in the environment, not yet ready.

    Args:
        splits: which ones.
        env: the evaluation's values.
        times: where to write down when the values that a split brings over had been asked for, if it brings any,
            and when its call had returned; see `aiopipe.notes`.
        clock: says what time it is.

    Raises:
        LaunchError: one could not be launched; the ones before it are.
    """
    slots, markers = env.slots, env.markers
    for split in splits:
        try:
            marker = markers[split.index] = _launch(split, slots, times, clock)
            if times is not None:
                times.append(clock())
            split.backend.launched(marker)
        except BaseException as error:  # a lane's thread must not end with it
            env.leave(split)
            raise LaunchError(split.index) from error
        for slot in split.frees:
            slots[slot] = None


def _launch(split: BoundSplit, slots: list[Any], times: list[float] | None, clock: Clock) -> Any:
    """Launch one split; return its marker.

    A function of its own, so that nothing here holds a value longer than the slots do: in the loop of
    `launch_splits`, the names for what one split brings and reads would hold it through the next ones.
    """
    moves = split.moves
    if moves:
        if len(moves) == 1:
            read, fill = moves[0]
            slots[fill] = split.backend.transfer((slots[read],))[0]
        else:
            moved = split.backend.transfer([slots[read] for read, _ in moves])
            for (_, fill), value in zip(moves, moved, strict=True):
                slots[fill] = value
        if times is not None:
            times.append(clock())
    operands = split.template.copy()
    for position, slot in split.feeds:
        operands[position] = slots[slot]
    results = split.call(*operands)
    for slot, value in zip(split.outputs, results, strict=False):  # a token, behind them, has no slot
        slots[slot] = value
    return results[split.marker]
