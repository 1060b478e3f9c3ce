"""docs/api.md: up to date, complete, and every public name documented."""

from __future__ import annotations

import enum
import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import aiopipe

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "api_reference.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("api_reference", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api = _load()


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "run `make api`"


def test_every_public_name_has_a_docstring() -> None:
    assert api.undocumented() == []


def test_every_public_name_has_a_section() -> None:
    page = api.reference()
    assert set(re.findall(r"^### (\w+)$", page, flags=re.MULTILINE)) == set(aiopipe.__all__)
    members = re.findall(r"^#### (\w+)\.(\w+)$", page, flags=re.MULTILINE)
    assert ("Scheduler", "graph_compute_async") in members and ("Backend", "synchronize") in members
    assert ("Pipeline", "__call__") in members
    assert not re.search(r"0x[0-9a-f]{6,}", page), "an address would differ from run to run"


# The renderer -------------------------------------------------------------------------------------


class Sample:
    """A thing.

    Args:
        size: how large,
            in bytes.
    """

    def __init__(self, size: int = 3) -> None:
        self.size = size

    def bare(self) -> int:
        return self.size

    async def shown(self, *args: Any, key: str = "k", **options: int) -> list[int]:
        """``args`` as `list`.

            >>> code

        Args:
            args, key: what.
            **options: more.

        Returns:
            A list: always.

        Raises:
            ValueError: never.
        """
        return []

    @property
    def length(self) -> int:
        """How long."""
        return 1


class Inherits(Sample):
    """Another."""

    def bare(self) -> int:
        return 1


@dataclass(frozen=True)
class Bare:
    size: int


class Level(enum.Enum):
    """Levels."""

    LOW = 1


@pytest.fixture
def as_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """These classes, as if they were aiopipe's."""
    monkeypatch.setattr(api, "PACKAGE", __name__)
    monkeypatch.setattr(sys.modules[__name__], "__all__", ["Bare", "Inherits", "Level", "Sample"], raising=False)


@pytest.mark.usefixtures("as_package")
def test_what_has_no_docstring_is_found() -> None:
    assert api.undocumented() == ["Bare", "Inherits.bare", "Sample.bare"]


@pytest.mark.usefixtures("as_package")
def test_a_section() -> None:
    sections = "\n".join(api.sections("Sample", Sample)).split("\n#### ")
    assert sections[0] == (
        "### Sample\n\n```python\nclass Sample(size: int = 3)\n```\n\n"
        "A thing.\n\n**Arguments**\n\n- `size`: how large,\n  in bytes.\n"
    )
    assert sections[2] == "Sample.length\n\n```python\nlength: int  # property\n```\n\nHow long.\n"
    assert sections[3] == (
        "Sample.shown\n\n```python\n"
        "async def shown(*args: Any, key: str = 'k', **options: int) -> list[int]\n```\n\n"
        "`args` as `list`.\n\n    >>> code\n\n"
        "**Arguments**\n\n- `args`, `key`: what.\n- `**options`: more.\n\n"
        "**Returns**\n\nA list: always.\n\n"
        "**Raises**\n\n- `ValueError`: never.\n"
    )


def test_defaults_and_long_signatures() -> None:
    def long(
        first_of_many: dict[str, int] | None = None, second: Level = Level.LOW, *, third: Any = Ellipsis, last: int = 5
    ) -> None: ...

    assert api.signature("long", long) == (
        "def long(\n"
        "    first_of_many: dict[str, int] | None = None,\n"
        "    second: Level = Level.LOW,\n"
        "    *,\n"
        "    third: Any = ...,\n"
        "    last: int = 5,\n"
        ") -> None"
    )


@pytest.mark.usefixtures("as_package")
def test_enums_list_their_members() -> None:
    assert list(api.sections("Level", Level))[-1] == "- `Level.LOW`\n"
