"""What raises, and exceptions that are odd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Falsy(Exception):
    """An error of somebody's library, which is false: ``if error`` does not see it."""

    def __bool__(self) -> bool:
        return False


class Empty(Exception):
    """An error that is a collection, and empty."""

    def __len__(self) -> int:
        return 0


class Speechless(Exception):
    """One that cannot be made a text of."""

    def __str__(self) -> str:
        raise ValueError("no text")


def raising(error: BaseException) -> Callable[..., Any]:
    """Called with anything, it raises that."""

    def broken(*_: Any) -> Any:
        raise error

    return broken
