"""examples/ggml_style.py: short, and it runs."""

from __future__ import annotations

import re
from pathlib import Path

from processes import ROOT, run_script

EXAMPLE = ROOT / "examples" / "ggml_style.py"


def test_the_low_level_example_runs(tmp_path: Path) -> None:
    done = run_script(EXAMPLE, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for shown in (
        "4096 bytes> 512 used",
        r"reserved: \{'cpu:1': \d+, 'cpu:2': \d+, 'cpu:0': 0\}",
        r"node +tanh#1 +cpu:2 +usr +float32\[2,16\] +ggml_style\.py:\d+ \(model\)",
        r'digraph "model" \{',
        r"observed tanh#1, of mean -?\d\.\d{3}$",
        r"2 splits, slot 1 is next, \d+ bytes on cpu:2",
        "on cpu:0 and cpu:2: 3 of 3 nodes compared, largest difference 0$",
    ):
        assert re.search(shown, done.stdout, re.MULTILINE), f"no {shown!r} in:\n{done.stdout}"


def test_the_low_level_example_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 80
