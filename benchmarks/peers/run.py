"""The same work by aiopipe and by its peers, interleaved in one run.

    make bench-peers                                         makes the environments, then runs everything
    python benchmarks/peers/run.py --kinds tiny --stages 2 --peers aiopipe,torch

Each peer is a process that lives through a measurement and is told what to do (`_protocol.py`), with the packages
of its own environment, ``.bench/venv-NAME``, pinned in ``requirements-NAME.txt``. Only one works at a time; they
take turns, round after round, and a ratio is the median over the rounds of a peer's time for an evaluation divided
by the yardstick's: the hand-written loop for stages, the whole model in one jit for MiniLM. Below 1 is faster.

Every result is compared, with a computation in float64 (stages) or with the yardstick's embeddings (MiniLM).
"cores" is the CPU time that a peer uses while it works, over the time that passes; "idle cores" while others work.
A peer that cannot run is in the table with the reason. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from _common import STAGES, WINDOW, finish, make_model, progress
from _protocol import Work, decode, save_work
from _table import summary, table
from _worker import PeerError, Worker, cpu_seconds, machine_seconds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROJECT = "project"
"""The environment that this script runs in."""


@dataclass(frozen=True)
class Peer:
    name: str
    environment: str
    command: tuple[str, ...]


STAGE_PEERS = (
    Peer("loop", PROJECT, ("jax_stages.py", "loop")),
    Peer("jit", PROJECT, ("jax_stages.py", "jit")),
    Peer("jit-window", PROJECT, ("jax_stages.py", "jit-window")),
    Peer("aiopipe", PROJECT, ("jax_stages.py", "aiopipe")),
    Peer("torch", "torch", ("torch_pipelining.py",)),
    Peer("spectrax", "spectrax", ("spectrax_mpmd.py",)),
    Peer("ray-compiled", "ray", ("ray_stages.py", "compiled")),
    Peer("ray-actors", "ray", ("ray_stages.py", "actors")),
)
MINILM_PEERS = (
    Peer("jit-window", PROJECT, ("jax_minilm.py", "jit-window")),
    Peer("aiopipe", PROJECT, ("jax_minilm.py", "aiopipe")),
    Peer("sentence-transformers", "sentence-transformers", ("sentence_minilm.py",)),
    Peer("onnxruntime", "onnxruntime", ("onnx_minilm.py",)),
)
PEERS = tuple(dict.fromkeys(peer.name for peer in STAGE_PEERS + MINILM_PEERS))
KINDS = (*STAGES, "minilm")
TOLERANCE = 1e-4
ALL = "all"


@dataclass
class Measurement:
    """What is known of each peer of one combination of kind and number of stages."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    evaluations: dict[str, int] = field(default_factory=dict)
    busy: dict[str, list[float]] = field(default_factory=dict)
    idle: dict[str, list[float]] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)


