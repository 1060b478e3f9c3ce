"""Embeds the help topics of Python with all-MiniLM-L6-v2, split over several devices, and searches them.

The whole use of aiopipe is in `search`; the rest is a command around it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import check_devices, n_cpus, names, positive, ratios
from command import run

if TYPE_CHECKING:
    import numpy as np
    from minilm.report import Report

EXAMPLES = """\
examples:
  %(prog)s                                                    two devices, the default query
  %(prog)s --devices cpu:0,cpu:1,cpu:2 --query "how do I open a file"
  %(prog)s --devices gpu:0,cpu:0 --split 5,1 --batch 32       five parts of six on the GPU
  %(prog)s --limit 200 --json | tail -n 1                     a quick look, for a program
"""

QUERY = "how do I close a file when an error happens"
REFERENCE = Path(__file__).parent / "minilm" / "reference.npz"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for; the defaults are in `parse`."""

    devices: tuple[str, ...]
    n_copies: int
    batch: int
    split: str | tuple[float, ...]
    query: str
    top: int
    limit: int | None
    json: bool


def parse(argv: Sequence[str] | None = None) -> Options:
    """Reads the command line; exits with a message where it makes no sense."""
    parser = argparse.ArgumentParser(
        description="Embed Python's help topics with all-MiniLM-L6-v2, split over several devices, and search them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=names, default="cpu:0,cpu:1", metavar="A,B", help="where to run (default: %(default)s)")
    add("--n-copies", type=positive, default=4, metavar="N", help="batches in flight (default: %(default)s)")
    add("--batch", type=positive, default=16, metavar="N", help="passages in a batch (default: %(default)s)")
    add("--split", type=ratios, default="auto", metavar="R,S", help="auto, or a share for each device (default: auto)")
    add("--query", default=QUERY, metavar="TEXT", help="what to search for (default: %(default)r)")
    add("--top", type=positive, default=5, metavar="N", help="how many passages to show (default: %(default)s)")
    add("--limit", type=positive, metavar="N", help="embed only the first N passages")
    add("--json", action="store_true", help="print one JSON object as the last line")
    options = Options(**vars(parser.parse_args(argv)))
    check_devices(parser, options.devices, options.split)
    return options


async def search(options: Options) -> Report:
    """Embeds all passages, and finds those nearest to the query."""
    # Imported late, so that --help is quick, and Ctrl-C works while this takes its second.
    import jax
    import numpy as np
    from minilm import model, report, text

    import aiopipe as ap

    if n_cpus(options.devices):
        jax.config.update("jax_num_cpu_devices", n_cpus(options.devices))  # before JAX starts its CPU client

    passages = text.passages(text.python_topics())[: options.limit]
    reference = dict(np.load(REFERENCE))
    probes = [options.query, *reference["sentences"].tolist()]

    # Threads, as each of these takes a good part of a second, in which an event loop must not stand still.
    config, params = await asyncio.to_thread(model.load)
    tokenizer = await asyncio.to_thread(text.load_tokenizer)
    tokens = await asyncio.to_thread(text.tokenize, tokenizer, [passage.text for passage in passages])
    batches = list(text.batches(tokens, options.batch))
    probe = text.one_batch(text.tokenize(tokenizer, probes))

    def embed(params: model.Params, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return model.embed(params, ids, mask, config)

    async with ap.Pipeline(
        embed,
        params,
        devices=list(options.devices),
        n_copies=options.n_copies,
        split=options.split,
        timeline=True,
    ) as pipe:
        async with ap.Progress(pipe) as progress:
            # The first evaluation of each shape compiles it, on every device; the very first decides the split.
            shapes = {batch.ids.shape: (batch.ids, batch.mask) for batch in [*batches, probe]}
            progress.begin("compiling for each shape", total=len(shapes))
            started = time.perf_counter()
            for ids, mask in shapes.values():
                await pipe(ids, mask)
                progress.advance()
            compile_s = time.perf_counter() - started

            embeddings = np.empty((len(passages), config.d_model), np.float32)
            in_flight: deque[np.ndarray] = deque()

            async def feed() -> AsyncIterator[tuple[np.ndarray, np.ndarray]]:
                # aiopipe takes a batch only when there is room for it, so this never runs far ahead.
                for batch in batches:
                    in_flight.append(batch.rows)
                    yield batch.ids, batch.mask

            progress.begin("embedding passages", total=len(passages))
            pipe.scheduler.reset_busy()  # the first evaluations waited for the compiler
            started = time.perf_counter()
            async for output in pipe.stream(feed()):
                rows = in_flight.popleft()  # results come in the order of the batches
                embeddings[rows] = output
                progress.advance(len(rows))
            stream_s = time.perf_counter() - started
            busy = dict(pipe.statistics().busy)

        query, *sentences = np.asarray(await pipe(probe.ids, probe.mask))
        plan = await pipe.plan(batches[0].ids, batches[0].mask)

    return report.Report(
        passages=len(passages),
        passages_per_s=len(passages) / stream_s,
        compile_s=compile_s,
        n_shapes=len(shapes),
        n_batches=len(batches),
        max_abs_err_vs_reference=float(np.abs(np.stack(sentences) - reference["embeddings"]).max()),
        query=options.query,
        results=report.nearest(query, embeddings, passages, options.top),
        devices=options.devices,
        n_copies=options.n_copies,
        busy=busy,
        plan=report.split_rows(plan),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 2 for wrong usage, as argparse has it."""
    options = parse(argv)

    def show(report: Report) -> None:
        print(report)
        if options.json:
            print(json.dumps(report.to_json()))

    return run(lambda: search(options), show, expected=(OSError, ValueError))


if __name__ == "__main__":
    sys.exit(main())
