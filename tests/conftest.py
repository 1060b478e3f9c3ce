"""What holds for every test: six CPU devices, and nothing left behind or blocked.

Three things fail a test whatever it asserts:

- aiopipe blocked the event loop's thread: it waited there for a thread, a lock, a timer, or an
  array that was not ready. The calls themselves are watched, not the clock, so a slow machine
  makes no difference. Test code may block: only calls that aiopipe makes count.
- a thread of aiopipe's outlives it,
- an asyncio task outlives it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Before JAX starts, and nowhere else: the number cannot be changed later.
jax.config.update("jax_num_cpu_devices", 6)

# Examples take as long as the machine lets them. "ci" draws the same ones in every run, AIOPIPE_HYPOTHESIS=long others;
# AIOPIPE_EXAMPLES says how many each property gets. docs/testing.md has the commands.
N_EXAMPLES = int(os.environ.get("AIOPIPE_EXAMPLES", 1000))
settings.register_profile("ci", deadline=None, max_examples=N_EXAMPLES, derandomize=True, database=None)
settings.register_profile(
    "long", deadline=None, max_examples=N_EXAMPLES, suppress_health_check=list(HealthCheck), database=None
)
settings.load_profile(os.environ.get("AIOPIPE_HYPOTHESIS", "ci"))

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = f"{ROOT / 'aiopipe'}{os.sep}"
OURS = tuple(f"{ROOT / folder}{os.sep}" for folder in ("tests", "examples", "benchmarks"))

THREAD_PREFIX = "aiopipe-"
GRACE_S = 2.0
"""How long a thread or task that is ending may take to end."""

DEBUG_MODULES = ("test_scenarios",)
"""Test modules whose names begin so run in asyncio's debug mode, unless they say otherwise."""


@pytest.fixture
def device_specs() -> list[str]:
    """At least two devices to run on: AIOPIPE_TEST_DEVICES, e.g. ``gpu:0,cpu:0``, or two CPU devices."""
    specs = [spec.strip() for spec in os.environ.get("AIOPIPE_TEST_DEVICES", "cpu:0,cpu:1").split(",")]
    if len(specs) < 2 or not all(specs):
        pytest.fail("AIOPIPE_TEST_DEVICES needs at least two devices, as in gpu:0,cpu:0", pytrace=False)
    return specs


@pytest.fixture
def device() -> jax.Device:
    """Not the default one."""
    return jax.devices("cpu")[-1]


@pytest.fixture
def happens_before() -> Iterator[Any]:
    """Says of the devices that it watches, at the latest at the end, what was not ordered: see `happens_before.py`."""
    from happens_before import HappensBefore

    known = HappensBefore()
    with known.watching():
        yield known
    known.check()


@pytest.fixture(scope="session")
def serve_host() -> Iterator[Any]:
    """A process that opens servers over small models, for all tests of them: `serving.Host`."""
    from serving import hosting  # here, as other tests do without its packages

    with hosting() as host:
        yield host


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser for all tests of pages: `webdriver.Chrome`."""
    from browsing import browsing

    with browsing(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


# Blocking calls ----------------------------------------------------------------------------------

blocking_calls: list[str] = []
"""Calls since the last look by which aiopipe blocked a thread with a running event loop."""


def _culprit() -> FrameType | None:
    """The frame of aiopipe that made the current call; None when somebody else did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(LIBRARY):
            return frame
        if path.startswith(OURS) and path != __file__:
            return None
        # Starting a thread waits until it runs, which it does at once.
        if frame.f_code is threading.Thread.start.__code__:
            return None
        frame = frame.f_back
    return None


def _watch(owner: Any, name: str, would_block: Callable[..., bool]) -> None:
    """Note calls of ``owner.name`` that would block an event loop; the call goes on as ever."""
    found = getattr(owner, name)
    original = found.fget if isinstance(found, property) else found

    @functools.wraps(original, assigned=("__module__", "__doc__"))
    def watched(*args: Any, **kwargs: Any) -> Any:
        if asyncio._get_running_loop() is not None and would_block(*args, **kwargs):
            frame = _culprit()
            if frame is not None:
                where = f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno} ({frame.f_code.co_name})"
                blocking_calls.append(f"{where} called {getattr(owner, '__name__', owner)}.{name}")
        return original(*args, **kwargs)

    setattr(owner, name, property(watched) if isinstance(found, property) else watched)


