"""Everything that can be done with states and evaluations, step by step, and what must have come of it.

What was meant to happen is worked out afterwards, from the order in which things were submitted: every evaluation
ends as its caller asked or as its ops let it, each value is that of the same steps one after the other, and a state
is marked where, and only where, an evaluation left it in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import aiopipe as ap
from aiopipe.devices.sim import Cluster
from aiopipe.graph import Graph
from aiopipe.runner import Runner
from simgraphs import array
from simprograms import POISON, bad, expected, same


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


class Entry:
    """Something that happened to a state, or an evaluation without one, in the order in which it took effect."""

    def __init__(self, kind: str, state: int | None, **what: Any) -> None:
        self.kind, self.state, self.what = kind, state, what
        self.task: asyncio.Task[Any] | None = None
        self.wants_cancel = False

    def __repr__(self) -> str:
        what = {name: value for name, value in self.what.items() if name != "graph"}
        return f"<{self.kind} state={self.state} {what} {self.task and self.task.done() and outcome(self.task)}>"


def outcome(task: asyncio.Task[Any]) -> Any:
    return asyncio.CancelledError() if task.cancelled() else task.exception() or "succeeded"


class Play:
    """One scheduler, some graphs, some states; `log` has what happened, in order."""

    def __init__(self, cluster: Cluster, sched: ap.Scheduler, graphs: Sequence[Graph], n_states: int) -> None:
        self.cluster, self.sched, self.graphs = cluster, sched, graphs
        self.log: list[Entry] = []
        self.by_task: dict[Any, Entry] = {}
        self.tasks: list[Entry] = []
        self.n = 0
        self.snapshots: list[tuple[int, ap.Snapshot]] = []
        self.watching = False
        n_leaves = len(graphs[0].state)
        self.initial = [[array(100 + 10 * i + j) for j in range(n_leaves)] for i in range(n_states)]
        self.begins = list(self.initial)  # a fork begins elsewhere than where it is reset to
        self.states = [ap.State(values, name=f"s{i}") for i, values in enumerate(self.initial)] if n_leaves else []

    def start(self, entry: Entry, work: Any) -> None:
        entry.task = asyncio.get_running_loop().create_task(work)
        self.by_task[entry.task] = entry
        self.tasks.append(entry)

    def took_effect(self) -> None:
        """Called where a submission has its place in the order."""
        entry = self.by_task.get(asyncio.current_task())
        if entry is not None and entry not in self.log:
            entry.what["watched"] = self.sched._runner.eval_callback is not None
            self.log.append(entry)

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

    async def do(self, step: Any) -> None:
        kind, *args = step
        s = args[0] % len(self.states) if self.states and kind in ("snapshot", "fork", "reset", "restore") else None
        if kind == "submit":
            graph = self.graphs[args[0] % len(self.graphs)]
            self.n += 1
            inputs = [array(10 * self.n + i) for i in range(len(graph.inputs))]
            if args[2]:
                bad.add(int(inputs[0][0]))
            s = args[1] % len(self.states) if self.states else None
            entry = Entry("submit", s, graph=graph, inputs=[x.copy() for x in inputs])
            self.start(entry, self.compute(graph, inputs, None if s is None else self.states[s], entry))
        elif kind == "cancel" and self.tasks:
            entry = self.tasks[args[0] % len(self.tasks)]
            assert entry.task is not None
            evaluation = entry.what.get("evaluation")
            if entry.kind == "submit":
                entry.wants_cancel = entry.wants_cancel or not entry.task.done()
                if evaluation is not None and args[1]:
                    evaluation.cancel()
                else:
                    entry.task.cancel()
        elif kind == "sleep":
            await self.cluster.clock.sleep(args[0])
        elif kind == "yield":
            for _ in range(args[0]):
                await asyncio.sleep(0)
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

    def watch(self, answers: list[bool], how: str) -> None:
        n = 0

        def plain(tensor: ap.Tensor, ask: bool) -> bool:
            nonlocal n
            n += 1
            if how == "raise" and n % 7 == 6:
                raise KeyError("the callback's own")
            return answers[n % len(answers)] or (not ask and n % 3 > 0)

        async def slow(tensor: ap.Tensor, ask: bool) -> bool:
            await self.cluster.clock.sleep(0.5)
            return plain(tensor, ask)

        self.sched.set_eval_callback(slow if how == "async" else plain)

    async def run(self, steps: Sequence[Any], between: Callable[[], Awaitable[None]] | None = None) -> None:
        """Do all steps; then look at every state that can be looked at."""
        with self.in_order():
            for step in steps:
                if between is not None:
                    await between()
                await self.do(step)
            if self.tasks:
                await asyncio.wait([entry.task for entry in self.tasks if entry.task], timeout=20)
            assert all(entry.task and entry.task.done() for entry in self.tasks), self.log
            self.sched.set_eval_callback(None)
            for s, state in enumerate(self.states):
                if state.error is None:
                    await self.do(("snapshot", s))
            if self.tasks:
                await asyncio.wait([entry.task for entry in self.tasks if entry.task])

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Note the order in which submissions take effect."""
        submit = Runner.submit

        async def submitting(runner: Runner, *args: Any, **options: Any) -> ap.Evaluation:
            self.took_effect()
            return await submit(runner, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "submit", submitting)
            yield

    # -- afterwards -----------------------------------------------------------------------------

    def check(self) -> None:
        """Every end was asked for, every value is that of the same steps one after the other."""
        for s in range(len(self.states)):
            self.check_state([e for e in self.log if e.state == s], self.begins[s], self.initial[s])
        for entry in self.log:
            if entry.state is None and entry.kind == "submit":
                how = outcome(entry.task)  # type: ignore[arg-type]
                want, _ = expected(entry.what["graph"], entry.what["inputs"])
                self.check_end(entry, how, [want])
                assert not isinstance(how, ap.StateError)

    def check_end(self, entry: Entry, how: Any, wanted: list[list[Any]]) -> None:
        watched, poisoned = entry.what.get("watched"), int(entry.what["inputs"][0][0]) in bad
        if how == "succeeded":
            assert any(same(entry.task.result(), want) for want in wanted), (entry, wanted)  # type: ignore[union-attr]
        elif isinstance(how, asyncio.CancelledError):
            assert entry.wants_cancel, entry
        elif isinstance(how, ap.EvaluationAborted):
            assert watched, entry
        elif isinstance(how, ap.EvaluationError):
            cause = how.__cause__
            assert (isinstance(cause, ArithmeticError) and poisoned) or (isinstance(cause, KeyError) and watched), entry
        else:
            assert isinstance(how, ap.StateError), entry

    def check_state(self, entries: list[Entry], begins: list[Any], initial: list[Any]) -> None:
        could = [begins]  # what the state may hold
        marked = maybe_marked = late = False
        behind = 0
        for entry in entries:
            assert entry.task is not None and entry.task.done(), entry
            how = outcome(entry.task)
            if entry.kind in ("reset", "restore"):
                assert how == "succeeded", entry
                could, marked, maybe_marked, late = [entry.what.get("values", initial)], False, False, False
                continue
            if isinstance(how, ap.StateError):
                assert marked or maybe_marked, f"{entry} of a state that nothing has marked: {entries}"
                marked = True
                behind += 1
                if entry.kind == "submit" and behind < self.sched.n_copies:  # launched before anybody knew
                    could = could + [expected(entry.what["graph"], entry.what["inputs"], c)[1] for c in could]
                continue
            if entry.kind in ("snapshot", "fork"):
                assert how == "succeeded", entry
                could = [c for c in could if same(entry.task.result(), c)]
                assert could and not marked, (entry, entries)
                continue
            if isinstance(how, ap.PlacementError):
                assert "state" in str(how)  # one node makes leaves that another graph has put on two devices
                continue
            steps = [(c, *expected(entry.what["graph"], entry.what["inputs"], c)) for c in could]
            self.check_end(entry, how, [want for _, want, _ in steps])
            if how == "succeeded":
                # What reads nothing that failed may be done before anybody knows of the failure.
                assert not marked or late, f"{entry} of a state that was marked: {entries}"
                could = [new for _, want, new in steps if same(entry.task.result(), want)]
                could = [new for new in could if marked or not any(v is POISON for v in new)]
                assert could, f"{entry} left a state that cannot be"
                maybe_marked = False
            elif isinstance(how, asyncio.CancelledError):
                could = could + [new for _, _, new in steps]
                maybe_marked = maybe_marked or bool(entry.what.get("watched")) or any(
                    v is POISON for _, _, new in steps for v in new
                )
            else:
                late = isinstance(how.__cause__, ArithmeticError)  # on its device
                marked, behind, could = True, 0, could + [new for _, _, new in steps]