class Session:
    """Starts the peers of one combination, lets them take turns, and ends them."""

    def __init__(self, options: argparse.Namespace, label: str, work: Work, reference: np.ndarray | None) -> None:
        self.options = options
        self.label = label
        self.work = work
        self.reference = reference
        self.workers: dict[str, Worker] = {}
        self.found = Measurement()

    async def measure(self, peers: Sequence[Peer]) -> Measurement:
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            setup = save_work(str(Path(folder) / "numbers.npz"), self.work)
            try:
                # One after the other: together they would compete for the cores, and some give up after a while.
                for peer in peers:
                    await self.attempt(peer.name, self.start(peer, setup))
                await self.rounds()
            finally:
                await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
        return self.found

    async def attempt(self, name: str, step: Any) -> bool:
        """Do something with a peer; it is out when that fails."""
        try:
            await step
            return True
        except PeerError as error:
            self.found.failed[name] = str(error)
            self.found.seconds.pop(name, None)
            progress(f"{self.label}: {name} failed: {error}")
            if worker := self.workers.pop(name, None):
                await worker.stop()
            return False

    async def start(self, peer: Peer, setup: dict[str, Any]) -> None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        python = sys.executable
        if peer.environment == PROJECT:
            env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks", ROOT / "examples")))
        else:
            folder = self.options.environments / f"venv-{peer.environment}"
            if not (folder / ".installed").exists():
                raise PeerError(f"its environment {folder} is not there; make bench-peers makes it")
            python = str(folder / "bin" / "python")
        progress(f"{self.label}: starting {peer.name}")
        log = self.options.environments / "peers" / f"{peer.name}.log"
        command = [python, str(HERE / peer.command[0]), *peer.command[1:]]
        self.workers[peer.name] = worker = await Worker.start(peer.name, command, env, log)
        self.found.versions[peer.name] = (await worker.ask(setup, self.options.setup_limit))["versions"]
        # Twice as many until it takes long enough to tell how many fill a run.
        count, seconds = WINDOW, 0.0
        while seconds < self.options.seconds / 4:
            count, seconds = await self.run(peer.name, count if not seconds else 2 * count)
        count, seconds = await self.run(peer.name, count)  # by now everything is compiled and warm
        self.found.evaluations[peer.name] = max(WINDOW, round(count * self.options.seconds / seconds))
        self.found.seconds[peer.name] = []

    async def run(self, name: str, evaluations: int) -> tuple[int, float]:
        """One run, its result checked: how many evaluations it was in the end, and the seconds."""
        command = {"cmd": "run", "evaluations": evaluations}
        reply = await self.workers[name].ask(command, self.options.run_limit)
        result = decode(reply["result"])
        if self.reference is None:
            self.reference = result
        if result.shape != self.reference.shape:
            raise PeerError(f"its result has the shape {result.shape}, not {self.reference.shape}")
        error = float(np.abs(result - self.reference).max())
        self.found.errors[name] = max(error, self.found.errors.get(name, 0.0))
        if not error <= TOLERANCE:
            raise PeerError(f"its result is off by {error:.2g}, more than {TOLERANCE:g}")
        return reply["evaluations"], reply["seconds"]

    async def timed(self, name: str) -> None:
        before, machine, began = self.cpu(), machine_seconds(), time.perf_counter()
        count, seconds = await self.run(name, self.found.evaluations[name])
        passed, after, machine_after = time.perf_counter() - began, self.cpu(), machine_seconds()
        self.found.seconds[name].append(seconds / count)
        for other in (before.keys() & after.keys()) - {ALL}:
            # A process that has ended takes its time with it, so the difference may be below zero.
            cores = max(0.0, after[other] - before[other]) / passed
            (self.found.busy if other == name else self.found.idle).setdefault(other, []).append(cores)
        if machine is not None and machine_after is not None:
            ours = after[ALL] - before[ALL]
            self.found.others.append(max(0.0, (machine_after - machine - ours) / passed))

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far of each peer, and of all with this process."""
        pids = {name: worker.process.pid for name, worker in self.workers.items()}
        return cpu_seconds({**pids, ALL: os.getpid()})

    async def rounds(self) -> None:
        for round_ in range(1, self.options.repetitions + 1):
            await self.quiet()
            for name in list(self.workers):
                await self.attempt(name, self.timed(name))
            progress(f"{self.label}: round {round_} of {self.options.repetitions}")

    async def quiet(self) -> None:
        """Wait while somebody else uses the cores, as long as the caller is willing to."""
        end = time.perf_counter() + self.options.patience
        while (before := machine_seconds()) is not None and time.perf_counter() < end:
            await asyncio.sleep(1)
            if (machine_seconds() or 0.0) - before < 0.2:
                break


def report(found: Measurement, peers: Sequence[Peer], yardstick: str, passages: float | None) -> dict[str, Any]:
    """One entry for each peer, and how much of the machine others used meanwhile."""
    numbers = summary(found.seconds, yardstick)
    entries: dict[str, dict[str, Any]] = {}
    for name in (peer.name for peer in peers):
        if name in found.failed:
            entries[name] = {"failed": found.failed[name]}
            continue
        entries[name] = numbers[name]
        if passages is not None:
            entries[name]["passages_per_s"] = round(passages / statistics.median(found.seconds[name]), 1)
        for key, values in (("cores", found.busy), ("idle_cores", found.idle)):
            if values.get(name):
                entries[name][key] = round(statistics.fmean(values[name]), 2)
        entries[name]["max_abs_err"] = float(f"{found.errors[name]:.1g}")
        entries[name]["versions"] = found.versions[name]
    others = round(statistics.fmean(found.others), 2) if found.others else None
    return {"yardstick": yardstick, "cores_used_by_others": others, "peers": entries}


def minilm_work(n_passages: int) -> Work:
    from minilm import model, text

    texts = [passage.text for passage in text.passages(text.python_topics())[:n_passages]]
    tokens = text.tokenize(text.load_tokenizer(), texts)
    pairs = [(batch.ids, batch.mask) for batch in text.batches(tokens, 16)]
    return Work("minilm", window=WINDOW, model=str(model.model_dir()), batches=pairs)


def stages_work(kind: str, n_stages: int) -> tuple[Work, np.ndarray]:
    """The work, and its result."""
    _, params, x = make_model(kind, n_stages)
    repeats = STAGES[kind][0]
    y = x.astype(np.float64)
    for w in params:
        for _ in range(repeats):
            y = np.tanh(y @ w)
    return Work(kind, params, x, repeats, WINDOW), y


async def measure(options: argparse.Namespace, kind: str, n_stages: int | None) -> dict[str, Any]:
    if n_stages is None:
        work, reference, among, yardstick = minilm_work(options.passages), None, MINILM_PEERS, "jit-window"
        passages = sum(len(ids) for ids, _ in work.batches) / len(work.batches)
        where: dict[str, Any] = {"kind": kind, "passages": options.passages, "batches": len(work.batches)}
        label = f"MiniLM, {options.passages} passages"
    else:
        (work, reference), among, yardstick = stages_work(kind, n_stages), STAGE_PEERS, "loop"
        passages = None
        where = {"kind": kind, "stages": n_stages}
        label = f"{kind}, {n_stages} stages"
    peers = [peer for peer in among if peer.name in {*options.peers, yardstick}]
    found = await Session(options, label, work, reference).measure(peers)
    result = report(found, peers, yardstick, passages)
    print(f"\n{label}: time for an evaluation over that of {yardstick!r}, median of {options.repetitions} rounds")
    print(table(result["peers"]), flush=True)
    if result["cores_used_by_others"] is not None:
        print(f"other programs meanwhile used {result['cores_used_by_others']:g} cores", flush=True)
    return where | result


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def among(known: Sequence[str]) -> Any:
        def names(text: str) -> list[str]:
            given = text.split(",")
            if unknown := [name for name in given if name not in known]:
                raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; known are {', '.join(known)}")
            return given

        return names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peers", type=among(PEERS), default=list(PEERS), help="default: all; the yardstick is always there")
    add("--kinds", type=among(KINDS), default=list(KINDS), help=f"default: {','.join(KINDS)}")
    add("--stages", type=among(("2", "4")), default=["2", "4"], help="default: 2,4; MiniLM has two devices")
    add("--repetitions", type=int, default=7, help="rounds (default: %(default)s)")
    add("--seconds", type=float, default=1.0, help="that a run should take (default: %(default)s)")
    add("--passages", type=int, default=256, help="for MiniLM (default: %(default)s)")
    add("--patience", type=float, default=0.0, help="seconds to wait before a round while others use the cores")
    add("--setup-limit", type=float, default=300.0, help="seconds for a peer to get ready (default: %(default)s)")
    add("--run-limit", type=float, default=120.0, help="seconds for one run (default: %(default)s)")
    add("--environments", type=Path, default=ROOT / ".bench", help="folder of the environments and logs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    wanted = [(kind, int(n)) for kind in options.kinds if kind in STAGES for n in options.stages]
    wanted += [(kind, None) for kind in options.kinds if kind not in STAGES]
    results = [asyncio.run(measure(options, kind, n_stages)) for kind, n_stages in wanted]
    print()
    finish({"benchmark": "peers", "window": WINDOW, "repetitions": options.repetitions, "results": results})


if __name__ == "__main__":
    main()
