"""Choosing the next token: every row by parameters of its own, with the samplers in llama.cpp's order.

The order is repetition penalty, top-k, top-p, min-p, temperature. A row's choice depends on its own scores, parameters,
seed and position alone, whatever the other rows do.

No step sorts the whole vocabulary without need. A greedy row costs an argmax. Otherwise the `CANDIDATES` best tokens
are sorted, and only a row whose filters may let more of them pass gets a sort of all; a row without filters is drawn
from the unsorted probabilities. The outcome is that of a full sort each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["CANDIDATES", "Sampling", "sample", "single", "stack"]

CANDIDATES = 128
"""How many of the best tokens are sorted in every step that draws."""

_DTYPES = {"top_k": np.int32, "seed": np.uint32}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens of one text are chosen.

    Attributes:
        temperature: scores are divided by it; 0 always takes the best token.
        top_k: only so many of the best tokens may be drawn; 0 sets no limit.
        top_p: only the best tokens that together have this probability may be drawn; 1 sets no limit.
        min_p: only tokens with this share of the best one's probability may be drawn; 0 sets no limit.
        repetition_penalty: divides the score of what was among the last tokens, or multiplies it where it is negative;
            1 changes nothing.
        seed: of the random numbers, below 2**32; with the position it determines them.

    Raises:
        ValueError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, needed in (
            ("temperature", lambda x: 0 <= x < math.inf, "a number of at least 0"),
            ("top_k", lambda x: isinstance(x, int) and 0 <= x < 2**31, "a whole number of at least 0"),
            ("top_p", lambda x: 0 < x <= 1, "above 0 and at most 1"),
            ("min_p", lambda x: 0 <= x <= 1, "from 0 to 1"),
            ("repetition_penalty", lambda x: 0 < x < math.inf, "a number above 0"),
            ("seed", lambda x: isinstance(x, int) and 0 <= x < 2**32, "a whole number from 0 to 2**32 - 1"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not good(value):
                raise ValueError(f"{name} is {value!r}, but must be {needed}")


def stack(samplings: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """The parameters of several rows as arrays, for `sample` and `llama.steps.decode`.

    Returns:
        Each attribute of `Sampling`, (rows,).
    """
    rows = [asdict(sampling) for sampling in samplings]
    return {name: np.asarray([row[name] for row in rows], _DTYPES.get(name, np.float32)) for name in asdict(Sampling())}


def single(sampling: Sampling) -> dict[str, np.ndarray]:
    """The parameters of one row, each value (), for `llama.steps.prefill`."""
    return {name: values[0] for name, values in stack([sampling]).items()}


def sample(logits: jax.Array, recent: jax.Array, sampling: dict[str, Any], positions: jax.Array) -> jax.Array:
    """Chooses a token for each row.

    Args:
        logits: scores, float32 (rows, n_vocab).
        recent: the last tokens of each row, in any order, int32 (rows, window); -1 stands for none.
        sampling: as `stack` gives it, each value (rows,).
        positions: where in its text each row's new token goes, int32 (rows,).

    Returns:
        Token ids, int32 (rows,).
    """
    s = {name: jnp.asarray(value) for name, value in sampling.items()}
    logits = jax.lax.cond(
        jnp.any(s["repetition_penalty"] != 1),
        lambda: _penalize(logits, recent, s["repetition_penalty"]),
        lambda: logits,
    )
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draws = s["temperature"] > 0
    drawn = jax.lax.cond(jnp.any(draws), lambda: _draw(logits, s, positions, draws), lambda: best)
    return jnp.where(draws, drawn, best)


def _penalize(logits: jax.Array, recent: jax.Array, penalty: jax.Array) -> jax.Array:
    n_vocab = logits.shape[-1]

    def one(logits: jax.Array, recent: jax.Array, penalty: jax.Array) -> jax.Array:
        scores = logits[jnp.clip(recent, 0)]
        scores = jnp.where(scores > 0, scores / penalty, scores * penalty)
        # A token that comes several times is set to the same score each time.
        return logits.at[jnp.where(recent < 0, n_vocab, recent)].set(scores, mode="drop")

    return jax.vmap(one)(logits, recent, penalty)


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    # The generator is named, so that a user's choice of another does not change what a seed gives.
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position))


def _draw(logits: jax.Array, s: dict[str, jax.Array], positions: jax.Array, draws: jax.Array) -> jax.Array:
    n_vocab = logits.shape[-1]
    n_top = min(CANDIDATES, n_vocab)
    uniform = jax.vmap(_uniform)(s["seed"], positions)
    total = jax.nn.logsumexp(logits, axis=-1)
    limits = {name: s[name] for name in ("temperature", "top_k", "top_p", "min_p")}

    # Without the barrier XLA merges later slices with top_k's own, and then sorts everything after all.
    top, ids = jax.lax.optimization_barrier(jax.lax.top_k(logits, n_top))
    keep = jax.vmap(_keep, (0, 0, 0, None))(top, total, limits, n_vocab)
    drawn = ids[jnp.arange(len(ids)), jax.vmap(_pick)(top, keep, s["temperature"], uniform)]

    def from_all() -> jax.Array:
        """In the order of the vocabulary."""
        return jax.vmap(_pick)(logits, jnp.ones_like(logits, bool), s["temperature"], uniform)

    unlimited = draws & ((s["top_k"] == 0) | (s["top_k"] >= n_vocab)) & (s["top_p"] >= 1) & (s["min_p"] <= 0)
    drawn = jnp.where(unlimited, jax.lax.cond(jnp.any(unlimited), from_all, lambda: drawn), drawn)

    # More tokens than the candidates may pass: top-k says so, or the last candidate passes and top-k sets no limit.
    open_end = (s["top_k"] > n_top) | ((s["top_k"] == 0) & keep[:, -1])
    overflow = draws & ~unlimited & open_end & (n_top < n_vocab)

    def row_from_sorted(row: tuple[Any, ...]) -> jax.Array:
        overflow, drawn, logits, total, limits, uniform = row

        def from_sorted() -> jax.Array:
            top, ids = jax.lax.top_k(logits, n_vocab)
            return ids[_pick(top, _keep(top, total, limits, n_vocab), limits["temperature"], uniform)]

        return jax.lax.cond(overflow, from_sorted, lambda: drawn)

    rows = (overflow, drawn, logits, total, limits, uniform)
    return jax.lax.cond(jnp.any(overflow), lambda: jax.lax.map(row_from_sorted, rows), lambda: drawn)


def _keep(top: jax.Array, total: jax.Array, limits: dict[str, jax.Array], n_vocab: int) -> jax.Array:
    """Which of one row's best tokens, sorted, pass its filters.

    Args:
        top: scores, descending, (n,).
        total: the log of the sum of all scores' exponentials, ().
        limits: each value ().
        n_vocab: how many tokens there are besides.
    """
    k = jnp.where(limits["top_k"] > 0, limits["top_k"], n_vocab)
    within = jnp.arange(len(top)) < k
    # Top-p counts in shares of what top-k let pass.
    total = jnp.where(k < n_vocab, jax.nn.logsumexp(jnp.where(within, top, -jnp.inf)), total)
    probability = jnp.exp(top - total)
    before = jnp.cumsum(probability) - probability
    nucleus = (limits["top_p"] >= 1) | (before < limits["top_p"])
    # The best token always passes.
    return within & ((nucleus & (top >= top[0] + jnp.log(limits["min_p"]))) | (jnp.arange(len(top)) == 0))


def _pick(scores: jax.Array, keep: jax.Array, temperature: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index whose share of the summed probabilities covers `uniform`, which is from 0 up to 1."""
    scaled = jnp.where(keep, scores - jnp.max(scores), -jnp.inf) / jnp.where(temperature > 0, temperature, 1)
    upto = jnp.cumsum(jnp.exp(scaled))
    # Rounding must not lead beyond the end. An index that adds nothing is never the first above the target.
    target = jnp.minimum(uniform * upto[-1], jnp.nextafter(upto[-1], jnp.float32(0)))
    return jnp.argmax(upto > target).astype(jnp.int32)
