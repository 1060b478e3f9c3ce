"""Observing an evaluation: its splits run in pieces, and a callback sees values on the way.

What happens is what ggml's scheduler does with an eval callback (`ggml_backend_sched_compute_splits`
in ggml-backend.cpp): ask about node after node, run those that nobody wants together with the next
one that somebody does, show that one's value, go on behind it. Two things differ: an abort ends the
whole evaluation and not only the split, and nobody blocks.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ._jax_settings import undisturbed
from .backend import Backend, Buffer, Executable, InlineLane, Lane
from .completion import Post, failure, first_failure
from .devices.base import BufferUsage, NodeFailure, Program
from .errors import AiopipeError, EvaluationAborted, EvaluationError, said_by
from .graph import Node, Tensor
from .lane_pool import LanePool
from .loaded import Loaded
from .recorder import Recorder
from .run import Run
from .sched.alloc import marker_of
from .sched.launch import BoundSplit, LaunchError
from .sched.lower import lower
from .sched.plan import Plan
from .sched.split import Split

__all__ = ["EvalCallback", "Observation", "Pieces"]

EvalCallback = Callable[[Tensor, bool], bool | Awaitable[bool]]
"""``callback(tensor, ask)``; `Scheduler.set_eval_callback` says what it is called with and what it answers."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A run of nodes of one split, compiled by itself.

    Attributes:
        inputs: ids of the tensors that it reads from outside.
        outputs: ids of what it makes for the rest of its split, for others, or to be shown.
        executable: computes the outputs from the inputs.
        marker: which output is kept to show that it is done, as `LaunchList.marker`.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    executable: Executable
    marker: int


class Pieces:
    """The pieces of plans, each compiled when it is first wanted and kept as long as its plan is loaded.

    Args:
        compile: makes a program's executable, off the event loop.
    """

    def __init__(self, compile: Callable[[Program, Backend], Awaitable[Executable]]) -> None:
        self._compile = compile
        self._made: WeakKeyDictionary[Plan, dict[tuple[int, int, int], Piece]] = WeakKeyDictionary()
        self._lock = asyncio.Lock()  # whoever wants a piece that is being compiled waits for it

    async def get(self, loaded: Loaded, split: int, begin: int, end: int) -> Piece:
        """The nodes `begin` to `end` (exclusive) of a split, counted within the split.

        Raises:
            AiopipeError: the backend refuses it.
            Exception: the compiler's error.
        """
        cut = (split, begin, end)
        made = self._made.setdefault(loaded.plan, {})
        if cut not in made:
            async with self._lock:
                if cut not in made:
                    made[cut] = await self._make(loaded, cut)
        return made[cut]

    async def _make(self, loaded: Loaded, cut: tuple[int, int, int]) -> Piece:
        index, begin, end = cut
        graph, split = loaded.plan.graph, loaded.plan.splits[index]
        nodes = [graph.nodes[i] for i in split.nodes]
        inside, behind = nodes[begin:end], nodes[end:]
        made = {t for node in inside for t in node.outputs}
        wanted = {t for node in behind for t in node.inputs}.union(split.outputs, inside[-1].outputs)
        outputs = tuple(sorted(made & wanted))
        bound = loaded.splits[index]
        if len(inside) == len(nodes) and outputs == split.outputs:
            inputs, executable = split.inputs, bound.executable
        else:
            inputs = tuple(dict.fromkeys(t for node in inside for t in node.inputs if t not in made))
            part = split._replace(nodes=split.nodes[begin:end], inputs=inputs, outputs=outputs)
            executable = await self._compile(lower(graph, [part], [()])[0], bound.backend)
        return Piece(inputs, outputs, executable, marker_of(graph.tensors, outputs, {t.id for t in graph.new_state}))


