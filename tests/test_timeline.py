"""The timeline: exact on simulated devices, sharpened by rules on real ones; as a file, a picture, text."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe import recorder
from aiopipe.devices.sim import Cluster, fail, sleep
from aiopipe.errors import AiopipeError
from aiopipe.notes import ADMITTED, ENDED, EVALUATED, LAUNCHED, QUICK, Note, PlanInfo, SplitInfo, spans_of
from aiopipe.recorder import BURST, SKIPPED, WATCH_S, Watching
from aiopipe.spans import HOST_TRACK, overlap_of, utilization_of
from aiopipe.timeline_file import to_trace
from simgraphs import array, by_device, chain

DEVICES = ["cpu:0", "cpu:1"]


async def run_sim(costs_s: Sequence[float], n: int, n_copies: int, **how: Any) -> tuple[ap.Timeline, Cluster]:
    """A chain over devices of these costs, streamed."""
    cluster = Cluster(len(costs_s), **by_device(costs_s), record=True, **how)
    graph = chain(len(costs_s))
    async with ap.Scheduler(cluster.backends, n_copies=n_copies, timeline=True) as sched:
        sched.set_cut(graph, range(len(costs_s)))
        async for _ in sched.stream(graph, (array(k) for k in range(n))):
            pass
    return sched.timeline, cluster


# Exact, in virtual time -----------------------------------------------------------------------------


async def test_spans_are_what_the_devices_did() -> None:
    timeline, cluster = await run_sim([1.0, 0.5, 2.0], 7, 3, latency_s=0.25, link_bytes_per_s=64.0)
    want = [(r.kind, r.backend.name, r.start_s, r.end_s, r.src.name if r.src else HOST_TRACK) for r in cluster.log]
    got = [
        ("launch" if s.kind == "compute" else s.kind, s.backend, s.begin_s, s.end_s, s.source or HOST_TRACK)
        for s in timeline.spans
        if s.kind in ("compute", "copy")
    ]
    assert sorted(got) == sorted(want) and len(got) == 7 * 6
    assert all(span.seen for span in timeline.spans)


async def test_utilization_and_overlap_are_exact() -> None:  # S7
    timeline, cluster = await run_sim([1.0, 1.0], 8, 4)
    assert cluster.clock.now == 9.0
    assert timeline.utilization() == {"sim:0": 8 / 9, "sim:1": 8 / 9}
    assert timeline.busy_s() == {"sim:0": 8.0, "sim:1": 8.0}
    overlap = timeline.overlap()
    assert (overlap.busy_s, overlap.overlap_s, overlap.sum_s) == (9.0, 7.0, 16.0)
    assert overlap.share == 7 / 9 and overlap.mean_busy == 16 / 9
    assert timeline.utilization((1.0, 8.0)) == {"sim:0": 1.0, "sim:1": 1.0}
    assert timeline.overlap((0.5, 1.5)) == ap.Overlap(busy_s=1.0, overlap_s=0.5, sum_s=1.5)


async def test_without_pipelining_nothing_overlaps() -> None:  # S7
    timeline, _ = await run_sim([1.0, 1.0], 8, 1)
    assert timeline.overlap() == ap.Overlap(busy_s=16.0, overlap_s=0.0, sum_s=16.0)
    assert timeline.utilization() == {"sim:0": 0.5, "sim:1": 0.5}


async def test_a_balanced_chain_overlaps_within_two_per_cent_of_the_bound() -> None:  # S7
    timeline, _ = await run_sim([1.0] * 4, 200, 6)
    assert timeline.overlap().mean_busy >= 4 / 1.02
    assert all(share >= 1 / 1.02 for share in timeline.utilization().values())


async def test_waiting_for_a_slot() -> None:
    cluster = Cluster(1, split_cost_s=1.0)
    graph = chain(1)
    async with ap.Scheduler(cluster.backends, n_copies=1, timeline=True) as sched:
        for k in range(3):
            await sched.graph_compute_async(graph, array(k))
        await sched.synchronize()
        waits = [span for span in sched.timeline.spans if span.kind == "wait"]
    assert [(s.evaluation, s.begin_s, s.end_s, s.backend, s.slot) for s in waits] == [
        (1, 0.0, 1.0, HOST_TRACK, 0),
        (2, 1.0, 2.0, HOST_TRACK, 0),
    ]


async def test_failed_and_cancelled_evaluations_are_there() -> None:
    cluster = Cluster(2, split_cost_s=1.0)
    graph = chain([sleep(1.0), fail(launches=[0])])
    async with ap.Scheduler(cluster.backends, n_copies=2, timeline=True) as sched:
        sched.set_cut(graph, range(2))
        first, second = [await sched.graph_compute_async(graph, array(k)) for k in range(2)]
        second.cancel()
        with pytest.raises(ap.EvaluationError):
            await first
        await sched.synchronize()
        spans = [s for s in sched.timeline.spans if s.kind == "compute"]
    assert [(s.evaluation, s.split) for s in spans] == [(0, 0), (0, 1), (1, 0), (1, 1)]


async def test_it_keeps_the_newest() -> None:
    cluster = Cluster(1, split_cost_s=1.0)
    graph = chain(1)
    async with ap.Scheduler(cluster.backends, timeline=60) as sched:
        async for _ in sched.stream(graph, (array(k) for k in range(200))):
            pass
        spans = sched.timeline.spans
        assert 10 < len(spans) <= 60 and spans[-1].evaluation == 199
        recent = sched.timeline.recent(5.0)
        assert {s.evaluation for s in recent.spans if s.kind == "compute"} == set(range(195, 200))
        assert recent.utilization() == {"sim:0": 1.0}
        frozen, found = sched.timeline.frozen(), sched.statistics()
        sched.timeline.clear()
        assert not sched.timeline.spans and len(frozen.spans) == len(spans) and frozen.frozen() is frozen
        assert found.busy == {"sim:0": 1.0} == frozen.utilization() and found.busy_s == frozen.busy_s()
        sched.reset_busy()
        assert not sched.timeline.spans and sched.statistics().busy == {"sim:0": 0.0}


async def test_a_plan_that_did_nothing_for_a_while_is_not_forgotten() -> None:
    cluster = Cluster(1, split_cost_s=1.0)
    first, others = chain(1), [chain(1) for _ in range(3)]
    async with ap.Scheduler(cluster.backends, timeline=True) as sched:
        await sched.graph_compute(first, array(0))
        for n, other in enumerate(others):
            sched.timeline.clear()
            await sched.graph_compute(other, array(1))  # a new plan, with nothing of the first one's noted
            await sched.graph_compute(first, array(2))
            assert {s.evaluation for s in sched.timeline.spans} == {2 * n + 1, 2 * n + 2}
            assert sched.timeline.utilization() == {"sim:0": 1.0}
        sched.forget(first)
        del first
        gc.collect()
        sched.timeline.clear()
        await sched.graph_compute(chain(1), array(3))
        plans = sched.timeline._recorder
        assert plans is not None and len(plans.noted()[1]) <= len(others) + 1  # what is not loaded any more is


async def test_without_one() -> None:
    async with ap.Scheduler(Cluster(1).backends) as sched:
        with pytest.raises(AiopipeError, match="timeline=True"):
            _ = sched.timeline
        assert sched.statistics().busy == {}
    with pytest.raises(ValueError, match="timeline=-1"):
        ap.Scheduler(Cluster(1).backends, timeline=-1)


# Rules, by hand -------------------------------------------------------------------------------------


def plan(*splits: tuple[str, tuple[int, ...]], instant: bool = False) -> PlanInfo:
    infos = [SplitInfo(backend, f"p{i}", depends, "", 0, instant) for i, (backend, depends) in enumerate(splits)]
    return PlanInfo("g", tuple(infos), (tuple(range(len(infos))),))


def evaluated(evaluation: int, released: float, *times: float) -> Note:
    return EVALUATED, evaluation, 0, 0, released, times


def computed(notes: Sequence[Note], info: PlanInfo) -> list[tuple[int, int, float, float, bool]]:
    spans = spans_of(notes, {0: info})
    return [(s.evaluation, s.split, s.begin_s, s.end_s, s.seen) for s in spans if s.kind == "compute"]


ONE = plan(("a", ()))
CHAIN = plan(("a", ()), ("b", (0,)))


def test_a_split_begins_when_the_one_before_on_its_backend_has_ended() -> None:
    notes = [(ENDED, 0, 0, 5.0), (ENDED, 1, 0, 8.0), evaluated(0, 5.0, 0, 1, 1.5), evaluated(1, 8.0, 1, 2, 2.5)]
    assert computed(notes, ONE) == [(0, 0, 1.0, 5.0, True), (1, 0, 5.0, 8.0, True)]


def test_a_split_begins_when_what_it_depends_on_has_ended() -> None:
    notes = [(ENDED, 0, 0, 5.0), (ENDED, 0, 1, 7.0), evaluated(0, 7.0, 0, 1, 1.5, 2)]
    assert computed(notes, CHAIN) == [(0, 0, 1.0, 5.0, True), (0, 1, 5.0, 7.0, True)]


def test_an_end_that_was_not_seen_comes_after_the_usual_time() -> None:
    seen = [(ENDED, 0, 0, 3.0), (ENDED, 0, 1, 7.0), evaluated(0, 7.0, 0, 1, 1.5, 1.6)]
    unseen = [(ENDED, 1, 1, 24.0), evaluated(1, 24.0, 0, 10, 10.5, 10.6)]
    got = computed(seen + unseen, CHAIN)
    assert got[2:] == [(1, 0, 10.0, 12.0, False), (1, 1, 12.0, 24.0, True)]


def test_but_early_enough_for_what_came_after_it() -> None:
    seen = [(ENDED, 0, 0, 3.0), (ENDED, 0, 1, 7.0), evaluated(0, 7.0, 0, 1, 1.5, 1.6)]  # 2 s, then 4 s
    unseen = [(ENDED, 1, 1, 15.0), evaluated(1, 15.0, 0, 10, 10.5, 10.6)]
    assert computed(seen + unseen, CHAIN)[2] == (1, 0, 10.0, 11.0, False)


def test_without_any_like_it_it_lasts_as_long_as_it_can_have() -> None:
    assert computed([evaluated(0, 9.0, 0, 1, 2)], ONE) == [(0, 0, 1.0, 9.0, False)]


def test_an_end_that_was_seen_late() -> None:
    seen = [(ENDED, 0, 0, 3.0), (ENDED, 0, 1, 7.0), evaluated(0, 7.0, 0, 1, 1.5, 1.6)]
    late = [(ENDED, 1, 1, 16.0), (ENDED, 1, 0, 17.0), evaluated(1, 17.0, 0, 10, 10.5, 10.6)]
    assert computed(seen + late, CHAIN)[2:] == [(1, 0, 10.0, 16.0, True), (1, 1, 16.0, 16.0, True)]


def test_what_is_instant_ends_when_its_call_returns() -> None:
    info = plan(("a", ()), ("b", (0,)), instant=True)
    got = computed([evaluated(0, 9.0, 0, 1, 2, 4)], info)
    assert got == [(0, 0, 1.0, 2.0, True), (0, 1, 2.0, 4.0, True)]


def test_quick_evaluations_between_those_that_are_noted() -> None:
    info = plan(("a", ()), instant=True)
    notes: list[Note] = [(QUICK, 0, 0, 0, 0, (0.0, 1.0, 2.0)), (QUICK, 4, 0, 0, 3, (14.0, 15.0, 16.0))]
    got = computed(notes, info)
    assert [g[0] for g in got] == [0, 1, 2, 3, 4]
    assert [g[2:] for g in got[1:4]] == [(2 + 4 * k + 1, 2 + 4 * k + 2, False) for k in range(3)]
    assert utilization_of(spans_of(notes, {0: info}), ["a"], (0.0, 16.0)) == {"a": 5 / 16}


def test_other_segments_waits_and_what_is_missing() -> None:
    info = PlanInfo("g", CHAIN.splits, ((0,), (1,)))
    notes: list[Note] = [(ADMITTED, 0, 0.5), (LAUNCHED, 0, 0, 1, (3.0, 3.5)), (ENDED, 0, 0, 4.0), (ENDED, 0, 1, 6.0)]
    notes += [evaluated(0, 6.0, 0, 1, 2), (LAUNCHED, 7, 0, 1, (8.0, 9.0)), (EVALUATED, 8, 0, -1, 9.5, (9.0,))]
    notes += [(EVALUATED, 9, 5, 0, 9.5, (9.0, 9.1, 9.2))]  # of a plan that is forgotten
    spans = spans_of(notes, {0: info})
    assert [(s.kind, s.begin_s, s.end_s) for s in spans] == [
        ("wait", 0, 0.5), ("capture", 0.5, 1), ("compute", 1, 4), ("compute", 4, 6), ("wait", 9.0, 9.5),
    ]  # fmt: skip


def test_launching_that_failed_halfway() -> None:
    assert computed([evaluated(0, 9.0, 0, 1, 2)], CHAIN) == [(0, 0, 1.0, 9.0, False)]


def test_splits_are_watched_in_bursts() -> None:
    watching = Watching()
    assert [watching.wants(100.0) for _ in range(BURST + 3)] == [True] * BURST + [False] * 3
    assert not watching.wants(100.0 + (BURST - 1) * WATCH_S)
    assert watching.wants(100.0 + (BURST + 0.5) * WATCH_S)
    slow = Watching()
    assert all(slow.wants(k * WATCH_S * 1.01) for k in range(100))


def test_overlap_counts_each_backend_once() -> None:
    spans = [ap.Span("compute", b, k, 0, 0, begin, end) for k, (b, begin, end) in enumerate(
        [("a", 0, 2), ("a", 1, 3), ("b", 2, 4), ("c", 2.5, 3)]
    )]  # fmt: skip
    assert overlap_of(spans, (0, 4)) == ap.Overlap(busy_s=4, overlap_s=1, sum_s=5.5)
    assert overlap_of([], (0, 0)).share == 0.0 and overlap_of([], (0, 0)).mean_busy == 0.0


# Real devices ---------------------------------------------------------------------------------------


def model(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize(("width", "quick"), [(4, True), (96, False)])
async def test_real_devices(width: int, quick: bool) -> None:
    params = [np.eye(width, dtype=np.float32)] * 4
    x = np.ones((2, width), np.float32)
    pipe = ap.Pipeline(model, params, devices=DEVICES, split=[1, 1], timeline=True)
    async with pipe:
        for _ in range(3 * (SKIPPED + 1)):
            await pipe(x)
    spans = [span for span in pipe.timeline.spans if span.kind == "compute"]
    assert {s.backend for s in spans} == set(DEVICES)
    by_split = {(s.evaluation, s.split): s for s in spans}
    for (evaluation, split), span in by_split.items():
        assert span.begin_s <= span.end_s
        if split:
            assert span.begin_s >= by_split[evaluation, 0].end_s - 1e-12
    for name in DEVICES:
        of_one = [s for s in spans if s.backend == name]
        assert all(b.begin_s >= a.end_s - 1e-12 for a, b in itertools.pairwise(of_one))
    assert any(not s.seen for s in spans) or not quick


def test_named_as_in_profiles_of_jax(tmp_path: Path) -> None:
    params = [np.eye(96, dtype=np.float32)] * 4

    async def profiled() -> set[str]:
        async with ap.Pipeline(model, params, devices=DEVICES, split=[1, 1], timeline=True) as pipe:
            await pipe(np.ones((2, 96), np.float32))
            with jax.profiler.trace(tmp_path):
                await pipe(np.ones((2, 96), np.float32))
            return {span.name for span in pipe.timeline.spans if span.kind == "compute"}

    names = asyncio.run(profiled())
    [profile] = tmp_path.rglob("*.xplane.pb")
    modules = set(re.findall(rb"jit_\w+", profile.read_bytes()))
    assert len(names) == 2 and {f"jit_{name}".encode() for name in names} <= modules


async def test_lanes_of_their_own_and_a_wait() -> None:
    params = [np.eye(32, dtype=np.float32)] * 2
    backends = [ap.open_backend(spec, dispatch="own") for spec in DEVICES]
    x = np.ones((2, 32), np.float32)
    async with ap.Scheduler(backends, n_copies=1, timeline=True) as sched:
        weights = await ap.place(params, {"0": backends[0], "1": backends[1]})
        graph = ap.trace(model, weights, x)
        for evaluation in [await sched.graph_compute_async(graph, x) for _ in range(4)]:
            await evaluation
        await sched.synchronize()
        spans = sched.timeline.spans
    for backend in backends:
        await backend.aclose()
    assert sum(s.kind == "compute" for s in spans) == 8 and any(s.kind == "wait" for s in spans)


# As a file ------------------------------------------------------------------------------------------


def check_schema(content: dict[str, Any]) -> None:
    """What the Trace Event Format and Perfetto ask for."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = set()
    opened: dict[Any, float] = {}
    for event in content["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys() and event["ts"] >= 0
        where = event["pid"], event["tid"]
        if event["ph"] == "M":
            named.add((event["name"], *where))
        elif event["ph"] == "X":
            tracks.setdefault(where, []).append((event["ts"], event["ts"] + event["dur"]))
            assert event["dur"] >= 0
        elif event["ph"] == "b":
            opened[event["id"]] = event["ts"]
        elif event["ph"] == "e":
            assert opened.pop(event["id"]) <= event["ts"]
        else:
            assert event["ph"] in "sf" and event["bp"] == "e"
    assert not opened
    for where, slices in tracks.items():
        assert ("thread_name", *where) in named
        stack: list[float] = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):  # they nest, or follow each other
            while stack and stack[-1] <= begin + 1e-3:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-3
            stack.append(end)
    for event in content["traceEvents"]:
        if event["ph"] in "sf":  # an arrow begins and ends in a slice
            at = tracks[event["pid"], event["tid"]]
            assert any(begin - 1e-3 <= event["ts"] <= end + 1e-3 for begin, end in at)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
