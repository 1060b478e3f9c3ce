"""The driver of benchmarks/peers: what it says to peers, and what it makes of their answers. Installs nothing."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "peers"))

import _protocol as protocol
import run as driver
from _table import ratios, summary, table
from _worker import PeerError, Worker, cpu_seconds, family

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"


class Doubler(protocol.Peer):
    """Fails when it is asked for 13 evaluations."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self, work: protocol.Work) -> dict[str, str]:
        self.work = work
        return {"doubler": "1"}

    def wake(self) -> None:
        self.calls.append("wake")

    def run(self, evaluations: int) -> tuple[int, Any]:
        if evaluations == 13:
            raise ValueError("unlucky")
        self.calls.append("run")
        return evaluations, [self.work.x * 2, self.work.x * 2]

    def rest(self) -> None:
        self.calls.append("rest")

    def stop(self) -> None:
        self.calls.append("stop")


WORK = protocol.Work(
    "tiny",
    [np.eye(3, dtype=np.float32), np.ones((3, 3), np.float32)],
    np.arange(6, dtype=np.float32).reshape(2, 3),
    repeats=5,
    window=2,
    model="here",
    batches=[(np.ones((2, 4), np.int32), np.zeros((2, 4), np.int32))],
)


def talk(peer: protocol.Peer, *commands: dict[str, Any]) -> list[dict[str, Any]]:
    out = io.StringIO()
    protocol.serve(peer, [json.dumps(command) + "\n" for command in commands], out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_work_arrives_as_it_was_sent(tmp_path: Path) -> None:
    arrived = protocol.load_work(json.loads(json.dumps(protocol.save_work(str(tmp_path / "numbers.npz"), WORK))))
    assert (arrived.kind, arrived.repeats, arrived.window, arrived.model) == ("tiny", 5, 2, "here")
    np.testing.assert_equal(arrived.weights, WORK.weights)
    np.testing.assert_equal(arrived.x, WORK.x)
    np.testing.assert_equal(arrived.batches, WORK.batches)


def test_a_conversation(tmp_path: Path) -> None:
    peer = Doubler()
    setup = protocol.save_work(str(tmp_path / "numbers.npz"), WORK)
    run, unlucky = ({"cmd": "run", "evaluations": n} for n in (3, 13))
    replies = talk(peer, setup, run, unlucky, {"cmd": "dance"}, {"cmd": "stop"}, run)
    assert [reply["ok"] for reply in replies] == [True, True, False, False, True]
    assert replies[0]["versions"] == {"doubler": "1"}
    assert replies[1]["evaluations"] == 3 and replies[1]["seconds"] >= 0
    np.testing.assert_equal(protocol.decode(replies[1]["result"]), np.concatenate([WORK.x * 2] * 2))
    assert replies[2]["error"] == "ValueError: unlucky"
    assert "'dance'" in replies[3]["error"]
    assert peer.calls == ["wake", "run", "rest", "wake", "rest", "stop"]


def test_a_peer_stops_when_the_driver_is_gone() -> None:
    peer = Doubler()
    assert talk(peer) == []
    assert peer.calls == ["stop"]


@pytest.mark.parametrize("array", [np.float32(3), np.zeros((0, 4), np.float32), np.ones((2, 3), np.float64).T])
def test_results_survive(array: np.ndarray) -> None:
    decoded = protocol.decode(protocol.encode(array))
    assert decoded.shape == array.shape
    np.testing.assert_equal(decoded, array)


# A peer's process ---------------------------------------------------------------------------------

FAKE = """\
import os, subprocess, sys, time
sys.path.insert(0, {folder!r})
from _protocol import Peer, serve

class Fake(Peer):
    def setup(self, work):
        print("noise on standard output", flush=True)
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return {{"child": str(self.child.pid)}}
    def run(self, evaluations):
        if evaluations == 99:
            os._exit(3)
        time.sleep(60 if evaluations == 98 else 0)
        return evaluations, 1.5

serve(Fake())
"""


@pytest.fixture
async def worker(tmp_path: Path) -> Any:
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(folder=str(PEERS)), encoding="utf-8")
    started = await Worker.start("fake", [sys.executable, str(script)], {}, tmp_path / "logs" / "fake.log")
    yield started
    await started.stop()


