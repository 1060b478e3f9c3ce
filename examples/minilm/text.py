"""Passages of text, and batches of a few fixed shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .files import read_tokenizer
from .model import model_dir

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "LENGTHS",
    "Batch",
    "Passage",
    "batches",
    "load_tokenizer",
    "one_batch",
    "passages",
    "python_topics",
    "tokenize",
]

LENGTHS = (48, 64, 96, 128)
"""Padded lengths: few, for each is compiled once, and close enough that padding costs little."""

MAX_WORDS = 36
"""Words of a passage at most. Half of the passages then have 50 tokens or fewer; code has many tokens to a word."""

_RULE = re.compile(r"[*=\-~^]{3,}")
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+")


@dataclass(frozen=True, slots=True)
class Passage:
    """Some sentences of a text.

    Attributes:
        topic: the text's name.
        text: the sentences, with single spaces.
    """

    topic: str
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Passages padded to one length.

    Attributes:
        rows: which passages, (batch,).
        ids: token ids, int32 (batch, length).
        mask: 1 for a token, 0 for padding, int32 (batch, length).
    """

    rows: np.ndarray
    ids: np.ndarray
    mask: np.ndarray


def python_topics() -> dict[str, str]:
    """The help topics of the running Python: some 80 texts of the language reference, nothing to install."""
    from pydoc_data.topics import topics

    return topics


def passages(texts: Mapping[str, str], max_words: int = MAX_WORDS) -> list[Passage]:
    """Cuts texts into windows of whole sentences that overlap by about half.

    Every word of a text, rules aside, is in one passage at least. A passage that comes in several
    texts is taken once, under the first one's name.

    Args:
        texts: name to text.
        max_words: no passage is longer; a sentence that is gets cut.
    """
    if max_words < 1:
        raise ValueError(f"max_words is {max_words}, but a passage needs at least 1 word; give a larger number")
    topic_of: dict[str, str] = {}
    for topic, text in texts.items():
        for words in _windows(list(_sentences(text, max_words)), max_words):
            topic_of.setdefault(" ".join(words), topic)
    return [Passage(topic, text) for text, topic in topic_of.items()]


def _sentences(text: str, max_words: int) -> Iterator[list[str]]:
    """Sentences as lists of words; a paragraph ends one too, as headings and code have no full stop."""
    for paragraph in _PARAGRAPH.split(text):
        lines = (line for line in paragraph.splitlines() if not _RULE.fullmatch(line.strip()))
        for sentence in _SENTENCE_END.split("\n".join(lines)):
            words = sentence.split()
            yield from (words[i : i + max_words] for i in range(0, len(words), max_words))


def _windows(sentences: Sequence[list[str]], max_words: int) -> Iterator[list[str]]:
    ends = list(accumulate(map(len, sentences), initial=0))  # ends[i]: words before sentence i
    start = stop = 0
    while stop < len(sentences):
        while stop < len(sentences) and ends[stop + 1] - ends[start] <= max_words:
            stop += 1
        yield [word for sentence in sentences[start:stop] for word in sentence]
        half = (ends[start] + ends[stop]) / 2
        start = next(i for i in range(start + 1, stop + 1) if ends[i] >= half)
        if stop < len(sentences):  # the next window must reach beyond this one, or it would repeat a part of it
            while ends[stop + 1] - ends[start] > max_words:
                start += 1


def load_tokenizer(folder: Path | None = None) -> Tokenizer:
    """The model's own tokenizer, without padding, which `batches` does, and without truncation, which `tokenize` does.

    Args:
        folder: holds ``tokenizer.json``; the installed package's when None.

    Raises:
        OSError: the file, or the package, is missing.
        ValueError: it is damaged; the message names it.
    """
    return read_tokenizer((model_dir() if folder is None else folder) / "tokenizer.json")


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int = LENGTHS[-1]) -> list[list[int]]:
    """Token ids of each text, ``[CLS]`` and ``[SEP]`` included, cut to `max_tokens`.

    Blocking; it releases the interpreter lock, so in a thread it holds up nobody.
    """
    tokenizer.enable_truncation(max_tokens)
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]


def batches(tokens: Sequence[Sequence[int]], size: int, lengths: Sequence[int] = LENGTHS) -> Iterator[Batch]:
    """Groups texts of like length, so that there are few shapes and little padding.

    Each shape is compiled once, so what does not fill a batch of one length moves up to the next length instead of
    becoming a batch of its own: there are at most as many shapes as lengths, and one more.

    Args:
        tokens: token ids of each text.
        size: rows of a batch; only the last batch has fewer.
        lengths: the padded lengths, ascending; a text goes to the first that holds it, or a later one.

    Yields:
        Batches of ascending lengths; every text is in exactly one.

    Raises:
        ValueError: a text fits no length, or an argument makes no sense.
    """
    if size < 1 or not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"got size {size}, lengths {tuple(lengths)}; need size >= 1 and ascending lengths")
    counts = _counts(tokens, lengths)
    rows = np.argsort(counts, kind="stable")
    stops = np.searchsorted(counts[rows], lengths, side="right")  # how many texts each length holds
    start = 0
    for length, stop in zip(lengths, stops, strict=True):
        while start + size <= stop or start < stop == len(rows):
            yield _pad(rows[start : start + size], tokens, counts, length)
            start += size


def one_batch(tokens: Sequence[Sequence[int]], lengths: Sequence[int] = LENGTHS) -> Batch:
    """All texts in one batch, in their own order, padded to the first length that holds the longest.

    Raises:
        ValueError: a text fits no length, or there is no text.
    """
    counts = _counts(tokens, lengths)
    length = next(length for length in lengths if length >= counts.max(initial=0))
    return _pad(np.arange(len(tokens)), tokens, counts, length)


def _counts(tokens: Sequence[Sequence[int]], lengths: Sequence[int]) -> np.ndarray:
    counts = np.fromiter(map(len, tokens), np.int64, len(tokens))
    if counts.max(initial=0) > lengths[-1]:
        raise ValueError(f"text {counts.argmax()} has {counts.max()} tokens, at most {lengths[-1]} fit; cut it before")
    return counts


def _pad(rows: np.ndarray, tokens: Sequence[Sequence[int]], counts: np.ndarray, length: int) -> Batch:
    mask = np.arange(length) < counts[rows, None]
    ids = np.zeros(mask.shape, np.int32)  # id 0 is [PAD]
    ids[mask] = np.concatenate([tokens[row] for row in rows])
    return Batch(rows, ids, mask.astype(np.int32))