class Observation:
    """One evaluation under a callback: a task on the loop that launches split after split.

    Args:
        run: what is evaluated; its inputs are captured before it starts.
        callback: asked and told.
        pieces: compiles what is run.
        lanes: launches happen on lanes that may block, for a piece may block its launcher where its split would not.
        post: has the loop call something; from any thread.
        recorder: told what is launched when, if somebody wants to know.

    Attributes:
        task: between its start and its end.
        failed: it ended because something failed on a device, or could not be launched there.
    """

    def __init__(
        self, run: Run, callback: EvalCallback, pieces: Pieces, lanes: LanePool, post: Post, recorder: Recorder | None
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self.failed = False
        self._run = run
        self._evaluation = run.evaluation.id
        self._loaded = run.loaded
        self._env = run.env
        self._callback = callback
        self._pieces = pieces
        self._lanes = lanes
        self._post = post
        self._recorder = recorder
        self._context = contextvars.copy_context()  # the submitter's, for the callback
        self._dropped = False
        self._job: asyncio.Future[BaseException | None] | None = None
        self._newest: tuple[int, Any] | None = None  # a split of which a part is launched, and that part's marker
        self._begun: BoundSplit | None = None  # the same split, from when its operands are brought over
        self._asked: set[int] = set()

    def start(self, ended: Callable[[BaseException | None], None]) -> None:
        """Begin. ``ended(error)`` is called on the loop when all is launched, or nothing more will be."""
        loop = asyncio.get_running_loop()
        name = f"aiopipe observe evaluation {self._evaluation}"
        self.task = loop.create_task(self._observe(), name=name, context=self._context)
        self.task.add_done_callback(partial(self._task_ended, ended))

    def cancel(self) -> None:
        """Launch nothing more, and have the callback's own ``await`` raise `asyncio.CancelledError`."""
        self._dropped = True
        if self.task is not None and not self.task.done():
            self.task.cancel()

    def _task_ended(self, ended: Callable[[BaseException | None], None], task: asyncio.Task[None]) -> None:
        if self._job is not None and not self._job.done():  # cancelled while a lane launches
            self._job.add_done_callback(lambda _: self._task_ended(ended, task))
            return
        self.task = self._job = None  # whose errors lead, by way of tracebacks, back to this
        if self._newest is not None:
            split, marker = self._newest
            self._env.markers[split] = marker  # what was launched of it is waited for
        if self._begun is not None:
            self._env.leave(self._begun)
        if task.cancelled():
            ended(asyncio.CancelledError())
            return
        error = task.exception()
        # Without its traceback: those frames are ours, and would keep the evaluation's arrays alive.
        ended(None if error is None else error.with_traceback(None))

    async def _observe(self) -> None:
        for split in self._loaded.plan.splits:
            await self._run_split(split)
            self._run.watch_split(split.index, self._post)

    async def _run_split(self, split: Split) -> None:
        graph, bound = self._loaded.plan.graph, self._loaded.splits[split.index]
        values: dict[int, Any] = {}
        begin = 0
        for end, i in enumerate(split.nodes, 1):
            node = graph.nodes[i]
            wanted = [t for t in node.outputs if await self._wants(split, node, t)]
            if wanted:
                await self._launch_piece(split, begin, end, values)
                begin = end
                await self._wait(bound, [values[t] for t in wanted])
                for t in wanted:
                    await self._show(split, node, t, values[t])
        if not begin:
            await self._on_lane(bound, lambda: self._launch_whole(bound))
            return
        if begin < len(split.nodes):
            await self._launch_piece(split, begin, len(split.nodes), values)
        slots, markers = self._env.slots, self._env.markers
        for slot, t in zip(bound.outputs, split.outputs, strict=True):
            slots[slot] = values[t]
        for slot in bound.frees:
            slots[slot] = None
        assert self._newest is not None
        markers[split.index], self._newest, self._begun = self._newest[1], None, None

    # -- the callback ---------------------------------------------------------------------------

    async def _wants(self, split: Split, node: Node, t: int) -> bool:
        if t in self._asked:  # a node that several splits repeat
            return False
        self._asked.add(t)
        return await self._call(split, node, self._loaded.plan.graph.tensors[t], ask=True)

    async def _show(self, split: Split, node: Node, t: int, value: Any) -> None:
        tensor, backend = self._loaded.plan.graph.tensors[t], self._loaded.splits[split.index].backend
        buffer = Buffer(
            backend=backend,
            buffer_type=backend.device.buffer_types()[0],
            usage=BufferUsage.COMPUTE,
            nbytes=tensor.nbytes,
            value=value,
        )
        if not await self._call(split, node, replace(tensor, buffers=(buffer,)), ask=False):
            raise EvaluationAborted(
                f"evaluation {self._evaluation} of {self._loaded.plan.graph.name!r} was aborted: the eval callback "
                f"returned False for {self._describe(split, node, tensor)}"
            )

    async def _call(self, split: Split, node: Node, tensor: Tensor, *, ask: bool) -> bool:
        try:
            answer = self._callback(tensor, ask)
            if inspect.isawaitable(answer):
                answer = await answer
            if not isinstance(answer, bool | np.bool_):  # the truth of anything else may have to be waited for
                raise TypeError(
                    f"the eval callback returned {type(answer).__name__} for {tensor.name!r} with ask={ask}: "
                    "expected True or False"
                )
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:
            cause = raised.with_traceback(_beyond_this_file(raised))
        else:
            if self._dropped:  # cancelled by the callback, or one that did not let itself be cancelled
                raise asyncio.CancelledError
            return bool(answer)
        error = EvaluationError(
            f"evaluation {self._evaluation} of {self._loaded.plan.graph.name!r} failed: the eval callback raised "
            f"{type(cause).__name__} (ask={ask}) for {self._describe(split, node, tensor)}: {said_by(cause)}",
            split=split.index,
            backend=self._loaded.splits[split.index].backend.name,
            node=node.name,
            source=node.source,
        )
        raise error from cause

    def _describe(self, split: Split, node: Node, tensor: Tensor) -> str:
        backend = self._loaded.splits[split.index].backend.name
        where = node.source or "an unknown line"
        return f"{tensor.describe()}, made by {node.op!r} at {where} in split {split.index} on {backend!r}"

    # -- launching and waiting ------------------------------------------------------------------

    async def _launch_piece(self, split: Split, begin: int, end: int, values: dict[int, Any]) -> None:
        try:
            piece = await self._pieces.get(self._loaded, split.index, begin, end)
        except AiopipeError:
            raise
        except Exception as error:
            raise failure(self._loaded.plan, self._evaluation, split.index, error) from error
        bound = self._begun = self._loaded.splits[split.index]

        def launch() -> Any:
            try:
                with undisturbed():
                    if not begin:
                        values.update(zip(split.inputs, _enter(bound, self._env.slots), strict=True))
                    results = piece.executable.call(*[values[t] for t in piece.inputs])
            except NodeFailure as invalid:
                if invalid.position is not None:
                    invalid.position += begin
                raise
            values.update(zip(piece.outputs, results, strict=False))  # a token has no tensor
            marker = results[piece.marker]
            bound.backend.launched(marker)
            self._newest = (split.index, marker)
            return marker

        recorder = self._recorder
        job = launch if recorder is None else partial(recorder.launch_part, self._run, bound, launch)
        await self._on_lane(bound, job)

    def _launch_whole(self, split: BoundSplit) -> None:
        if self._recorder is None:
            self._run.launch((split,))
        else:
            self._recorder.launch_one(self._run, split)

    async def _on_lane(self, split: BoundSplit, job: Callable[[], Any]) -> None:
        """Run a job on the lane of a split's backend; if this is cancelled, the job still goes on."""
        future: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        def run() -> None:
            error: BaseException | None = None
            if not self._dropped:
                try:
                    job()
                except BaseException as raised:  # the lane's thread must not end with it
                    error = raised
            self._post(future.set_result, error)

        self._lane_of(split).post(run)
        self._job = future
        error = await asyncio.shield(future)
        if error is not None:
            cause = error.__cause__ if isinstance(error, LaunchError) else error
            assert cause is not None
            self.failed = True
            raise failure(self._loaded.plan, self._evaluation, split.index, cause)

    def _lane_of(self, split: BoundSplit) -> Lane:
        for segment, lane in zip(self._loaded.segments, self._loaded.lanes, strict=True):
            if split.index in segment.splits and type(lane) is not InlineLane:
                return lane
        return self._lanes.lane_for(split.backend, own=True, inline=False)

    async def _wait(self, split: BoundSplit, values: Sequence[Any]) -> None:
        """Wait until values are there; raise the error of the first split that failed, if they are not."""
        if split.backend.all_ready(values):
            error = split.backend.error_of(values)
        else:
            error = await self._answer(
                lambda tell: split.backend.notify(values, lambda error: self._post(tell, error))
            )
        if error is None:
            return
        markers = list(self._env.markers)
        if self._newest is not None:
            markers[self._newest[0]] = self._newest[1]
        under_way = [s for s in self._loaded.splits if markers[s.index] is not None]
        guilty, cause = await self._answer(
            lambda tell: first_failure(under_way, markers, error, self._post, lambda *found: tell(found))
        )
        self.failed = True
        raise failure(self._loaded.plan, self._evaluation, guilty, cause)

    async def _answer(self, ask: Callable[[Callable[[Any], None]], None]) -> Any:
        """What `ask` has its argument called with, on the loop; too late if this was cancelled meanwhile."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ask(lambda answer: None if future.done() else future.set_result(answer))
        return await future


def _enter(split: BoundSplit, slots: list[Any]) -> list[Any]:
    """Bring over what a split needs from elsewhere; return its operands."""
    moved = split.backend.transfer([slots[read] for read, _ in split.moves]) if split.moves else ()
    for (_, fill), value in zip(split.moves, moved, strict=True):
        slots[fill] = value
    operands = split.template.copy()
    for position, slot in split.feeds:
        operands[position] = slots[slot]
    return operands


def _beyond_this_file(error: BaseException) -> Any:
    """The part of an error's traceback that is the user's; the frames before it keep an evaluation's arrays alive."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback
