"""Launch lists: for each split, where its operands come from and where its results go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, overload

__all__ = ["LaunchList", "LaunchLists", "Row"]


class LaunchList(NamedTuple):
    """How one split gets its operands and where its results go, as environment slots.

    Attributes:
        weights: (operand position, tensor id) of the weights.
        gather: (operand position, environment slot) of the rest.
        moves: (slot to read, slot to fill) of the values to bring to this backend first.
        outputs: slots of the results, in order.
        frees: slots whose value nobody needs after this split, if splits are launched in order.
        marker: which of its results shows that the split is done, kept until the evaluation ends:
            the smallest that is no state; or the token behind them.
    """

    weights: tuple[tuple[int, int], ...]
    gather: tuple[tuple[int, int], ...]
    moves: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    marker: int


Row = tuple[list[int], list[int], list[int], list[int], list[int], int]
"""The fields of a `LaunchList`, pairs one after the other."""


class LaunchLists(Sequence[LaunchList]):
    """The launch lists of all splits, kept as numbers in one list.

    There may be as many as nodes, and each has a dozen tuples, which the garbage collector would go through again and
    again while more of them are made; so these are made when they are asked for.

    Args:
        rows: the fields of each.
    """

    __slots__ = ("_begins", "_numbers")

    def __init__(self, rows: Iterable[Row]) -> None:
        numbers: list[int] = []
        begins = [0]
        for weights, gather, moves, outputs, frees, marker in rows:
            numbers += (marker, len(weights), len(gather), len(moves), len(outputs))
            numbers += weights
            numbers += gather
            numbers += moves
            numbers += outputs
            numbers += frees
            begins.append(len(numbers))
        self._numbers, self._begins = numbers, begins

    @overload
    def __getitem__(self, index: int) -> LaunchList: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[LaunchList, ...]: ...

    def __getitem__(self, index: int | slice) -> LaunchList | tuple[LaunchList, ...]:
        found = range(len(self))[index]
        return self._made(found) if isinstance(found, int) else tuple(map(self._made, found))

    def __iter__(self) -> Iterator[LaunchList]:
        return map(self._made, range(len(self)))

    def __len__(self) -> int:
        return len(self._begins) - 1

    def _made(self, row: int) -> LaunchList:
        begin, end = self._begins[row], self._begins[row + 1]
        marker, *sizes = self._numbers[begin : begin + 5]
        ends = [*accumulate(sizes, initial=begin + 5), end]
        weights, gather, moves, outputs, frees = (self._numbers[i:k] for i, k in pairwise(ends))
        return LaunchList(_pairs(weights), _pairs(gather), _pairs(moves), tuple(outputs), tuple(frees), marker)


def _pairs(flat: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(flat[::2], flat[1::2], strict=True))
