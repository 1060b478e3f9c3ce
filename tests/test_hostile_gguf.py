"""GGUF files made to do harm: whatever is in them, they are read or refused, soon and in little memory."""

from __future__ import annotations

import dataclasses
import re
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from llama import weights
from llama.gguf_file import read_file
from llama.tokenizer import Tokenizer

import llamas

TINY = llamas.TINY.read_bytes()
HUGE = [2**31, 2**32 - 1, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def refused(path: Path, *, mib: float = 8) -> str:
    """Loads a file in every way there is; what was said against it, or "", after checking that this cost little."""
    said = ""
    for load in (weights.load, Tokenizer):
        tracemalloc.start()
        began = time.process_time()
        try:
            load(path)
        except ValueError as error:
            assert str(path) in str(error) and len(str(error)) < 2000
            said = said or str(error)
        seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seconds < 5 and peak < mib * 2**20 + 16 * path.stat().st_size, f"{seconds} s, {peak} bytes"
    return said


# A file in its parts -----------------------------------------------------------------------------


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def scalar(code: str, value: Any) -> bytes:
    return struct.pack(f"<{code}", value)


@dataclasses.dataclass
class Draft:
    """A file that need not be sound; `parts` are what a reader must read in one go or piece by piece."""

    fields: list[tuple[bytes, int, bytes]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes = b""
    version: int = 3
    n_tensors: int | None = None
    n_fields: int | None = None

    def parts(self) -> Iterator[bytes]:
        yield b"GGUF"
        yield scalar("I", self.version)
        yield scalar("Q", len(self.tensors) if self.n_tensors is None else self.n_tensors)
        yield scalar("Q", len(self.fields) if self.n_fields is None else self.n_fields)
        for key, kind, value in self.fields:
            yield scalar("Q", len(key))
            yield key
            yield scalar("I", kind)
            yield value
        for name, dims, kind, offset in self.tensors:
            yield scalar("Q", len(name))
            yield name
            yield scalar("I", len(dims))
            for n in dims:
                yield scalar("Q", n)
            yield scalar("I", kind)
            yield scalar("Q", offset)

    def to_bytes(self) -> bytes:
        header = b"".join(self.parts())
        return header + bytes(-len(header) % 32) + self.data


def small() -> Draft:
    """One layer of width 4, sound as a container."""
    texts = [(b"general.architecture", b"llama"), (b"tokenizer.ggml.model", b"llama")]
    numbers = [(b"block_count", 1), (b"embedding_length", 4), (b"attention.head_count", 2), (b"feed_forward_length", 8)]
    numbers += [(b"context_length", 16)]
    fields = [(key, 8, string(text)) for key, text in texts]
    fields += [(b"llama." + key, 4, scalar("I", value)) for key, value in numbers]
    fields.append((b"llama.attention.layer_norm_rms_epsilon", 6, scalar("f", 1e-5)))
    tokens = [b"<0x%02X>" % i for i in range(256)]
    fields.append((b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 256) + b"".join(map(string, tokens))))
    fields.append((b"tokenizer.ggml.token_type", 9, struct.pack("<IQ256i", 5, 256, *[6] * 256)))
    shapes = {"token_embd": [4, 256], "output_norm": [4], "blk.0.attn_norm": [4], "blk.0.ffn_norm": [4]}
    shapes |= {f"blk.0.attn_{part}": [4, 4] for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": [4, 8], "blk.0.ffn_up": [4, 8], "blk.0.ffn_down": [8, 4]}
    tensors, offset = [], 0
    for name, dims in shapes.items():
        tensors.append((f"{name}.weight".encode(), dims, 0, offset))
        offset += -(-int(np.prod(dims)) * 4 // 32) * 32
    return Draft(fields, tensors, bytes(offset))


def write(path: Path, draft: Draft) -> Path:
    path.write_bytes(draft.to_bytes())
    return path


def test_the_draft_is_sound(tmp_path: Path) -> None:
    path = write(tmp_path / "f", small())
    assert refused(path) == ""
    config, params = weights.load(path)
    assert config.n_layers == 1 and params["embed"].shape == (256, 4)


# Cut short ---------------------------------------------------------------------------------------


def test_a_file_that_ends_at_or_beside_any_part_is_explained(tmp_path: Path) -> None:
    draft, path, ends, at = small(), tmp_path / "f", set(), 0
    for part in draft.parts():
        at += len(part)
        ends |= {at - 1, at, at + 1}
    whole = draft.to_bytes()
    ends |= {len(whole) - 1, len(whole) - len(draft.data), len(whole) - len(draft.data) + 1}
    places = sorted(n for n in ends if n < len(whole))
    assert len(places) > 150
    for n in places:
        path.write_bytes(whole[:n])
        for load in (weights.load, Tokenizer):
            with pytest.raises(ValueError, match=r"no GGUF file|damaged or incomplete") as caught:
                load(path)
            assert str(path) in str(caught.value), n


# Absurd numbers, wrong types, wrong places --------------------------------------------------------


@pytest.mark.parametrize("n", HUGE)
@pytest.mark.parametrize("what", "tensors fields key text array texts dim dims offset name".split())
def test_absurd_numbers(tmp_path: Path, what: str, n: int) -> None:
    draft = small()
    if what == "tensors":
        draft.n_tensors = n
    elif what == "fields":
        draft.n_fields = n
    elif what == "text":
        draft.fields.append((b"x", 8, string(b"y", n)))
    elif what == "array":
        draft.fields.append((b"x", 9, struct.pack("<IQ", 4, n)))
    elif what == "texts":
        draft.fields.append((b"x", 9, struct.pack("<IQ", 8, n)))
    elif what == "dim":
        draft.tensors.append((b"x", [n], 0, 0))
    elif what == "dims":
        draft.tensors.append((b"x", [n, n, n, n], 0, 0))  # whose product overflows any number of a machine
    elif what == "offset":
        draft.tensors.append((b"x", [4], 0, n - n % 32))
    path = write(tmp_path / "f", draft)
    if what in ("key", "name"):
        raw = draft.to_bytes()
        place = raw.index(b"general.architecture" if what == "key" else b"token_embd") - 8
        path.write_bytes(raw[:place] + scalar("Q", n) + raw[place + 8 :])
    assert re.search("damaged or incomplete", refused(path))


@pytest.mark.parametrize("kind", [13, 14, 77, 2**31, 2**32 - 1])
def test_types_that_are_not_there(tmp_path: Path, kind: int) -> None:
    for draft in (small(), small()):
        draft.fields.append((b"x", kind, b""))
        assert "has the unknown type" in refused(write(tmp_path / "f", draft))
    draft = small()
    draft.tensors[0] = (*draft.tensors[0][:2], 2**20 + kind % 7, 0)
    assert "has the unknown type" in refused(write(tmp_path / "f", draft))
    draft = small()
    draft.fields.append((b"x", 9, struct.pack("<IQ", kind, 1)))
    assert "which no model has" in refused(write(tmp_path / "f", draft))


@pytest.mark.parametrize("depth", [1, 2, 1000, 100_000])
def test_arrays_of_arrays(tmp_path: Path, depth: int) -> None:
    draft = small()
    draft.fields.append((b"x", 9, struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)))
    assert "an array of type 9, which no model has" in refused(write(tmp_path / "f", draft))


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"a\x80"], ids=lambda text: text.hex()
)
def test_texts_that_are_no_utf8(tmp_path: Path, text: bytes) -> None:
    for fields, tensors in (
        ([(text, 4, scalar("I", 1))], []),
        ([(b"x", 8, string(text))], []),
        ([(b"x", 9, struct.pack("<IQ", 8, 1) + string(text))], []),
        ([], [(text, [1], 0, 0)]),
    ):
        draft = small()
        draft.fields += fields
        draft.tensors += tensors
        assert "is no UTF-8 text" in refused(write(tmp_path / "f", draft))


