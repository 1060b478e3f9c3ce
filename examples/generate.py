"""Writes text with a llama model from a GGUF file, its layers spread over several devices, several texts at once.

The use of aiopipe is in `llama/generator.py`, `llama/group.py` and `llama/graphs.py`; this is a command around it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import check_devices, n_cpus, names, positive, ratios
from command import run

if TYPE_CHECKING:
    from llama.generator import Generator, Stream
    from llama.tokenizer import Tokenizer

EXAMPLES = """\
examples:
  %(prog)s --chat "What is the capital of Japan?" --devices cpu:0,cpu:1 --max-tokens 32
  %(prog)s --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 7
  %(prog)s --prompts-file questions.txt --devices gpu:0,cpu:0 --split 9,1 --quantized
  %(prog)s --model other.gguf --prompt "def fib(n):" --json | tail -n 1

Compiling takes a while the first time. JAX keeps what it has compiled in the folder that the environment variable
JAX_COMPILATION_CACHE_DIR names.
"""

QUESTION = "What is the capital of Japan?"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for; the defaults are in `parse`."""

    model: Path | None
    prompt: tuple[str, ...]
    chat: tuple[str, ...]
    prompts_file: Path | None
    system: str | None
    devices: tuple[str, ...]
    split: str | tuple[float, ...]
    n_copies: int | None
    rows: int | None
    n_ctx: int
    chunk: int
    quantized: bool
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    json: bool


