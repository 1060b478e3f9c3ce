"""`Closing`: how a scheduler ends."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import anyio

from ._loops import running_loop
from ._threads import in_thread
from .backend import Backend
from .plans import Plans
from .runner import Runner

__all__ = ["Closing", "check_limit"]


class Closing:
    """Ends one scheduler, once, whoever asks and however often. What raised is done again by whoever asks next.

    Args:
        runner: its evaluations are waited for, or cancelled, and its threads ended.
        plans: what is being loaded is broken off.
        backends: of the scheduler, for messages.
        opened: backends to close at the end.
        let_go: called when all of them are closed.
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
        self._backends = backends
        self._names = ", ".join(backend.name for backend in backends)
        self._plans = plans
        self._opened = list(opened)
        self._let_go = let_go
        self._task: asyncio.Task[None] | None = None

    async def close(self, *, cancel: bool, timeout_s: float | None) -> None:
        """`Scheduler.aclose`."""
        check_limit(timeout_s)
        if self._runner.origin.forked:
            return
        if self._runner.move() or (self._task is not None and _failed(self._task)):
            self._task = None  # which can never end, or has left something
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
        held_up: list[str] = []
        # Each step happens whatever those before it raise, the last one here first; so warnings, which the program may
        # have turned into errors, come when nothing else is left to do.
        async with AsyncExitStack() as steps:
            steps.callback(self._warn, held_up, timeout_s)
            steps.callback(self._let_go)
            steps.callback(self._runner.hang_up)
            steps.push_async_callback(self._close_backends, timeout_s)
            for backend in self._backends:  # those that stay open shall not keep results of this one's
                steps.callback(backend.forget_ready)
            steps.push_async_callback(self._close_lanes, timeout_s, held_up)
            steps.push_async_callback(self._runner.end_observing, timeout_s)
            steps.callback(self._runner.cancel_all)
            with anyio.move_on_after(timeout_s):
                await self._runner.synchronize()

    async def _close_lanes(self, timeout_s: float | None, held_up: list[str]) -> None:
        lanes, idle = self._runner.lanes, self._runner.idle
        held_up += await in_thread(lambda: lanes.close(timeout_s, idle=idle), "close")

    async def _close_backends(self, timeout_s: float | None) -> None:
        """Close those that are not; all of them, whatever one raises."""
        opened = list(self._opened)
        closed = await asyncio.gather(*(_close_backend(each, timeout_s) for each in opened), return_exceptions=True)
        self._opened = [each for each, error in zip(opened, closed, strict=True) if error is not None]
        for error in closed:
            if error is not None:
                raise error

    @staticmethod
    def _warn(held_up: Sequence[str], timeout_s: float | None) -> None:
        if held_up:
            warnings.warn(f"{'; '.join(held_up)}; left alone after {timeout_s} s", ResourceWarning, stacklevel=1)


def check_limit(timeout_s: float | None) -> None:
    """Refuse a time limit for closing that makes no sense, before anything is closed.

    Raises:
        ValueError: it is negative or not a number.
    """
    if timeout_s is not None and not timeout_s >= 0:
        raise ValueError(f"timeout_s is {timeout_s!r}: expected seconds, at least 0 (None for no limit)")


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _close_backend(backend: Backend, timeout_s: float | None) -> None:
    with anyio.move_on_after(timeout_s):
        await backend.aclose()
