"""The samplers of the llama example against plain NumPy, and what is random about them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from llama.sampling import Sampling, sample, stack

choose = jax.jit(sample)


def uniform(seed: int, position: int) -> float:
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return float(jax.random.uniform(key))


def reference(logits: np.ndarray, recent: np.ndarray, s: Sampling, u: float) -> set[int]:
    """The tokens that may come out, in float64: more than one where rounding decides."""
    x = logits.astype(np.float64)
    for token in {int(t) for t in recent if t >= 0}:
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    if s.temperature == 0:
        return {int(x.argmax())}
    unlimited = (s.top_k == 0 or s.top_k >= len(x)) and s.top_p == 1 and s.min_p == 0
    ids = np.arange(len(x)) if unlimited else np.argsort(-x, kind="stable")
    ids = ids[: s.top_k] if s.top_k else ids
    p = np.exp(x[ids] - x.max())
    p /= p.sum()
    found: set[int] = set()
    for slack in (-1e-6, 0, 1e-6):  # a float32 sum may put the border one token further
        keep = (np.cumsum(p) - p < s.top_p + slack) | (s.top_p == 1)
        keep &= p >= s.min_p * p.max() * (1 + slack)
        keep[0] |= not unlimited
        left = ids[keep]
        q = np.exp((x[left] - x.max()) / s.temperature)
        upto = np.cumsum(q / q.sum())
        low, high = np.searchsorted(upto, [u - 1e-5, u + 1e-5], side="right")
        found |= set(left[low : high + 1].tolist())
    return found


SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.5),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, repetition_penalty=1.3),
    Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    Sampling(temperature=1.5, top_k=1),
    Sampling(temperature=1.2, top_k=7),
    Sampling(temperature=0.9, top_p=0.5),
    Sampling(temperature=0.9, top_p=1e-6),
    Sampling(temperature=0.9, top_p=0.9999),  # more than the candidates pass
    Sampling(temperature=3.0, min_p=0.001),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.0, top_k=300),
    Sampling(temperature=1.0, top_k=300, top_p=0.8, repetition_penalty=0.5),
    Sampling(temperature=1e-3),
    Sampling(temperature=2.0, top_k=10**6, min_p=0.02),
]


def seeded(sampling: Sampling, seed: int) -> Sampling:
    return Sampling(**{name: getattr(sampling, name) for name in Sampling.__slots__ if name != "seed"}, seed=seed)


@pytest.mark.parametrize("n_vocab", [50, 1000])  # fewer than the candidates, and more
def test_tokens_equal_plain_numpy(n_vocab):
    random = np.random.default_rng(n_vocab)
    for trial in range(40):
        scale = random.choice([0.1, 1.0, 4.0])
        logits = (random.standard_normal((len(SAMPLINGS), n_vocab)) * scale).astype(np.float32)
        recent = random.integers(-1, n_vocab, (len(SAMPLINGS), 8)).astype(np.int32)
        samplings = [seeded(s, trial * 100 + i) for i, s in enumerate(SAMPLINGS)]
        positions = random.integers(0, 5000, len(SAMPLINGS)).astype(np.int32)
        chosen = np.asarray(choose(logits, recent, stack(samplings), positions))
        for i, s in enumerate(samplings):
            allowed = reference(logits[i], recent[i], s, uniform(s.seed, int(positions[i])))
            assert int(chosen[i]) in allowed, f"trial {trial}: {s}"


@pytest.mark.parametrize("n_vocab", [50, 1000])
def test_a_row_alone_chooses_the_same(n_vocab):
    random = np.random.default_rng(1)
    n = len(SAMPLINGS)
    logits = random.standard_normal((n, n_vocab)).astype(np.float32)
    recent, positions = random.integers(0, n_vocab, (n, 8)).astype(np.int32), np.arange(n, dtype=np.int32)
    together = np.asarray(choose(logits, recent, stack(SAMPLINGS), positions))
    for i, s in enumerate(SAMPLINGS):
        others = [s if j == i else Sampling() for j in range(n)]
        assert choose(logits, recent, stack(others), positions)[i] == together[i], s
        assert choose(logits[i : i + 1], recent[i : i + 1], stack([s]), positions[i : i + 1])[0] == together[i], s


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0), Sampling(temperature=0.5), Sampling(temperature=1.0, top_p=0.85)]
)
def test_tokens_come_as_often_as_they_should(sampling):
    share = np.asarray([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])
    n = 4000
    samplings = stack([seeded(sampling, i // 2) for i in range(n)])
    logits = np.tile(np.log(share, dtype=np.float32), (n, 1))
    # Two positions for each seed: neither may repeat the other.
    chosen = np.asarray(choose(logits, np.full((n, 1), -1, np.int32), samplings, np.arange(n, dtype=np.int32) % 2))
    expected = np.where(np.cumsum(share) - share < sampling.top_p, share, 0) ** (1 / sampling.temperature)
    expected /= expected.sum()
    counts = np.bincount(chosen, minlength=len(share))
    assert (np.abs(counts - n * expected) <= 4.5 * np.sqrt(n * expected * (1 - expected))).all(), counts / n
    same = (chosen[::2] == chosen[1::2]).mean()
    assert abs(same - np.square(expected).sum()) < 0.05


def test_randomness_is_the_seed_and_the_position():
    logits, recent = np.zeros((64, 1000), np.float32), np.full((64, 1), -1, np.int32)
    samplings, positions = stack([Sampling(temperature=1.0, seed=2**32 - 1)] * 64), np.arange(64, dtype=np.int32)
    chosen = np.asarray(choose(logits, recent, samplings, positions))
    assert len(set(chosen.tolist())) > 50
    assert np.array_equal(chosen[::-1], choose(logits, recent, samplings, positions[::-1]))
    assert np.array_equal(chosen, choose(logits, recent, samplings, positions))
    assert not np.array_equal(chosen, choose(logits, recent, stack([Sampling(temperature=1.0)] * 64), positions))


def test_repetition_is_penalized_once_and_only_among_the_last_tokens():
    logits = np.asarray([[2.0, 1.9, -1.0, 0.5], [-1.0, -1.1, -4.0, -4.0], [2.0, 1.9, -1.0, 0.5]], np.float32)
    recent = np.asarray([[0, 0, 0, -1], [0, 2, 2, 2], [-1, -1, -1, -1]], np.int32)
    samplings = stack([Sampling(repetition_penalty=1.04)] + [Sampling(repetition_penalty=1.2)] * 2)
    # 2.0 / 1.04 > 1.9, whereas dividing for each of three occurrences would give less; -1 * 1.2 < -1.1.
    assert np.asarray(choose(logits, recent, samplings, np.zeros(3, np.int32))).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, but must be a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": -1}, "top_k is -1, but must be a whole number"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": 2**31}, "top_k is 2147483648"),
        ({"top_p": 0.0}, "top_p is 0.0, but must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 1.5}, "min_p is 1.5, but must be from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, but must be a number above 0"),
        ({"seed": -1}, "seed is -1, but must be a whole number from 0"),
        ({"seed": 2**32}, "seed is 4294967296"),
    ],
)
def test_senseless_parameters_are_explained(values, message):
    with pytest.raises(ValueError) as caught:
        Sampling(**values)
    assert message in str(caught.value)


def test_stack_keeps_types_and_order():
    arrays = stack([Sampling(seed=2**32 - 1), Sampling(temperature=1, top_k=3)])
    assert {name: a.dtype.name for name, a in arrays.items()} == {
        "temperature": "float32",
        "top_k": "int32",
        "top_p": "float32",
        "min_p": "float32",
        "repetition_penalty": "float32",
        "seed": "uint32",
    }
    assert arrays["temperature"].tolist() == [0, 1] and arrays["seed"].tolist() == [2**32 - 1, 0]
