"""What a batcher has done: counts, sizes, waits. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .batching import Batch

__all__ = ["BatcherStatistics", "Tally"]


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """What a batcher has done so far.

    Attributes:
        requests: calls that were taken in.
        refused: calls that were not, because too much was waiting.
        succeeded, failed, cancelled: how calls ended.
        rows: rows that were evaluated for somebody.
        batches: evaluations.
        sizes: padded number of rows -> how many batches had it.
        padding: share of what was evaluated that was padding, of rows and of lengths; 0 to 1.
        waiting: rows that wait now.
        in_flight: batches that are evaluated now.
        mean_wait_s: how long rows waited for their batch, on average.
        max_wait_s: how long at most.
        batch_s: how long a batch takes, a moving average.
    """

    requests: int
    refused: int
    succeeded: int
    failed: int
    cancelled: int
    rows: int
    batches: int
    sizes: Mapping[int, int]
    padding: float
    waiting: int
    in_flight: int
    mean_wait_s: float
    max_wait_s: float
    batch_s: float


class Tally:
    """Counts while a batcher works.

    Attributes:
        requests, refused, succeeded, failed, cancelled: calls; see `BatcherStatistics`.
    """

    def __init__(self) -> None:
        self.requests = self.refused = self.succeeded = self.failed = self.cancelled = 0
        self._sizes: Counter[int] = Counter()
        self._rows = self._used = self._cells = 0
        self._wait_s = self._max_wait_s = self._batch_s = 0.0

    def began(self, batch: Batch, now_s: float) -> None:
        """A batch is evaluated from now on."""
        self._sizes[batch.size] += 1
        self._rows += batch.n_rows
        self._cells += batch.size * max(batch.length, 1)
        for part in batch.parts:
            wait_s = now_s - part.since_s
            self._used += part.n_rows * max(part.n_tokens, 1)
            self._wait_s += part.n_rows * wait_s
            self._max_wait_s = max(self._max_wait_s, wait_s)

    def ended(self, took_s: float) -> None:
        """A batch took so long."""
        self._batch_s = took_s if self._batch_s == 0 else 0.8 * self._batch_s + 0.2 * took_s

    def until_taken_s(self, n_rows: int, max_batch: int, at_once: int) -> float:
        """A guess of how long it takes until so many rows have been taken, `at_once` batches at a time.

        A batch is said to take a second until one has ended.
        """
        return math.ceil(n_rows / max_batch) * (self._batch_s or 1.0) / at_once

    def statistics(self, *, waiting: int, in_flight: int) -> BatcherStatistics:
        """All of it."""
        return BatcherStatistics(
            requests=self.requests,
            refused=self.refused,
            succeeded=self.succeeded,
            failed=self.failed,
            cancelled=self.cancelled,
            rows=self._rows,
            batches=self._sizes.total(),
            sizes=dict(sorted(self._sizes.items())),
            padding=1 - self._used / self._cells if self._cells else 0.0,
            waiting=waiting,
            in_flight=in_flight,
            mean_wait_s=self._wait_s / self._rows if self._rows else 0.0,
            max_wait_s=self._max_wait_s,
            batch_s=self._batch_s,
        )
