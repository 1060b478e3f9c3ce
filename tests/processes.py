"""Python programs run as a user would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_script(script: Path, folder: Path, *argv: str, warnings: str = "error") -> subprocess.CompletedProcess[str]:
    """A script in a fresh process, in `folder`, with aiopipe on its path; `-W error` unless told otherwise."""
    return subprocess.run(
        [sys.executable, "-W", warnings, str(script), *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
