"""The files of a sentence encoder, from wherever they come: checked before they are believed.

What is wrong with a file is said in a `ValueError` that names it, in time and memory in proportion to its size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from package import has_failed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["read_json", "read_tensors", "read_tokenizer"]

MAX_JSON_NBYTES = 1 << 20
"""A configuration has a few hundred bytes."""

_FLOATS = ("F16", "F32", "F64")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, no JSON, no object, or has a key twice.
    """

    def object_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key comes twice")
        return found

    if (size := path.stat().st_size) > MAX_JSON_NBYTES:
        raise ValueError(f"{path}: it has {size} bytes, but a configuration at most {MAX_JSON_NBYTES}")
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=object_of)
    except RecursionError:
        raise ValueError(f"{path}: this is nested too deeply for a configuration") from None
    except ValueError as error:  # of the syntax, or of the encoding
        raise ValueError(f"{path}: this is no configuration in JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: this is JSON, but no object")
    return value


def read_tensors(
    path: Path, expected: Iterable[tuple[str, Sequence[str]]], sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file, as float32. What nobody expects is not read.

    Args:
        path: the file. It must not be cut short meanwhile, for it is mapped into memory.
        expected: a tensor's name, and the names of its dimensions.
        sizes: dimensions that are known. One that is not is as the first tensor that has it says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, a tensor is missing, or has another shape or type.
    """
    from safetensors import safe_open

    known, found = dict(sizes), {}
    try:
        with safe_open(path, framework="np") as file:
            there = frozenset(file.keys())
            for name, dims in expected:
                if name not in there:
                    raise _Unfit(f"the tensor {name} is missing")
                part = file.get_slice(name)
                shape, kind = tuple(part.get_shape()), part.get_dtype()
                if len(shape) != len(dims) or shape != tuple(map(known.setdefault, dims, shape)):
                    wanted = ", ".join(f"{d}={known[d]}" if d in known else d for d in dims)
                    raise _Unfit(f"the tensor {name} has shape {shape}, but must have ({wanted})")
                if kind not in _FLOATS or not all(shape):
                    raise _Unfit(f"the tensor {name} is {kind}{list(shape)}, but must be of type {', '.join(_FLOATS)}")
                found[name] = np.asarray(file.get_tensor(name), np.float32)
    except _Unfit as error:
        raise ValueError(f"{path}: {error}") from None
    except OSError:
        raise
    except Exception as error:  # the package raises several kinds, none of which names the file
        raise ValueError(f"{path}: the file is damaged or incomplete: {error}") from error
    return found


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer as Hugging Face's package writes it, without padding or truncation.

    Raises:
        OSError: it cannot be read.
        ValueError: the package cannot read it.
    """
    from tokenizers import Tokenizer

    text = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except BaseException as error:
        if not has_failed(error):
            raise
        raise ValueError(f"{path}: this is no tokenizer, or is damaged: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class _Unfit(Exception):
    """What is read is not what is wanted."""
