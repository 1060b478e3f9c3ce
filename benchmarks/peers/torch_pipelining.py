"""Stages with torch.distributed.pipelining: one process for each, gloo over the loopback interface, `ScheduleGPipe`.

A microbatch is one evaluation. The schedule runs a step of many: with a step of only four, the pipeline would fill
and drain all the time, which costs more than letting the first stage run ahead.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _protocol import Peer, Work, serve
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICROBATCHES = 32


class Stage(torch.nn.Module):
    def __init__(self, w: np.ndarray, repeats: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.from_numpy(w), requires_grad=False)
        self.repeats = repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats):
            x = torch.tanh(x @ self.w)
        return x


class Rank:
    """One stage in this process; all ranks call `steps` with the same number."""

    def __init__(self, rank: int, work: Work, rendezvous: str) -> None:
        n_stages = len(work.weights)
        # Stages work at the same time, so together they have as many threads as there are cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // n_stages))
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=n_stages)
        self.x = torch.from_numpy(np.concatenate([work.x] * MICROBATCHES)) if rank == 0 else None
        example = torch.from_numpy(work.x)
        stage = PipelineStage(
            Stage(work.weights[rank], work.repeats),
            rank,
            n_stages,
            torch.device("cpu"),
            input_args=example,
            output_args=example,
        )
        self.schedule = ScheduleGPipe(stage, MICROBATCHES)

    @torch.inference_mode()
    def steps(self, n: int) -> Any:
        """The last evaluation's result, in the last rank."""
        output = None
        for _ in range(n):
            output = self.schedule.eval() if self.x is None else self.schedule.eval(self.x)
        return None if output is None else output.chunk(MICROBATCHES)[-1].numpy()


def follow(rank: int, work: Work, rendezvous: str, pipe: Connection) -> None:
    """The other ranks' processes: sleep until told how many steps to make; no steps means the end."""
    ours = Rank(rank, work, rendezvous)
    pipe.send(None)
    try:
        while steps := pipe.recv():
            pipe.send(ours.steps(steps))
    except EOFError:  # the first rank is gone
        pass
    finally:
        dist.destroy_process_group()


class Torch(Peer):
    def setup(self, work: Work) -> dict[str, str]:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.folder = tempfile.TemporaryDirectory()
        rendezvous = str(Path(self.folder.name) / "rendezvous")
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(1, len(work.weights)):
            ours, theirs = context.Pipe()
            process = context.Process(target=follow, args=(rank, work, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.rank = Rank(0, work, rendezvous)
        for pipe in self.pipes:
            pipe.recv()
        return {"torch": torch.__version__}

    def run(self, evaluations: int) -> tuple[int, Any]:
        steps = -(-evaluations // MICROBATCHES)
        for pipe in self.pipes:
            pipe.send(steps)
        self.rank.steps(steps)
        return steps * MICROBATCHES, [pipe.recv() for pipe in self.pipes][-1]

    def stop(self) -> None:
        for pipe in getattr(self, "pipes", []):
            pipe.send(0)
        for process in getattr(self, "processes", []):
            process.join(10)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    serve(Torch())
