"""Stages with spectrax-lib: one function with markers between the stages, `sxjit` without a schedule.

That is its forward-only path: each call hands all stages to JAX and returns before they have finished, so calls
are kept in flight as in the hand-written loop. Its schedules are for training steps, whose results are losses.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import spectrax as spx
from _protocol import Peer, Work, serve
from spectrax.runtime.mpmd import sxjit, sxstage_iter


class Spectrax(Peer):
    def setup(self, work: Work) -> dict[str, str]:
        n_stages = len(work.weights)
        jax.config.update("jax_num_cpu_devices", n_stages)
        mesh = spx.create_mesh(axis_dims=(n_stages, 1, 1, 1, 1, 1), mpmd_axis="pp")

        @sxjit(mesh=mesh)
        def forward(weights: list[Any], x: Any) -> Any:
            for i, w in enumerate(weights):
                if i:
                    x = sxstage_iter(x)
                for _ in range(work.repeats):
                    x = jnp.tanh(x @ w)
            return x

        # Weights on their stages' devices; whatever is there already, it does not move again.
        self.weights = [
            jax.device_put(w, device) for w, device in zip(work.weights, jax.devices()[:n_stages], strict=True)
        ]
        self.forward = forward
        self.work = work
        result = forward(self.weights, work.x).block_until_ready()
        if result.devices() != {jax.devices()[n_stages - 1]}:
            raise RuntimeError(f"the result is on {result.devices()}: the stages did not go to {n_stages} devices")
        return {"spectrax-lib": spx.__version__, "jax": jax.__version__}

    def run(self, evaluations: int) -> tuple[int, Any]:
        pending: deque[Any] = deque()
        last = None
        for x in itertools.repeat(self.work.x, evaluations):
            pending.append(self.forward(self.weights, x))
            if len(pending) >= self.work.window:
                last = pending.popleft().block_until_ready()
        while pending:
            last = pending.popleft().block_until_ready()
        return evaluations, last


if __name__ == "__main__":
    serve(Spectrax())
