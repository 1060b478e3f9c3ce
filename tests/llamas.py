"""What the tests of examples/llama share: the models, compiled steps, and a driver that writes one text."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from llama import model, steps, weights
from llama.sampling import Sampling, single, stack

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny.gguf"
STATIC = ("config", "n_kv")

prefill = jax.jit(steps.prefill, static_argnames=(*STATIC, "last"), donate_argnames="state")
prefill_logits = jax.jit(steps.prefill_logits, static_argnames=STATIC, donate_argnames="state")
decode = jax.jit(steps.decode, static_argnames=STATIC, donate_argnames="state")
decode_rows = jax.jit(steps.decode_rows, static_argnames=STATIC, donate_argnames="state")
decode_rows_logits = jax.jit(steps.decode_rows_logits, static_argnames=STATIC, donate_argnames="state")
decode_logits = jax.jit(steps.decode_logits, static_argnames=STATIC, donate_argnames="state")


@functools.partial(jax.jit, static_argnames=STATIC)
def all_logits(params, cache, tokens, rows, start, config, n_kv):
    """The scores after each token, (batch, length, n_vocab), and the cache."""
    hidden, cache = model.forward(params, cache, tokens, rows, start, config, n_kv)
    return model.logits(params, hidden), cache


@functools.cache
def tiny() -> tuple[model.Config, model.Params]:
    """Random weights, 4 layers, 260 tokens, an output matrix of its own."""
    return _on_device(weights.load(TINY))


@functools.cache
def smollm2() -> tuple[model.Config, model.Params]:
    """SmolLM2-135M as float32; fails with what to install where it is missing."""
    return _on_device(weights.load())


def _on_device(loaded: tuple[model.Config, model.Params]) -> tuple[model.Config, model.Params]:
    return loaded[0], jax.device_put(loaded[1])


def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}_reference.npz") as arrays:
        return dict(arrays)


def write(
    loaded: tuple[model.Config, model.Params],
    prompt: Sequence[int],
    n: int,
    *,
    state: Any = None,
    rows: int = 3,
    row: int = 1,
    chunk: int = 16,
    n_ctx: int = 128,
    n_kv: int = 128,
    sampling: Sampling = Sampling(),  # noqa: B008 - it is frozen
    pad: int = 0,
    others: Mapping[int, tuple[int, int, Sampling]] | None = None,
) -> tuple[list[int], Any]:
    """Continues `prompt` by `n` tokens in one row; returns them, and the state.

    Args:
        others: row to the token and the position that it starts from, and how it chooses; it decodes beside.
    """
    config, params = loaded
    state = steps.new_state(config, rows, n_ctx) if state is None else state
    for start in range(0, len(prompt), chunk):
        part = list(prompt[start : start + chunk])
        padded = np.asarray(part + [pad] * (chunk - len(part)), np.int32)
        args = padded, np.int32(row), np.int32(start), np.int32(len(part))
        token, state = prefill(params, state, *args, single(sampling), config=config, n_kv=n_kv)
    found = [int(token)]
    beside = dict(others or {})
    tokens, positions = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    samplings, active = [Sampling()] * rows, np.zeros(rows, bool)
    for i, (token, position, how) in (beside | {row: (found[0], len(prompt), sampling)}).items():
        tokens[i], positions[i], samplings[i], active[i] = token, position, how, True
    for _ in range(n - 1):
        new, state = decode(params, state, tokens, positions, active, stack(samplings), config=config, n_kv=n_kv)
        tokens, positions = np.array(new), positions + active
        found.append(int(tokens[row]))
    return found, state
