"""docs/cli.md: its commands run, and print what it shows; it lists every field of the JSON and every exit code."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiopipe.cli.outcome import ExitCode
from commands import ROOT, call, run, save_timeline

TEXT = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
CONSOLE = re.compile(r"^```console\n\$ aiopipe (.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN = {command: output for command, output in CONSOLE.findall(TEXT)}
NUMBER = re.compile(r"[\d,]*\d(\.\d+)*(e[+-]\d+)?( [mµn]?s\b)?")
MEASURED = ("bench", "devices")
"""Commands whose numbers depend on the machine."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder, with the module that the page shows."""
    module = re.search(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert module is not None
    (tmp_path / "my_model.py").write_text(module[1], encoding="utf-8")
    save_timeline(tmp_path / "run.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    return tmp_path


def comparable(command: str, text: str) -> str:
    """The lines of an output without blanks at their ends; with N for a number, and one blank for many, if measured.

    Of the devices only their names, as the rest is JAX's, and of a folder nothing.
    """
    lines = [line.rstrip() for line in text.strip().splitlines() if not line.startswith("to read: ")]
    if command.startswith("devices"):
        lines = [line.split()[0] for line in lines]
    elif command.split()[0] in MEASURED:
        lines = [re.sub(r" +", " ", NUMBER.sub("N", line)).strip() for line in lines]
    return "\n".join(lines)


@pytest.mark.allow_blocking("bench measures a loop that blocks")
@pytest.mark.parametrize("command", SHOWN)
def test_command_prints_what_is_shown(command: str, folder: Path) -> None:
    argv, shown = shlex.split(command), SHOWN[command]
    code = 4 if "error: " in shown else 0
    if command.split()[0] == "devices":
        answer = run(*argv, folder=folder)
    else:
        quick = ("--rounds", "9", "--evaluations", "4") if command.startswith("bench") else ()
        answer = call(*argv, *quick, code=code)
    said = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert comparable(command, answer.out + "\n".join(said)) == comparable(command, shown)


def fields(found: Any, path: str = "") -> Iterator[str]:
    """``splits[].index`` for each number or text of a JSON value; of objects in a list, those of the first."""
    if isinstance(found, dict):
        for name, value in found.items():
            yield from fields(value, f"{path}.{name}" if path else name)
    elif isinstance(found, list) and found and isinstance(found[0], dict):
        yield from fields(found[0], f"{path}[]")
    else:
        yield path


def documented(command: str) -> set[str]:
    """The fields that the page lists of a command; ``.type`` behind ``devices[].name`` is ``devices[].type``."""
    table = re.search(rf"^Of `{command}`.*?:\n\n(.*?)\n\n", TEXT, re.MULTILINE | re.DOTALL)
    assert table is not None
    found: set[str] = set()
    for row in table[1].splitlines()[2:]:
        prefix = ""
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            if not name.startswith("."):
                prefix = name.rpartition(".")[0]
            found.add(f"{prefix}{name}" if name.startswith(".") else name)
    return found


@pytest.mark.allow_blocking("bench measures a loop that blocks")
@pytest.mark.parametrize(
    "argv",
    [
        ("devices",),
        ("plan", "my_model:model", "--input", "4x512"),
        ("bench", "my_model:model", "--input", "4x512", "--rounds", "1", "--evaluations", "4"),
        ("timeline", "run.json"),
        ("example",),
    ],
    ids=lambda argv: argv[0],
)
def test_every_field_is_documented(argv: tuple[str, ...]) -> None:
    found = call(*argv, "--json").json
    assert set(fields(found)) - {"command", "aiopipe"} == documented(argv[0])


def test_every_exit_code_is_documented() -> None:
    codes = re.findall(r"^\| (\d+) \|", TEXT[TEXT.index("## Exit codes") :], re.MULTILINE)
    assert sorted(map(int, codes)) == sorted(int(code) for code in ExitCode)
    text = call("--help").out
    assert all(code in text for code in codes)
