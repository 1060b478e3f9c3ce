"""Which requests form the next batch, how large it is made, and what is padding. Pure: no loop, no thread, no clock.

Requests of one kind (structure, element types, shapes without the axis of rows) can share a batch. They wait in
groups, one for each kind and padded length. The group whose head has waited longest goes first, so nobody starves; what
room its padded size leaves is given to shorter requests of the same kind, which cost nothing there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Batch", "BatchQueue", "Part", "Sizes", "merge", "powers_of_two", "rows_of"]

Array = np.ndarray[Any, Any]


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, …, and `limit` itself."""
    sizes = []
    size = 1
    while size < limit:
        sizes.append(size)
        size *= 2
    return (*sizes, limit)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What batches are padded to.

    Attributes:
        buckets: numbers of rows, ascending; the last one is the most that a batch may have.
        lengths: lengths of axis 1, ascending; empty where that axis is not padded.

    Raises:
        ValueError: they are not ascending, or not positive.
    """

    buckets: tuple[int, ...]
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for what, sizes in (("buckets", self.buckets), ("lengths", self.lengths)):
            if list(sizes) != sorted(set(sizes)) or any(size < 1 for size in sizes):
                raise ValueError(f"{what} are {sizes}, expected ascending whole numbers of at least 1")
        if not self.buckets:
            raise ValueError("there are no buckets: give at least one number of rows")

    @property
    def max_batch(self) -> int:
        """The most rows of a batch."""
        return self.buckets[-1]

    def bucket(self, n_rows: int) -> int:
        """The smallest bucket that holds so many rows."""
        return next(size for size in self.buckets if size >= n_rows)

    def length(self, n: int) -> int:
        """The smallest length that holds `n`; 0 where axis 1 is not padded."""
        return next(size for size in self.lengths if size >= n) if self.lengths else 0

    def cut(self, n_rows: int) -> list[tuple[int, int]]:
        """The first row and the end of each part of a request: one, unless it is larger than a batch."""
        step = self.max_batch
        if n_rows <= step:
            return [(0, n_rows)]
        return [(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]


class Part(NamedTuple):
    """Rows that are evaluated together: a request, or what of a large one fits a batch.

    Attributes:
        id: whose it is, and which part.
        kind: only parts of an equal kind share a batch.
        n_rows: how many rows, at most `Sizes.max_batch`.
        n_tokens: the length of its axis 1, at most the largest of `Sizes.lengths`; 0 where it is not padded.
        since_s: when it began to wait.
    """

    id: tuple[int, int]
    kind: Hashable
    n_rows: int
    n_tokens: int
    since_s: float


class Batch(NamedTuple):
    """Parts that are evaluated together, in the order of their rows.

    Attributes:
        parts: at least one.
        size: how many rows it is padded to.
        length: what axis 1 is padded to; 0 where it is not.
    """

    parts: tuple[Part, ...]
    size: int
    length: int

    @property
    def n_rows(self) -> int:
        """Rows that somebody wants."""
        return sum(part.n_rows for part in self.parts)

    def places(self) -> Iterator[tuple[Part, int, int]]:
        """Each part with its first row and the end of its rows."""
        start = 0
        for part in self.parts:
            yield part, start, start + part.n_rows
            start += part.n_rows


class _Group:
    """Parts of one kind and length, oldest first."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], Part] = {}
        self.n_rows = 0

    @property
    def head(self) -> Part:
        return next(iter(self.parts.values()))

    def add(self, part: Part) -> None:
        self.parts[part.id] = part
        self.n_rows += part.n_rows

    def remove(self, part: Part) -> None:
        del self.parts[part.id]
        self.n_rows -= part.n_rows

    def take(self, room: int) -> list[Part]:
        """What fits, oldest first; what does not fit lets others by, and is first the next time."""
        taken = []
        for part in self.parts.values():
            if part.n_rows <= room:
                taken.append(part)
                room -= part.n_rows
                if not room:
                    break
        for part in taken:
            self.remove(part)
        return taken


