"""Launching: values go where the launch lists say, in any order that lanes can have; nothing is let go too early."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopipe.sched.launch import BoundSplit, Environment, LaunchError, launch_splits
from aiopipe.sched.launch_lists import LaunchList
from aiopipe.sched.plan import feeds_for_lanes, make_plan
from graphs import Draft, chain, gpus
from launching import Launching, lanes_for, random_plan


@given(st.integers(0, 2**32), st.integers(0, 30), st.integers(1, 3), st.integers(0, 3))
def test_lanes_that_overtake_each_other_compute_the_same(seed: int, n_nodes: int, n_gpus: int, n_state: int) -> None:
    plan = random_plan(seed, n_nodes, n_gpus, n_state)
    rng = random.Random(seed)
    lane_of = [rng.randrange(3) for _ in plan.devices]
    launching = lanes_for(plan, lane_of)
    launching.run_in_lanes(lane_of, rng.randrange)
    assert (launching.results(), launching.new_state()) == launching.expected()


@given(st.integers(0, 2**32), st.integers(0, 30), st.integers(0, 3), st.integers(0, 3))
def test_afterwards_only_results_and_markers_are_left(seed: int, n_nodes: int, n_gpus: int, n_state: int) -> None:
    plan = random_plan(seed, n_nodes, n_gpus, n_state)
    launching = Launching(plan)
    launching.run()
    slots = launching.env.slots
    kept = {i for kind, i in plan.results if kind != "weight"}
    kept |= {slot for state in plan.state for slot in state[1:] if slot >= 0}
    assert {slot for slot, value in enumerate(slots) if value is not None} <= kept
    assert all(marker is not None for marker in launching.env.markers)


def test_lanes_share_what_only_one_of_them_may_let_go() -> None:
    """A value that two lanes read stays to the end; with one lane its last reader lets it go."""
    b = Draft()
    trunk = b.op("mul", b.x())
    left, right = b.op("mul", trunk), b.op("exp", trunk)
    plan = make_plan(b.build([left, right]), gpus(3), cut=[0, 1, 2])
    slot = plan.launch_lists[0].outputs[0]
    shared = [slot in feed.frees for feed in feeds_for_lanes(plan, [0, 0, 0, 0])]
    assert shared == [False, False, True]
    assert feeds_for_lanes(plan, [0, 0, 0, 0]) == list(plan.launch_lists)
    for lane_of in ([0, 1, 2, 0], [0, 0, 1, 0], [1, 0, 1, 0]):
        assert not any(slot in feed.frees for feed in feeds_for_lanes(plan, lane_of))
    assert [slot in feed.frees for feed in feeds_for_lanes(plan, [0, 1, 1, 0])] == shared


def test_what_a_split_comes_after_has_been_launched_on_any_lane() -> None:
    """The first device's value is read by the second; the third's split comes after the second's, so it may let go."""
    b = Draft()
    a = b.op("mul", b.x())
    c = b.op("exp", a)
    plan = make_plan(b.build([b.op("add", a, c)]), gpus(3), cut=[0, 1, 2])
    feeds = feeds_for_lanes(plan, [0, 1, 2, 0])
    assert plan.splits[2].depends == (0, 1)
    assert plan.launch_lists[0].outputs[0] in feeds[2].frees
    assert [set(feed.frees) for feed in feeds] == [set(feed.frees) for feed in plan.launch_lists]


# -- one split -----------------------------------------------------------------------------------


class Broken:
    """A backend and an executable, one of which raises."""

    def __init__(self, transfer: Exception | None = None, call: Exception | None = None) -> None:
        self.errors = {"transfer": transfer, "call": call}
        self.told: list[Any] = []

    def transfer(self, values: Sequence[Any]) -> list[Any]:
        self._maybe("transfer")
        return [("moved", value) for value in values]

    def call(self, *operands: Any) -> list[Any]:
        self._maybe("call")
        return [("made", operands), "token"]

    def launched(self, marker: Any) -> None:
        self.told.append(marker)

    def holds(self, value: Any) -> bool:
        return isinstance(value, tuple) and value[0] == "moved"

    def _maybe(self, where: str) -> None:
        error = self.errors[where]
        if error is not None:
            raise error


def bound(index: int, broken: Broken, feed: LaunchList) -> BoundSplit:
    plan = make_plan(chain(2, width=8), gpus(2), cut=[0, 0, 1, 1])
    split = plan.splits[index]
    return BoundSplit(split, feed, broken, broken, {w.id: w.name for w in plan.graph.weights})  # type: ignore[arg-type]


FEED = LaunchList(weights=((1, 1),), gather=((0, 1),), moves=((0, 1),), outputs=(2,), frees=(0, 1), marker=1)


def test_one_split() -> None:
    env, backend = Environment(4, 2), Broken()
    env.slots[0] = "x"
    split = bound(0, backend, FEED)
    assert split.executable is split.backend is backend
    launch_splits([split], env)
    assert env.slots == [None, None, ("made", (("moved", "x"), "w0")), None]
    assert env.markers == ["token", None]
    assert backend.told == ["token"]


