"""The llama architecture: grouped-query attention, rotary positions, SwiGLU, RMS norm, and a cache of keys and values.

An ordinary function of ordinary pytrees. It knows nothing of devices or pipelines.

Between the blocks flows the hidden state alone, which is held *features first*, (dim, tokens), with the tokens of all
rows side by side. A matrix stored as (out, in), as GGUF files have it, then is the left operand of each product and is
read along its rows: on a CPU that is up to twice as fast as tokens first, with few tokens above all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .quantized import Matrix, rows_of, weight

__all__ = ["Cache", "Config", "Params", "forward", "logits", "new_cache"]

Params = dict[str, Any]
Cache = dict[str, Any]

# TensorFloat-32, the default of many GPUs, is too coarse for the reference; on a CPU this changes nothing.
_einsum = partial(jnp.einsum, precision="highest")


# Values (batch, length, heads, head_dim) go to the row and the position that (batch, length, 2) names.
_SCATTER = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2, 3), inserted_window_dims=(0, 2), scatter_dims_to_operand_dims=(0, 2)
)


@dataclass(frozen=True, slots=True)
class Config:
    """What the weights alone do not say.

    Attributes:
        n_layers: how many blocks.
        n_heads: heads of the queries.
        n_kv_heads: heads of the keys and values; each serves ``n_heads // n_kv_heads`` heads of the queries.
        head_dim: width of a head.
        d_model: width of the hidden state.
        d_ff: width inside the feed-forward part.
        n_vocab: how many tokens there are.
        n_ctx: the longest context that the model was trained for.
        rope_dim: how many values of a head rotary positions turn, the first ones; even.
        rope_base: the base of their frequencies.
        eps: added to the mean square in each RMS norm.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_model: int
    d_ff: int
    n_vocab: int
    n_ctx: int
    rope_dim: int
    rope_base: float
    eps: float


def new_cache(config: Config, rows: int, n_ctx: int | None = None, dtype: Any = jnp.float32) -> Cache:
    """An empty cache of keys and values.

    The positions of one head lie side by side, so that what a head reads is one piece of memory. Every block has
    arrays of its own: they can stay where the block's weights are, and be donated from step to step.

    Args:
        config: shape of the model.
        rows: how many texts it holds.
        n_ctx: how many tokens of each; the model's own context length when None.
        dtype: of keys and values.

    Returns:
        ``{"blocks": [{"k": ..., "v": ...}, ...]}``, each array (rows, n_kv_heads, n_ctx, head_dim).

    Raises:
        ValueError: a size makes no sense.
    """
    n_ctx = config.n_ctx if n_ctx is None else n_ctx
    if rows < 1 or not 1 <= n_ctx <= config.n_ctx:
        raise ValueError(f"got {rows} rows of {n_ctx} tokens; need 1 row or more, of 1 to {config.n_ctx} tokens")
    shape = (rows, config.n_kv_heads, n_ctx, config.head_dim)
    return {"blocks": [{name: jnp.zeros(shape, dtype) for name in "kv"} for _ in range(config.n_layers)]}


