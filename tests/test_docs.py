"""The documents: what they name exists. What they show runs: tests/test_blocks.py."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import aiopipe

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path for path in FILES}
EVERY_DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS)

TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
ROW = re.compile(r"^\| *(.*?) *\|$", re.MULTILINE)

ANSWERS = {"done", "better", "n/a"}
"""What docs/ggml.md says of a behaviour: none is left open."""


def text_of(document: str) -> str:
    return DOCUMENTS[document].read_text(encoding="utf-8")


def rows(document: str, heading: str) -> list[list[str]]:
    """The cells of every row of the tables whose first column is headed so."""
    found: list[list[str]] = []
    inside = False
    for line in text_of(document).splitlines():
        row = ROW.match(line)
        if row is None:
            inside = False
            continue
        cells = [cell.strip() for cell in row[1].split("|")]
        if cells[0] == heading:
            inside = True
        elif inside and set(line) - set("|- :"):
            found.append(cells)
    return found


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """``test_x`` and ``TestClass::test_x`` of a test file; nothing if it is not there."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + n.name for n in inner if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(names)


def known_test(name: str) -> bool:
    path, _, test = name.partition("::")
    return test in names_in(path) and test.rpartition("::")[2].startswith("test_")


def test_there_are_documents() -> None:
    assert {"README.md", "docs/architecture.md", "docs/ggml.md", "docs/benchmarks.md"} <= DOCUMENTS.keys()


@EVERY_DOCUMENT
def test_named_tests_exist(document: str) -> None:
    named = re.findall(r"tests/\w+\.py::[\w:]+", text_of(document))
    missing = sorted({name for name in named if not known_test(name)})
    assert not missing, "\n".join(missing)


@EVERY_DOCUMENT
def test_named_files_exist(document: str) -> None:
    named = re.findall(r"\b(?:tests|benchmarks|examples|scripts|docs|aiopipe)/[\w/]+\.\w+", text_of(document))
    missing = sorted({name for name in named if not (ROOT / name).is_file()})
    assert not missing, "\n".join(missing)


@EVERY_DOCUMENT
def test_named_make_commands_exist(document: str) -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    named = {code.split()[1] for code in CODE.findall(text_of(document)) if code.startswith("make ")}
    assert named <= targets


@EVERY_DOCUMENT
def test_links_resolve(document: str) -> None:
    here = DOCUMENTS[document].parent
    local = [link.partition("#")[0] for link in LINK.findall(text_of(document)) if "://" not in link]
    missing = sorted({link for link in local if link and not (here / link).exists()})
    assert not missing, "\n".join(missing)


@EVERY_DOCUMENT
def test_named_public_names_exist(document: str) -> None:
    named = set(re.findall(r"\bap\.(\w+)", text_of(document)))
    missing = sorted(name for name in named if name not in aiopipe.__all__)
    assert not missing, missing


def test_every_module_has_a_line_in_the_map() -> None:
    listed = [row[0].strip("`") for row in rows("docs/architecture.md", "file")]
    folder = ROOT / "aiopipe"
    there = [str(path.relative_to(folder)) for path in folder.rglob("*.py") if "__pycache__" not in path.parts]
    assert listed == sorted(there), "docs/architecture.md, Modules: one line for each file of aiopipe/, sorted"


def test_every_benchmark_is_described() -> None:
    there = {path.name for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    described = {row[0].strip("`") for row in rows("docs/benchmarks.md", "script")}
    assert described == there, "docs/benchmarks.md: one row for each script of benchmarks/, no row without a script"


def test_every_behaviour_of_ggml_has_an_answer() -> None:
    behaviours = rows("docs/ggml.md", "behaviour")
    assert len(behaviours) > 80
    for cells in behaviours:
        behaviour, answer, shown_by = cells
        kind = re.match(r"\*\*(.+?)\*\*", answer)
        assert kind is not None and kind[1] in ANSWERS, behaviour
        needs_test = kind[1] in {"done", "better"}
        assert needs_test == ("::" in shown_by), f"{behaviour}: {kind[1]}, shown by {shown_by or 'nothing'}"
        if kind[1] == "n/a":
            assert answer.startswith("**n/a**: "), f"{behaviour}: say why"


def test_every_promise_is_held_by_tests() -> None:
    promises = rows("docs/reliability.md", "promise")
    assert len(promises) > 10
    for promise, shown_by in promises:
        named = CODE.findall(shown_by)
        assert named, f"{promise}: no test"
        for name in named:
            path, _, test = name.partition("::")
            assert (not test and (ROOT / path).is_file()) or test in names_in(path), f"{promise}: there is no {name}"
