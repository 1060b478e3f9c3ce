"""``aiopipe example`` and ``aiopipe serve``: the scripts of examples/, which a wheel carries along."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .outcome import Failure, UsageError

__all__ = ["Examples", "find_examples", "run_example"]

PACKAGE = Path(__file__).resolve().parent.parent
HELPERS = frozenset({"arguments", "command", "package"})
"""Files beside the scripts that are none."""


@dataclass(frozen=True, slots=True)
class Examples:
    """The scripts, each with what its first line says."""

    folder: Path
    about: dict[str, str]
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields that docs/cli.md lists."""
        return {
            "folder": str(self.folder),
            "examples": [{"name": name, "about": about} for name, about in self.about.items()],
        }

    def show(self, console: Console) -> None:
        """A table, and where they are."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("example")
        table.add_column("what it does")
        for name, about in self.about.items():
            table.add_row(name, about)
        console.print(table)
        console.print(f"\nto read: {self.folder}", soft_wrap=True)


def find_examples() -> Examples:
    """The scripts of an installed wheel, or of the checkout.

    Raises:
        FileNotFoundError: there are none.
    """
    for folder in (PACKAGE / "examples", PACKAGE.parent / "examples"):
        if (folder / "server.py").is_file():
            scripts = [path for path in sorted(folder.glob("*.py")) if path.stem not in HELPERS]
            return Examples(folder, {path.stem: _first_line(path) for path in scripts})
    raise FileNotFoundError(f"the examples are missing beside {PACKAGE}: install aiopipe again from a wheel")


def _first_line(script: Path) -> str:
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def run_example(name: str, argv: Sequence[str], command: str) -> int:
    """Run a script in this process.

    Args:
        name: which.
        argv: what it gets; its own ``--help`` says what that may be.
        command: what its help calls it.

    Returns:
        Its exit code.

    Raises:
        UsageError: there is no such script.
    """
    found = find_examples()
    if name not in found.about:
        raise UsageError(f"there is no example {name!r}; there are {', '.join(found.about)}")
    sys.path.insert(0, str(found.folder))
    sys.argv = [command, *argv]
    main = importlib.import_module(name).main
    if inspect.iscoroutinefunction(main):
        asyncio.run(main())
        return 0
    code: int = main(list(argv))
    return code
