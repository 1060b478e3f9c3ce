"""The command line, ``aiopipe``: what it takes is in the extra `cli`, and nothing else of aiopipe imports it."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """The command. Returns the exit code where its packages are missing; else it ends by `SystemExit`."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        print(f"error: the command line needs {error.name}: pip install 'aiopipe[cli]'", file=sys.stderr)
        return 1
    app(prog_name="aiopipe")
    return 0
