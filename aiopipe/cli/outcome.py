"""How a command ends: its result or its error, as text or as one JSON object, and the exit code."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, Protocol

import typer
from rich.console import Console

from .. import __version__
from ..errors import AiopipeError, AllocationError, EvaluationError, PlacementError, TensorError, TraceError
from .interrupt import CtrlC

__all__ = ["ExitCode", "Failure", "FunctionFailed", "Outcome", "UsageError", "carry_out", "users_line"]


class ExitCode(IntEnum):
    """What a command ends with; docs/cli.md says the same."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    FUNCTION = 3
    NO_ROOM = 4
    INTERRUPTED = 130


class UsageError(Exception):
    """What the command was asked for makes no sense."""


class FunctionFailed(Exception):
    """The user's own code raised, which is the cause."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a command fails although it has something to show."""

    code: ExitCode
    message: str


class Outcome(Protocol):
    """What a command found out."""

    @property
    def failure(self) -> Failure | None:
        """Why it fails all the same."""

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints, beside ``command`` and ``aiopipe``."""

    def show(self, console: Console) -> None:
        """Print it for people."""


def carry_out(command: str, work: Callable[[CtrlC], Outcome], *, as_json: bool, debug: bool) -> NoReturn:
    """Do the work, show what came of it, and end the command.

    Args:
        command: its name.
        work: what it does; gets what knows of Ctrl-C, for event loops.
        as_json: one JSON object on standard output, and nothing else.
        debug: show tracebacks.
    """
    code = ExitCode.DONE
    with CtrlC() as ctrl_c, _unchanged() if debug else _without_logs_of_jax():
        try:
            # What a user's code prints is for people, and would spoil a JSON object.
            with _stdout_is_stderr() if as_json else _unchanged():
                outcome = work(ctrl_c)
            failure = outcome.failure
            found = outcome.to_json()
            if as_json:
                _print_json(command, {**found, **({"error": _as_json(failure)} if failure else {})})
            else:
                outcome.show(_console())
            if failure is not None:
                _say(failure)
                code = failure.code
        except (KeyboardInterrupt, asyncio.CancelledError):
            ctrl_c.say()
            code = ExitCode.INTERRUPTED
        except BrokenPipeError:
            raise  # whoever read it has left: the parser ends quietly
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if debug:
                traceback.print_exc()
            failure = _failure_of(error)
            if failure is None:
                failure = Failure(ExitCode.FAILED, f"{type(error).__name__}: {error} (--debug shows where)")
            if as_json and failure.code is not ExitCode.USAGE:
                _print_json(command, {"error": _as_json(failure)})
            _say(failure)
            code = failure.code
    raise typer.Exit(int(code))


def _failure_of(error: Exception) -> Failure | None:
    """What an error means for who typed the command; None where it is no business of theirs."""
    message = str(error)
    if isinstance(error, UsageError):
        return Failure(ExitCode.USAGE, message)
    if isinstance(error, AllocationError):
        return Failure(ExitCode.NO_ROOM, message)
    if isinstance(error, PlacementError):
        return Failure(ExitCode.USAGE, message)
    if isinstance(error, FunctionFailed):
        return Failure(ExitCode.FUNCTION, message)
    if isinstance(error, (TraceError, TensorError, EvaluationError)):
        cause = error.__cause__
        why = f"\n{type(cause).__name__}: {cause}" if cause is not None and str(cause) not in message else ""
        return Failure(ExitCode.FUNCTION, _TRACEBACK.sub(_last_line, message + why))
    if isinstance(error, (AiopipeError, OSError)):
        return Failure(ExitCode.FAILED, message)
    return None


_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:  File .*\n(?:    .*\n)*)*")
_FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)')


def _last_line(found: re.Match[str]) -> str:
    """What stands for a traceback that XLA has put into a message."""
    frames = _FRAME.findall(found[0])
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]} ({frames[-1][2]}): " if frames else ""


_LIBRARIES = (
    str(Path(__file__).resolve().parent.parent),
    str(Path(json.__file__).parent.parent),
    "site-packages",
    "dist-packages",
)


def users_line(error: BaseException) -> str:
    """Where in the user's code an error came up, as ``model.py:12 (layer)``; empty if nowhere there."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in _LIBRARIES) and not frame.filename.startswith("<"):
            return f"{Path(frame.filename).name}:{frame.lineno}" + (
                "" if frame.name == "<module>" else f" ({frame.name})"
            )
    return ""


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    before, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout = before


@contextmanager
def _without_logs_of_jax() -> Iterator[None]:
    """JAX logs the traceback of a callback that failed; the command says the same in one line."""
    logger = logging.getLogger("jax")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


def _console() -> Console:
    """Standard output; where it is no terminal, wide enough for every table. Brackets in names are no markup."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=160)


def _print_json(command: str, found: dict[str, Any]) -> None:
    print(json.dumps({"command": command, "aiopipe": __version__, **found}, indent=2, allow_nan=False), flush=True)


def _as_json(failure: Failure) -> dict[str, Any]:
    return {"exit_code": int(failure.code), "message": failure.message}


def _say(failure: Failure) -> None:
    print(f"error: {failure.message}", file=sys.stderr, flush=True)
