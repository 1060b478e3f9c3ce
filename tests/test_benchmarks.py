"""Every benchmark runs from one end to the other, in small: what it then measures means nothing."""

from __future__ import annotations

import json

import pytest

from processes import ROOT, run_script

SMALL = {
    "batcher": "--clients 4 --rounds 1 --repetitions 1",
    "breakdown": "--evaluations 20",
    "loop_lag": "--loads zero-flop --seconds 0.2 --repetitions 1",
    "memory": "--evaluations 300",
    "overhead": "--evaluations 20 --repetitions 1",
    "planning": "--nodes 100,1000 --trace 100 --repetitions 1",
    "simulated": "--evaluations 5 --devices 2,4",
    "throughput": "--kinds medium --evaluations 5 --repetitions 1",
    "timeline": "--kinds tiny --repetitions 1",
    "weights": "--evaluations 20 --repetitions 1",
}
WITH_A_MODEL = {"generate", "serve_load"}
"""These load a model of 270 MB; what they drive has tests of its own (`test_generator.py`, `test_serve*.py`)."""


def test_none_is_forgotten() -> None:
    assert {script.stem for script in (ROOT / "benchmarks").glob("[!_]*.py")} == SMALL.keys() | WITH_A_MODEL


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(name: str) -> None:
    done = run_script(ROOT / "benchmarks" / f"{name}.py", ROOT, *SMALL[name].split(), warnings="default")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == name
    assert {"jax", "python", "cores"} <= result.keys()
    for check in result.get("checks", ()):
        assert check["what"] and isinstance(check["value"], (int, float)) and isinstance(check["bar"], (int, float))
