"""`Closing`: how a scheduler ends."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Sequence

import anyio

from ._loops import running_loop
from ._threads import in_thread
from .backend import Backend
from .plans import Plans
from .runner import Runner

__all__ = ["Closing"]


class Closing:
    """Ends one scheduler, once, whoever asks and however often.

    Args:
        runner: its evaluations are waited for, or cancelled, and its threads ended.
        plans: what is being loaded is broken off.
        backends: of the scheduler, for messages.
        opened: backends to close at the end.
        let_go: called at the very end.
    """

    def __init__(
        self,
        runner: Runner,
        plans: Plans,
        backends: Sequence[Backend],
        opened: Sequence[Backend],
        let_go: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._names = ", ".join(backend.name for backend in backends)
        self._plans = plans
        self._opened = opened
        self._let_go = let_go
        self._task: asyncio.Task[None] | None = None

    async def close(self, *, cancel: bool, timeout_s: float | None) -> None:
        """`Scheduler.aclose`."""
        if self._runner.origin.forked:
            return
        if self._runner.move():
            self._task = None  # which can never end
        self._runner.closed = True
        if self._task is None:
            self._plans.cancel()
            self._task = running_loop().create_task(self._close(timeout_s), name="aiopipe close")
        if cancel:
            self._runner.cancel_all()
        cancelled: asyncio.CancelledError | None = None
        while not self._task.done():  # threads and arrays must not outlive a cancelled caller
            try:
                with anyio.CancelScope(shield=cancelled is not None):  # its scopes cancel again and again: once will do
                    await asyncio.shield(self._task)
            except asyncio.CancelledError as error:
                cancelled = error
                self._runner.cancel_all()
        if cancelled is not None:
            raise cancelled
        self._task.result()

    def __del__(self) -> None:
        runner = getattr(self, "_runner", None)
        if runner is None or runner.closed or runner.loop is None:  # None, too, where it is another process's
            return
        warnings.warn(
            f"a scheduler over {self._names} was never closed: use it (or its Pipeline) in an 'async with' block, or "
            "await its aclose()",
            ResourceWarning,
            stacklevel=2,
        )
        if runner.idle:  # evaluations whose callers still hold them go on
            runner.lanes.abandon()

    async def _close(self, timeout_s: float | None) -> None:
        """In a task of its own: cancelling whoever waits for it does not break it off."""
        with anyio.move_on_after(timeout_s):
            await self._runner.synchronize()
        self._runner.cancel_all()
        await self._runner.end_observing(timeout_s)
        await in_thread(lambda: self._runner.lanes.close(timeout_s), "close")
        closed = await asyncio.gather(
            *(_close_backend(backend, timeout_s) for backend in self._opened), return_exceptions=True
        )
        self._runner.hang_up()
        self._let_go()
        for error in closed:
            if error is not None:
                raise error


async def _close_backend(backend: Backend, timeout_s: float | None) -> None:
    with anyio.move_on_after(timeout_s):
        await backend.aclose()
