"""Every code block of the documents: Python runs, commands exist, data can be read."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiopipe.cli.app import app
from blocks import COMPARED, Block, blocks_of, fits, run_page
from serving import Host

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = ROOT / "docs" / "api.md"
"""Its blocks are signatures, which are no programs; tests/test_api_reference.py checks them."""

BLOCKS: dict[str, list[Block]] = {
    path.relative_to(ROOT).as_posix(): blocks_of(path.read_text(encoding="utf-8"))
    for path in FILES
    if path != GENERATED
}
PROGRAMS = [page for page, blocks in BLOCKS.items() if any(block.language == "python" for block in blocks)]
ASKS_A_SERVER = "http://127.0.0.1:8000"
# Those of `console` are run and compared by tests/test_cli_docs.py.
LANGUAGES = {"", "console", "html", "json", "nginx", "python", "pytb", "sh", "text", "toml"}


# flax 0.12.0, the newest for the oldest JAX, says these when flax.nnx is imported.
SAID_BY_FLAX = ("jax.array_ref is deprecated", "jax.ArrayRef is deprecated")
WARNINGS = ["-Werror", *(f"-Wignore:{message}" for message in SAID_BY_FLAX)]


class Pages:
    """A process that runs pages: `tests/blocks.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *WARNINGS, str(ROOT / "tests" / "blocks.py")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == {"ready": True}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def run(self, page: Path, swap: dict[str, str]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"page": str(page), "swap": swap}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    host = Pages()
    try:
        yield host
    finally:
        host.close()


@pytest.fixture
def swap(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """For a page that asks a server: where one is, with the same models by name."""
    page = request.getfixturevalue("page")
    if not any(ASKS_A_SERVER in block.code for block in BLOCKS[page] if block.language == "python"):
        yield {}
        return
    host: Host = request.getfixturevalue("serve_host")
    url = host.tell(open={"grace_s": 1.0})["url"]
    yield {ASKS_A_SERVER: url}
    host.tell(close=url)
    host.tell(ended=url)


# Python ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", PROGRAMS)
def test_python_runs(page: str, pages: Pages, swap: dict[str, str]) -> None:
    answer = pages.run(ROOT / page, swap)
    too_new = re.search(r"^ImportError: cannot import name '\w+' from 'jax\b.*", answer["error"], re.MULTILINE)
    if too_new and page == "docs/howto/libraries.md":
        pytest.skip(f"a library of this page does not go with this jax: {too_new[0]}")
    assert not answer["error"], answer["error"]
    assert answer["stderr"] == ""
    assert answer["ran"] == sum(block.language == "python" and not block.not_run for block in BLOCKS[page])


@pytest.mark.parametrize("page", BLOCKS)
def test_every_language_is_known(page: str) -> None:
    """So that nothing escapes by another name, such as `py`."""
    assert {block.language for block in BLOCKS[page]} <= LANGUAGES


@pytest.mark.parametrize("page", BLOCKS)
def test_what_is_said_of_a_block_stands_behind_one(page: str) -> None:
    before = ""
    for block in BLOCKS[page]:
        if block.title or block.language == "pytb":
            assert before == "python" and (block.language, block.title) in COMPARED, f"{page}:{block.line}"
        before = block.language


def page_of(*blocks: str) -> str:
    return "\n".join(f"```{block}\n```\n" for block in blocks)


def test_the_runner_runs_blocks_in_order_and_awaits() -> None:
    waits = "python\nimport asyncio\nawait asyncio.sleep(0)\nassert x"
    assert run_page(page_of("python\nx = 1", "sh\nls", waits), "p") == 2


@pytest.mark.parametrize(
    "page",
    [
        page_of("python\nprint(2)", 'text title="prints"\n3'),
        page_of("python\nprint(2)", 'pytb title="raises"\nValueError: 2'),
        page_of("python\nraise ValueError(2)", 'pytb title="raises"\nValueError: 3'),
    ],
)
def test_the_runner_notices_what_is_not_so(page: str) -> None:
    with pytest.raises(AssertionError, match=r"^it (prints|raises)"):
        run_page(page, "p")


def test_the_runner_notices_errors_and_hidden_blocks() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(page_of("sh\nls", "python\n1 / 0"), "p")
    assert caught.value.__notes__ == ["This is the block of p at line 6."]
    with pytest.raises(ValueError, match="2 lines begin with"):
        run_page("- a\n\n      ```python\n      1 / 0\n      ```\n", "p")
    assert run_page("<!-- not run: it cannot -->\n\n" + page_of("python\n1 / 0"), "p") == 0


def test_an_ellipsis_stands_for_anything() -> None:
    assert fits("a … c\nd", "a b\nb c  \nd\n")
    assert not fits("a … c", "a b")


# Everything else -------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SCRIPTS = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("aiopipe/cli", "examples", "benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)


def commands(code: str) -> Iterator[list[str]]:
    """The words of each command; one may go on over lines, in quotes or behind a backslash."""
    pending = ""
    for line in code.splitlines():
        pending += line + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue
        if not line.endswith("\\"):
            pending = ""
            if words:
                yield words
    assert not pending, f"a command that does not end: {pending}"


def check_options(words: list[str]) -> None:
    """Options are ones that some script of ours has."""
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert option == "--help" or f'"{option}"' in SCRIPTS, f"no script takes {option}"


def check_command(words: list[str]) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "make":
        targets = [word for word in rest if "=" not in word]
        assert targets and all(re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE) for target in targets)
        for name, _, value in (word.partition("=") for word in rest if "=" in word):
            assert re.search(rf"^{name} [?:]?=", MAKEFILE, re.MULTILINE), name
            check_options(value.split())
    elif program == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]) is not None, rest[1]
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), rest[0]
        check_options(rest[1:])
    elif program == "pip":
        for extras in re.findall(r"(?:\.|aiopipe)\[([\w,-]+)\]", " ".join(rest)):
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys(), extras
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in rest if word.endswith(".py"))
    elif program == "curl":
        for data in (rest[i + 1] for i, word in enumerate(rest) if word == "-d"):
            json.loads(data)
    elif program == "aiopipe":
        assert rest[0] in COMMANDS, rest[0]
        check_options(rest[1:])
    elif program == "uvicorn":
        assert re.fullmatch(r"\w+:\w+", rest[0]), "module:application, of the page itself"
    else:
        raise AssertionError(f"what of {program} can be checked? Say so here.")


COMMANDS = {command.name for command in app.registered_commands}
CHECKED = {"sh", "json", "toml"}
OTHERS = [(page, block) for page, blocks in BLOCKS.items() for block in blocks if block.language in CHECKED]


@pytest.mark.parametrize(("page", "block"), OTHERS, ids=[f"{page}:{block.line}" for page, block in OTHERS])
def test_commands_exist_and_data_can_be_read(page: str, block: Block) -> None:
    if block.language == "json":
        json.loads(block.code)
    elif block.language == "toml":
        tomllib.loads(block.code)
    else:
        for words in commands(block.code):
            check_command(words)
