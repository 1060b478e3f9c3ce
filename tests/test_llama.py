"""The llama model of the examples against llama.cpp, and its steps; without aiopipe."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama import model, steps, weights
from llama.sampling import Sampling, single, stack

import llamas
from llamas import (
    all_logits,
    decode,
    decode_logits,
    decode_rows,
    decode_rows_logits,
    prefill,
    prefill_logits,
    write,
)

pytestmark = pytest.mark.timeout(180)  # a model is compiled, beside whatever else the machine does

DRAWS = Sampling(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=7)


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    return llamas.reference("tiny_gguf")


def chunked(tokens: np.ndarray, chunk: int, n_ctx: int = 64, n_kv: int = 64) -> np.ndarray:
    """The scores after each token, read in chunks into row 1 of 2; the last chunk is padded with token 9."""
    config, params = llamas.tiny()
    cache, found = model.new_cache(config, 2, n_ctx), []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        padded = np.pad(part, (0, chunk - len(part)), constant_values=9)[None]
        where = np.asarray([1], np.int32), np.asarray([start], np.int32)
        scores, cache = all_logits(params, cache, padded, *where, config=config, n_kv=n_kv)
        found.append(scores[0, : len(part)])
    return np.concatenate(found)


# against llama.cpp ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 32, 44])
def test_logits_of_every_position_equal_the_reference(reference, chunk):
    got = chunked(reference["tokens"], chunk)
    assert got.shape == (44, 260) and got.dtype == np.float32
    assert np.abs(got - reference["logits"]).max() < 1e-4
    assert np.abs(got - reference["logits_token_by_token"]).max() < 1e-4


def test_decoding_token_by_token_equals_the_reference(reference):
    config, params = llamas.tiny()
    state, found = steps.new_state(config, 2, 64), []
    active = np.asarray([False, True])
    for position, token in enumerate(reference["tokens"]):
        args = np.asarray([3, token], np.int32), np.asarray([0, position], np.int32), active
        scores, state = decode_logits(params, state, *args, config=config, n_kv=64)
        found.append(scores[1])
    assert np.abs(np.stack(found) - reference["logits"]).max() < 1e-4


@pytest.mark.parametrize("chunk", [7, 16, 44])
def test_greedy_tokens_equal_the_reference(reference, chunk):
    assert write(llamas.tiny(), reference["tokens"], 16, chunk=chunk)[0] == reference["greedy"].tolist()


def test_smollm2_equals_llama_cpp():
    config, params = llamas.smollm2()
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert "output" not in params
    expected = llamas.reference("smollm2_llamacpp")
    where = np.asarray([1], np.int32), np.asarray([0], np.int32)
    cache = model.new_cache(config, 2, 64)
    got, _ = all_logits(params, cache, expected["ids"].astype(np.int32)[None], *where, config=config, n_kv=64)
    assert np.abs(got[0] - expected["logits_f32"]).max() < 1e-3
    # Decoding reads the prompt too, which spares one compilation of 30 layers.
    greedy = expected["greedy_f32"].tolist()
    state, found = steps.new_state(config, 2, 32), greedy[:1]
    for position in range(24):
        tokens = np.asarray([0, greedy[position] if position < 5 else found[-1]], np.int32)
        args = tokens, np.full(2, position, np.int32), np.asarray([False, True]), stack([Sampling()] * 2)
        chosen, state = decode(params, state, *args, config=config, n_kv=32)
        found.append(int(chosen[1]))
    assert found[5:] == greedy[5:]


# buckets, chunks and dtypes ------------------------------------------------------------------------


def test_unused_positions_do_not_matter(reference):
    wide = chunked(reference["tokens"], 22, 256, 256)
    assert np.abs(wide - chunked(reference["tokens"], 22, 256, 48)).max() < 1e-5


def test_a_chunk_may_stick_out_of_the_cache(reference):
    # The second chunk spans positions 32 to 63 of 45; a write moved back to fit would ruin positions 13 to 31.
    got = chunked(reference["tokens"], 32, 45, 45)
    assert np.abs(got - reference["logits"]).max() < 1e-4


def test_padding_changes_nothing_that_matters(reference):
    prompt = reference["tokens"][:21]
    runs = [write(llamas.tiny(), prompt, 12, sampling=DRAWS, pad=pad) for pad in (0, 200)]
    assert runs[0][0] == runs[1][0]
    assert runs[0][0] == write(llamas.tiny(), prompt, 12, sampling=DRAWS, chunk=7)[0]
    assert runs[0][1]["recent"].tolist() == runs[1][1]["recent"].tolist()
    used = slice(0, len(prompt) + 11)
    for a, b in zip(*(jax.tree.leaves(state["cache"]) for _, state in runs), strict=True):
        assert np.array_equal(a[:, :, used], b[:, :, used])


def test_a_row_can_be_used_again(reference):
    loaded = llamas.tiny()
    fresh, _ = write(loaded, reference["tokens"][:9], 12, sampling=DRAWS)
    _, state = write(loaded, reference["tokens"][::-1], 30, sampling=DRAWS)
    assert write(loaded, reference["tokens"][:9], 12, state=state, sampling=DRAWS)[0] == fresh


def test_to_the_last_position_and_not_beyond(reference):
    config, params = llamas.tiny()
    found, state = write(llamas.tiny(), reference["tokens"][:40], 8, n_ctx=47, n_kv=47)
    assert found == write(llamas.tiny(), reference["tokens"][:40], 8)[0]  # position 46 was read
    before = jax.tree.map(np.array, state["cache"])
    args = np.full(3, 5, np.int32), np.full(3, 47, np.int32), np.ones(3, bool)
    _, state = decode_logits(params, state, *args, config=config, n_kv=47)
    assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(state["cache"])))


def test_a_cache_of_bfloat16_is_close(reference):
    config, params = llamas.tiny()
    state = steps.new_state(config, 2, 64, jnp.bfloat16)
    args = reference["tokens"], np.int32(0), np.int32(0), np.int32(44)
    scores, state = prefill_logits(params, state, *args, config=config, n_kv=64)
    assert state["cache"]["blocks"][0]["k"].dtype == jnp.bfloat16
    assert 0 < np.abs(scores - reference["logits"][-1]).max() < 0.1


def test_some_rows_at_once_equal_one_after_the_other(reference):
    config, params = llamas.tiny()
    tokens = np.stack([reference["tokens"][:12], reference["tokens"][12:24]])
    rows, start = np.asarray([2, 0], np.int32), np.zeros(2, np.int32)
    sizes = {"config": config, "n_kv": 16}
    both, _ = all_logits(params, model.new_cache(config, 3, 32), tokens, rows, start, **sizes)
    for i in range(2):
        part = tokens[i : i + 1], rows[i : i + 1], start[:1]
        each, _ = all_logits(params, model.new_cache(config, 3, 32), *part, **sizes)
        assert np.abs(both[i] - each[0]).max() < 1e-5


def test_rotary_positions_may_turn_a_part_of_a_head():
    config, _ = llamas.tiny()
    part = dataclasses.replace(config, rope_dim=8)
    x = np.random.default_rng(0).standard_normal((2, 16, 5)).astype(np.float32)
    turned = model._rotate(jnp.asarray(x), *model._turn(jnp.arange(5), part))
    assert np.array_equal(turned[:, 8:], x[:, 8:])
    angle = np.arange(5) * config.rope_base ** (-np.arange(4)[:, None] / 4)
    pairs = (x[:, 0:8:2] + 1j * x[:, 1:8:2]) * np.exp(1j * angle)
    assert np.abs(np.asarray(turned[:, 0:8:2]) - pairs.real).max() < 1e-5
    assert np.abs(np.asarray(turned[:, 1:8:2]) - pairs.imag).max() < 1e-5


# rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), DRAWS], ids=["greedy", "draws"])
def test_neighbours_do_not_matter(reference, sampling):
    loaded = llamas.tiny()
    alone, _ = write(loaded, reference["tokens"], 12, sampling=sampling)
    for how in (Sampling(), Sampling(temperature=2.0, top_p=0.99, repetition_penalty=3.0)):
        others = {0: (17, 0, how), 2: (201, 90, how)}
        assert write(loaded, reference["tokens"], 12, sampling=sampling, others=others)[0] == alone


def test_nothing_of_an_inactive_row_changes(reference):
    config, params = llamas.tiny()
    _, state = write(llamas.tiny(), reference["tokens"], 2)
    before = jax.tree.map(np.array, state)
    args = np.asarray([4, 5, 6], np.int32), np.asarray([0, 3, 9], np.int32), np.asarray([True, False, True])
    chosen, state = decode(params, state, *args, stack([DRAWS] * 3), config=config, n_kv=128)
    assert chosen[1] == 5
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        assert np.array_equal(a[1], b[1]) and not np.array_equal(a[0], b[0])


def test_last_tokens_are_noted_whatever_the_chunks(reference):
    config, params = llamas.tiny()
    tokens = np.random.default_rng(0).integers(0, 260, 100).astype(np.int32)
    expected = np.empty(steps.WINDOW, np.int32)
    expected[np.arange(36, 100) % steps.WINDOW] = tokens[36:]
    for chunk in (16, 100, 128):
        _, state = write(llamas.tiny(), tokens, 1, chunk=chunk)
        assert state["recent"][1].tolist() == expected.tolist()
    assert (state["recent"][0] == -1).all()
    args = np.asarray([7, 8, 9], np.int32), np.asarray([0, 100, 0], np.int32), np.asarray([False, True, True])
    _, state = decode_logits(params, state, *args, config=config, n_kv=128)
    expected[100 % steps.WINDOW] = 8
    assert state["recent"][1].tolist() == expected.tolist()
    assert state["recent"][2].tolist() == [9] + [-1] * 63
    _, state = write(llamas.tiny(), tokens[:3], 1, state=state)
    assert state["recent"][1].tolist() == [*tokens[:3].tolist(), *[-1] * 61]


def test_a_chunk_that_another_follows_needs_no_token(reference):
    config, params = llamas.tiny()
    tokens, greedy = reference["tokens"], reference["greedy"]
    state = steps.new_state(config, 1, 64)
    token, state = prefill(
        params, state, tokens[:22], *np.int32([0, 0, 22]), single(Sampling()), config=config, n_kv=64, last=False
    )
    assert token == -1
    token, _ = prefill(params, state, tokens[22:], *np.int32([0, 22, 22]), single(Sampling()), config=config, n_kv=64)
    assert token == greedy[0]


def filled() -> steps.State:
    """Four rows that hold 70 tokens each, so that the window of recent ones has gone round."""
    config, params = llamas.tiny()
    state = steps.new_state(config, 4, 96)
    for row in range(4):
        tokens = np.random.default_rng(row).integers(0, 260, 70).astype(np.int32)
        args = tokens, *np.int32([row, 0, 70]), single(Sampling())
        _, state = prefill(params, state, *args, config=config, n_kv=96)
    return state


@pytest.mark.parametrize("rows", [[2], [3, 0], [1, 0, 3, 2]], ids=str)
def test_some_rows_decode_as_all_do(rows):
    config, params = llamas.tiny()
    sizes = {"config": config, "n_kv": 96}
    all_, some = filled(), filled()
    before = jax.tree.map(np.array, all_)
    idle = [row for row in range(4) if row not in rows]
    active = np.isin(np.arange(4), rows)
    how = [DRAWS, Sampling(), dataclasses.replace(DRAWS, seed=3), Sampling(repetition_penalty=1.5)]
    tokens, positions = np.asarray([5, 6, 7, 8], np.int32), np.asarray([70, 0, 71, 70], np.int32)  # row 1 starts anew
    for _ in range(6):
        want, all_ = decode(params, all_, tokens, positions, active, stack(how), **sizes)
        args = tokens[rows], np.asarray(rows, np.int32), positions[rows], stack([how[row] for row in rows])
        got, some = decode_rows(params, some, *args, **sizes)
        assert got.tolist() == np.asarray(want)[rows].tolist()
        tokens, positions = np.array(want), positions + active
    assert np.array_equal(some["recent"], all_["recent"])
    for a, b, was in zip(*map(jax.tree.leaves, (some, all_, before)), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-5
        assert np.array_equal(np.asarray(a)[idle], was[idle]) and not np.array_equal(a[rows[0]], was[rows[0]])


def test_scores_of_some_rows_equal_those_of_all():
    config, params = llamas.tiny()
    tokens, positions = np.asarray([5, 6, 7, 8], np.int32), np.full(4, 70, np.int32)
    want, _ = decode_logits(params, filled(), tokens, positions, np.ones(4, bool), config=config, n_kv=96)
    for rows in ([2], [3, 1]):
        args = tokens[rows], np.asarray(rows, np.int32), positions[rows]
        got, _ = decode_rows_logits(params, filled(), *args, config=config, n_kv=96)
        assert np.abs(got - want[np.asarray(rows)]).max() < 1e-5


@pytest.mark.parametrize("rows", [[4], [1, 4]], ids=str)
def test_an_entry_without_a_row_does_nothing(rows):
    config, params = llamas.tiny()
    before = jax.tree.map(np.array, filled())
    args = np.asarray([9] * len(rows), np.int32), np.asarray(rows, np.int32), np.full(len(rows), 70, np.int32)
    got, state = decode_rows(params, filled(), *args, stack([DRAWS] * len(rows)), config=config, n_kv=96)
    assert got[-1] == 9
    touched = rows[:-1]
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        assert [row for row in range(4) if not np.array_equal(a[row], b[row])] == touched


# cost and errors -----------------------------------------------------------------------------------


@pytest.mark.xfail(
    jax.__version_info__ < (0, 9), reason="the XLA of JAX 0.8 copies the cache in scratch memory, whoever compiles it"
)
@pytest.mark.parametrize("step", ["prefill", "decode", "decode_rows"])
def test_the_cache_is_written_in_place_and_its_length_costs_nothing(step):
    config, params = llamas.tiny()
    config = dataclasses.replace(config, n_ctx=4096)
    if step == "decode":
        args = np.zeros(4, np.int32), np.zeros(4, np.int32), np.ones(4, bool), stack([Sampling()] * 4)
    elif step == "decode_rows":
        args = *np.zeros((3, 2), np.int32), stack([Sampling()] * 2)
    else:
        args = np.zeros(8, np.int32), *np.int32([0, 0, 8]), single(Sampling())
    used = []
    for n_ctx in (128, 4096):
        state = steps.new_state(config, 4, n_ctx)
        compiled = getattr(llamas, step).lower(params, state, *args, config=config, n_kv=64).compile()
        analysis = compiled.memory_analysis()
        if analysis is None:
            pytest.skip("this backend does not tell what memory a program uses")
        used.append(analysis.temp_size_in_bytes)
        assert analysis.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(state["cache"]))
    assert used[0] == used[1]


def test_senseless_sizes_are_explained():
    config, params = llamas.tiny()
    for rows, n_ctx in ((0, 8), (1, 0), (1, 257)):
        with pytest.raises(ValueError, match="1 to 256 tokens"):
            model.new_cache(config, rows, n_ctx)
    assert model.new_cache(config, 1)["blocks"][3]["v"].shape == (1, 2, 256, 16)
    cache, tokens = model.new_cache(config, 2, 8), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="n_kv must be at most"):
        model.forward(params, cache, tokens, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), config, 9)
    with pytest.raises(ValueError, match="a text for each"):
        model.forward(params, cache, tokens, None, jnp.zeros(1, jnp.int32), config, 8)


def test_paths_of_the_weights():
    leaves = jax.tree_util.tree_leaves_with_path(weights.load(llamas.TINY)[1])
    shapes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}
    assert shapes["blocks/3/attn/q"] == (64, 64) and shapes["blocks/0/attn/k"] == (32, 64)
    assert shapes["blocks/2/mlp/down"] == (64, 128) and shapes["output"] == shapes["embed"] == (260, 64)
    assert len(shapes) == 39 and all(leaf.dtype == np.float32 for _, leaf in leaves)


# quantized weights --------------------------------------------------------------------------------


def test_quantized_weights_hold_memory_while_they_are_used() -> None:
    """A step dequantizes one matrix after the other: what it needs for that is that of the largest, the head's."""
    config, params = weights.load(quantized=True)
    held = sum(array.nbytes for array in jax.tree.leaves(params))
    head = config.n_vocab * config.d_model * 4
    everything = 4 * (config.n_layers * config.d_model * 3 * config.d_ff)
    state = jax.eval_shape(lambda: steps.new_state(config, 1, 32))
    args = np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, bool), stack([Sampling()])
    compiled = decode.lower(params, state, *args, config=config, n_kv=32).compile()
    needed = compiled.memory_analysis().temp_size_in_bytes
    assert needed < 1.1 * head < everything and held + needed < everything