class BatchQueue:
    """What waits, and what of it is next.

    Args:
        sizes: of the batches.
        max_wait_s: how long a part waits for others at most, if it is let go on.

    Attributes:
        n_rows: rows that wait.
    """

    def __init__(self, sizes: Sizes, max_wait_s: float) -> None:
        self.sizes = sizes
        self.max_wait_s = max_wait_s
        self.n_rows = 0
        self._groups: dict[tuple[Hashable, int], _Group] = {}
        self._group_of: dict[tuple[int, int], tuple[Hashable, int]] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, part: Part) -> bool:
        """Have it wait; whether there is a full batch of its group now."""
        key = part.kind, self.sizes.length(part.n_tokens)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        group.add(part)
        self._group_of[part.id] = key
        self.n_rows += part.n_rows
        return group.n_rows >= self.sizes.max_batch

    def discard(self, id: tuple[int, int]) -> bool:
        """Have it wait no more; whether it did."""
        key = self._group_of.get(id)
        if key is None:
            return False
        group = self._groups[key]
        part = group.parts[id]
        group.remove(part)
        self._gone(key, [part])
        return True

    def due_s(self) -> float | None:
        """When somebody will have waited long enough; None where nobody waits."""
        oldest = min((group.head.since_s for group in self._groups.values()), default=None)
        return None if oldest is None else oldest + self.max_wait_s

    def next_batch(self, now_s: float) -> Batch | None:
        """The next batch, taken out of the queue: a full one, or one whose head has waited long enough by now.

        Args:
            now_s: ``-math.inf`` lets only full batches go, ``math.inf`` all of them.
        """
        ready = [
            (group.head.since_s, key)
            for key, group in self._groups.items()
            if group.n_rows >= self.sizes.max_batch or group.head.since_s + self.max_wait_s <= now_s
        ]
        if not ready:
            return None
        _, key = min(ready, key=lambda entry: entry[0])
        parts = self._take(key, self.sizes.max_batch)
        n_rows = sum(part.n_rows for part in parts)
        size = self.sizes.bucket(n_rows)
        kind, length = key
        for shorter in reversed([n for n in self.sizes.lengths if n <= length]):
            if n_rows < size:
                more = self._take((kind, shorter), size - n_rows)
                n_rows += sum(part.n_rows for part in more)
                parts += more
        return Batch(tuple(parts), size, length)

    def _take(self, key: tuple[Hashable, int], room: int) -> list[Part]:
        group = self._groups.get(key)
        taken = [] if group is None else group.take(room)
        self._gone(key, taken)
        return taken

    def _gone(self, key: tuple[Hashable, int], parts: Sequence[Part]) -> None:
        for part in parts:
            del self._group_of[part.id]
            self.n_rows -= part.n_rows
        if parts and not self._groups[key].parts:
            del self._groups[key]


def merge(batch: Batch, values: Sequence[Sequence[Array]], pad: Any) -> list[Array]:
    """The arrays of a batch.

    Rows that nobody wants repeat the last one, so that they compute nothing that the others do not.

    Args:
        batch: which parts, and what they are padded to.
        values: the arrays of each part, (n_rows, ...), all of the same types.
        pad: what stands behind the end of axis 1, where that is padded.

    Returns:
        New arrays, (size, ...) or (size, length, ...).
    """
    merged = []
    for arrays in zip(*values, strict=True):
        rest = arrays[0].shape[1:]
        ragged = batch.length > 0 and len(rest) > 0
        out = np.empty((batch.size, *((batch.length, *rest[1:]) if ragged else rest)), arrays[0].dtype)
        for array, (_, start, stop) in zip(arrays, batch.places(), strict=True):
            if ragged:
                out[start:stop, : array.shape[1]] = array
                out[start:stop, array.shape[1] :] = pad
            else:
                out[start:stop] = array
        out[batch.n_rows :] = out[batch.n_rows - 1]
        merged.append(out)
    return merged


def rows_of(batch: Batch, results: Sequence[Array]) -> list[list[Array]]:
    """For each part its rows of every result, as arrays of their own."""
    return [[np.array(result[start:stop]) for result in results] for _, start, stop in batch.places()]