def test_several_moves_go_together() -> None:
    env, backend = Environment(5, 2), Broken()
    env.slots[:2] = "x", "y"
    feed = FEED._replace(moves=((0, 2), (1, 3)), gather=((0, 3),), frees=(0,), outputs=(4,), marker=0)
    launch_splits([bound(0, backend, feed)], env)
    made = ("made", (("moved", "y"), "w0"))
    assert env.slots == [None, "y", ("moved", "x"), ("moved", "y"), made]
    assert env.markers[0] == made


@pytest.mark.parametrize("where", ["transfer", "call"])
def test_a_launch_that_fails_says_which_and_leaves_the_ones_before_it(where: str) -> None:
    error = RuntimeError("boom")
    good, bad = Broken(), Broken(**{where: error})
    env = Environment(4, 2)
    env.slots[0] = "x"
    later = FEED._replace(weights=(), moves=((2, 3),), gather=((0, 3),), outputs=(1,), frees=(2,))
    with pytest.raises(LaunchError) as caught:
        launch_splits([bound(0, good, FEED), bound(1, bad, later)], env)
    assert (caught.value.split, caught.value.args, caught.value.__cause__) == (1, (1,), error)
    assert env.markers == ["token", None]
    assert env.slots[2] is not None, "let go by a split that was not launched"
    assert (good.told, bad.told) == (["token"], [])


def test_copies_that_were_begun_for_a_split_that_was_not_launched_are_known() -> None:
    """Somebody has to wait for them before their slots are used again; what the backend does not hold needs no wait."""
    env, boom = Environment(4, 2), RuntimeError("boom")
    stray = [Broken(call=boom), Broken(call=boom), Broken(transfer=boom), Broken(call=boom)]
    stray[3].transfer = lambda values: [None] * len(values)  # type: ignore[method-assign]
    for i, backend in enumerate(stray):
        env.slots[:2] = f"x{i}", None
        with pytest.raises(LaunchError):
            launch_splits([bound(0, backend, FEED)], env)
    assert env.strays == [(stray[0], ("moved", "x0")), (stray[1], ("moved", "x1"))]


def test_a_copy_that_a_backend_cannot_say_anything_of_hides_no_other() -> None:
    env, backend = Environment(5, 2), Broken(call=RuntimeError("boom"))

    def holds(value: Any) -> bool:
        if value == ("moved", "x"):
            raise ValueError("deleted")
        return True

    backend.holds = holds  # type: ignore[method-assign]
    env.slots[:2] = "x", "y"
    feed = FEED._replace(moves=((0, 2), (1, 3)), gather=((0, 3),), frees=(0,), outputs=(4,), marker=0)
    with pytest.raises(LaunchError, match="0") as caught:
        launch_splits([bound(0, backend, feed)], env)
    assert str(caught.value.__cause__) == "boom"
    assert env.strays == [(backend, ("moved", "y"))]


@pytest.mark.parametrize("n_moved", [1, 3])
def test_a_backend_that_moves_fewer_or_more_than_asked_is_at_fault(n_moved: int) -> None:
    """Nothing runs with operands that were not brought."""
    env, backend = Environment(5, 2), Broken()
    env.slots[:2] = "x", "y"
    backend.transfer = lambda values: ["z"] * n_moved  # type: ignore[method-assign]
    feed = FEED._replace(moves=((0, 2), (1, 3)), gather=((0, 3),), frees=(), outputs=(4,), marker=0)
    with pytest.raises(LaunchError) as caught:
        launch_splits([bound(0, backend, feed)], env)
    assert isinstance(caught.value.__cause__, ValueError)
    assert (backend.told, env.slots[4]) == ([], None)


def test_times_are_noted_when_all_is_brought_and_when_it_is_launched() -> None:
    """One for a split that brings nothing; none of what comes after a failure."""
    now = itertools.count(10.0)
    env, times = Environment(4, 2), list[float]()
    env.slots[0] = "x"
    later = FEED._replace(weights=(), moves=(), gather=((0, 2),), outputs=(), frees=())
    with pytest.raises(LaunchError):
        launch_splits(
            [bound(0, Broken(), FEED), bound(1, Broken(call=ValueError()), later)], env, times, lambda: next(now)
        )
    assert times == [10.0, 11.0]
    launch_splits([bound(1, Broken(), later)], env, times, lambda: next(now))
    assert times == [10.0, 11.0, 12.0]


def test_operands_of_one_evaluation_are_not_those_of_the_next() -> None:
    env, other, backend = Environment(4, 2), Environment(4, 2), Broken()
    env.slots[0], other.slots[0] = "x", "y"
    split = bound(0, backend, FEED)
    launch_splits([split], env)
    assert split.template == [None, "w0"]
    launch_splits([split], other)
    assert (env.slots[2][1][0], other.slots[2][1][0]) == (("moved", "x"), ("moved", "y"))
