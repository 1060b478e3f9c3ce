"""Which requests share a batch: the decisions of a batcher, without a loop."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopipe.batch_tally import Tally
from aiopipe.batching import Batch, BatchQueue, Part, Sizes, merge, powers_of_two, rows_of

SIZES = st.builds(
    lambda buckets, lengths: Sizes(tuple(sorted(buckets)), tuple(sorted(lengths))),
    st.sets(st.integers(1, 12), min_size=1, max_size=4),
    st.sets(st.integers(1, 9), max_size=3),
)


@st.composite
def queues(draw: st.DrawFn) -> tuple[BatchQueue, list[Part]]:
    """A queue, and parts to put into it, oldest first."""
    sizes = draw(SIZES)
    parts = []
    for i in range(draw(st.integers(0, 25))):
        n_tokens = draw(st.integers(1, sizes.lengths[-1])) if sizes.lengths else 0
        n_rows = draw(st.integers(1, sizes.max_batch))
        parts.append(Part((i, 0), draw(st.sampled_from("ab")), n_rows, n_tokens, float(i)))
    return BatchQueue(sizes, draw(st.sampled_from([0.0, 3.0, 100.0]))), parts


def drain(queue: BatchQueue, now_s: float = math.inf) -> list[Batch]:
    batches = []
    while (batch := queue.next_batch(now_s)) is not None:
        batches.append(batch)
    return batches


def check(batch: Batch, sizes: Sizes) -> None:
    """What holds for every batch."""
    assert len({part.kind for part in batch.parts}) == 1
    assert batch.size == sizes.bucket(batch.n_rows) <= sizes.max_batch
    assert batch.length == (sizes.length(max(part.n_tokens for part in batch.parts)) if sizes.lengths else 0)
    places = list(batch.places())
    assert [part for part, _, _ in places] == list(batch.parts)
    ends = [0, *(stop for _, _, stop in places)]
    assert [start for _, start, _ in places] == ends[:-1] and ends[-1] == batch.n_rows


@given(queues())
def test_every_part_is_in_one_batch(drawn: tuple[BatchQueue, list[Part]]) -> None:
    queue, parts = drawn
    for part in parts:
        queue.add(part)
    assert (len(queue), queue.n_rows) == (len(parts), sum(part.n_rows for part in parts))
    batches = drain(queue)
    for batch in batches:
        check(batch, queue.sizes)
    assert sorted(part.id for batch in batches for part in batch.parts) == [part.id for part in parts]
    assert (len(queue), queue.n_rows, queue.due_s()) == (0, 0, None)


@given(queues())
def test_the_oldest_is_in_the_next_batch(drawn: tuple[BatchQueue, list[Part]]) -> None:
    queue, parts = drawn
    for part in parts:
        queue.add(part)
    left = list(parts)
    while (batch := queue.next_batch(math.inf)) is not None:
        assert left[0] in batch.parts
        left = [part for part in left if part not in batch.parts]


@given(queues(), st.floats(0, 130))
def test_a_batch_goes_when_it_is_full_or_due(drawn: tuple[BatchQueue, list[Part]], now_s: float) -> None:
    queue, parts = drawn
    for part in parts:
        queue.add(part)
    due_s = queue.due_s()
    assert due_s == (parts[0].since_s + queue.max_wait_s if parts else None)
    for batch in drain(queue, now_s):
        heads = [part for part in batch.parts if queue.sizes.length(part.n_tokens) == batch.length]
        full = sum(part.n_rows for part in parts if (part.kind, queue.sizes.length(part.n_tokens)) == (
            heads[0].kind, batch.length
        )) >= queue.sizes.max_batch  # fmt: skip
        assert full or heads[0].since_s + queue.max_wait_s <= now_s
    # What is left is neither.
    rows: dict[Any, int] = {}
    while (batch := queue.next_batch(math.inf)) is not None:
        for part in batch.parts:
            assert part.since_s + queue.max_wait_s > now_s
            key = part.kind, queue.sizes.length(part.n_tokens)
            rows[key] = rows.get(key, 0) + part.n_rows
    assert all(n < queue.sizes.max_batch for n in rows.values())


@given(queues(), st.data())
def test_what_is_discarded_is_in_no_batch(drawn: tuple[BatchQueue, list[Part]], data: st.DataObject) -> None:
    queue, parts = drawn
    for part in parts:
        queue.add(part)
    gone = data.draw(st.sets(st.sampled_from([part.id for part in parts]))) if parts else set()
    assert all(queue.discard(id) for id in gone)
    assert not any(queue.discard(id) for id in gone)
    left = [part.id for part in parts if part.id not in gone]
    assert queue.n_rows == sum(part.n_rows for part in parts if part.id in left)
    assert sorted(part.id for batch in drain(queue) for part in batch.parts) == left


@given(queues())
def test_no_wanted_row_makes_a_batch_larger_than_its_own_group_does(drawn: tuple[BatchQueue, list[Part]]) -> None:
    """Shorter parts only take rows that would have been padding."""
    queue, parts = drawn
    for part in parts:
        queue.add(part)
    for batch in drain(queue):
        own = sum(p.n_rows for p in batch.parts if queue.sizes.length(p.n_tokens) == batch.length)
        assert batch.size == queue.sizes.bucket(own)


def part(i: int, n_rows: int, n_tokens: int = 0) -> Part:
    return Part((i, 0), "kind", n_rows, n_tokens, float(i))


def test_room_is_given_to_shorter_parts_and_never_to_longer_ones() -> None:
    queue = BatchQueue(Sizes((1, 2, 4, 8), (16, 32)), 0.0)
    for new in (part(0, 3, 20), part(1, 1, 5), part(2, 2, 30), part(3, 1, 16)):
        queue.add(new)
    batch = queue.next_batch(math.inf)
    assert batch is not None
    assert ([p.id[0] for p in batch.parts], batch.size, batch.length) == ([0, 2, 1, 3], 8, 32)
    queue.add(part(4, 3, 5))
    queue.add(part(5, 1, 30))
    batch = queue.next_batch(math.inf)
    assert batch is not None and ([p.id[0] for p in batch.parts], batch.size, batch.length) == ([4], 4, 16)


def test_a_group_is_full_with_the_rows_of_a_batch_and_counts_none_that_left() -> None:
    queue = BatchQueue(Sizes((1, 4)), 100.0)
    assert [queue.add(part(i, 1)) for i in range(4)] == [False, False, False, True]
    for i in range(2):
        queue.discard((i, 0))
    assert queue.next_batch(-math.inf) is None
    assert [queue.add(part(i, 1)) for i in (4, 5)] == [False, True]
    batch = queue.next_batch(-math.inf)
    assert batch is not None and [p.id[0] for p in batch.parts] == [2, 3, 4, 5]


def test_kinds_that_came_at_the_same_time_need_no_order() -> None:
    """Of equals the one that was there first; kinds are compared for equality alone."""
    queue = BatchQueue(Sizes((2,)), 0.0)
    kinds = [object(), "text", 3]
    for i, kind in enumerate(kinds):
        queue.add(Part((i, 0), kind, 1, 0, 7.0))
    assert [batch.parts[0].kind for batch in drain(queue)] == kinds


def test_what_does_not_fit_lets_others_by_and_is_first_the_next_time() -> None:
    queue = BatchQueue(Sizes((4,)), 0.0)
    for new in (part(0, 3), part(1, 3), part(2, 1), part(3, 1)):
        queue.add(new)
    assert [[p.id[0] for p in batch.parts] for batch in drain(queue)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("limit", "sizes"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))])
def test_powers_of_two(limit: int, sizes: tuple[int, ...]) -> None:
    assert powers_of_two(limit) == sizes


@given(SIZES, st.integers(1, 60))
def test_a_large_call_is_cut_into_full_batches_and_a_rest(sizes: Sizes, n_rows: int) -> None:
    cuts = sizes.cut(n_rows)
    assert [i for start, stop in cuts for i in range(start, stop)] == list(range(n_rows))
    assert all(stop - start == sizes.max_batch for start, stop in cuts[:-1])
    assert 1 <= cuts[-1][1] - cuts[-1][0] <= sizes.max_batch


@pytest.mark.parametrize("wrong", [(), (0, 1), (2, 1), (1, 1)])
def test_sizes_that_make_no_sense(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^buckets are \(|^there are no buckets: give at least one number of rows$"):
        Sizes(wrong)
    with pytest.raises(ValueError, match=r"^lengths are \("):
        Sizes((1,), wrong or (3, 3))


@given(queues(), st.integers(-3, 3))
def test_merged_rows_are_parted_again(drawn: tuple[BatchQueue, list[Part]], pad: int) -> None:
    queue, parts = drawn
    for new in parts:
        queue.add(new)
    for batch in drain(queue):
        values = []
        for p in batch.parts:
            tokens = np.full((p.n_rows, p.n_tokens or 3, 2), p.id[0], np.int16)
            ids = np.full((p.n_rows, p.n_tokens or 3), p.id[0], np.int8)
            values.append([tokens, np.arange(p.n_rows, dtype=np.float32) + p.id[0], ids])
        tokens, numbers, ids = merge(batch, values, pad)
        assert (tokens.dtype, numbers.dtype, ids.dtype) == (np.int16, np.float32, np.int8)
        assert ids.shape == (batch.size, batch.length or 3)
        assert (ids[: batch.n_rows] == tokens[: batch.n_rows, :, 0]).all()
        assert tokens.shape == (batch.size, batch.length or 3, 2) and numbers.shape == (batch.size,)
        for (_, start, stop), (given_tokens, given_numbers, _), (got_tokens, got_numbers) in zip(
            batch.places(), values, rows_of(batch, [tokens, numbers]), strict=True
        ):
            width = given_tokens.shape[1]
            np.testing.assert_array_equal(got_tokens[:, :width], given_tokens)
            assert (tokens[start:stop, width:] == pad).all()
            np.testing.assert_array_equal(got_numbers, given_numbers)
            assert not np.shares_memory(got_tokens, tokens) and got_numbers.flags.writeable
        assert (tokens[batch.n_rows :] == tokens[batch.n_rows - 1]).all()


def test_the_tally() -> None:
    tally = Tally()
    assert tally.until_taken_s(100, 4, 2) == 12.5  # nothing is known yet, so a batch is said to take a second
    parts = (Part((0, 0), "k", 2, 6, 1.0), Part((1, 0), "k", 1, 3, 2.0))
    tally.began(Batch(parts, 4, 8), now_s=4.0)
    tally.ended(2.0)
    assert tally.until_taken_s(9, 4, 2) == 3.0  # three batches, two at a time
    tally.ended(7.0)
    tally.requests, tally.refused, tally.succeeded, tally.failed, tally.cancelled = 9, 4, 3, 2, 1
    found = tally.statistics(waiting=3, in_flight=1)
    assert (found.requests, found.refused, found.succeeded, found.failed, found.cancelled) == (9, 4, 3, 2, 1)
    assert (found.rows, found.batches, found.sizes, found.waiting, found.in_flight) == (3, 1, {4: 1}, 3, 1)
    assert found.padding == 1 - (2 * 6 + 1 * 3) / 32
    assert (found.mean_wait_s, found.max_wait_s, found.batch_s) == (pytest.approx(8 / 3), 3.0, 3.0)
    for _ in range(2):
        tally.began(Batch((Part((2, 0), "k", 2, 0, 5.0),), 4, 0), now_s=6.0)
    found = tally.statistics(waiting=0, in_flight=0)
    assert (found.rows, found.batches, found.sizes) == (7, 3, {4: 3})
    assert found.padding == 1 - (15 + 2 + 2) / (32 + 4 + 4)  # a length of 0: an axis that is not padded
    assert (found.mean_wait_s, found.max_wait_s) == (pytest.approx((8 + 2 + 2) / 7), 3.0)


def test_nothing_is_tallied_at_first() -> None:
    found = Tally().statistics(waiting=0, in_flight=0)
    assert set(dataclasses.astuple(dataclasses.replace(found, sizes=0))) == {0} and found.sizes == {}
