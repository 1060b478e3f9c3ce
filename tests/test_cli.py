"""The command line, as a user types it: every command, every exit code."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import aiopipe as ap
from aiopipe.cli.bench import _difference
from aiopipe.cli.progress import Progress
from aiopipe.cli.words import number, seconds_text
from commands import MODEL, ROOT, call, environment, interrupted, run, save_timeline

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is the current one: `my_model.py` is in it."""
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    return tmp_path


# All of it ---------------------------------------------------------------------------------------


def test_help_has_every_command_and_the_exit_codes() -> None:
    text = call("--help").out
    assert all(name in text for name in ("devices", "plan", "bench", "timeline", "serve", "example"))
    assert "130" in text


@pytest.mark.parametrize("command", ["devices", "plan", "bench", "timeline", "example"])
def test_help_of_a_command_has_examples(command: str) -> None:
    text = call(command, "--help").out
    assert f"aiopipe {command}" in text and "--json" in text


def test_version() -> None:
    import aiopipe

    assert call("--version").out == f"aiopipe {aiopipe.__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        ("fly",),
        ("plan",),
        ("plan", "my_model:model", "--nonsense"),
        ("plan", "my_model", "--input", "4x64"),
        ("plan", "my_model:nothing", "--input", "4x64"),
        ("plan", "no_model:model", "--input", "4x64"),
        ("plan", "my_model:params", "--input", "4x64"),
        ("plan", "my_model:model", "--input", "4 by 64"),
        ("plan", "my_model:model", "--input", "4x64:floot32"),
        ("plan", "my_model:model", "--input", "4x64", "--weights", "nothing"),
        ("plan", "my_model:model", "--input", "4x64", "--weights", "[1, 2"),
        ("plan", "my_model:model", "--input", "4x64", "--devices", "cpu:0,cpu:0"),
        ("plan", "my_model:model", "--input", "4x64", "--devices", "moon:0"),
        ("plan", "my_model:model", "--input", "4x64", "--devices", "sim:0"),
        ("plan", "my_model:model", "--input", "4x64", "--devices", "sim:2,cpu:0"),
        ("plan", "my_model:model", "--input", "4x64", "--devices", "sim:2", "--link", "25 parsecs"),
        ("plan", "my_model:model", "--input", "4x64", "--devices", "sim:2", "--split", "1,2,3"),
        ("plan", "my_model:model", "--input", "4x64", "--devices", "sim:2", "--split", "half"),
        ("plan", "my_model:model", "--input", "4x64", "--devices", "sim:2", "--place", "*"),
        ("plan", "my_model:model", "--input", "4x64", "--devices", "sim:2", "--place", "0=sim:0"),
        ("plan", "my_model:model", "--input", "4x64", "--flops", "1T"),
        ("plan", "my_model:model", "--input", "4x64", "--n-copies", "none"),
        ("bench", "my_model:model", "--input", "4x64", "--devices", "sim:2"),
        ("example", "nothing"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_and_says_what_was_expected(argv: tuple[str, ...]) -> None:
    answer = call(*argv, code=2)
    assert answer.out == ""
    assert "rror" in answer.err or "Usage" in answer.err


def test_without_the_extra_it_says_how_to_get_it(folder: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; import aiopipe.cli; sys.exit(aiopipe.cli.main())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "pip install 'aiopipe[cli]'" in done.stderr


def test_python_dash_m_and_cpu_devices_of_its_own(folder: Path) -> None:
    answer = run("devices", "--cpus", "3", "--json", folder=folder)
    assert [device["name"] for device in answer.json["devices"] if device["type"] == "cpu"] == [
        "cpu:0", "cpu:1", "cpu:2",
    ]  # fmt: skip
    assert answer.err == ""


# devices -----------------------------------------------------------------------------------------


def test_devices() -> None:
    text = call("devices").out
    assert "cpu:0" in text and "cpu:5" in text


def test_devices_as_json() -> None:
    found = call("devices", "--json").json
    assert found["command"] == "devices"
    assert found["devices"][0]["name"] == "cpu:0"
    assert {"cpu", "gpu", "sim", "ray"} <= set(found["backends"])


# plan --------------------------------------------------------------------------------------------


def test_plan() -> None:
    answer = call("plan", "my_model:model", "--input", "4x64", "--devices", "cpu:0,cpu:1")
    assert "16 nodes, 2 splits" in answer.out
    assert "bubble" in answer.out


def test_plan_as_json() -> None:
    found = call("plan", "my_model:model", "--input", "4x64", "--devices", "cpu:0,cpu:1", "--json").json
    assert found["command"] == "plan"
    assert [split["device"] for split in found["splits"]] == ["cpu:0", "cpu:1"]
    assert [device["weights_nbytes"] for device in found["devices"]] == [4 * 64 * 64 * 4] * 2
    assert found["fit"]["fits"] is True
    # Two equal halves that no link holds up: nothing but filling and draining.
    assert found["estimate"]["steady_bubble"] == pytest.approx(0, abs=1e-6)


def test_plan_by_a_path_and_weights_of_other_kinds(folder: Path) -> None:
    want = call("plan", "my_model:model", "--input", "4x64", "--devices", "sim:2", "--json").json
    shapes = "[" + ",".join(['"64x64"'] * 8) + "]"
    for weights in ("init", "my_model:params", shapes, "params"):
        found = call("plan", f"{folder}/my_model.py:model", "--weights", weights, "--input", "float32[4,64]",
                     "--devices", "sim:2", "--json")  # fmt: skip
        assert found.json["devices"] == want["devices"]


def test_plan_with_a_tree_as_input_and_with_a_state() -> None:
    found = call("plan", "my_model:pair", "--input", '{"x": "4x64", "y": "float32[]"}', "--devices", "sim:2", "--json")
    assert [tensor["name"] for tensor in found.json["graph"]["inputs"]] == ["batch/x", "batch/y"]
    found = call("plan", "my_model:step", "--state", "4x64", "--input", "4x64", "--devices", "sim:2", "--json")
    assert sum(device["state_nbytes"] for device in found.json["devices"]) == 4 * 64 * 4


def test_plan_on_simulated_devices_with_slow_links() -> None:
    argv = ("plan", "my_model:model", "--input", "4x64", "--devices", "sim:4", "--json")
    fast = call(*argv).json
    slow = call(*argv, "--link", "1MB/s", "--latency", "10us").json
    assert len(fast["splits"]) == len(slow["splits"]) == 4
    assert slow["estimate"]["alone_s"] > fast["estimate"]["alone_s"] + 3 * 1e-3  # three copies of 1 KB
    assert slow["estimate"]["steady_bubble"] > fast["estimate"]["steady_bubble"]


def test_plan_by_shares_and_by_globs() -> None:
    argv = ("plan", "my_model:model", "--input", "4x64", "--devices", "sim:2", "--json")
    found = call(*argv, "--split", "3,1").json
    assert [device["weights_nbytes"] for device in found["devices"]] == [6 * 64 * 64 * 4, 2 * 64 * 64 * 4]
    found = call(*argv, "--place", "0=sim:1", "--place", "*=sim:0").json
    assert [split["device"] for split in found["splits"]] == ["sim:1", "sim:0"]


def test_plan_compiled_has_the_temporaries() -> None:
    argv = ("plan", "my_model:model", "--input", "4x64", "--devices", "cpu:0,cpu:1", "--json")
    assert call(*argv).json["temporaries_known"] is False
    answer = call(*argv, "--compile")
    assert answer.json["temporaries_known"] is True
    assert "compiling 2/2" in answer.err


def test_a_plan_that_does_not_fit_is_4_and_says_what_would() -> None:
    argv = ("plan", "my_model:model", "--input", "4x64", "--devices", "sim:2", "--json")
    answer = call(*argv, "--memory", "70KB", code=4)
    assert answer.json["fit"]["fits"] is False
    largest = answer.json["fit"]["largest_n_copies"]
    assert 0 < largest < 4
    assert f"n_copies={largest} would fit" in answer.err
    assert call(*argv, "--memory", "70KB", "--n-copies", str(largest)).json["fit"]["fits"] is True
    assert call(*argv, "--memory", "70KB", "--n-copies", "auto").json["n_copies"] == largest


def test_weights_that_do_not_fit_ask_for_more_devices() -> None:
    argv = ("plan", "my_model:model", "--input", "4x64", "--memory", "40KB", "--json", "--devices")
    answer = call(*argv, "sim:2", code=4)
    needed = answer.json["fit"]["devices_needed"]
    assert 4 < needed <= 8  # two weights leave no room for four evaluations
    assert f"{needed} devices" in answer.err
    assert call(*argv, f"sim:{needed}").json["fit"]["fits"] is True


def test_a_function_that_cannot_be_traced_is_3_with_its_line() -> None:
    answer = call("plan", "my_model:breaks", "--input", "4x64", "--devices", "sim:2", code=3)
    assert "my_model.py:" in answer.err and "(breaks)" in answer.err


def test_debug_shows_the_traceback(folder: Path) -> None:
    answer = run("plan", "my_model:breaks", "--input", "4x64", "--devices", "sim:2", "--debug", folder=folder, code=3)
    assert "Traceback" in answer.err and "in breaks" in answer.err


def test_a_module_that_raises_is_3(folder: Path) -> None:
    (folder / "broken.py").write_text("import my_model\n1 / 0\n", encoding="utf-8")
    answer = call("plan", "broken:model", "--input", "4x64", code=3)
    assert "broken.py:2" in answer.err and "ZeroDivisionError" in answer.err


def test_a_module_that_needs_another_is_3_whatever_its_name(folder: Path) -> None:
    for needed in ("jaxless", "nothere"):
        (folder / f"{needed}_model.py").write_text(f"import {needed}", encoding="utf-8")
        assert f"No module named '{needed}'" in call("plan", f"{needed}_model:model", code=3).err
    assert "there is no module" in call("plan", "nothing_model:model", code=2).err


def test_errors_as_json() -> None:
    answer = call("plan", "my_model:breaks", "--input", "4x64", "--devices", "sim:2", "--json", code=3)
    assert answer.json["command"] == "plan"
    assert answer.json["error"]["exit_code"] == 3
    assert answer.json["error"]["message"] in answer.err


def test_ctrl_c_while_the_module_is_imported_is_130(folder: Path) -> None:
    text = "import sys, time\nprint('slow import', file=sys.stderr, flush=True)\ntime.sleep(30)\n"
    (folder / "slow.py").write_text(text, encoding="utf-8")
    answer = interrupted("plan", "slow:model", "--input", "4x64", folder=folder, when="slow import")
    assert answer.code == 130
    assert answer.err.endswith("interrupted\n") and "Traceback" not in answer.err


# bench -------------------------------------------------------------------------------------------

LOOPS = pytest.mark.allow_blocking("the loop that is measured beside blocks, as it does for those who write it")
QUICK = ("--rounds", "2", "--evaluations", "8")


@LOOPS
def test_bench_as_json() -> None:
    argv = ("bench", "my_model:model", "--input", "4x64", "--devices", "cpu:0,cpu:1", *QUICK, "--json")
    answer = call(*argv)
    found = answer.json
    assert (found["command"], found["splits"], found["rounds"], found["evaluations"]) == ("bench", 2, 2, 8)
    runs = found["runs"]
    assert all(runs[name]["per_s"] > 0 and len(runs[name]["seconds"]) == 2 for name in ("pipeline", "loop", "jit"))
    # Of the two rounds: each peer's time over the pipeline's, of which the median is the mean.
    ratios = [b / a for a, b in zip(runs["pipeline"]["seconds"], runs["loop"]["seconds"], strict=True)]
    assert found["ratios"]["loop"] == pytest.approx(sum(ratios) / 2)
    assert found["max_abs_diff"] < 1e-5
    assert "measuring 2/2" in answer.err


@LOOPS
def test_bench() -> None:
    text = call("bench", "my_model:pair", "--input", '{"x": "4x64", "y": "float32[]"}', "-d", "cpu:0,cpu:1", *QUICK).out
    assert all(word in text for word in ("aiopipe", "loop", "jit", "largest difference"))


def test_bench_of_a_function_that_fails_on_a_device_is_3() -> None:
    answer = call("bench", "my_model:fails", "--input", "4x64", "--devices", "cpu:0,cpu:1", *QUICK, "--json", code=3)
    assert "my_model.py:38 (no): RuntimeError: the camera is off" in answer.json["error"]["message"]


def test_bench_that_does_not_fit_is_4() -> None:
    argv = ("bench", "my_model:model", "--input", "4x64", "--devices", "cpu:0,cpu:1", "--memory", "70KB", *QUICK)
    assert "n_copies=" in call(*argv, code=4).err


def test_ctrl_c_while_measuring_is_130(folder: Path) -> None:
    argv = ("bench", "my_model:model", "--input", "4x64", "--devices", "cpu:0,cpu:1", "--rounds", "1000", "--json")
    answer = interrupted(*argv, folder=folder, when="measuring")
    assert answer.code == 130 and answer.out == ""
    assert answer.err.endswith("interrupted\n") and "Traceback" not in answer.err


# timeline ----------------------------------------------------------------------------------------


def test_timeline(folder: Path) -> None:
    save_timeline(folder / "run.json")
    text = call("timeline", "run.json").out
    assert "sim:0" in text and "10 evaluations in 22.0 ms" in text
    found = call("timeline", "run.json", "--plot", "run.png", "--json").json
    first, second = found["devices"]
    # 2 ms and 1 ms for each evaluation, and between them 1.024 ms for the copy.
    assert (first["busy_s"], second["busy_s"]) == (pytest.approx(20e-3), pytest.approx(10e-3))
    assert found["seconds"] == pytest.approx(20e-3 + 1.024e-3 + 1e-3)
    assert found["overlap"]["seconds"] == pytest.approx(8e-3 + 0.976e-3)  # the last one but for its end
    assert (first["splits"], second["copies"], second["copied_nbytes"]) == (10, 10, 10 * 4 * 64 * 4)
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")


def test_names_with_brackets_are_shown_as_they_are(folder: Path) -> None:
    spans = [ap.Span("compute", "[red]a[/b]", 0, 0, 0, 0.0, 1.0)]
    ap.Timeline(spans, ["[red]a[/b]"]).save("run.json")
    (folder / "[old]").mkdir()
    text = call("timeline", "run.json", "--plot", "[old]/run.png").out
    assert "[red]a[/b]" in text and "picture: [old]/run.png" in text
    assert "ends with .png" in call("timeline", "run.json", "--plot", "run.txt", code=1).err


def test_a_timeline_that_is_none(folder: Path) -> None:
    assert "no file" in call("timeline", "nothing.json", code=2).err
    (folder / "bad.json").write_text("{}", encoding="utf-8")
    assert "no timeline" in call("timeline", "bad.json", code=1).err
    assert "no timeline" in call("timeline", "bad.json", "--json", code=1).json["error"]["message"]


# example, serve ----------------------------------------------------------------------------------


def test_examples_are_listed() -> None:
    text = call("example").out
    assert "ggml_style" in text and "Embeds the help topics" in text
    found = call("example", "--json").json
    assert [example["name"] for example in found["examples"]] == ["embed", "generate", "ggml_style", "server"]
    assert Path(found["folder"], "embed.py").is_file()


def test_an_example_runs(folder: Path) -> None:
    assert "splits, slot 1 is next" in run("example", "ggml_style", folder=folder).out


@pytest.mark.parametrize(
    ("argv", "name"),
    [(("example", "embed", "--help"), "aiopipe example embed"), (("serve", "--help"), "aiopipe serve")],
)
def test_help_of_an_example_is_its_own(argv: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["aiopipe", *argv])
    text = call(*argv).out
    assert text.startswith(f"usage: {name}") and f"{name} --devices" in text


# What goes wrong, and what is seldom -------------------------------------------------------------

SIM = ("--devices", "sim:2", "--json")


@pytest.mark.parametrize(
    "argv",
    [
        ("--link", "0GB/s"),
        ("--flops", "0"),
        ("--flops", "1T,2T,3T"),
        ("--memory", f"{10**400}GB"),
        ("--compile",),
        ("--place", "nothing=sim:0"),
        ("--weights", "[3]"),
        ("--weights", "4 by 4"),
        ("--weights", "no_file.py:init"),
    ],
    ids=" ".join,
)
def test_wrong_options_of_plan(argv: tuple[str, ...]) -> None:
    answer = call("plan", "my_model:model", "--input", "4x64", *SIM, *argv, code=2)
    assert argv[0] in answer.err and answer.out == ""


def test_a_module_without_weights_says_how_to_name_them(folder: Path) -> None:
    (folder / "bare.py").write_text("def double(nothing, x):\n    return 2 * x\n", encoding="utf-8")
    assert "--weights" in call("plan", "bare:double", "--input", "4", *SIM, code=2).err
    found = call("plan", "bare:double", "--input", "4:bf16", "--weights", "null", *SIM).json
    assert found["graph"]["weights"] == 0 and found["graph"]["outputs"][0]["dtype"] == "bfloat16"


def test_weights_that_a_function_makes(folder: Path) -> None:
    text = "import numpy as np\nfrom my_model import *\n\ndef looks():\n    w = init()\n"
    text += "    assert float(w[0][0, 0]) < 99\n    return w\n\ndef breaks():\n    return 1 / 0\n"
    (folder / "makers.py").write_text(text, encoding="utf-8")
    argv = ("plan", "makers:model", "--input", "4x64", *SIM, "--weights")
    assert call(*argv, "looks").json["graph"]["weights"] == 8  # JAX alone could not tell
    answer = call(*argv, "breaks", code=3)
    assert "makers.py:10" in answer.err and "ZeroDivisionError" in answer.err


def test_more_cpu_devices_than_jax_has_started_with() -> None:
    assert "started with fewer" in call("devices", "--cpus", "7", code=2).err
    assert "at most" in call("devices", "--cpus", "100000", code=2).err


def test_a_node_that_no_device_has_room_for() -> None:
    answer = call("plan", "my_model:model", "--input", "4x64", *SIM, "--memory", "1KB", code=4)
    assert answer.json["fit"]["devices_needed"] is None and "not even with n_copies=1" in answer.err
    assert call("plan", "my_model:model", "-i", "4x64", *SIM, "--memory", "1KB", "--place", "*=sim:0", code=4).json


def test_an_error_that_nobody_expected_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr("aiopipe.cli.app.find_devices", broken)
    answer = call("devices", "--json", code=1)
    assert answer.json["error"]["message"] == "ZeroDivisionError: inside (--debug shows where)"


def test_whoever_reads_it_may_leave(folder: Path) -> None:
    command = f"{sys.executable} -m aiopipe example | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stderr == "" and done.returncode in (0, 1)


def test_ctrl_c_that_the_users_code_holds_up_ends_it_all_the_same(folder: Path) -> None:
    text = "import sys, time\nprint('slow import', file=sys.stderr, flush=True)\n"
    text += "for _ in range(2):\n    try:\n        time.sleep(30)\n    except KeyboardInterrupt:\n        pass\n"
    (folder / "stubborn.py").write_text(text, encoding="utf-8")
    answer = interrupted("plan", "stubborn:model", "--input", "4x64", folder=folder, when="slow import")
    assert answer.code == 130 and answer.err.endswith("interrupted\n")


def test_progress_on_a_terminal_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with Progress() as progress:
        progress.step("compiling", 1, 2)
        progress.step("compiling", 2, 2)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "compiling" in shown and shown.endswith("\x1b[2K")  # the bar is wiped away


@LOOPS
def test_bench_takes_as_many_evaluations_as_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiopipe.cli.bench.ROUND_S", 0.02)
    found = call("bench", "my_model:model", "--input", "4x64", "-d", "cpu:0", "--rounds", "1", "--json").json
    assert found["evaluations"] >= 4


@LOOPS
def test_bench_leaves_out_what_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> Any:
        def body() -> None:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

        return body

    monkeypatch.setattr("aiopipe.cli.bench.on_one_device", full)
    monkeypatch.setattr("aiopipe.cli.bench.hand_written", lambda *args: None)
    argv = ("bench", "my_model:model", "--input", "4x64", "-d", "cpu:0,cpu:1", *QUICK)
    found = call(*argv, "--json").json
    assert (found["runs"]["jit"], found["runs"]["loop"], found["max_abs_diff"]) == (None, None, None)
    assert "no room" in call(*argv).out


def test_differences_of_results() -> None:
    assert _difference([np.array([1, 2])], [np.array([1, 4])]) == 2.0
    assert _difference(np.array([1j]), np.array([1.0])) == pytest.approx(2**0.5)
    assert _difference(np.array([np.nan, 1.0]), np.array([1.0, 1.0])) is None
    assert _difference([np.array([np.nan, np.inf])], [np.array([np.nan, np.inf])]) == 0.0
    assert _difference(jax.random.key(0), jax.random.key(0)) is None
    assert _difference(np.zeros((0,)), np.zeros((0,))) == 0.0


def test_numbers_for_people() -> None:
    said = [seconds_text(s) for s in (0, 2.5e-9, 12.345e-6, 0.5, 120)]
    assert said == ["0 s", "2.50 ns", "12.3 µs", "500 ms", "120 s"]
    assert [number(n) for n in (float("inf"), 0.125, 12345)] == ["?", "0.125", "12,345"]