def test_names_that_come_twice(tmp_path: Path) -> None:
    draft = small()
    draft.fields.append(draft.fields[3])
    assert "comes twice" in refused(write(tmp_path / "f", draft))
    draft = small()
    draft.tensors.append(draft.tensors[3])
    assert "comes twice" in refused(write(tmp_path / "f", draft))


@pytest.mark.parametrize("offset", [1, 4, 31])
def test_tensors_at_odd_places(tmp_path: Path, offset: int) -> None:
    draft = small()
    name, dims, kind, at = draft.tensors[-1]
    draft.tensors[-1] = (name, dims, kind, at + offset)
    draft.data += bytes(32)
    assert f"begins at {at + offset}, which is no multiple of 32" in refused(write(tmp_path / "f", draft))


def test_tensors_that_share_bytes(tmp_path: Path) -> None:
    """Thousands of tensors in the same few bytes would need thousands of times the file's size."""
    draft = small()
    name, dims, kind, at = draft.tensors[5]
    draft.tensors[5] = (name, dims, kind, at - 32)
    assert re.search(r"the tensors '.*' and '.*' overlap", refused(write(tmp_path / "f", draft)))
    draft = small()
    draft.tensors = [(b"t%d" % i, [256], 0, 0) for i in range(2000)]
    assert "overlap" in refused(write(tmp_path / "f", draft))


