"""`Batcher`: requests that come one by one share evaluations."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from ._fork import Origin
from ._threads import closing_s, in_thread
from .batch_request import INLINE_NBYTES, Call, Request, Template, read_call, to_host
from .batch_tally import BatcherStatistics, Tally
from .batching import Array, Batch, BatchQueue, Part, Sizes, merge, powers_of_two, rows_of
from .closing import check_limit
from .errors import BackendClosedError, OverloadedError, TensorError, WrongLoopError
from .pipeline import Pipeline

__all__ = ["Batcher"]

T = TypeVar("T")


class Batcher:
    """Concurrent calls of one pipeline, merged along axis 0: ``y = await batcher(x)`` in each of many request handlers.

    Calls that wait at the same time, with equal structures, types and shapes (but for axis 0), share an evaluation. It
    begins when `max_batch` rows are there, or the oldest of them has waited for `max_wait`, and a slot of the pipeline
    is free: so batches grow by themselves while the pipeline is busy, and up to `n_copies` of them overlap. A batch is
    padded to one of a few sizes, each of which is compiled once. Every call gets its own rows of the result, as NumPy
    arrays of its own.

    A call that is cancelled takes its rows with it, or, if they are on their way, has them discarded. A batch that
    fails raises its error in the calls of this batch, and a pytree node that cannot be put together in the call whose
    rows it has. Nobody else notices either.

    Args:
        pipe: what evaluates; it stays open for longer than the batcher. Each row of its results must depend on the same
            row of its inputs alone, and every result must have the axis of rows in front.
        max_batch: rows of a batch at most. A call with more is cut into several batches.
        max_wait: seconds that a call waits for others at most, while a slot is free.
        buckets: numbers of rows that batches are padded to, ascending; `max_batch` is the last of them. By default the
            powers of two below it, and itself.
        lengths: for inputs whose axis 1 differs, as sequences of tokens have it: what that axis is padded to,
            ascending. A batch takes the first that holds its longest call. All inputs with an axis 1 must have it of
            one length; results keep the padded length.
        pad: what axis 1 is padded with; also inside a mask, so that 0 there means padding.
        max_queue: rows that may wait at most.
        like: inputs as every call must have them, arrays or `jax.ShapeDtypeStruct` with any number of rows: a tuple or
            a list has the inputs of a call, anything else is its only one. Without it calls of another kind are
            evaluated by themselves, and what is wrong with them is known only then.

    Raises:
        ValueError: a size makes no sense.

    Example::

        async with ap.Pipeline(model, params, devices=["cpu:0", "cpu:1"]) as pipe, ap.Batcher(pipe) as batcher:
            y = await batcher(x)            # x and y: (rows, ...)
            y = await batcher.single(item)  # without the axis of rows
    """

    def __init__(
        self,
        pipe: Pipeline,
        *,
        max_batch: int = 32,
        max_wait: float = 0.002,
        buckets: Sequence[int] | None = None,
        lengths: Sequence[int] = (),
        pad: Any = 0,
        max_queue: int = 1024,
        like: Any = None,
    ) -> None:
        if max_batch < 1 or max_queue < 1 or not 0 <= max_wait < math.inf:
            raise ValueError(
                f"got max_batch={max_batch}, max_queue={max_queue}, max_wait={max_wait}; expected whole numbers of at "
                "least 1 and seconds"
            )
        chosen = powers_of_two(max_batch) if buckets is None else tuple(buckets)
        if not chosen or chosen[-1] != max_batch:
            raise ValueError(f"got buckets {chosen} for max_batch={max_batch}, which must be the last of them")
        self._pipe = pipe
        self._sizes = Sizes(chosen, tuple(lengths))
        self._pad = pad
        self._max_queue = max_queue
        self._template = None if like is None else Template(like, bool(self._sizes.lengths))
        self._queue = BatchQueue(self._sizes, max_wait)
        self._tally = Tally()
        self._requests: dict[int, Request] = {}
        self._n_requests = 0
        self._running: dict[asyncio.Task[None], Batch] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limit = 1
        self._closed = False
        self._origin = Origin()
        # Batches belong to no caller: whose call happens to start one must not matter to what the pipeline sees.
        self._context = contextvars.copy_context()

    async def __call__(self, *inputs: Any) -> Any:
        """The pipeline's result for these inputs, (rows, ...) each; NumPy arrays.

        Args:
            inputs: as the pipeline takes them, each array with an axis of rows in front, of one length for all. They
                must stay as they are until the call returns.

        Raises:
            TensorError: the inputs do not fit, among themselves or with `like`; or the pipeline's results are no rows.
            OverloadedError: too much is waiting; `retry_after_s` says when to try again.
            BackendClosedError: the batcher or its pipeline is closed, or was before the result was there.
            EvaluationError: the batch failed on a device. Other errors of the pipeline likewise.
        """
        return await self._evaluate(inputs, single=False)

    async def single(self, *inputs: Any) -> Any:
        """The same for one item: inputs and result without the axis of rows."""
        return await self._evaluate(inputs, single=True)

    async def prepare(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every size now, the largest first, so that no call has to wait for it.

        The pipeline must keep as many plans (`max_plans`) as there are pairs of buckets and lengths.

        Args:
            on_progress: called with (compiled, to compile).

        Raises:
            ValueError: the batcher was made without `like`.
        """
        if self._template is None:
            raise ValueError("what calls look like is not known: give the batcher `like`")
        lengths, buckets = reversed(self._sizes.lengths or (0,)), self._sizes.buckets
        shapes = [(n_rows, length) for length in lengths for n_rows in reversed(buckets)]
        for done, (n_rows, length) in enumerate(shapes):
            if on_progress is not None:
                on_progress(done, len(shapes))
            await self._pipe.plan(*self._template.at(n_rows, length))
        if on_progress is not None:
            on_progress(len(shapes), len(shapes))

    def statistics(self) -> BatcherStatistics:
        """What has been done so far."""
        return self._tally.statistics(waiting=self._queue.n_rows, in_flight=len(self._running))

    async def aclose(self, *, cancel: bool = False, timeout_s: float | None = 30.0) -> None:
        """Evaluate what waits (or with `cancel` drop it), and take nothing more in. Idempotent.

        Args:
            cancel: calls that are not done raise `BackendClosedError`.
            timeout_s: after so long what is left is dropped, too.

        Raises:
            ValueError: `timeout_s` is negative or not a number; nothing is closed.
        """
        check_limit(timeout_s)
        if self._origin.forked:
            return
        self._closed = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._requests and not cancel:
                    self._pump(math.inf)
                    if not self._running:
                        break  # nothing will come of what is left: it is told so
                    await asyncio.wait(self._running)
        except TimeoutError:
            pass
        finally:
            self._drop()
            await self._all_ended()

    async def __aenter__(self) -> Batcher:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await self.aclose(cancel=kind is not None, timeout_s=closing_s(kind))

    def _check_open(self) -> None:
        self._origin.check("this batcher")
        if self._closed:
            raise BackendClosedError("this batcher is closed: make a new one")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._limit = self._pipe.n_copies
            self._loop = loop
        elif self._loop is not loop:
            raise WrongLoopError("this batcher belongs to another event loop: make one for each")

    async def _evaluate(self, inputs: tuple[Any, ...], *, single: bool) -> Any:
        """Wait for the result of a call."""
        self._check_open()
        call = await read_call(inputs, self._sizes, self._pad, self._template, single)
        self._check_open()
        id, request = self._take_in(call)
        try:
            result = await request.result
        except asyncio.CancelledError:
            self._leave(id, request)
            raise
        except BaseException:
            self._tally.failed += 1
            raise
        self._tally.succeeded += 1
        return result

    def _take_in(self, call: Call) -> tuple[int, Request]:
        waiting = self._queue.n_rows
        if call.n_rows > self._max_queue:
            raise TensorError(
                f"got {call.n_rows} rows, but at most {self._max_queue} may wait: send fewer at a time, or give the "
                "batcher a larger `max_queue`"
            )
        if waiting + call.n_rows > self._max_queue:
            self._tally.refused += 1
            taken_s = self._tally.until_taken_s(waiting, self._sizes.max_batch, self._limit)
            after_s = max(self._queue.max_wait_s, taken_s)
            raise OverloadedError(
                f"{waiting} rows wait, and {call.n_rows} more are too many: at most {self._max_queue} may wait "
                f"(max_queue); try again in {after_s:.3g} s",
                waiting=waiting,
                max_queue=self._max_queue,
                retry_after_s=after_s,
            )
        assert self._loop is not None
        id = self._n_requests
        self._n_requests += 1
        cuts = self._sizes.cut(call.n_rows)
        request = self._requests[id] = Request(call, cuts, self._loop)
        now_s = self._loop.time()
        # Beside longer calls a part would be padded to another length than the rest of its call.
        kind = (call.kind, "cut") if len(cuts) > 1 and self._sizes.lengths else call.kind
        full = False
        try:
            for i, (start, stop) in enumerate(cuts):
                full |= self._queue.add(Part((id, i), kind, stop - start, call.n_tokens, now_s))
        except BaseException:  # kinds are compared, and the user's own pytree node may raise there
            self._forget(id, request)
            raise
        self._tally.requests += 1
        if full:
            self._pump(-math.inf)  # what is not full waits, if only for those who call in this pass of the loop
        elif self._timer is None:
            self._set_timer()
        return id, request

    def _leave(self, id: int, request: Request) -> None:
        """A caller does not want its result any more."""
        self._tally.cancelled += 1
        request.leave()
        self._forget(id, request)
        for task, batch in self._running.items():
            if all(part.id[0] not in self._requests for part in batch.parts):
                task.cancel()  # nobody wants any of it

    def _forget(self, id: int, request: Request) -> None:
        self._requests.pop(id, None)
        for i in range(len(request.cuts)):
            self._queue.discard((id, i))

    def _drop(self) -> None:
        """End what is left."""
        error = BackendClosedError("the batcher was closed before this result was there")
        for id, request in list(self._requests.items()):
            request.fail(error)
            self._forget(id, request)
        for task in self._running:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _all_ended(self) -> None:
        """Wait for every batch, also where this is cancelled: no task may be left that nobody knows."""
        cancelled: asyncio.CancelledError | None = None
        while self._running:
            try:
                await asyncio.wait(self._running)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _pump(self, now_s: float) -> None:
        """Begin what may begin by now, and see to it that the rest is looked at in time."""
        assert self._loop is not None
        while len(self._running) < self._limit:
            batch = self._queue.next_batch(now_s)
            if batch is None:
                break
            ids = [part.id for part in batch.parts]
            structure = self._requests[ids[0][0]].call.structure
            work = self._run(batch, structure, [self._requests[id].arrays(i) for id, i in ids])
            task = self._loop.create_task(work, name="aiopipe batch", context=self._context)
            self._running[task] = batch
            task.add_done_callback(self._ended)
        if self._timer is None:
            self._set_timer()

    def _set_timer(self) -> None:
        """Look again when somebody has waited long enough; where no slot is free, the next that ends does so."""
        assert self._loop is not None
        due_s = self._queue.due_s()
        if due_s is not None and len(self._running) < self._limit:
            self._timer = self._loop.call_at(due_s, self._due, due_s, context=self._context)

    def _due(self, due_s: float) -> None:
        assert self._loop is not None
        self._timer = None
        self._pump(max(due_s, self._loop.time()))

    def _ended(self, task: asyncio.Task[None]) -> None:
        assert self._loop is not None
        batch = self._running.pop(task)
        try:
            if task.cancelled():  # by others, before it began
                self._fail(batch, BackendClosedError("its batch was cancelled before this result was there"))
            elif not isinstance(task.exception(), (KeyboardInterrupt, SystemExit)):  # which the loop has had already
                task.result()  # it raises nothing but what is a fault of this file
        finally:
            if self._requests:
                self._pump(math.inf if self._closed else self._loop.time())

    async def _run(self, batch: Batch, structure: Any, values: list[list[Array]]) -> None:
        """Evaluate a batch; give everybody what is theirs.

        Args:
            batch: its parts.
            structure: of the inputs.
            values: the inputs of each part.
        """
        assert self._loop is not None
        began_s = self._loop.time()
        self._tally.began(batch, began_s)
        try:
            made, rows = await self._results(batch, structure, values)
            self._tally.ended(self._loop.time() - began_s)
            for (id, i), found in zip((part.id for part in batch.parts), rows, strict=True):
                request = self._requests.get(id)  # None where its caller has left
                if request is not None and request.succeed(i, found, made):
                    del self._requests[id]
        except asyncio.CancelledError:  # of this task, as nobody is left; or of the evaluation, by its scheduler
            self._fail(batch, BackendClosedError("the pipeline was closed before this result was there"))
        except (KeyboardInterrupt, SystemExit):
            self._fail(batch, BackendClosedError("the program was to end before this result was there"))
            raise
        except BaseException as error:
            if self._loop.is_closed():
                raise  # this is `GeneratorExit`, and nobody can be told
            self._fail(batch, error)

    async def _results(self, batch: Batch, structure: Any, values: list[list[Array]]) -> tuple[Any, list[list[Array]]]:
        """The structure of the results, and the arrays of each part."""
        n_given = sum(array.nbytes for arrays in values for array in arrays)
        inputs = await _copied(lambda: merge(batch, values, self._pad), n_given)
        result = await self._pipe(*jax.tree.unflatten(structure, inputs))
        leaves, made = jax.tree.flatten(result)
        for leaf in leaves:
            if not leaf.shape or leaf.shape[0] != batch.size:
                raise TensorError(
                    f"a result has the shape {tuple(leaf.shape)} for a batch of {batch.size} rows, expected a row for "
                    "each: only such results can be parted among the calls"
                )
        arrays = await to_host(leaves)
        return made, await _copied(lambda: rows_of(batch, arrays), sum(array.nbytes for array in arrays))

    def _fail(self, batch: Batch, error: BaseException) -> None:
        for id in {part.id[0] for part in batch.parts}:
            request = self._requests.get(id)
            if request is not None:
                request.fail(error)
                self._forget(id, request)


async def _copied(copy: Callable[[], list[T]], nbytes: int) -> list[T]:
    """Copy arrays here, or in a thread where that takes long."""
    return copy() if nbytes <= INLINE_NBYTES else await in_thread(copy, "batch")
