"""Code blocks of the documents: read them, and run a page's in order, as somebody would who pastes them one by one.

As a program it is a host: it imports what every page needs once, and runs each page that it is told of in a fork, so
that each meets a JAX that has not started. A line of JSON in, ``{"page": ..., "swap": {...}}``, a line of JSON out.

All ``python`` blocks of a page share a namespace; `await` works at top level, as in a notebook or
``python -m asyncio``. What follows a block as ``text title="prints"`` is what it prints, and ``pytb title="raises"`` is
the error that it raises, as ``Name: message``; ``…`` in either stands for anything. A comment
``<!-- not run: reason -->`` above a block leaves it out.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import linecache
import os
import re
import sys
import tempfile
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

PRINTS, RAISES = "prints", "raises"
COMPARED = {("text", PRINTS), ("pytb", RAISES)}
FILE = "model.py"
"""What plans and errors call the file of a block."""

NOT_RUN = re.compile(r"<!-- not run: (.+?) -->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        line: number of its first line of code.
        language: the first word behind the fence.
        title: what the fence gives as ``title="..."``.
        code: what is inside.
        not_run: the reason that the comment above it gives; empty where there is none.
    """

    line: int
    language: str
    title: str
    code: str
    not_run: str


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a page, in order.

    Raises:
        ValueError: a fence is where Markdown sees none, such as in a paragraph.
    """
    found = []
    comment = ""
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = re.search(r'title="([^"]*)"', rest)
            first = (token.map or [0])[0] + 2
            found.append(Block(first, language, title[1] if title else "", token.content, comment))
        reason = NOT_RUN.search(token.content) if token.type == "html_block" else None
        comment = reason[1] if reason else ""
    fences = len(re.findall(r"^ *```[^`\n]*$", text, re.MULTILINE))
    if fences != 2 * len(found):
        raise ValueError(f"{fences} lines begin with ```, but there are {len(found)} blocks")
    return found


def run_page(text: str, name: str) -> int:
    """Run a page's Python blocks in order; how many.

    Raises:
        AssertionError: a block printed or raised something else than the page says.
    """
    blocks = blocks_of(text)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    ran = 0
    with asyncio.Runner() as runner:
        for block, then in zip(blocks, [*blocks[1:], None], strict=True):
            if block.language == "python" and not block.not_run:
                try:
                    _run_block(block, then, vars(module), runner)
                except Exception as error:
                    error.add_note(f"This is the block of {name} at line {block.line}.")
                    raise
                ran += 1
        left = asyncio.all_tasks(runner.get_loop())
        assert not left, f"tasks are left: {left}"
    return ran


def _run_block(block: Block, then: Block | None, namespace: dict[str, Any], runner: asyncio.Runner) -> None:
    """Run one block, as a file of its own, and compare with the one behind it, if that says what comes of it."""
    wanted = then.title if then is not None and (then.language, then.title) in COMPARED else ""
    expected = then.code if then is not None else ""
    linecache.cache[FILE] = (len(block.code), None, block.code.splitlines(keepends=True), FILE)
    code = compile(block.code, FILE, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    printed = io.StringIO()
    raised = ""
    with contextlib.redirect_stdout(printed):
        try:
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, namespace))
            else:
                exec(code, namespace)
        except Exception as error:
            if wanted != RAISES:
                raise
            raised = f"{type(error).__name__}: {error}"
    if wanted == RAISES:
        assert raised, "it raises nothing"
        assert fits(expected, raised), f"it raises\n{raised}"
    if wanted == PRINTS:
        assert fits(expected, printed.getvalue()), f"it prints\n{printed.getvalue()}"


def fits(expected: str, found: str) -> bool:
    """Whether a text is the expected one, in which ``…`` stands for anything."""

    def lines(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.strip().splitlines())

    pattern = ".*?".join(map(re.escape, lines(expected).split("…")))
    return re.fullmatch(pattern, lines(found), re.DOTALL) is not None


# The host --------------------------------------------------------------------------------------------


def _in_fork(order: dict[str, Any]) -> dict[str, Any]:
    """Run a page in a fork: how many blocks ran, the error if there was one, and what was written to standard error."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.dup2(errors.fileno(), 2)
            answer: dict[str, Any] = {"ran": 0, "error": ""}
            try:
                path = Path(order["page"])
                text = path.read_text(encoding="utf-8")
                for old, new in order["swap"].items():
                    text = text.replace(old, new)
                with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                    answer["ran"] = run_page(text, path.name)
            except BaseException:
                answer["error"] = traceback.format_exc()
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        errors.seek(0)
        answer = json.loads(said) if said else {"ran": 0, "error": "its process has ended"}
        return {**answer, "stderr": errors.read().decode(errors="replace")}


def main() -> None:
    """Answer orders until standard input ends."""
    import aiopipe  # noqa: F401 - and JAX with it, which has started nothing yet

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_in_fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
