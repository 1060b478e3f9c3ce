"""The soak script for a minute; `make soak` runs it for half an hour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(200)
def test_a_minute_of_everything() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "scripts" / "soak.py"), "--minutes", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.rpartition("}")[0] + "}")
    assert not found["wrong"]
    assert {"call", "step", "stream", "failed", "aborted", "batched", "in time", "snapshot"} <= found["counts"].keys()
