"""The steps that a generator calls: a chunk of one row's prompt, and one token of every row or of some.

All shapes are fixed, so each step is compiled once for each `n_kv`. Donate the state: XLA then writes into it in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .model import Config, Params, forward, logits, new_cache
from .sampling import sample

__all__ = [
    "WINDOW",
    "State",
    "decode",
    "decode_logits",
    "decode_rows",
    "decode_rows_logits",
    "new_state",
    "prefill",
    "prefill_logits",
]

WINDOW = 64
"""How many tokens back the repetition penalty looks."""

State = dict[str, Any]


def new_state(config: Config, rows: int, n_ctx: int | None = None, dtype: Any = jnp.float32) -> State:
    """The state of `rows` texts.

    Returns:
        ``{"cache": ..., "recent": ...}``: the cache as `llama.model.new_cache` gives it, and the last `WINDOW` tokens
        of each row, int32 (rows, WINDOW), that of position p at p % WINDOW, or -1.

    Raises:
        ValueError: a size makes no sense.
    """
    return {"cache": new_cache(config, rows, n_ctx, dtype), "recent": jnp.full((rows, WINDOW), -1, jnp.int32)}


def prefill_logits(
    params: Params,
    state: State,
    tokens: jax.Array,
    row: jax.Array,
    start: jax.Array,
    length: jax.Array,
    config: Config,
    n_kv: int,
) -> tuple[jax.Array, State]:
    """Reads a chunk of one row's text; see `prefill`.

    Returns:
        The scores of the token after the chunk, (n_vocab,), and the new state.
    """
    hidden, state = _read_chunk(params, state, tokens, row, start, length, config, n_kv)
    return logits(params, jax.lax.dynamic_index_in_dim(hidden, length - 1, keepdims=False)), state


def prefill(
    params: Params,
    state: State,
    tokens: jax.Array,
    row: jax.Array,
    start: jax.Array,
    length: jax.Array,
    sampling: dict[str, Any],
    config: Config,
    n_kv: int,
    last: bool = True,
) -> tuple[jax.Array, State]:
    """Reads a chunk of one row's text and chooses the token after it.

    A text's first chunk starts at 0, which makes the row new; what it held before plays no part. What stands behind
    `length` does no harm: its keys and values lie at positions that are written again before anything attends to
    them, or are beyond the end of the cache and dropped.

    Args:
        params: as `llama.weights.load` returns them.
        state: as `new_state` returns it; worth donating.
        tokens: token ids and padding, int32 (chunk,).
        row: which row of the state, int32 ().
        start: the position of the first token, int32 ().
        length: how many of the tokens count, at least 1, int32 ().
        sampling: how the token is chosen; one row of `llama.sampling.stack`, each value ().
        config: shape of the model.
        n_kv: static; at least ``start + length``. See `llama.model.forward`.
        last: static; False for a chunk that another one follows, whose token nobody needs: it is -1 then.

    Returns:
        The token at position ``start + length``, int32 (), and the new state.
    """
    if not last:
        _, state = _read_chunk(params, state, tokens, row, start, length, config, n_kv)
        return jnp.full((), -1, jnp.int32), state
    scores, state = prefill_logits(params, state, tokens, row, start, length, config, n_kv)
    recent = jax.lax.dynamic_index_in_dim(state["recent"], row)
    one = {name: jnp.asarray(value)[None] for name, value in sampling.items()}
    return sample(scores[None], recent, one, (start + length)[None])[0], state


def _read_chunk(
    params: Params,
    state: State,
    tokens: jax.Array,
    row: jax.Array,
    start: jax.Array,
    length: jax.Array,
    config: Config,
    n_kv: int,
) -> tuple[jax.Array, State]:
    """The last hidden state of a chunk, (chunk, d_model), and the new state."""
    hidden, cache = forward(params, state["cache"], tokens[None], row[None], start[None], config, n_kv)
    # Behind the blocks, as everything is that belongs on the device of the last one.
    index = jnp.arange(len(tokens), dtype=jnp.int32)
    ring = jnp.where(start == 0, -1, jax.lax.dynamic_index_in_dim(state["recent"], row, keepdims=False))
    # Of a chunk longer than the window only the end is noted, each place once.
    noted = (index < length) & (index >= length - WINDOW)
    ring = ring.at[jnp.where(noted, (start + index) % WINDOW, WINDOW)].set(tokens, mode="drop")
    return hidden[0], {"cache": cache, "recent": state["recent"].at[row].set(ring, mode="drop")}


def decode_logits(
    params: Params,
    state: State,
    tokens: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    config: Config,
    n_kv: int,
) -> tuple[jax.Array, State]:
    """Reads one token of every row; see `decode`.

    Returns:
        The scores of the next tokens, (rows, n_vocab), those of inactive rows without meaning, and the new state.
    """
    rows, n_ctx = len(tokens), state["cache"]["blocks"][0]["k"].shape[2]
    start = jnp.where(active, positions, n_ctx)
    hidden, cache = forward(params, state["cache"], tokens[:, None], None, start, config, n_kv)
    # Behind the blocks, as everything is that belongs on the device of the last one.
    recent = jnp.where((active & (positions == 0))[:, None], -1, state["recent"])
    place = jnp.where(active, positions % WINDOW, WINDOW)  # what is out of range is written nowhere
    recent = recent.at[jnp.arange(rows), place].set(tokens, mode="drop")
    return logits(params, hidden[:, 0]), {"cache": cache, "recent": recent}


def decode(
    params: Params,
    state: State,
    tokens: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    sampling: dict[str, Any],
    config: Config,
    n_kv: int,
) -> tuple[jax.Array, State]:
    """Reads one token of every active row and chooses the next of each.

    Args:
        params: as `llama.weights.load` returns them.
        state: as `new_state` returns it; worth donating.
        tokens: the token of each row, int32 (rows,).
        positions: where in its text it stands, int32 (rows,).
        active: rows that take part, bool (rows,); nothing of the others changes.
        sampling: as `llama.sampling.stack` gives it, each value (rows,).
        config: shape of the model.
        n_kv: static; above the positions of all active rows. See `llama.model.forward`.

    Returns:
        The tokens at ``positions + 1``, int32 (rows,), those of inactive rows as given, and the new state.
    """
    scores, state = decode_logits(params, state, tokens, positions, active, config, n_kv)
    return _choose(scores, state["recent"], tokens, positions, active, sampling), state


def decode_rows_logits(
    params: Params,
    state: State,
    tokens: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    config: Config,
    n_kv: int,
) -> tuple[jax.Array, State]:
    """Reads one token of each of some rows; see `decode_rows`.

    Returns:
        The scores of the next tokens, (entries, n_vocab), and the new state.
    """
    hidden, cache = forward(params, state["cache"], tokens[:, None], rows, positions, config, n_kv)
    ring = jnp.where((positions == 0)[:, None], -1, _recent(state, rows))
    ring = ring.at[jnp.arange(len(rows)), positions % WINDOW].set(tokens)
    return logits(params, hidden[:, 0]), {"cache": cache, "recent": state["recent"].at[rows].set(ring, mode="drop")}


def decode_rows(
    params: Params,
    state: State,
    tokens: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    sampling: dict[str, Any],
    config: Config,
    n_kv: int,
) -> tuple[jax.Array, State]:
    """Reads one token of each of some rows and chooses the next, as `decode` does.

    It costs what its entries do, however many rows the state has; an entry for every row costs as much as `decode`.

    Args:
        params: as `llama.weights.load` returns them.
        state: as `new_state` returns it; worth donating.
        tokens: the token of each entry, int32 (entries,).
        rows: the row of each, int32 (entries,), each at most once. An entry whose row is the number of rows, or more,
            does nothing: it fills a size for which there is a compiled step.
        positions: where in its text the token stands, int32 (entries,).
        sampling: as `llama.sampling.stack` gives it, each value (entries,).
        config: shape of the model.
        n_kv: static; above all positions that matter. See `llama.model.forward`.

    Returns:
        The tokens at ``positions + 1``, int32 (entries,), those of entries that do nothing as given, and the new
        state.
    """
    active = rows < len(state["recent"])
    scores, state = decode_rows_logits(params, state, tokens, rows, positions, config, n_kv)
    return _choose(scores, _recent(state, rows), tokens, positions, active, sampling), state


def _recent(state: State, rows: jax.Array) -> jax.Array:
    return state["recent"].at[rows].get(mode="clip")


def _choose(
    scores: jax.Array,
    recent: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    sampling: dict[str, Any],
) -> jax.Array:
    """The next tokens; nothing is penalized or drawn where `active` is False, and `tokens` stay."""
    idle = {"temperature": 0.0, "repetition_penalty": 1.0}
    some = {k: jnp.where(active, v, idle[k]) if k in idle else v for k, v in sampling.items()}
    return jnp.where(active, sample(scores, recent, some, positions + 1), tokens)