def parse(argv: Sequence[str] | None = None) -> Options:
    """Reads the command line; exits with a message where it makes no sense."""

    def split(text: str) -> str | tuple[float, ...]:
        return ratios(text, ("auto", "layers"))

    parser = argparse.ArgumentParser(
        description="Write text with a llama model whose layers are spread over several devices.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to write")
    add = what.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="a text to continue; may come several times")
    add("--chat", action="append", default=[], metavar="TEXT", help="a question to answer; may come several times")
    add("--prompts-file", type=Path, metavar="FILE", help="a question in each line; all are answered at once")
    add("--system", metavar="TEXT", help="what the model is told before a question (default: what its template says)")
    add("--max-tokens", type=positive, default=128, metavar="N", help="for each text (default: %(default)s)")
    where = parser.add_argument_group("the model, and where it runs")
    add = where.add_argument
    add("--model", type=Path, metavar="FILE", help="a GGUF file (default: SmolLM2-135M-Instruct, from its package)")
    add("--quantized", action="store_true", help="leave Q4_0, Q4_1 and Q8_0 weights so in memory")
    add("--devices", type=names, default="cpu:0,cpu:1", metavar="A,B", help="in this order (default: %(default)s)")
    add(
        "--split",
        type=split,
        default="auto",
        metavar="R,S",
        help="auto balances time, layers their number; or a share for each device (default: auto)",
    )
    add("--n-copies", type=positive, metavar="N", help="steps in flight (default: enough for all groups)")
    add("--rows", type=positive, metavar="N", help="texts that take their steps together (default: as many as fit)")
    add("--n-ctx", type=positive, default=512, metavar="N", help="tokens of a text at most (default: %(default)s)")
    add("--chunk", type=positive, default=64, metavar="N", help="tokens of a prompt in a step (default: %(default)s)")
    how = parser.add_argument_group("how tokens are chosen")
    add = how.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the best each time (default: %(default)s)")
    add("--top-k", type=int, default=0, metavar="N", help="only among the N best; 0: no limit")
    add("--top-p", type=float, default=1.0, metavar="P", help="only among the best that together have probability P")
    add("--min-p", type=float, default=0.0, metavar="P", help="only with at least this share of the best's probability")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: less of what was just written")
    add("--seed", type=int, default=0, metavar="N", help="of the random numbers (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    given = vars(parser.parse_args(argv))
    options = Options(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    check_devices(parser, options.devices, options.split)
    try:
        sampling_of(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def sampling_of(options: Options) -> Any:
    """How tokens are chosen."""
    from llama.sampling import Sampling

    keys = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return Sampling(**{key: getattr(options, key) for key in keys})


def prompts_of(options: Options, tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """The texts to write: what is asked, and its token ids. What is asked twice is written twice."""
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    questions = list(options.chat)
    if options.prompts_file is not None:
        questions += [line.strip() for line in options.prompts_file.read_text("utf-8").splitlines() if line.strip()]
    if not questions and not options.prompt:
        questions = [QUESTION]
    found = [(text, tokenizer.encode(text)) for text in options.prompt]
    return found + [(q, tokenizer.chat([*system, {"role": "user", "content": q}])) for q in questions]


async def write(stream: Stream, tokenizer: Tokenizer, on_token: Callable[[], None]) -> str:
    """Shows a text while it is written; returns it."""
    detokenizer, text = tokenizer.detokenizer(), ""
    async for token in stream:
        on_token()
        piece = detokenizer.push(token)
        print(piece, end="", flush=True)
        text += piece
    rest = detokenizer.finish()
    print(rest)
    return text + rest


async def generate(options: Options) -> dict[str, Any]:
    """Writes every text, all at once; returns what there is to report."""
    # Imported late, so that --help is quick, and Ctrl-C works while this takes its second.
    import jax
    from llama import tokenizer as tokens
    from llama import weights
    from llama.generator import Generator
    from llama.gguf_file import read_file

    import aiopipe as ap

    if n_cpus(options.devices):
        jax.config.update("jax_num_cpu_devices", n_cpus(options.devices))  # before JAX starts its CPU client

    # Threads, as each of these takes a good part of a second, in which an event loop must not stand still.
    path = options.model or weights.model_path()
    file = await asyncio.to_thread(read_file, path)
    config, params = await asyncio.to_thread(weights.load, file, options.quantized)
    tokenizer = await asyncio.to_thread(tokens.Tokenizer, file)
    prompts = prompts_of(options, tokenizer)

    began = time.perf_counter()
    compiling = ap.Progress()
    rows = options.rows or min(8, -(-len(prompts) // len(options.devices)))
    async with Generator(
        config,
        params,
        devices=list(options.devices),
        rows=rows,
        n_ctx=min(options.n_ctx, config.n_ctx),
        chunk=options.chunk,
        n_copies=options.n_copies,
        split=options.split,
        timeline=True,
        on_progress=compiling.update,
    ) as generator:
        async with compiling:
            compiling.begin("compiling")
            await warm_up(generator, [ids for _, ids in prompts])
        ready_s = time.perf_counter() - began
        generator.scheduler.reset_busy()
        began = time.perf_counter()
        how = {"sampling": sampling_of(options), "max_tokens": options.max_tokens, "stop": tokenizer.stop_ids}
        streams = [(text, generator.submit(ids, **how)) for text, ids in prompts]
        texts = []
        async with AsyncExitStack() as stack:
            writing = ap.Progress(generator.scheduler)
            if not sys.stdout.isatty():  # else the texts themselves show how far it is
                await stack.enter_async_context(writing)
            writing.begin("writing tokens")
            for text, stream in streams:
                if len(streams) > 1:
                    print(f"\n> {text}")
                texts.append(await write(stream, tokenizer, writing.advance))
        wall_s = time.perf_counter() - began
        return report(options, generator, streams, texts, wall_s, ready_s)


async def warm_up(generator: Generator, prompts: Sequence[Sequence[int]]) -> None:
    """Compile what these prompts need, so that what is measured is writing."""
    streams = [generator.submit(prompt, max_tokens=2) for prompt in prompts]
    for stream in streams:
        async for _ in stream:
            pass


def report(
    options: Options,
    generator: Generator,
    streams: Sequence[tuple[str, Stream]],
    texts: Sequence[str],
    wall_s: float,
    ready_s: float,
) -> dict[str, Any]:
    """What was written, how fast, and where."""
    first = [s.first_token_s for _, s in streams if s.first_token_s is not None]
    prompt_tokens = sum(s.prompt_tokens for _, s in streams)
    decoded = sum(max(0, s.n_tokens - 1) for _, s in streams)
    decode_s = wall_s - max(first, default=0.0)
    scheduler = generator.scheduler
    return {
        "texts": [
            {
                "prompt": asked,
                "text": text,
                "prompt_tokens": stream.prompt_tokens,
                "tokens": stream.n_tokens,
                "finish_reason": stream.finish_reason,
                "first_token_s": stream.first_token_s,
            }
            for (asked, stream), text in zip(streams, texts, strict=True)
        ],
        "ready_s": ready_s,
        "prompt_tokens_per_s": prompt_tokens / max(first) if first else None,
        "decode_tokens_per_s": decoded / decode_s if decoded and decode_s > 0 else None,
        "busy": dict(generator.statistics().scheduler.busy),
        "memory_nbytes": {backend.name: scheduler.buffer_size(backend) for backend in scheduler.backends},
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()},
    }


def show(found: dict[str, Any]) -> None:
    """A summary for people, on standard error, so that standard output has the texts alone."""

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    print(
        f"\nprompt {rate(found['prompt_tokens_per_s'])} tokens/s, then {rate(found['decode_tokens_per_s'])} tokens/s; "
        f"ready after {found['ready_s']:.1f} s",
        file=sys.stderr,
    )
    for name, nbytes in found["memory_nbytes"].items():
        busy = found["busy"].get(name)
        share = "" if busy is None else f", busy {busy:.0%}"
        print(f"{name}: {nbytes / 1e6:.0f} MB{share}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 2 for wrong usage, as argparse has it."""
    options = parse(argv)

    def show_all(found: dict[str, Any]) -> None:
        show(found)
        if options.json:
            print(json.dumps(found))

    return run(lambda: generate(options), show_all, expected=(OSError, ValueError))


if __name__ == "__main__":
    sys.exit(main())
