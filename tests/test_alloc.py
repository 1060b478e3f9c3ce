"""Sizes, donation, limits and buffer types: what a plan says that it holds is what launching it holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopipe.devices.base import BufferType, DeviceProps, DeviceType
from aiopipe.errors import AllocationError, PlacementError
from aiopipe.graph import Graph
from aiopipe.sched.alloc import (
    BackendSize,
    check_buffers,
    check_memory,
    choose_buffer_types,
    donations,
    largest_n_copies,
    marker_of,
    memory_limits,
)
from aiopipe.sched.plan import Plan, make_plan
from aiopipe.sched.split import last_uses
from graphs import Draft, FakeDevice, chain, gpus
from launching import Launching, random_plan

# -- what is held --------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(0, 30), st.integers(0, 3), st.integers(0, 3))
def test_a_plan_holds_what_it_says(seed: int, n_nodes: int, n_gpus: int, n_state: int) -> None:
    """To the byte: looked at after each transfer, before and after each call."""
    plan = random_plan(seed, n_nodes, n_gpus, n_state)
    launching = Launching(plan)
    launching.run()
    assert (launching.results(), launching.new_state()) == launching.expected()
    assert launching.peaks == [size.copy_nbytes for size in plan.sizes]


@given(st.integers(0, 2**32), st.integers(0, 30), st.integers(0, 3), st.integers(0, 3))
def test_what_is_held_once(seed: int, n_nodes: int, n_gpus: int, n_state: int) -> None:
    """Weights where a split reads them or a caller gets them, state at home."""
    plan = random_plan(seed, n_nodes, n_gpus, n_state)
    graph = plan.graph
    for b, size in enumerate(plan.sizes):
        read = {t for split in plan.splits if split.backend == b for t in split.inputs}
        held = read & {w.id for w in graph.weights}
        assert held <= plan.weights[b]
        assert size.weights_nbytes == sum(graph.tensors[t].nbytes for t in plan.weights[b])
        homes = zip(graph.state, plan.state_homes, strict=True)
        assert size.state_nbytes == sum(leaf.nbytes for leaf, home in homes if home == b)
        assert size.fixed_nbytes == size.weights_nbytes + size.state_nbytes
    returned = {t.id for t in graph.outputs} & {w.id for w in graph.weights}
    assert returned <= set().union(*plan.weights)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("last", [DeviceType.CPU, DeviceType.SIM])
def test_every_input_is_staged(in_place: bool, last: DeviceType) -> None:
    """Where its first reader reads it in place, else on the host if that is a CPU; what is returned, as an array."""
    b = Draft()
    inputs = [b.x("a", 8), b.x("b", 16), b.x("unread", 64), b.x("returned", 32), b.x("passed on", 128)]
    y = b.op("add", *inputs[:2], inputs[3], nbytes=4)
    devices = gpus(1)
    devices[0].props = DeviceProps(DeviceType.GPU, "fake", aliases_host=in_place)
    devices[1].props = DeviceProps(last, "host")
    plan = make_plan(b.build([y, inputs[3], inputs[4]]), devices)
    staged = 8 + 16
    copies = 0 if in_place else staged
    host = 0 if in_place or last is DeviceType.SIM else staged
    held = (staged if in_place else 0) + 32
    assert [size.copy_nbytes for size in plan.sizes] == [held + copies + 4, host + 128]
    launching = Launching(plan)
    launching.run()
    assert launching.peaks == [size.copy_nbytes for size in plan.sizes]


# -- donation ------------------------------------------------------------------------------------


def donated(plan: Plan) -> list[list[str]]:
    """The names of what each split gives away."""
    props = [device.props for device in plan.devices]
    taken = donations(plan.graph, plan.splits, props, last_uses(plan.splits, len(props) + 1))
    assert taken == tuple(program.donate for program in plan.programs)
    names = [[plan.graph.tensors[t].name for t in split.inputs] for split in plan.splits]
    return [[names[i][position] for position in positions] for i, positions in enumerate(taken)]


@given(st.integers(0, 2**32), st.integers(0, 30), st.integers(0, 3), st.integers(0, 3))
def test_what_is_given_away_is_nobodys_afterwards(seed: int, n_nodes: int, n_gpus: int, n_state: int) -> None:
    plan = random_plan(seed, n_nodes, n_gpus, n_state)
    graph = plan.graph
    replaces = {old.id: new.id for old, new in zip(graph.state, graph.new_state, strict=True)}
    for split, program in zip(plan.splits, plan.programs, strict=True):
        brought = {t: (src, nbytes) for other in plan.splits[: split.index + 1] for t, src, nbytes in other.brings
                   if other.backend == split.backend}
        made = [(graph.tensors[t].shape, graph.tensors[t].dtype) for t in split.outputs]
        for position in program.donate:
            t = split.inputs[position]
            readers = [s.index for s in plan.splits if s.backend == split.backend and t in s.inputs]
            copied_from = [s.index for s in plan.splits if (t, split.backend) in [(c.tensor, c.src) for c in s.copies]]
            assert readers[-1] == split.index and not copied_from
            if t in replaces and t not in brought:
                assert replaces[t] in split.outputs and len(readers) == 1
            else:
                src, nbytes = brought[t]
                assert src >= 0 and nbytes > plan.devices[split.backend].props.view_nbytes
            made.remove((graph.tensors[t].shape, graph.tensors[t].dtype))  # each takes over one of its type


def two_values_moved(*, outputs: Sequence[int], reads: Sequence[int] = (0, 1)) -> Plan:
    """Two values of 8 bytes go to the second backend, where a node makes values of these sizes from some of them."""
    b = Draft()
    h = [b.op("mul", b.x(), nbytes=8), b.op("exp", b.x("y"), nbytes=8)]
    made = b.ops("split", *(h[i] for i in reads), nbytes=outputs)
    return make_plan(b.build(made), gpus(2), cut=[0, 0, 1])


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ((8,), ["mul#0"]),
        ((8, 8), ["mul#0", "exp#1"]),
        ((8, 8, 8), ["mul#0", "exp#1"]),
        ((4, 8), ["mul#0"]),
        ((4, 4), []),
    ],
)
def test_each_output_takes_over_one_copy_of_its_type(outputs: Sequence[int], expected: list[str]) -> None:
    assert donated(two_values_moved(outputs=outputs)) == [[], expected]


def test_a_copy_may_be_given_away_after_one_that_may_not() -> None:
    b = Draft()
    h = [b.op("mul", b.x(), nbytes=16), b.op("exp", b.x("y"), nbytes=8)]
    plan = make_plan(b.build([b.op("add", *h, nbytes=8)]), gpus(2), cut=[0, 0, 1])
    assert donated(plan) == [[], ["exp#1"]]


def cached(n_readers: int, *, reads: bool = True) -> Graph:
    """Two leaves of the state; a node replaces the second one, others read it."""
    b = Draft()
    b.state("kept", (8,), "int8", 8)
    cache = b.state("cache", (8,), "int8", 8)
    new = b.op("update", b.x(), *([cache] if reads else []))
    others = [b.op("attend", cache) for _ in range(n_readers)]
    return b.build(others, new_state=[0, new])


def test_state_is_taken_over_by_its_next_value() -> None:
    assert donated(make_plan(cached(0), gpus(1))) == [["cache"]]
    assert donated(make_plan(cached(2), gpus(1))) == [["cache"]]  # all in one split


def test_state_that_another_split_reads_is_not() -> None:
    plan = make_plan(cached(1), gpus(2), cut=[0, 1])
    assert donated(plan) == [[], ["cache"]]  # that one is a copy of it
    assert plan.sizes[0].copy_nbytes == 8 + 8 + 1  # the input, the next value beside the old one, a token


def test_state_that_is_replaced_unread_is_nobodys_to_take() -> None:
    assert donated(make_plan(cached(0, reads=False), gpus(1))) == [[]]


def test_state_and_a_copy_of_its_type_do_not_take_over_the_same_output() -> None:
    b = Draft()
    cache = b.state("cache", (8,), "int8", 8)
    far = b.op("mul", b.x())
    new, y = b.ops("update", far, cache, nbytes=(8, 8))
    for outputs, expected in (([y], ["cache", "mul#0"]), ([], ["cache"])):
        plan = make_plan(b.build(outputs, new_state=[new]), gpus(2), cut=[0, 1])
        assert donated(plan) == [[], expected]


def test_the_marker_is_the_smallest_that_is_no_state_or_a_token() -> None:
    b = Draft()
    sizes = (64, 4, 8, 4)
    made = b.ops("split", b.x(), nbytes=sizes)
    tensors = b.build(made).tensors
    assert marker_of(tensors, made, set()) == 1  # the first of the smallest
    assert marker_of(tensors, made, {made[1]}) == 3
    assert marker_of(tensors, made, {made[1], made[3]}) == 2
    assert marker_of(tensors, made, set(made)) == 4
    assert marker_of(tensors, [], set()) == 0


# -- limits --------------------------------------------------------------------------------------


def too_much(sizes: Sequence[BackendSize], limits: Sequence[int | None], n_copies: int) -> AllocationError:
    with pytest.raises(AllocationError) as caught:
        check_memory(sizes, ["a", "b", "c"][: len(sizes)], limits, n_copies)
    return caught.value


def test_the_largest_number_of_copies_is_that_of_all_backends() -> None:
    sizes, limits = [BackendSize(10, 10), BackendSize(0, 30, 5), BackendSize()], [55, 100, 0]
    assert largest_n_copies(sizes, limits, 8) == 3
    assert largest_n_copies(sizes, limits, 2) == 2
    assert largest_n_copies(sizes, [55, None, None], 8) == 4
    assert largest_n_copies(sizes, [9, None, None], 8) == 0
    assert largest_n_copies([BackendSize(10)], [9], 8) == 0  # copies are nothing, and yet it does not fit
    error = too_much(sizes, limits, 8)
    assert (error.backend, error.fits_n_copies) == ("a", 3)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(0, 200)), max_size=3), st.integers(1, 9))
def test_it_is_the_largest(backends: list[tuple[int, int, int]], at_most: int) -> None:
    sizes = [BackendSize(weights, copy) for weights, copy, _ in backends]
    limits = [limit for *_, limit in backends]

    def fits(n: int) -> bool:
        return all(size.total(n) <= limit for size, limit in zip(sizes, limits, strict=True))

    assert largest_n_copies(sizes, limits, at_most) == max((n for n in range(1, at_most + 1) if fits(n)), default=0)


@pytest.mark.parametrize(
    ("size", "limit", "n_copies", "message"),
    [
        (
            BackendSize(100, 10, 5),
            144,
            4,
            "backend 'a' needs 145 bytes (weights 100, temporaries 5, 4 copies of 10), but may use 144: "
            "n_copies=3 would fit",
        ),
        (
            BackendSize(100, 10, 5, 7),
            122,
            2,
            "backend 'a' needs 132 bytes (weights 100, state 7, temporaries 5, 2 copies of 10), but may use 122: "
            "n_copies=1 would fit",
        ),
        (
            BackendSize(100, 10),
            109,
            1,
            "backend 'a' needs 110 bytes (weights 100, temporaries 0, 1 copy of 10), but may use 109: "
            "move weights to another device, or use smaller batches",
        ),
    ],
)
def test_what_does_not_fit_says_what_it_needs(size: BackendSize, limit: int, n_copies: int, message: str) -> None:
    error = too_much([size], [limit], n_copies)
    assert str(error) == message
    assert (error.asked_nbytes, error.available_nbytes) == (size.total(n_copies), limit)
    assert f"n_copies={error.fits_n_copies} would fit" in message or error.fits_n_copies == 0


def test_a_tensor_larger_than_the_largest_buffer_of_its_backend() -> None:
    plan = make_plan(chain(2, width=8, weight=100), gpus(2), cut=[0, 0, 1, 1])
    names = ["gpu:0", "gpu:1", "cpu:0"]
    check_buffers(plan.graph, plan.splits, names, [None, None, None])
    check_buffers(plan.graph, plan.splits, names, [100, None, 1])
    check_buffers(plan.graph, plan.splits, names, [None, 100, 1])
    for limits in ([99, 100, None], [100, 99, 100]):
        with pytest.raises(AllocationError):
            check_buffers(plan.graph, plan.splits, names, limits)
    message = (
        "tensor 'w1' int8[100] has 100 bytes, but a single buffer on 'gpu:1' at most 99: cut it, or choose another "
        "buffer type"
    )
    with pytest.raises(AllocationError, match=f"^{re.escape(message)}$") as caught:
        check_buffers(plan.graph, plan.splits, names, [None, 99, None])
    error = caught.value
    assert (error.backend, error.asked_nbytes, error.available_nbytes) == ("gpu:1", 100, 99)
    wide = make_plan(chain(1, width=8, weight=1), gpus(1))
    with pytest.raises(AllocationError, match="tensor 'x' "):
        check_buffers(wide.graph, wide.splits, names, [7, None])
    b = Draft()
    made = make_plan(b.build([b.op("iota", nbytes=9)]), gpus(1))
    with pytest.raises(AllocationError, match="tensor 'iota#0' "):
        check_buffers(made.graph, made.splits, names, [8, None])


def test_limits_are_those_given_or_what_the_devices_report() -> None:
    devices = [FakeDevice("gpu:0", memory_nbytes=100), FakeDevice("gpu:1")]
    assert memory_limits(devices, None) == [100, None]
    assert memory_limits(devices, 7) == [7, 7]
    assert memory_limits(devices, {"gpu:1": 7}) == [100, 7]
    assert memory_limits(devices, {"gpu:0": 7}) == [7, None]


# -- buffer types --------------------------------------------------------------------------------

HBM = BufferType("gpu:0")
PINNED = BufferType("gpu:0", "pinned_host", is_host=True)
SLOW = BufferType("gpu:0", "slow")
RAM = BufferType("cpu:0", "ram", is_host=True)


class Roomy(FakeDevice):
    """A device with three kinds of memory; it cannot work in the last."""

    def buffer_types(self) -> tuple[BufferType, ...]:
        return HBM, PINNED, SLOW

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        return buffer_type in (HBM, PINNED)


class Host(FakeDevice):
    def buffer_types(self) -> tuple[BufferType, ...]:
        return (RAM,)


ROOMY = (Roomy("gpu:0"), Host("cpu:0"))


@pytest.mark.parametrize(
    ("given", "first"),
    [
        (None, HBM),
        ([], HBM),
        ([None], HBM),
        ([None, "ram"], HBM),
        (["pinned_host"], PINNED),
        ([PINNED, None], PINNED),
        ({}, HBM),
        ({"cpu:0": "ram"}, HBM),
        ({"gpu:0": "pinned_host"}, PINNED),
        ({"gpu:0": PINNED, "cpu:0": RAM}, PINNED),
    ],
)
def test_the_memory_asked_for_or_the_default(given: Any, first: BufferType) -> None:
    assert choose_buffer_types(ROOMY, given) == (first, RAM)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu:7": HBM}, "buffer_types names 'gpu:7', expected one of the backends ['gpu:0', 'cpu:0']"),
        (
            [None, None, "ram"],
            "buffer_types has 3 entries, expected at most one for each of ['gpu:0', 'cpu:0']",
        ),
        (["ram"], "'gpu:0' has no memory kind 'ram', expected one of ['device', 'pinned_host', 'slow']"),
        (
            ["slow"],
            "'gpu:0' cannot work in buffer type 'slow' of 'gpu:0': give one of its own, ['device', 'pinned_host']",
        ),
        ([None, HBM], "'cpu:0' cannot work in buffer type 'device' of 'gpu:0': give one of its own, ['ram']"),
    ],
)
def test_memory_that_is_not_there(
    given: Sequence[BufferType | str | None] | Mapping[str, BufferType | str], message: str
) -> None:
    with pytest.raises(PlacementError, match=f"^{re.escape(message)}$"):
        choose_buffer_types(ROOMY, given)
