"""The models that are served: their weights on the devices, everything compiled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llama import weights
from llama.generator import Generator
from llama.gguf_file import File, read_file
from llama.tokenizer import Tokenizer
from minilm import model as minilm
from minilm.text import load_tokenizer

import aiopipe as ap

__all__ = ["LENGTHS", "Models", "Sizes", "open_embeddings", "open_generator"]

LENGTHS = (16, 48, 128, 256)
"""Tokens that texts to embed are padded to; MiniLM was trained with 256 at most."""

BUCKETS = (1, 8)
"""Rows that batches of them are padded to."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is written and embedded at the same time.

    Attributes:
        rows: texts that take their steps together; there are as many such groups as devices.
        n_ctx: tokens of a text at most, its prompt included.
        chunk: tokens of a prompt that one step reads.
        lengths: what texts to embed are padded to, in tokens.
        buckets: what batches of them are padded to, in rows.
    """

    rows: int = 8
    n_ctx: int = 1024
    chunk: int = 64
    lengths: tuple[int, ...] = LENGTHS
    buckets: tuple[int, ...] = BUCKETS


@dataclass(frozen=True, slots=True)
class Models:
    """What is ready to serve; the one or the other may be missing.

    Attributes:
        generator, tokenizer: write texts.
        pipe, batcher, embed_tokenizer: embed them.
        width: of an embedding.
        max_input: tokens of a text to embed at most.
    """

    generator: Generator | None = None
    tokenizer: Tokenizer | None = None
    pipe: ap.Pipeline | None = None
    batcher: ap.Batcher | None = None
    embed_tokenizer: Any = None
    width: int = 0
    max_input: int = 0


@asynccontextmanager
async def open_generator(
    path: Path | None, backends: Sequence[ap.Backend], sizes: Sizes, split: Any = "auto"
) -> AsyncIterator[tuple[Generator, Tokenizer]]:
    """A language model on these backends, with every step compiled; and its tokenizer.

    Args:
        path: a GGUF file; the installed SmolLM2 when None.
        backends: in the order of the model's parts.
        sizes: how much is written at the same time.
        split: as for `Generator`.

    Raises:
        FileNotFoundError: there is no such file, or no installed model.
        ValueError: the file is damaged, or has a model that cannot be computed.
    """
    # Threads, as each of these takes a good part of a second.
    file: File = await asyncio.to_thread(read_file, path or weights.model_path())
    config, params = await asyncio.to_thread(weights.load, file)
    tokenizer = await asyncio.to_thread(Tokenizer, file)
    generator = Generator(
        config,
        params,
        devices=backends,
        rows=sizes.rows,
        n_ctx=min(sizes.n_ctx, config.n_ctx),
        chunk=sizes.chunk,
        split=split,
        timeline=True,
    )
    async with generator:
        del params  # they are on the devices
        async with ap.Progress() as progress:
            progress.begin("compiling the language model")
            await generator.prepare(on_progress=progress.update)
        yield generator, tokenizer


@asynccontextmanager
async def open_embeddings(
    loaded: tuple[minilm.Config, minilm.Params] | None, backends: Sequence[ap.Backend], sizes: Sizes, max_queue: int
) -> AsyncIterator[Models]:
    """A sentence encoder on these backends, with every size compiled.

    Args:
        loaded: as `minilm.model.load` returns it; the installed MiniLM when None.
        backends: in the order of the model's parts.
        sizes: what batches are padded to.
        max_queue: rows that may wait.

    Raises:
        FileNotFoundError: there is no installed model.
    """
    config, params = loaded or await asyncio.to_thread(minilm.load)
    tokenizer = await asyncio.to_thread(load_tokenizer)
    n_shapes = len(sizes.lengths) * len(sizes.buckets)
    ids = np.zeros((1, 1), np.int32)
    async with (
        ap.Pipeline(
            partial(minilm.embed, config=config), params, devices=backends, timeline=True, max_plans=n_shapes
        ) as pipe,
        ap.Batcher(
            pipe,
            max_batch=sizes.buckets[-1],
            buckets=sizes.buckets,
            lengths=sizes.lengths,
            max_queue=max_queue,
            like=(ids, ids),
        ) as batcher,
    ):
        async with ap.Progress() as progress:
            progress.begin("compiling the sentence encoder")
            await batcher.prepare(progress.update)
        yield Models(
            pipe=pipe,
            batcher=batcher,
            embed_tokenizer=tokenizer,
            width=config.d_model,
            max_input=sizes.lengths[-1],
        )