def forward(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    rows: jax.Array | None,
    start: jax.Array,
    config: Config,
    n_kv: int,
) -> tuple[jax.Array, Cache]:
    """Continues texts by some tokens each.

    Token ``t`` of entry ``b`` has position ``start[b] + t`` in row ``rows[b]`` of the cache. Its key and value are
    written there, and it attends to the positions up to its own. What lies outside the cache, a row or a position, is
    written nowhere; what such a token gives means nothing.

    Args:
        params: as `llama.weights.load` returns them.
        cache: as `new_cache` returns it.
        tokens: token ids, int32 (batch, length).
        rows: the row of each entry, int32 (batch,), each at most once; None means all rows of the cache in order.
        start: the position of each entry's first token, int32 (batch,), not negative.
        config: shape of the model.
        n_kv: static: attention reads the first `n_kv` positions of the cache and no others, so cost follows the
            length in use. It must be at least ``start + length`` of every entry that matters; a few sizes, such as
            powers of two, keep the number of compilations small.

    Returns:
        The last hidden state after the final norm, (batch, length, d_model), and the cache with the new keys and
        values.

    Raises:
        ValueError: the shapes do not fit one another.
    """
    size, _, n_ctx, _ = cache["blocks"][0]["k"].shape
    batch, length = tokens.shape
    if not 1 <= n_kv <= n_ctx or (rows is None and batch != size):
        raise ValueError(
            f"got n_kv {n_kv} and {batch} texts for a cache of {size} rows of {n_ctx} tokens; "
            "n_kv must be at most the latter, and without rows there must be a text for each"
        )
    positions = start[:, None] + jnp.arange(length, dtype=jnp.int32)  # (batch, length)
    # What every block needs of the positions, once and in the shapes in which it is used: where the model is cut, a
    # device then gets these few small arrays and not several for each block.
    where = jnp.arange(batch, dtype=jnp.int32) if rows is None else rows
    at = jnp.stack([jnp.broadcast_to(where[:, None], positions.shape), positions], -1)  # (batch, length, 2)
    visible = (jnp.arange(n_kv) <= positions[:, :, None])[:, None, None]  # (batch, 1, 1, length, n_kv)
    turn = _turn(positions, config)
    x = rows_of(params["embed"], tokens.reshape(-1)).T  # (d_model, batch * length)
    blocks = []
    for p, kv in zip(params["blocks"], cache["blocks"], strict=True):
        mixed, kv = _attention(p["attn"], _norm(p["attn"]["norm"], x, config.eps), kv, rows, at, turn, visible, config)
        x = x + mixed
        x = x + _mlp(p["mlp"], _norm(p["mlp"]["norm"], x, config.eps))
        blocks.append(kv)
    x = _norm(params["norm"], x, config.eps)
    return x.T.reshape(batch, length, -1), {"blocks": blocks}


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Scores of the next token.

    Args:
        params: as `llama.weights.load` returns them.
        hidden: as `forward` returns it, or a part of it, (..., d_model).

    Returns:
        (..., n_vocab).
    """
    table = params.get("output", params["embed"])
    # Without the barrier XLA makes the last transpose part of the product, whose kernel on a CPU then is not the fast
    # one: with few tokens this product alone would take as long as three times the rest of the model.
    flat = jax.lax.optimization_barrier(_linear(table, hidden.reshape(-1, hidden.shape[-1]).T))
    return flat.T.reshape(*hidden.shape[:-1], -1)


def _linear(w: Matrix, x: jax.Array) -> jax.Array:
    """(out, in) times (in, tokens)."""
    return _einsum("oi,in->on", weight(w, after=x), x)


def _norm(scale: jax.Array, x: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(0, keepdims=True) + eps) * scale[:, None]


def _mlp(p: Params, x: jax.Array) -> jax.Array:
    return _linear(p["down"], jax.nn.silu(_linear(p["gate"], x)) * _linear(p["up"], x))


def _turn(positions: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles of each position, (1, rope_dim / 2, tokens)."""
    half = config.rope_dim // 2
    frequencies = jnp.asarray([config.rope_base ** (-i / half) for i in range(half)], jnp.float32)
    angle = frequencies[None, :, None] * positions.reshape(1, 1, -1).astype(jnp.float32)
    # Without the barrier XLA computes them anew for every head and value, which costs as much as attention itself.
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))
    return cos, sin


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns each *adjacent* pair (x[2i], x[2i+1]) of (heads, head_dim, tokens); values beyond the angles stay.

    Files in Hugging Face's order pair x[i] with x[i + half] instead; GGUF files have queries and keys permuted.
    """
    heads, width, n = x.shape
    half = cos.shape[1]
    pairs = x[:, : 2 * half].reshape(heads, half, 2, n)
    even, odd = pairs[:, :, 0], pairs[:, :, 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], 2).reshape(heads, 2 * half, n)
    return turned if width == 2 * half else jnp.concatenate([turned, x[:, 2 * half :]], 1)


def _attention(
    p: Params,
    x: jax.Array,
    kv: dict[str, jax.Array],
    rows: jax.Array | None,
    at: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    visible: jax.Array,
    config: Config,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Writes keys and values of (d_model, tokens) at rows and positions `at`, then attends to what is `visible`."""
    batch, length, _ = at.shape
    heads, width = config.n_kv_heads, config.head_dim
    group = config.n_heads // heads
    q = _rotate(_linear(p["q"], x).reshape(heads * group, width, -1), *turn)
    k = _rotate(_linear(p["k"], x).reshape(heads, width, -1), *turn)
    v = _linear(p["v"], x).reshape(heads, width, -1)

    # A scatter drops what is out of range. dynamic_update_slice would move a chunk that sticks out at the end back,
    # over older positions. Given a donated cache, XLA writes in place.
    new = {
        name: jax.lax.scatter(
            kv[name],
            at,
            value.reshape(heads, width, batch, length).transpose(2, 3, 0, 1).astype(kv[name].dtype),
            _SCATTER,
            mode="drop",
        )
        for name, value in (("k", k), ("v", v))
    }
    keys, values = (_read(new[name], rows, visible.shape[-1]).astype(x.dtype) for name in "kv")

    # The heads that share keys and values are one product's rows: nothing is repeated.
    q = q.reshape(heads, group, width, batch, length).transpose(3, 0, 1, 4, 2) * width**-0.5
    scores = _einsum("bhgtd,bhnd->bhgtn", q, keys)
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    mixed = _einsum("bhgtn,bhnd->bhgtd", jax.nn.softmax(scores, axis=-1), values)
    return _linear(p["out"], mixed.transpose(1, 2, 4, 0, 3).reshape(heads * group * width, -1)), new


def _read(array: jax.Array, rows: jax.Array | None, n_kv: int) -> jax.Array:
    """The first positions of the rows, (batch, n_kv_heads, n_kv, head_dim)."""
    if rows is None:
        return array[:, :, :n_kv]
    if rows.shape == (1,):  # a gather would do, but this is a plain copy
        zero = jnp.zeros((), rows.dtype)
        return jax.lax.dynamic_slice(array, (rows[0], zero, zero, zero), (1, array.shape[1], n_kv, array.shape[3]))
    return array.at[rows, :, :n_kv].get(mode="clip")