async def test_saved_and_loaded(tmp_path: Path, name: str) -> None:
    timeline, _ = await run_sim([1.0, 0.5, 2.0], 7, 3, latency_s=0.25, link_bytes_per_s=64.0)
    timeline.save(tmp_path / name)
    loaded = ap.Timeline.load(tmp_path / name)
    assert loaded.backends == timeline.backends and len(loaded.spans) == len(timeline.spans)
    for got, want in zip(loaded.spans, timeline.spans, strict=True):
        assert got._replace(begin_s=0, end_s=0, asked_s=0) == want._replace(begin_s=0, end_s=0, asked_s=0)
        assert (got.begin_s, got.end_s, got.asked_s) == pytest.approx((want.begin_s, want.end_s, want.asked_s))
    assert loaded.utilization() == pytest.approx(timeline.utilization())
    check_schema(to_trace(timeline.spans, timeline.backends))


async def test_arrows_lead_from_an_evaluation_to_its_splits() -> None:
    timeline, _ = await run_sim([1.0, 1.0], 3, 2)
    events = to_trace(timeline.spans, timeline.backends)["traceEvents"]
    starts, ends = ({e["id"] for e in events if e["ph"] == phase} for phase in "sf")
    assert starts == ends == {f"{k}.{i}" for k in range(3) for i in range(2)}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"sim:0", "sim:1", "slot 0", "slot 1"}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"otherData": {"producer": "aiopipe"}}', "\x1f\x8b", "[" * 100_000]
)
def test_loading_something_else(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content, encoding="latin-1")
    with pytest.raises(AiopipeError, match=r"x\.json"):
        ap.Timeline.load(tmp_path / "x.json")


