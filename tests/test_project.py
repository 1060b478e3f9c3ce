"""The project itself: versions agree, the package imports cleanly, and the guards of conftest.py work."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import conftest

ROOT = Path(__file__).resolve().parent.parent
TEXT = frozenset({"", *".cfg .css .html .ini .js .json .jsonl .md .py .sh .toml .txt .yaml .yml".split()})


def tracked_text_files() -> list[Path]:
    """What is under version control, or, in an unpacked sdist, what is there."""
    found: list[Path] = []
    git = shutil.which("git")
    if git is not None and (ROOT / ".git").exists():
        command = [git, "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(command, capture_output=True, check=False)
        found = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    if not found:
        folders = ("aiopipe", "benchmarks", "docs", "examples", "scripts", "tests")
        found = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    return [path for path in found if path.suffix in TEXT and path.is_file() and "__pycache__" not in path.parts]


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(\d[^\]]*)\]", changelog, flags=re.MULTILINE)
    assert headings[0] == version


def test_package_is_typed() -> None:
    assert (ROOT / "aiopipe" / "py.typed").is_file()


def test_import_is_clean() -> None:
    """No warning, and JAX has not started: the user may still configure it."""
    code = "import aiopipe, jax; jax.config.update('jax_num_cpu_devices', 3); assert len(jax.devices('cpu')) == 3"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_brings_nothing_but_what_it_depends_on() -> None:
    """So that it takes little more than importing JAX."""
    code = (
        "import sys, anyio, jax, numpy; before = set(sys.modules); import aiopipe; "
        "print(*(name for name in sys.modules if name not in before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    new = {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    ours = {name for name in new if name.partition(".")[0] == "aiopipe"}
    assert "aiopipe.pipeline" in ours and not any(name.startswith("aiopipe.cli") for name in ours)
    assert new - ours <= {"numpy.typing", "numpy._typing._add_docstring"}


def test_no_paths_of_a_machine() -> None:
    # Put together here, so that this file does not find itself.
    pattern = re.compile("|".join(f"/{folder}/" for folder in ("home", "root", "Users")))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_every_benchmark_and_example_compiles() -> None:
    for folder in ("benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


# The guards of conftest.py ------------------------------------------------------------------------


def as_aiopipe(function: Any) -> Any:
    """The same function, as if it stood in a file of aiopipe."""
    namespace = dict(function.__globals__)
    exec(compile(inspect.getsource(function), conftest.LIBRARY + "pretended.py", "exec"), namespace)
    return namespace[function.__name__]


def sleep(_: Any) -> None:
    time.sleep(0.001)


def wait_for_event(_: Any) -> None:
    threading.Event().wait(0.001)


def join_thread(_: Any) -> None:
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    thread.join()


def wait_for_array(array: Any) -> None:
    array.block_until_ready()


def wait_for_tree(array: Any) -> None:
    jax.block_until_ready({"a": [array, array]})


def read_array(array: Any) -> None:
    np.asarray(array)


def read_number(array: Any) -> None:
    float(array)


WAITS = [sleep, wait_for_event, join_thread]
READS = [wait_for_array, wait_for_tree, read_array, read_number]


def argument_of(function: Any) -> Any:
    """For a function that reads: a number that takes long enough to compute to be caught unfinished."""
    if function in WAITS:
        return None
    operand = jax.numpy.full((600, 600), 1e-3)
    compute(operand).block_until_ready()
    return compute(operand)


@jax.jit
def compute(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x)[0, 0]


def noted() -> list[str]:
    """What the guard has noted; afterwards this test is innocent."""
    calls = list(conftest.blocking_calls)
    conftest.blocking_calls.clear()
    return calls


@pytest.mark.parametrize("function", [*WAITS, *READS])
async def test_blocking_call_of_aiopipe_is_noted(function: Any) -> None:
    as_aiopipe(function)(argument_of(function))
    calls = noted()
    assert calls
    assert all(f"{Path('aiopipe', 'pretended.py')}:" in call and f"({function.__name__})" in call for call in calls)


@pytest.mark.parametrize("function", [*WAITS, *READS])
async def test_blocking_call_of_a_test_is_not(function: Any) -> None:
    function(argument_of(function))
    assert not noted()


@pytest.mark.parametrize("function", READS)
async def test_reading_a_ready_array_is_not(function: Any) -> None:
    array = argument_of(function)
    array.block_until_ready()
    as_aiopipe(function)(array)
    assert not noted()


@pytest.mark.parametrize("function", [*WAITS, *READS])
async def test_blocking_another_thread_is_not(function: Any) -> None:
    await asyncio.to_thread(as_aiopipe(function), argument_of(function))
    assert not noted()


@pytest.mark.asyncio_debug
async def test_debug_mode_is_on() -> None:
    assert asyncio.get_running_loop().get_debug()


@pytest.mark.asyncio_debug(False)
async def test_debug_mode_is_off() -> None:
    assert not asyncio.get_running_loop().get_debug()
