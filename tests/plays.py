"""Submitting, cancelling, failing, aborting and state use in a drawn order, and what is true of it afterwards.

What was meant to happen is worked out at the end, from the order in which things were submitted: every evaluation
ended as its caller asked or as its ops let it, each value is that of the same steps one after the other, and a state
is marked where, and only where, an evaluation left it in between.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import strategies as st

import aiopipe as ap
from aiopipe.graph import Graph
from aiopipe.runner import Runner
from simprograms import POISON, same

PATIENCE_S = 3600 if os.environ.get("AIOPIPE_HYPOTHESIS") == "long" else 60
"""How long everything together may take before it counts as hanging; more where it is run with what others leave."""

_ARGUMENTS: Mapping[str, Sequence[st.SearchStrategy[Any]]] = {
    "submit": (st.integers(0, 2), st.integers(0, 3), st.sampled_from([False] * 6 + [True])),
    "cancel": (st.integers(0, 5), st.booleans()),
    "sleep": (st.sampled_from([0.0, 0.5, 1.0, 7.0]),),
    "yield": (st.integers(1, 3),),
    "hold": (st.booleans(),),
    "snapshot": (st.integers(0, 3),),
    "fork": (st.integers(0, 3),),
    "reset": (st.integers(0, 3),),
    "restore": (st.integers(0, 3), st.integers(0, 9)),
    "watch": (st.lists(st.booleans(), min_size=1, max_size=5), st.sampled_from(["", "async", "raise"])),
    "unwatch": (),
}
_KINDS = ["submit"] * 9 + ["cancel"] * 4 + ["sleep"] * 2 + ["hold"] * 2 + ["reset"] * 2 + [*_ARGUMENTS]


@st.composite
def _act(draw: st.DrawFn) -> tuple[Any, ...]:
    kind = draw(st.sampled_from(_KINDS))
    return (kind, *(draw(argument) for argument in _ARGUMENTS[kind]))


ACTS = st.lists(_act(), min_size=4, max_size=24)


class World(Protocol):
    """Where a play is given: on simulated devices, or on real ones."""

    launches_bit_by_bit: bool
    """Whether an evaluation may be cancelled when only a part of it has been launched."""

    def array(self, number: int) -> np.ndarray[Any, Any]:
        """What inputs and states consist of; tells which it is."""

    def poison(self, first: np.ndarray[Any, Any]) -> None:
        """Have ops that can fail do so in evaluations with that first input."""

    def is_poisoned(self, first: np.ndarray[Any, Any]) -> bool:
        """Whether that was asked for."""

    def is_fault(self, error: BaseException | None) -> bool:
        """Whether the error is that of an op which failed because it was to."""

    def expected(self, graph: Graph, inputs: Sequence[Any], state: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
        """Outputs and the new state of one evaluation; `POISON` where a failure leaves nothing."""

    async def sleep(self, seconds: float) -> None:
        """Let some time pass."""

    def hold(self, *, hold: bool) -> None:
        """Have ops that can be slow wait until they are let go."""


class Entry:
    """Something that happened to a state, or an evaluation without one, in the order in which it took effect."""

    def __init__(self, kind: str, state: int | None, **what: Any) -> None:
        self.kind, self.state, self.what = kind, state, what
        self.task: asyncio.Task[Any] | None = None
        self.wants_cancel = False

    def __repr__(self) -> str:
        what = {name: value for name, value in self.what.items() if name != "graph"}
        return f"<{self.kind} state={self.state} {what} {self.task and self.task.done() and outcome(self.task)}>"


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def outcome(task: asyncio.Task[Any]) -> Any:
    return asyncio.CancelledError() if task.cancelled() else task.exception() or "succeeded"


class Play:
    """One scheduler, some graphs, some states; `log` has what happened, in order."""

    def __init__(self, world: World, sched: ap.Scheduler, graphs: Sequence[Graph], n_states: int) -> None:
        self.world, self.sched, self.graphs = world, sched, graphs
        self.log: list[Entry] = []
        self.by_task: dict[Any, Entry] = {}
        self.tasks: list[Entry] = []
        self.n = 0
        self.snapshots: list[tuple[int, ap.Snapshot]] = []
        n_leaves = len(graphs[0].state)
        self.initial = [[world.array(100 + 10 * i + j) for j in range(n_leaves)] for i in range(n_states)]
        self.begins = list(self.initial)  # a fork begins elsewhere than where it is reset to
        self.states = [ap.State(values, name=f"s{i}") for i, values in enumerate(self.initial)] if n_leaves else []

    async def run(self, acts: Sequence[Any], between: Callable[[], Awaitable[None]] | None = None) -> None:
        """Do it all, and wait for the end of it; then look at every state that can be looked at."""
        with self._noted():
            try:
                for act in acts:
                    if between is not None:
                        await between()
                    await self.do(act)
            finally:
                self.world.hold(hold=False)
            await self._ended()
            self.sched.set_eval_callback(None)
            for s, state in enumerate(self.states):
                if state.error is None:
                    await self.do(("snapshot", s))
            await self._ended()

    async def _ended(self) -> None:
        tasks = [entry.task for entry in self.tasks if entry.task]
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.done() for task in tasks), self.log

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Log submissions where they take their place in the order."""
        submit = Runner.submit

        async def submitting(runner: Runner, *args: Any, **options: Any) -> ap.Evaluation:
            entry = self.by_task.get(asyncio.current_task())
            if entry is not None and entry not in self.log:
                entry.what["watched"] = self.sched._runner.eval_callback is not None
                self.log.append(entry)
            return await submit(runner, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "submit", submitting)
            yield

    def start(self, entry: Entry, work: Any) -> None:
        entry.task = asyncio.get_running_loop().create_task(work)
        self.by_task[entry.task] = entry
        self.tasks.append(entry)

    async def compute(self, graph: Graph, inputs: list[Any], state: ap.State | None, entry: Entry) -> Any:
        try:
            evaluation = await self.sched.graph_compute_async(graph, *inputs, state=state)
            entry.what["evaluation"] = evaluation
        finally:
            for x in inputs:
                x[:] = -1
            if entry not in self.log:  # refused
                self.log.append(entry)
        return flat(await evaluation)

    async def noting(self, entry: Entry, work: Any) -> Any:
        try:
            return await work
        finally:
            if entry not in self.log:
                self.log.append(entry)

    async def fork(self, state: ap.State, values: list[Any]) -> list[Any]:
        other = await state.fork()
        begins = [np.asarray(v) for v in (await other.snapshot()).value]
        self.states.append(other)
        self.initial.append(values)
        self.begins.append(begins)
        return begins

    async def snapshot(self, s: int) -> list[Any]:
        snapshot = await self.states[s].snapshot()
        self.snapshots.append((s, snapshot))
        return [np.asarray(v) for v in snapshot.value]

    async def do(self, act: Any) -> None:
        kind, *args = act
        s = args[0] % len(self.states) if self.states and kind in ("snapshot", "fork", "reset", "restore") else None
        if kind == "submit":
            self.submit(*args)
        elif kind == "cancel" and self.tasks:
            self.cancel(*args)
        elif kind == "sleep":
            await self.world.sleep(args[0])
        elif kind == "yield":
            for _ in range(args[0]):
                await asyncio.sleep(0)
        elif kind == "hold":
            self.world.hold(hold=args[0])
        elif kind == "watch":
            self.watch(*args)
        elif kind == "unwatch":
            self.sched.set_eval_callback(None)
        elif s is not None and kind == "snapshot":
            entry = Entry(kind, s)
            self.start(entry, self.noting(entry, self.snapshot(s)))
        elif s is not None and kind == "fork" and len(self.states) < 6:
            entry = Entry(kind, s)
            self.start(entry, self.noting(entry, self.fork(self.states[s], self.initial[s])))
        elif s is not None and kind == "reset":
            entry = Entry(kind, s)
            self.start(entry, self.noting(entry, self.states[s].reset()))
        elif s is not None and kind == "restore" and self.snapshots:
            _, snapshot = self.snapshots[args[1] % len(self.snapshots)]
            entry = Entry(kind, s, values=[np.asarray(v) for v in snapshot.value])
            self.start(entry, self.noting(entry, self.states[s].restore(snapshot)))

    def submit(self, which: int, state: int, poisoned: bool) -> None:
        graph = self.graphs[which % len(self.graphs)]
        self.n += 1
        inputs = [self.world.array(10 * self.n + i) for i in range(len(graph.inputs))]
        if poisoned:
            self.world.poison(inputs[0])
        s = state % len(self.states) if self.states else None
        entry = Entry("submit", s, graph=graph, inputs=[x.copy() for x in inputs])
        self.start(entry, self.compute(graph, inputs, None if s is None else self.states[s], entry))

    def cancel(self, which: int, from_outside: bool) -> None:
        """One of those that were started last."""
        entry = self.tasks[max(0, len(self.tasks) - 1 - which)]
        assert entry.task is not None
        evaluation = entry.what.get("evaluation")
        if entry.kind == "submit":
            entry.wants_cancel = entry.wants_cancel or not entry.task.done()
            if evaluation is not None and from_outside:
                evaluation.cancel()
            else:
                entry.task.cancel()

    def watch(self, answers: list[bool], how: str) -> None:
        n = 0

        def plain(tensor: ap.Tensor, ask: bool) -> bool:
            nonlocal n
            n += 1
            if how == "raise" and n % 7 == 6:
                raise KeyError("the callback's own")
            return answers[n % len(answers)] or (not ask and n % 3 > 0)

        async def slow(tensor: ap.Tensor, ask: bool) -> bool:
            await self.world.sleep(0.5)
            return plain(tensor, ask)

        self.sched.set_eval_callback(slow if how == "async" else plain)

    # -- afterwards -----------------------------------------------------------------------------

    def check(self) -> None:
        """Every end was asked for, every value is that of the same steps one after the other."""
        for s in range(len(self.states)):
            self.check_state([e for e in self.log if e.state == s], self.begins[s], self.initial[s])
        for entry in self.log:
            if entry.state is None and entry.kind == "submit":
                how = outcome(entry.task)  # type: ignore[arg-type]
                want, _ = self.world.expected(entry.what["graph"], entry.what["inputs"])
                self.check_end(entry, how, [want])
                assert not isinstance(how, ap.StateError)

    def check_end(self, entry: Entry, how: Any, wanted: list[list[Any]]) -> None:
        watched, poisoned = entry.what.get("watched"), self.world.is_poisoned(entry.what["inputs"][0])
        if how == "succeeded":
            assert any(same(entry.task.result(), want) for want in wanted), (entry, wanted)  # type: ignore[union-attr]
        elif isinstance(how, asyncio.CancelledError):
            assert entry.wants_cancel, entry
        elif isinstance(how, ap.EvaluationAborted):
            assert watched, entry
        elif isinstance(how, ap.EvaluationError):
            cause = how.__cause__
            assert (self.world.is_fault(cause) and poisoned) or (isinstance(cause, KeyError) and watched), entry
        else:
            assert isinstance(how, ap.StateError), entry

    def check_state(self, entries: list[Entry], begins: list[Any], initial: list[Any]) -> None:
        could = [begins]  # what the state may hold
        marked = maybe_marked = late = maybe_late = False
        for i, entry in enumerate(entries):
            assert entry.task is not None and entry.task.done(), entry
            how = outcome(entry.task)
            if entry.kind in ("reset", "restore"):
                assert how == "succeeded", entry
                could = [entry.what.get("values", initial)]
                marked = maybe_marked = late = maybe_late = False
                continue
            if isinstance(how, ap.StateError):
                assert marked or maybe_marked, f"{entry} of a state that nothing has marked: {entries}"
                marked, late = True, late or maybe_late
                if entry.kind == "submit" and self.is_read_after(entries, i):  # it may have been launched by then
                    could = could + [new for _, new in self.steps(entry, could)]
                continue
            # What reads nothing that failed may be done before anybody knows of the failure.
            if entry.kind in ("snapshot", "fork"):
                assert how == "succeeded", entry
                could = [c for c in could if same(entry.task.result(), c)]
                assert could and (not marked or late), (entry, entries)
                continue
            if isinstance(how, ap.PlacementError):
                assert "state" in str(how)  # one node makes leaves that another graph has put on two devices
                continue
            steps = self.steps(entry, could)
            self.check_end(entry, how, [want for want, _ in steps])
            if how == "succeeded":
                assert not marked or late, f"{entry} of a state that was marked: {entries}"
                could = [new for want, new in steps if same(entry.task.result(), want)]
                could = [new for new in could if marked or not any(v is POISON for v in new)]
                assert could, f"{entry} left a state that cannot be"
                maybe_marked = maybe_late  # it may have been done before anybody knew
            elif isinstance(how, asyncio.CancelledError):
                halfway = self.world.launches_bit_by_bit or bool(entry.what.get("watched"))
                # Also where what fails is no part of the state, as for those that nobody cancels.
                maybe_late = maybe_late or self.world.is_poisoned(entry.what["inputs"][0])
                maybe_marked = maybe_marked or halfway or maybe_late
                could = could + [new for _, new in steps] if self.is_read_after(entries, i) else could
            else:
                late = self.world.is_fault(how.__cause__)  # on its device
                marked = True
                could = could + [new for _, new in steps] if self.is_read_after(entries, i) else could

    def steps(self, entry: Entry, could: list[list[Any]]) -> list[tuple[list[Any], list[Any]]]:
        """What an evaluation makes of each of the states: outputs, and the state that it leaves."""
        return [self.world.expected(entry.what["graph"], entry.what["inputs"], c) for c in could]

    def is_read_after(self, entries: list[Entry], i: int) -> bool:
        """Whether anybody has seen what the state held then; the possibilities double with each that may have been."""
        rest = itertools.takewhile(lambda entry: entry.kind not in ("reset", "restore"), entries[i + 1 :])
        return any(entry.task is not None and outcome(entry.task) == "succeeded" for entry in rest)
