"""Every kind of event loop that aiopipe's users have on this platform."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def _eager() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]  # from Python 3.12 on
    return loop


KINDS: dict[str, tuple[Callable[[], asyncio.AbstractEventLoop], bool]] = {
    "asyncio": (asyncio.new_event_loop, False),
    "asyncio-debug": (asyncio.new_event_loop, True),
}
"""Name -> (makes the loop, whether in debug mode)."""

if sys.version_info >= (3, 12):
    KINDS["asyncio-eager"] = (_eager, True)

if sys.platform != "win32" and sys.implementation.name == "cpython":  # as the extra `test` has it
    import uvloop

    KINDS["uvloop"] = (uvloop.new_event_loop, False)
    KINDS["uvloop-debug"] = (uvloop.new_event_loop, True)


def run(kind: str, main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own of that kind; no task may be left."""
    factory, debug = KINDS[kind]

    async def watched() -> T:
        result = await main
        deadline = asyncio.get_running_loop().time() + 2.0
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            assert asyncio.get_running_loop().time() < deadline, f"tasks are left: {left}"
            await asyncio.sleep(0.001)
        return result

    with asyncio.Runner(loop_factory=factory, debug=debug) as runner:
        return runner.run(watched())