def is_gone(pid: int) -> bool:
    """Not there, or dead and only not yet collected by whoever adopted it."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


async def test_a_process_answers_and_leaves_nothing_behind(worker: Worker, tmp_path: Path) -> None:
    setup = protocol.save_work(str(tmp_path / "numbers.npz"), WORK)
    child = int((await worker.ask(setup, 30))["versions"]["child"])
    reply = await worker.ask({"cmd": "run", "evaluations": 5}, 30)
    assert reply["evaluations"] == 5 and protocol.decode(reply["result"]) == 1.5
    assert "noise" in worker.log.read_text(encoding="utf-8")
    if sys.platform == "linux":
        assert family(worker.process.pid).keys() == {worker.process.pid, child}
        assert cpu_seconds({"fake": worker.process.pid})["fake"] > 0
    await worker.stop()
    assert worker.process.returncode is not None
    if sys.platform == "linux":
        async with asyncio.timeout(20):  # it is killed, but goes when the kernel gets to it
            while not is_gone(child):  # noqa: ASYNC110  # nobody tells when another process has gone
                await asyncio.sleep(0.01)


async def test_a_peer_has_a_time_limit(worker: Worker) -> None:
    with pytest.raises(PeerError, match=r"run took more than 0\.5 s"):
        await worker.ask({"cmd": "run", "evaluations": 98}, 0.5)
    worker.process.kill()  # or stopping it would wait for the rest of the minute


async def test_a_peer_that_dies_says_where_to_look(worker: Worker) -> None:
    with pytest.raises(PeerError, match=r"ended during run; see .*fake\.log"):
        await worker.ask({"cmd": "run", "evaluations": 99}, 30)


# Numbers ------------------------------------------------------------------------------------------

SECONDS = {"loop": [1.0, 2.0, 4.0], "fast": [0.5, 0.5, 4.0], "late": [2.0, 4.0]}


def test_ratios_are_taken_within_a_round() -> None:
    assert ratios(SECONDS, "fast", "loop") == [0.5, 0.25, 1.0]
    assert ratios(SECONDS, "late", "loop") == [2.0, 2.0]


def test_summary() -> None:
    found = summary(SECONDS, "loop")
    assert found["loop"] == {"ms_per_evaluation": 2000.0, "ratio": 1.0, "lowest": 1.0, "highest": 1.0, "best": 1.0}
    assert found["fast"] == {"ms_per_evaluation": 500.0, "ratio": 0.5, "lowest": 0.25, "highest": 1.0, "best": 0.5}
    assert summary({"fast": [0.5]}, "loop") == {"fast": {"ms_per_evaluation": 500.0}}


def test_table_shows_what_failed() -> None:
    lines = table({**summary(SECONDS, "loop"), "gone": {"failed": "no environment"}}).splitlines()
    assert lines[0].split() == ["peer", "ratio", "lowest", "to", "highest", "best", "ms"]
    assert lines[2].split() == ["fast", "0.5", "0.25", "to", "1", "0.5", "500"]
    assert lines[4] == "gone  failed: no environment"


# The driver ---------------------------------------------------------------------------------------


def test_unknown_peers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        driver.parse(["--peers", "aiopipe,abacus"])
    assert "got abacus; known are loop, jit," in capsys.readouterr().err


def test_every_environment_is_pinned_and_made() -> None:
    needed = {peer.environment for peer in driver.STAGE_PEERS + driver.MINILM_PEERS} - {driver.PROJECT}
    pinned = {path.stem.removeprefix("requirements-") for path in PEERS.glob("requirements-*.txt")}
    made = re.search(r"^PEERS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert made is not None
    assert needed == pinned - {"llama-cpp"} == set(made[1].split())  # that one is benchmarks/generate.py's
    for path in PEERS.glob("requirements-*.txt"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert lines and all(re.match(r"[\w-]+==\d", line) for line in lines), path.name


def test_every_script_is_there() -> None:
    for peer in driver.STAGE_PEERS + driver.MINILM_PEERS:
        assert (PEERS / peer.command[0]).is_file(), peer


def test_expected_result() -> None:
    work, expected = driver.stages_work("tiny", 2)
    np.testing.assert_allclose(np.tanh(np.tanh(work.x @ work.weights[0]) @ work.weights[1]), expected, rtol=1e-5)


def test_a_small_run(tmp_path: Path) -> None:
    """With the peers that need no environment, and one whose environment is missing."""
    command = [sys.executable, str(PEERS / "run.py"), "--environments", str(tmp_path)]
    command += "--kinds tiny --stages 2 --peers aiopipe,torch --repetitions 2 --seconds 0.05".split()
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    (tiny,) = result["results"]
    assert (tiny["kind"], tiny["stages"], tiny["yardstick"]) == ("tiny", 2, "loop")
    assert list(tiny["peers"]) == ["loop", "aiopipe", "torch"]
    assert tiny["peers"]["loop"]["ratio"] == 1.0
    assert tiny["peers"]["aiopipe"]["ratio"] > 0
    assert tiny["peers"]["aiopipe"]["max_abs_err"] < 1e-5
    assert "venv-torch is not there" in tiny["peers"]["torch"]["failed"]
    assert "torch    failed: its environment" in done.stdout