def test_tensors_in_another_order_are_read(tmp_path: Path) -> None:
    draft = small()
    draft.tensors.reverse()
    assert refused(write(tmp_path / "f", draft)) == ""


@pytest.mark.parametrize(
    ("kind", "value"),
    [(4, scalar("I", 2)), (2, scalar("H", 65535)), (8, string(b"many")), (9, struct.pack("<IQ2I", 4, 2, 1, 1))],
)
def test_parts_of_a_model_are_refused(tmp_path: Path, kind: int, value: bytes) -> None:
    draft = small()
    draft.fields.append((b"split.count", kind, value))
    assert "parts of a model; join them first" in refused(write(tmp_path / "f", draft))


def test_a_whole_model_may_say_so(tmp_path: Path) -> None:
    draft = small()
    draft.fields.append((b"split.count", 2, scalar("H", 1)))
    assert refused(write(tmp_path / "f", draft)) == ""


def test_what_is_said_stays_short(tmp_path: Path) -> None:
    draft = small()
    many = struct.pack("<IQ", 8, 20_000) + string(b"word") * 20_000
    draft.fields = [f for f in draft.fields if f[0] != b"llama.block_count"] + [(b"llama.block_count", 9, many)]
    assert "llama.block_count is ['word', 'word'" in refused(write(tmp_path / "f", draft))


@pytest.mark.parametrize("name", ["general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"])
@pytest.mark.parametrize("n", [0, 1, 2])
def test_arrays_where_texts_belong(tmp_path: Path, name: str, n: int) -> None:
    for value in (struct.pack(f"<IQ{n}I", 4, n, *range(n)), struct.pack("<IQ", 8, n) + string(b"llama") * n):
        draft = small()
        draft.fields = [f for f in draft.fields if f[0] != name.encode()] + [(name.encode(), 9, value)]
        path = write(tmp_path / "f", draft)
        assert name.endswith("pre") or re.search("its architecture is|but must be a text", refused(path))


