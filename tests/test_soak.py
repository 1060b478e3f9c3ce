"""The soak script for a few seconds; `make soak` runs it for longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(120)
def test_a_few_seconds_of_everything() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "scripts" / "soak.py"), "--minutes", "0.08"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.rpartition("}")[0] + "}")
    assert not found["wrong"]
    assert {"call", "step", "stream", "failed"} <= found["counts"].keys()
