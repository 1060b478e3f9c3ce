"""What the driver and a peer's process say to each other: JSON objects, one a line, on standard input and output.

    {"cmd": "setup", "kind": "tiny", "numbers": "….npz", …}   load, compile, be ready; answers once
    {"cmd": "run", "evaluations": 400}                        answers with seconds, evaluations and the last result
    {"cmd": "stop"}                                           answers, then the process ends

An answer is ``{"ok": true, …}`` or ``{"ok": false, "error": "…"}``. A peer's own environment needs NumPy for this
file, and nothing else. Between commands a process sleeps in `readline`, so that it costs the others nothing.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np

LONGEST_LINE = 1 << 27
"""Bytes of an answer at most; a result of a few megabytes is part of it."""


@dataclass(frozen=True)
class Work:
    """What a peer has to compute.

    Attributes:
        kind: of stages, as in ``_common.STAGES``, or ``minilm``.
        weights: one matrix for each stage.
        x: the input of every evaluation.
        repeats: how often a stage computes ``x = tanh(x @ w)``.
        window: evaluations in flight, where a peer has such a notion.
        model: folder of the weights of MiniLM, as Hugging Face lays them out.
        batches: token ids and masks for MiniLM; one evaluation is one batch, and a run goes over all of them.
    """

    kind: str
    weights: list[np.ndarray] = field(default_factory=list)
    x: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    repeats: int = 1
    window: int = 4
    model: str = ""
    batches: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


class Peer:
    """One way to do the work."""

    def setup(self, work: Work) -> dict[str, str]:
        """Get ready; return the versions of what does the work."""
        raise NotImplementedError

    def wake(self) -> None:
        """Before each run, not timed: whatever cannot be left standing because it uses the cores while idle."""

    def run(self, evaluations: int) -> tuple[int, Any]:
        """Evaluate about so often; return how often it was, and the last result (MiniLM: all results)."""
        raise NotImplementedError

    def rest(self) -> None:
        """After each run, not timed: undo `wake`."""

    def stop(self) -> None:
        """Leave nothing behind."""

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry one command out."""
        match command["cmd"]:
            case "setup":
                return {"ok": True, "versions": self.setup(load_work(command))}
            case "run":
                self.wake()
                try:
                    began = time.perf_counter()
                    evaluations, result = self.run(command["evaluations"])
                    seconds = time.perf_counter() - began
                finally:
                    self.rest()
                return {"ok": True, "seconds": seconds, "evaluations": evaluations, "result": encode(result)}
            case "stop":
                self.stop()
                return {"ok": True}
            case other:
                return {"ok": False, "error": f"got the command {other!r}; known are setup, run and stop"}


def save_work(path: str, work: Work) -> dict[str, Any]:
    """Write the numbers of `work` to a file; return the command that sets a peer up with them."""
    arrays = {f"w{i}": w for i, w in enumerate(work.weights)}
    for i, (ids, mask) in enumerate(work.batches):
        arrays |= {f"ids{i}": ids, f"mask{i}": mask}
    np.savez(path, x=work.x, **arrays)
    plain = {"kind": work.kind, "repeats": work.repeats, "window": work.window, "model": work.model}
    return {"cmd": "setup", "numbers": path, "n_weights": len(work.weights), "n_batches": len(work.batches), **plain}


def load_work(command: dict[str, Any]) -> Work:
    """The work that `save_work` saved."""
    with np.load(command["numbers"]) as arrays:
        return Work(
            command["kind"],
            [arrays[f"w{i}"] for i in range(command["n_weights"])],
            arrays["x"],
            command["repeats"],
            command["window"],
            command["model"],
            [(arrays[f"ids{i}"], arrays[f"mask{i}"]) for i in range(command["n_batches"])],
        )


def encode(result: Any) -> dict[str, Any]:
    """An array, or a list of arrays that are rows of one, as JSON."""
    array = np.concatenate([np.asarray(part) for part in result]) if isinstance(result, list) else np.asarray(result)
    data = np.asarray(array, dtype="<f4", order="C")
    return {"shape": list(data.shape), "float32": base64.b64encode(data.tobytes()).decode("ascii")}


def decode(result: dict[str, Any]) -> np.ndarray:
    """The array that `encode` was given."""
    return np.frombuffer(base64.b64decode(result["float32"]), dtype="<f4").reshape(result["shape"])


def serve(peer: Peer, lines: Iterable[str] | None = None, out: TextIO | None = None) -> None:
    """Be the peer's process: answer until told to stop, or until the driver is gone."""
    if out is None:
        # Libraries print what they like: only answers may reach the driver, so the rest joins standard error.
        out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    stopped = False
    try:
        for line in sys.stdin if lines is None else lines:
            command = json.loads(line)
            stopped = command["cmd"] == "stop"
            try:
                reply = peer.answer(command)
            except Exception as error:
                traceback.print_exc()
                reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(reply) + "\n")
            out.flush()
            if stopped:
                break
    finally:
        if not stopped:
            peer.stop()
