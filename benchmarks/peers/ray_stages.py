"""Stages as Ray actors, each with its jitted stage: ``python ray_stages.py actors | compiled``.

- actors: plain calls, a stage's result reference passed to the next stage,
- compiled: the same actors in a Compiled Graph, whose channels are shared memory.

A local cluster of as many CPUs as there are stages, on the loopback interface; its dashboard is off.
"""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

# Read when Ray is imported and when its processes start.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # Ray would keep one in the user's home
}

import ray
from _protocol import Peer, Work, serve
from ray.dag import InputNode


@ray.remote
class Stage:
    def __init__(self, w: np.ndarray, repeats: int) -> None:
        import jax
        import jax.numpy as jnp

        def stage(w: Any, x: Any) -> Any:
            for _ in range(repeats):
                x = jnp.tanh(x @ w)
            return x

        self.w = jax.device_put(w)
        self.stage = jax.jit(stage)

    def process(self) -> int:
        return os.getpid()

    def step(self, x: np.ndarray) -> np.ndarray:
        # A copy, as x may be a view of a channel, which cannot carry the next one while JAX still holds it.
        return np.asarray(self.stage(self.w, np.array(x)))


class Actors(Peer):
    submit: Callable[[np.ndarray], Any]

    def setup(self, work: Work) -> dict[str, str]:
        self.work = work
        self.folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # logs, sockets
        ray.init(
            num_cpus=len(work.weights),
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=200 << 20,
            _temp_dir=self.folder.name,
        )
        self.stages = [Stage.options(num_cpus=1).remote(w, work.repeats) for w in work.weights]
        self.submit = self.make_submit()
        ray.get(self.submit(work.x))
        return {"ray": ray.__version__}

    def make_submit(self) -> Callable[[np.ndarray], Any]:
        def submit(x: Any) -> Any:
            for stage in self.stages:
                x = stage.step.remote(x)
            return x

        return submit

    def run(self, evaluations: int) -> tuple[int, Any]:
        pending: deque[Any] = deque()
        for x in itertools.repeat(self.work.x, evaluations):
            pending.append(self.submit(x))
            if len(pending) >= self.work.window:
                # Not kept: a result is a view of the channel, which cannot carry the next one before it is gone.
                ray.get(pending.popleft())
        while len(pending) > 1:
            ray.get(pending.popleft())
        return evaluations, np.array(ray.get(pending.popleft()))

    def stop(self) -> None:
        if ray.is_initialized():
            ray.shutdown()
            self.folder.cleanup()


class Compiled(Actors):
    """The graph is there only while it is used: its actors poll their channels, an idle one costs about a core."""

    def wake(self) -> None:
        with InputNode() as x:
            node: Any = x
            for stage in self.stages:
                node = stage.step.bind(node)
        self.graph = node.experimental_compile(_max_inflight_executions=self.work.window)
        self.submit = self.graph.execute
        for _ in range(20):
            ray.get(self.submit(self.work.x))

    def rest(self) -> None:
        self.graph.teardown()


PEERS = {"actors": Actors, "compiled": Compiled}

if __name__ == "__main__":
    serve(PEERS[sys.argv[1]]())