async def test_loading_what_is_damaged(tmp_path: Path) -> None:
    timeline, _ = await run_sim([1.0], 2, 1)
    path = tmp_path / "x.json.gz"
    timeline.save(path)
    whole = path.read_bytes()
    for damaged in (whole[:20] + bytes(10) + whole[30:], whole[:-20], whole[:-8] + bytes(8)):
        path.write_bytes(damaged)
        with pytest.raises(AiopipeError, match="no timeline that"):
            ap.Timeline.load(path)
    content = to_trace(timeline.spans, timeline.backends)
    path = tmp_path / "x.json"
    for begin_s in (float("nan"), float("inf"), 10**400):
        path.write_text(json.dumps({**content, "otherData": {**content["otherData"], "begin_s": begin_s}}))
        with pytest.raises(AiopipeError, match="no timeline that"):
            ap.Timeline.load(path)


# To look at -----------------------------------------------------------------------------------------


async def test_as_text() -> None:
    timeline, _ = await run_sim([1.0, 0.5], 8, 4)
    text = str(timeline)
    assert "8 evaluations in 8.5 s" in text and "sim:0  busy  94.1%  8 splits, 1 s each" in text
    assert "sim:0  0" in text.splitlines()[-3] and "7" in text.splitlines()[-2]
    assert str(ap.Timeline([], ["a"])) == "timeline: nothing has been evaluated yet"


