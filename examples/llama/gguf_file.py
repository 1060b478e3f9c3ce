"""The GGUF container: fields and tensors of a file, read with every size checked against the file's own.

The `gguf` package has a reader too. It trusts the file: a damaged length makes it loop without end, or raise whatever
NumPy raises. So the header is read here, and the package's part is what the types mean and how they are dequantized.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

__all__ = ["File", "Tensor", "read_file"]

MAX_TENSORS = 65536
"""Tensors, and fields, of a file at most; models have some hundreds."""

MAX_DIMS = 4

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor is, and what it holds.

    Attributes:
        name: such as ``blk.0.attn_q.weight``.
        shape: rows first, as NumPy has it; the file has the other order.
        kind: the name of its type, such as ``F32`` or ``Q4_1``.
        offset: of its first byte in the file.
        n_bytes: how long it is.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class File:
    """The header of a file.

    Attributes:
        path: the file.
        fields: key to value; an array of numbers is a NumPy array, one of strings a list.
        tensors: name to tensor.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Tensor]

    def raw(self, tensor: Tensor) -> np.ndarray:
        """The tensor's bytes, uint8 (..., bytes of a row).

        Raises:
            ValueError: the file has become shorter since its header was read.
        """
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.n_bytes)
        if len(data) != tensor.n_bytes:
            raise ValueError(f"{self.path}: the data of {tensor.name} ends early; was the file changed meanwhile?")
        return np.frombuffer(data, np.uint8).reshape(*tensor.shape[:-1], -1)

    def values(self, tensor: Tensor) -> np.ndarray:
        """The tensor as float32, dequantized if need be.

        Raises:
            ValueError: its type cannot be dequantized, or the file has become shorter.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        raw = self.raw(tensor)
        if tensor.kind in ("F32", "F16"):
            return raw.view("<f4" if tensor.kind == "F32" else "<f2").astype(np.float32)
        try:
            return np.asarray(dequantize(raw, GGMLQuantizationType[tensor.kind]), np.float32).reshape(tensor.shape)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: {tensor.name} has type {tensor.kind}, which cannot be read") from error


class _Cursor:
    """Reads a file from its start; what would reach beyond its end is an error."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.offset = 0
        self._file = file

    def fail(self, what: str) -> NoReturn:
        raise ValueError(f"{self.path}: {what} (at byte {self.offset}); the file is damaged or incomplete")

    def take(self, n: int, what: str) -> bytes:
        if n > self.size - self.offset:
            self.fail(f"{what} needs {n} bytes, but {self.size - self.offset} are left")
        data = self._file.read(n)
        if len(data) != n:
            self.fail(f"{what} ends early")
        self.offset += n
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str) -> str:
        data = self.take(self.number("Q", what), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is no UTF-8 text")

    def value(self, kind: int, what: str) -> Any:
        if code := _SCALARS.get(kind):
            return self.number(code, what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            self.fail(f"{what} has the unknown type {kind}")
        kind, n = self.number("I", what), self.number("Q", what)
        if code := _SCALARS.get(kind):
            dtype = np.dtype(f"<{code}" if code != "?" else code)
            return np.frombuffer(self.take(n * dtype.itemsize, what), dtype)
        if kind != _STRING:
            self.fail(f"{what} is an array of type {kind}, which no model has")
        if n > (self.size - self.offset) // 8:  # each has a length of 8 bytes
            self.fail(f"{what} has {n} texts, more than the rest of the file holds")
        return [self.string(what) for _ in range(n)]


def read_file(path: str | os.PathLike[str]) -> File:
    """Reads the header of a GGUF file, version 2 or 3.

    Time and memory stay in proportion to the file's size, whatever is in it.

    Raises:
        ValueError: it is no such file, or is damaged; the message names it.
        OSError: it cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        cursor = _Cursor(path, file)
        if cursor.size < 24 or cursor.take(4, "the magic number") != b"GGUF":
            raise ValueError(f"{path}: this is no GGUF file")
        version = cursor.number("I", "the version")
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version {version} is not known; only 2 and 3, little-endian, are")
        n_tensors, n_fields = cursor.number("Q", "the header"), cursor.number("Q", "the header")
        if max(n_tensors, n_fields) > MAX_TENSORS:
            cursor.fail(f"{n_tensors} tensors and {n_fields} fields are more than any model has")
        fields: dict[str, Any] = {}
        for _ in range(n_fields):
            key = cursor.string("the name of a field")
            if key in fields:
                cursor.fail(f"the field {key!r} comes twice")
            fields[key] = cursor.value(cursor.number("I", key), f"the field {key!r}")
        infos = [_tensor_info(cursor) for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            cursor.fail(f"the alignment is {alignment!r}, but must be a power of two")
        start = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                cursor.fail(f"the tensor {name!r} comes twice")
            if offset % alignment:
                cursor.fail(f"the tensor {name!r} begins at {offset}, which is no multiple of {alignment}")
            tensors[name] = _place(cursor, name, shape, kind, start + offset)
        _check_apart(cursor, tensors.values())
    return File(path, fields, tensors)


def _check_apart(cursor: _Cursor, tensors: Iterable[Tensor]) -> None:
    """Refuse tensors that share bytes: a small file could stand for any amount of weights."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            cursor.fail(f"the tensors {before!r} and {tensor.name!r} overlap")
        end, before = tensor.offset + tensor.n_bytes, tensor.name


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("the name of a tensor")
    n_dims = cursor.number("I", name)
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.fail(f"the tensor {name!r} has {n_dims} dimensions, but must have 1 to {MAX_DIMS}")
    shape = tuple(cursor.number("Q", name) for _ in range(n_dims))[::-1]
    return name, shape, cursor.number("I", name), cursor.number("Q", name)


def _place(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        cursor.fail(f"the tensor {name!r} has the unknown type {kind}")
    per_block, block_bytes = GGML_QUANT_SIZES[known]
    if min(shape) < 1 or shape[-1] % per_block:
        cursor.fail(f"the tensor {name!r} of type {known.name} has shape {shape}, which cannot be")
    n_bytes = math.prod(shape) // per_block * block_bytes
    if offset + n_bytes > cursor.size:
        cursor.fail(f"the tensor {name!r} has {n_bytes} bytes from byte {offset}, but the file has {cursor.size}")
    return Tensor(name, shape, known.name, offset, n_bytes)