# Any of it ---------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(0, 40), st.sampled_from(HUGE), st.integers(0, 2**64 - 1))
known = [entry[0] for entry in (*small().fields, *small().tensors)]
names = st.one_of(st.binary(max_size=12), st.sampled_from(known))
field_values = st.one_of(
    st.binary(max_size=40),
    st.binary(max_size=20).map(string),
    st.tuples(st.integers(0, 13), numbers, st.binary(max_size=64)).map(lambda t: struct.pack("<IQ", *t[:2]) + t[2]),
    st.lists(st.binary(max_size=6), max_size=6).map(lambda t: struct.pack("<IQ", 8, len(t)) + b"".join(map(string, t))),
)
some_fields = st.lists(st.tuples(names, st.integers(0, 14), field_values), max_size=4)
some_tensors = st.lists(
    st.tuples(names, st.lists(numbers, max_size=5), st.integers(0, 40), numbers), max_size=3
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(some_fields, some_tensors, st.data())
def test_any_file_is_read_or_explained(
    tmp_path_factory: pytest.TempPathFactory, fields: Any, tensors: Any, data: st.DataObject
) -> None:
    draft = small()
    if data.draw(st.booleans()):
        replaced = {f[0] for f in fields}
        draft.fields = [f for f in draft.fields if f[0] not in replaced]
        replaced = {t[0] for t in tensors}
        draft.tensors = [t for t in draft.tensors if t[0] not in replaced]
    draft.fields += fields
    draft.tensors += tensors
    if data.draw(st.booleans()):
        draft.n_tensors, draft.n_fields = data.draw(numbers), data.draw(numbers)
    raw = bytearray(draft.to_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        value = data.draw(st.one_of(st.binary(min_size=1, max_size=8), numbers.map(lambda n: scalar("Q", n))))
        raw[place : place + len(value)] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(raw)
    refused(path)


texts = st.one_of(st.text(max_size=4), st.sampled_from(["a", "b", "ab", "<0x41>", "\u2581", "\u0120", "<s>", ""]))
arrays = st.one_of(
    st.lists(st.integers(-1, 7), max_size=12).map(lambda xs: np.array(xs, np.int32)),
    st.lists(st.floats(width=32), max_size=4).map(lambda xs: np.array(xs, np.float32)),
)
values = st.one_of(st.integers(-2, 2**32), st.booleans(), st.floats(), texts, arrays, st.lists(texts, max_size=12))
pairs = st.lists(st.tuples(texts, texts).map(" ".join), max_size=6)


@given(
    st.lists(texts, max_size=12),
    st.one_of(st.none(), arrays),
    st.sampled_from(["gpt2", "llama"]),
    pairs,
    st.dictionaries(
        st.sampled_from("tokens token_type merges model pre bos_token_id eos_token_id add_bos_token".split()),
        values,
        max_size=3,
    ),
)
@example(["a", "b", "ab"], None, "gpt2", ["a b"], {})
@example(["aaaaa", "bbbbb"], None, "gpt2", ["aaaaa bbbbb"], {})  # which the package panics at
def test_any_vocabulary_is_read_or_explained(
    tokens: list[str], kinds: Any, model: str, merges: list[str], changes: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {"tokens": tokens, "token_type": np.ones(len(tokens), np.int32), "model": model}
    fields |= {"merges": merges} | ({} if kinds is None else {"token_type": kinds}) | changes
    file = dataclasses.replace(
        read_file(llamas.TINY), fields={f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    )
    try:
        tokenizer = Tokenizer(file)
    except ValueError as error:
        assert str(file.path) in str(error)
        return
    ids = tokenizer.encode("ab <s>\u00e4", special=True)
    assert all(0 <= i < tokenizer.n_vocab for i in ids)
    assert isinstance(tokenizer.decode(range(tokenizer.n_vocab), special=True), str)


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% for x in 'a' %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ range(10 ** 9) }}",
        "{{ 'x'.__class__.__base__.__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('echo') }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
    ids=range(11),
)
def test_templates_that_reach_out_or_never_end_are_explained(template: str) -> None:
    file = read_file(llamas.TINY)
    file = dataclasses.replace(file, fields=file.fields | {"tokenizer.chat_template": template})
    with pytest.raises(ValueError, match=r"its chat template (does not accept|cannot be read)") as caught:
        Tokenizer(file).chat_text([{"role": "user", "content": "Hi"}])
    assert str(file.path) in str(caught.value)