async def test_as_html() -> None:
    timeline, _ = await run_sim([1.0, 0.5], 8, 4)
    html = timeline._repr_html_()
    assert html.count("<rect") >= 16 and "<script" not in html and "<svg" in html
    evil = ap.Span("compute", "<b>", 0, 0, 0, 0.0, 1.0, "<i>&")
    html = ap.Timeline([evil], ["<b>"])._repr_html_()
    assert "<b>" not in html and "<i>" not in html and "&lt;b&gt;" in html and "&lt;i&gt;&amp;" in html
    assert "nothing has been evaluated" in ap.Timeline([], ["a"])._repr_html_()


async def test_as_a_picture(tmp_path: Path) -> None:
    timeline, _ = await run_sim([1.0, 0.5], 8, 4, latency_s=0.25)
    timeline.plot(tmp_path / "run.png")
    timeline.plot(tmp_path / "run.svg", window=(1.0, 3.0))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "run.svg").read_text(encoding="utf-8")
    with pytest.raises(AiopipeError, match="nothing"):
        ap.Timeline([], ["a"]).plot(tmp_path / "none.png")
    with pytest.raises(AiopipeError, match="window"):
        timeline.plot(tmp_path / "none.png", window=(2.0, 1.0))
    for name in ("none", "none.gif"):  # without an ending it would be another file
        with pytest.raises(AiopipeError, match=f"{name}' to plot into, expected a name that ends with"):
            timeline.plot(tmp_path / name)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aiopipe.timeline_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(AiopipeError, match=r"aiopipe\[plot\]"):
        ap.Timeline([ap.Span("compute", "a", 0, 0, 0, 0.0, 1.0)], ["a"]).plot(tmp_path / "x.png")


