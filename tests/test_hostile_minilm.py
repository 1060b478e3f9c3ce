"""Files of the sentence encoder that are damaged or made to do harm: read or refused, soon and in little memory."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minilm import model, text

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None or importlib.util.find_spec("tokenizers") is None,
    reason="needs safetensors and tokenizers",
)

WIDTH, INNER = 8, 16
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": WIDTH,
    "layer_norm_eps": 1e-12,
}
HUGE = [2**31, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def tensors() -> dict[str, np.ndarray]:
    """A model of one layer."""
    sizes = {"width": WIDTH, "inner": INNER, "words": 11, "positions": 12, "kinds": 2}
    config = model.Config(n_layers=1, n_heads=2, d_model=WIDTH)
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal([sizes[d] for d in dims]).astype(np.float32) for name, dims in model._expected(config)
    }


def raw_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def parts() -> tuple[dict[str, Any], bytes]:
    """The header and the data of a sound file."""
    header, data = {}, b""
    for name, array in tensors().items():
        begin, data = len(data), data + array.tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    return header, data


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(raw_file(*parts()))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return tmp_path


def refused(load: Callable[[Path], object], path: Path, *, or_other: str = "") -> str:
    """What is said against a file (or another, which does not fit it), or ""; after checking that this cost little."""
    said = ""
    tracemalloc.start()
    try:
        began = time.process_time()
        try:
            load(path.parent)
        except ValueError as error:
            said = str(error)
        seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not said or str(path) in said or (or_other and str(path.parent / or_other) in said)
    assert len(said) < 3000
    assert seconds < 5 and peak < 2**23 + 16 * path.stat().st_size, f"{seconds} s, {peak} bytes"
    return said


def test_the_folder_is_sound(folder: Path) -> None:
    config, params = model.load(folder)
    assert config == model.Config(n_layers=1, n_heads=2, d_model=WIDTH)
    y = model.embed(params, np.ones((1, 3), np.int32), np.ones((1, 3), np.int32), config)
    assert y.shape == (1, WIDTH)
    assert text.tokenize(text.load_tokenizer(folder), ["a b c"]) == [[1, 2, 0]]


# The configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no configuration in JSON"),
        (b"\xff\xfe", "no configuration in JSON"),
        (b"{", "no configuration in JSON"),
        (b"[" * 200_000, "nested too deeply|no configuration"),
        (b'{"a":' * 100_000, "nested too deeply|no configuration"),
        (b"[1]", "but no object"),
        (b'{"hidden_size": 8, "hidden_size": 9}', "a key comes twice"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "no configuration in JSON"),
        (b" " * (2**20 + 1), "a configuration at most"),
        (b"{}", "num_hidden_layers is None, but must be a number"),
    ],
    ids=range(10),
)
def test_broken_configurations(folder: Path, content: bytes, message: str) -> None:
    path = folder / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        model.load(folder)
    assert refused(model.load, path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size", "layer_norm_eps"])
@pytest.mark.parametrize("value", [None, 0, -1, True, "8", [8], {}, 1.5, math.nan, math.inf, 2**63, "x" * 10_000])
def test_numbers_that_make_no_sense(folder: Path, key: str, value: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | {key: value}))
    assert f"{key} is" in refused(model.load, path)


def test_heads_that_do_not_fit(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": 3}))
    assert "3 attention heads cannot share a width of 8" in refused(model.load, folder / "config.json")


@pytest.mark.parametrize("n", [2, 1000, 2**31 - 1])
def test_more_layers_than_there_are(folder: Path, n: int) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": n}))
    said = refused(model.load, folder / "model.safetensors")
    assert "the tensor encoder.layer.1.attention.self.query.weight is missing" in said


# The weights -------------------------------------------------------------------------------------


def changed(name: str, **entry: Any) -> dict[str, Any]:
    header, _ = parts()
    header[name] = header[name] | entry
    return header


FIRST = "embeddings.word_embeddings.weight"
SECOND = "embeddings.position_embeddings.weight"
NORM = "embeddings.LayerNorm.weight"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged or incomplete"),
        (bytes(7), "damaged or incomplete"),
        (bytes(8), "damaged or incomplete"),
        *((raw_file({}, length=n), "damaged or incomplete") for n in HUGE),
        (raw_file(b"no json"), "damaged or incomplete"),
        (raw_file(b"\xff" * 20), "damaged or incomplete"),
        (raw_file(b"[]"), "damaged or incomplete"),
        (raw_file(b'{"a":' * 100_000), "damaged or incomplete"),
        (raw_file({}), "is missing"),
        (raw_file({FIRST: {}}), "damaged or incomplete"),
        (raw_file(parts()[0], parts()[1][:-1]), "damaged or incomplete"),
        (raw_file(parts()[0], parts()[1] + b"x"), "damaged or incomplete"),
        (raw_file(changed(FIRST, data_offsets=[0, 2**63]), parts()[1]), "damaged or incomplete"),
        (raw_file(changed(FIRST, data_offsets=[2**64 - 1, 8]), parts()[1]), "damaged or incomplete"),
        (raw_file(changed(FIRST, data_offsets=[-1, 8]), parts()[1]), "damaged or incomplete"),
        (raw_file(changed(SECOND, data_offsets=[0, 352]), parts()[1]), "damaged or incomplete"),
        (raw_file(changed(FIRST, shape=[2**62, 2**62]), parts()[1]), "damaged or incomplete"),
        (raw_file(changed(FIRST, shape=[11, 9]), parts()[1]), "damaged or incomplete"),
        (raw_file(changed(FIRST, shape=[8, 11]), parts()[1]), r"has shape \(8, 11\), but must have \(words"),
        (raw_file(changed(FIRST, shape=[88]), parts()[1]), r"has shape \(88,\)"),
        (raw_file(changed(NORM, dtype="I32"), parts()[1]), r"is I32\[8\], but must be of type"),
        (raw_file(changed(NORM, dtype="F64", shape=[4]), parts()[1]), r"has shape \(4,\)"),
        (raw_file(changed(NORM, dtype="F128"), parts()[1]), "damaged or incomplete"),
        (raw_file({k: v for k, v in parts()[0].items() if k != FIRST}, parts()[1]), "damaged or incomplete|is missing"),
    ],
    ids=range(30),
)
def test_broken_weights(folder: Path, content: bytes, message: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    said = refused(model.load, path)
    with pytest.raises(ValueError, match=message):
        raise ValueError(said)


def test_a_name_that_comes_twice_is_refused_or_read_as_one(folder: Path) -> None:
    """Of two entries for the same bytes the package takes the last, which must fit like any other."""
    header, data = parts()
    entry = json.dumps(header[FIRST])
    twice = json.dumps(header)[:-1] + f', "{FIRST}": {entry}}}'
    path = folder / "model.safetensors"
    path.write_bytes(raw_file(twice.encode(), data))
    assert refused(model.load, path) in ("",) or "damaged" in refused(model.load, path)
    other = json.dumps(header[FIRST] | {"shape": [8, 11]})
    path.write_bytes(raw_file((json.dumps(header)[:-1] + f', "{FIRST}": {other}}}').encode(), data))
    assert refused(model.load, path)


def test_weights_cut_short_anywhere(folder: Path) -> None:
    path, whole = folder / "model.safetensors", raw_file(*parts())
    header = len(whole) - len(parts()[1])
    for n in sorted({*range(0, 40), *range(40, header, 97), header - 1, header, header + 1, len(whole) - 1}):
        path.write_bytes(whole[:n])
        assert "damaged or incomplete" in refused(model.load, path), n


def test_other_floats_become_float32_and_what_nobody_expects_is_not_read(folder: Path) -> None:
    from safetensors.numpy import save_file

    halves = {name: array.astype(np.float16) for name, array in tensors().items()}
    save_file({**halves, "pooler.dense.weight": np.ones(3, np.int64)}, folder / "model.safetensors")
    _, params = model.load(folder)
    assert params["embeddings"]["word"].dtype == np.float32 and "pooler" not in params


# The tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"a":' * 100_000,
        json.dumps(TOKENIZER | {"model": None}).encode(),
        json.dumps(TOKENIZER | {"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}).encode(),
        json.dumps(
            TOKENIZER | {"model": {"type": "BPE", "vocab": {"a" * 9: 0, "b": 1}, "merges": ["a" * 9 + " b"]}}
        ).encode(),
        json.dumps(TOKENIZER | {"model": {"type": "WordLevel", "vocab": {"a": 2**63}, "unk_token": "?"}}).encode(),
        json.dumps(TOKENIZER | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}).encode(),
        json.dumps(TOKENIZER | {"version": "9.0"}).encode(),
    ],
    ids=range(11),
)
def test_broken_tokenizers(folder: Path, content: bytes) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(content)
    assert "is no tokenizer, or is damaged" in refused(text.load_tokenizer, path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_not_there(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError):
        model.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError):
        text.load_tokenizer(folder)


# Any of it ---------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(0, 300), st.sampled_from(HUGE), st.integers(-(2**64), 2**64))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "F64", "BF16", "I64", "BOOL", "F8_E4M3", "X", ""]),
        "shape": st.lists(numbers, max_size=4),
        "data_offsets": st.lists(numbers, min_size=1, max_size=3),
    }
)
NAMES = {"weights": "model.safetensors", "config": "config.json", "tokenizer": "tokenizer.json"}


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("which", NAMES)
@given(st.data())
def test_any_file_is_read_or_explained(folder: Path, which: str, data: st.DataObject) -> None:
    header, values = parts()
    path, load = folder / NAMES[which], text.load_tokenizer if which == "tokenizer" else model.load
    sound = {"weights": header, "config": CONFIG, "tokenizer": TOKENIZER}[which]
    changes: Any = entries if which == "weights" and data.draw(st.booleans()) else json_values
    some = st.dictionaries(st.one_of(st.sampled_from(list(sound)), st.text(max_size=4)), changes, max_size=3)
    changed = {**sound, **data.draw(some)}
    if which == "weights":
        length = data.draw(st.one_of(st.none(), st.none(), st.integers(0, 2**64 - 1)))
        raw = bytearray(raw_file(changed, values, length))
    else:
        raw = bytearray(json.dumps(changed).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        place, value = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.binary(min_size=1, max_size=8))
        raw[place : place + len(value)] = value
    path.write_bytes(raw)
    try:
        refused(load, path, or_other=NAMES["weights"] if which == "config" else "")
    finally:
        path.write_bytes(raw_file(header, values) if which == "weights" else json.dumps(sound).encode())
