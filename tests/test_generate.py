"""The command that writes text: its options, its answer, its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import generate as command
import pytest

from llamas import TINY

EXAMPLES = Path(command.__file__).parent
ROOT = EXAMPLES.parent


def run(*argv: str, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "generate.py"), *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_options() -> None:
    options = command.parse([])
    assert (options.devices, options.split, options.max_tokens) == (("cpu:0", "cpu:1"), "auto", 128)
    assert command.sampling_of(options).temperature == 0
    options = command.parse(
        ["--chat", "a", "--chat", "b", "--prompt", "c", "--split", "3,1", "--temperature", "0.7", "--top-k", "5"]
    )
    assert options.chat == ("a", "b") and options.prompt == ("c",) and options.split == (3.0, 1.0)
    assert command.sampling_of(options).top_k == 5
    assert command.parse(["--split", "layers"]).split == "layers"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--devices", "cpu:0,cpu:0"], "different devices"),
        (["--split", "1,2,3"], "3 ratios for 2 devices"),
        (["--split", "even"], "expected auto or layers"),
        (["--max-tokens", "0"], "at least 1"),
        (["--top-p", "0"], "top_p is 0.0, but must be above 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--devices", "cpu:99"], "at most 64 make sense"),
    ],
)
def test_options_that_make_no_sense(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        command.parse(argv)
    assert info.value.code == 2 and message in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        command.parse(["--help"])
    out = capsys.readouterr().out
    assert info.value.code == 0 and "--chat" in out and "examples:" in out


@pytest.mark.timeout(180)  # four programs of twelve layers are compiled, beside whatever else the machine does
def test_it_answers_questions_on_two_devices(tmp_path: Path) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("What is the capital of France?\n\n", encoding="utf-8")
    argv = ["--chat", command.QUESTION, "--prompts-file", str(questions)]
    done = run(*argv, "--devices", "cpu:0,cpu:1", "--max-tokens", "32", "--json")
    assert done.returncode == 0, done.stderr
    *shown, found = done.stdout.strip().splitlines()
    report = json.loads(found)
    for asked, answer in zip(report["texts"], ("Tokyo", "Paris"), strict=True):
        assert answer in asked["text"] and asked["text"] in "\n".join(shown)
        assert asked["finish_reason"] == "stop" and asked["tokens"] > 3
    assert report["decode_tokens_per_s"] > 0 and report["prompt_tokens_per_s"] > 0
    assert all(report["memory_nbytes"][name] > 10**8 and 0 < report["busy"][name] <= 1 for name in ("cpu:0", "cpu:1"))
    assert "tokens/s" in done.stderr and "busy" in done.stderr


@pytest.mark.timeout(180)  # as above
def test_texts_over_three_devices() -> None:
    asked = ["--prompt", "abc", "--prompt", "xyz", "--prompt", "abc"]
    argv = ["--model", str(TINY), *asked, "--n-ctx", "128", "--max-tokens", "6"]
    done = run(*argv, "--devices", "cpu:0,cpu:1,cpu:2", "--split", "layers", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [text["prompt"] for text in report["texts"]] == ["abc", "xyz", "abc"]
    assert [text["tokens"] for text in report["texts"]] == [6, 6, 6]
    assert report["texts"][0]["text"] == report["texts"][2]["text"]  # what is asked twice is written twice
    assert set(report["busy"]) == {"cpu:0", "cpu:1", "cpu:2"}


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(TINY.read_bytes()[:5000])
    for argv, message in (
        (["--model", str(tmp_path / "none.gguf")], "none.gguf"),
        (["--model", str(damaged)], "damaged.gguf"),
        (["--model", str(TINY), "--prompt", "a" * 200, "--n-ctx", "128"], "fewer than the context of 128"),
        (["--model", str(TINY), "--prompt", "abc", "--devices", "nope:0"], "nope"),
    ):
        done = run(*argv)
        assert done.returncode in (1, 2) and message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