def test_the_content_is_json() -> None:
    span = ap.Span("wait", HOST_TRACK, 3, -1, -1, 0.0, 1.0, "wait")
    assert json.loads(json.dumps(to_trace([span], ["a"])))["otherData"]["backends"] == ["a"]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_was_seen_the_order_holds(seed: int) -> None:
    """Random devices do random work in order; whatever part of the ends is seen, and however late, nothing overlaps."""
    rng = random.Random(seed)
    info = plan(("a", ()), ("b", (0,)), ("a", (1,)))
    notes: list[Note] = []
    free = {"a": 0.0, "b": 0.0}
    for k in range(20):
        asked, end = k * 0.5, 0.0
        times, ends = [asked, asked], []
        for split in info.splits:
            times.append(times[-1] + 0.01)
            end = free[split.backend] = max(free[split.backend], times[-1], end) + rng.choice([0.2, 1.0, 1.1])
            ends.append(end)
        seen = [i for i in range(3) if rng.random() < 0.5]
        notes += [(ENDED, k, i, ends[i] + rng.choice([0.0, 0.0, 0.3])) for i in seen]
        notes.append(evaluated(k, end + 0.3, *times))
    spans = spans_of(notes, {0: info})
    by_split = {(s.evaluation, s.split): s for s in spans if s.kind == "compute"}
    assert len(by_split) == 60
    for (evaluation, split), span in by_split.items():
        assert span.begin_s <= span.end_s
        assert not split or span.begin_s >= by_split[evaluation, split - 1].end_s
    for name in "ab":
        lane = sorted((s for s in by_split.values() if s.backend == name), key=lambda s: (s.evaluation, s.split))
        assert all(b.begin_s >= a.end_s for a, b in itertools.pairwise(lane))


async def test_two_lanes_that_note_a_new_plan_at_once_give_it_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(2, compute=True)
    graph = chain(2)
    async with ap.Scheduler(cluster.backends, timeline=True) as sched:
        sched.set_cut(graph, (0, 1))
        await sched.alloc_graph(graph)
        noter, loaded = sched._runner._recorder, sched._plans.get(graph)
        assert noter is not None and loaded is not None
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(noter._noted(loaded)))
        plan_info = recorder.plan_info

        def slow(of: Any) -> Any:
            if not other.ident:
                other.start()
                other.join(0.2)  # to its end, unless it has to wait
            return plan_info(of)

        monkeypatch.setattr(recorder, "plan_info", slow)
        first = noter._noted(loaded)
        other.join()
        assert found == [first]
        assert await sched.graph_compute(graph, array(1)) is not None
        assert len(sched.timeline.spans) >= 2