def _unready(value: Any) -> bool:
    """Whether reading the value would wait for a device."""
    is_ready = getattr(value, "is_ready", None)
    if is_ready is None:
        return False
    # Up to JAX 0.10, is_ready() of a deleted array ends the process.
    return not (value.is_deleted() or is_ready())


def _any_unready(tree: Any) -> bool:
    return any(map(_unready, jax.tree.leaves(tree)))


def _first_unready(*args: Any, **kwargs: Any) -> bool:
    return any(map(_unready, args)) or any(map(_unready, kwargs.values()))


def _thread_runs(thread: threading.Thread, timeout: float | None = None) -> bool:
    return thread.is_alive() and timeout != 0


def _condition_waits(condition: threading.Condition, timeout: float | None = None) -> bool:
    return timeout != 0


def pytest_sessionstart() -> None:
    """Put the watches in place.

    Events, semaphores, queues and `concurrent.futures` all wait by way of `Condition.wait`. NumPy
    reads an array on a CPU through the buffer protocol, without asking any method of the array.
    """
    _watch(time, "sleep", lambda seconds: seconds > 0)
    _watch(threading.Thread, "join", _thread_runs)
    _watch(threading.Condition, "wait", _condition_waits)
    _watch(jax, "block_until_ready", _any_unready)
    _watch(jax, "device_get", _any_unready)
    for name in ("array", "asarray", "ascontiguousarray", "copyto"):
        _watch(np, name, _first_unready)
    array_type = type(jax.numpy.zeros(()))
    public = "block_until_ready __array__ __bool__ __float__ __index__ __int__ __repr__ __str__ item tolist".split()
    # What moving an array to another client reads has no public name.
    private = ["_value"] if isinstance(getattr(array_type, "_value", None), property) else []
    for name in public + private:
        _watch(array_type, name, _first_unready)


def _report_blocking(item: pytest.Item) -> None:
    calls = list(dict.fromkeys(blocking_calls))
    blocking_calls.clear()
    if calls and item.get_closest_marker("allow_blocking") is None:
        pytest.fail("the event loop's thread was blocked: " + "\n  ".join(calls), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    _report_blocking(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    _report_blocking(item)


# Debug mode --------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Mark what runs in debug mode, and hold markers to their form."""
    for item in items:
        module = item.path.name
        if module.startswith(DEBUG_MODULES) and item.get_closest_marker("asyncio_debug") is None:
            item.add_marker(pytest.mark.asyncio_debug)
        allowed = item.get_closest_marker("allow_blocking")
        if allowed is not None and not (allowed.args and isinstance(allowed.args[0], str)):
            raise pytest.UsageError(f"{item.nodeid}: allow_blocking needs a reason")


def _wants_debug(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("asyncio_debug")
    if marker is not None:
        return bool(marker.args[0]) if marker.args else True
    return os.environ.get("AIOPIPE_ASYNCIO_DEBUG", "") not in ("", "0")


# What is left behind -----------------------------------------------------------------------------


@pytest.fixture
async def _loop_guard(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Debug mode where it is wanted; afterwards no task may be pending."""
    loop = asyncio.get_running_loop()
    if _wants_debug(request.node):
        loop.set_debug(True)
    before = asyncio.all_tasks()
    yield
    deadline = time.monotonic() + GRACE_S
    me = asyncio.current_task()
    while left := [task for task in asyncio.all_tasks() - before if task is not me]:
        if time.monotonic() > deadline:
            pytest.fail("tasks are left: " + "\n  ".join(map(repr, left)), pytrace=False)
        await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """First to be set up and last to go, so it sees what the test and its other fixtures leave."""
    before = set(threading.enumerate())
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("_loop_guard")
    yield
    deadline = time.monotonic() + GRACE_S
    left = []
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(THREAD_PREFIX):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                left.append(thread.name)
    if left:
        pytest.fail(f"threads are left: {', '.join(sorted(left))}", pytrace=False)
