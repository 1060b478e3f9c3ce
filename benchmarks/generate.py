"""Tokens a second of `examples/llama` on CPU devices, and beside it llama.cpp with the same file and threads.

    make bench-generate                          makes llama.cpp's environment, then runs this
    python benchmarks/generate.py [--quick] [--streams 1,16]

Texts are written by greedy choice, as many at once as a row's "streams". What is compared takes turns, round after
round: aiopipe on one device, on two, and llama.cpp in a process of its own. Prompts are read first; "tokens_per_s" is
the sum over the texts of tokens a second from a text's first token to its last, by either program's own clock, and
"with_prompts_per_s" all tokens written over the time from submitting to the last one. Ratios are medians over the
rounds. Without ``.bench/venv-llama-cpp`` aiopipe is measured alone.

"steps" are the compiled steps by themselves, without aiopipe, in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from _common import Check, finish, progress, start_jax
from _worker import PeerError, Worker
from llama import steps, weights
from llama.generator import Generator
from llama.sampling import Sampling, single, stack
from llama.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
N_CTX = 256
PROMPT = 32
"""Tokens of a prompt whose text is timed."""
LONG_PROMPT, N_LONG = 192, 2
"""Of the prompts that are timed themselves, and how many at once."""
BACKENDS = {"1 device": ["cpu:0"], "2 devices": ["cpu:0", "cpu:1"]}
PEER = "llama.cpp"
PARTS = ["f32", "q4_1", "copies", "growth", "steps"]
TINY = ROOT / "tests" / "data" / "tiny.gguf"


def prompts(count: int, length: int) -> list[list[int]]:
    """Token ids that have nothing to do with each other, so that no two texts are alike."""
    return [[(37 * i * i + 11 * i + 101 * j) % 40000 + 100 for i in range(length)] for j in range(count)]


@dataclass(frozen=True, slots=True)
class Written:
    """One run."""

    seconds: float
    rate: float
    n_tokens: int
    texts: list[Any]


def threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def write(generator: Generator, texts: Sequence[Sequence[int]], max_tokens: int) -> Written:
    async def one(stream: Any) -> list[int]:
        return [token async for token in stream]

    began = time.perf_counter()
    streams = [generator.submit(text, max_tokens=max_tokens) for text in texts]
    found = await asyncio.gather(*map(one, streams))
    seconds = time.perf_counter() - began
    if wrong := {s.finish_reason for s in streams} - {"length"} or {len(f) for f in found} - {max_tokens}:
        raise RuntimeError(f"texts were to be of {max_tokens} tokens each, but there were {wrong}")
    rate = sum((s.n_tokens - 1) / s.decode_s for s in streams) if max_tokens > 1 else 0.0
    return Written(seconds, rate, sum(map(len, found)), found)


# llama.cpp -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def llama_cpp(file: str, streams: Sequence[int]) -> Any:
    """Its process, ready; None where its environment is missing or it fails."""
    folder = ROOT / ".bench" / "venv-llama-cpp"
    if not (folder / ".installed").exists():
        progress(f"{folder} is not there (make bench-generate makes it): aiopipe is measured alone")
        yield None
        return
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(folder / "bin" / "python"), str(ROOT / "benchmarks" / "peers" / "llama_cpp.py")]
    worker = await Worker.start(PEER, command, env, ROOT / ".bench" / "peers" / "llama-cpp.log")
    try:
        setup = {"cmd": "setup", "file": file, "streams": streams, "n_ctx": N_CTX, "threads": threads()}
        try:
            await worker.ask(setup, 120)
        except PeerError as error:
            progress(f"llama.cpp failed, aiopipe is measured alone: {error}")
            yield None
            return
        yield worker
    finally:
        await worker.stop()


async def ask(worker: Worker, streams: int, texts: Sequence[Sequence[int]], max_tokens: int) -> Written:
    command = {"cmd": "run", "streams": streams, "prompts": texts, "max_tokens": max_tokens}
    reply = await worker.ask(command, 120)
    if set(reply["n_tokens"]) != {max_tokens}:
        raise RuntimeError(f"llama.cpp wrote {reply['n_tokens']} tokens instead of {max_tokens} each")
    return Written(reply["seconds"], sum(reply["rates"]), sum(reply["n_tokens"]), reply["texts"])


# the comparison ------------------------------------------------------------------------------------


async def take_turns(
    runs: dict[str, Callable[[], Any]], rounds: int, label: str
) -> tuple[dict[str, list[Written]], dict[str, list[Any]]]:
    """Each run once to warm up, then in turn; every other round the other way round. Also the texts of the first."""
    found: dict[str, list[Written]] = {name: [] for name in runs}
    texts: dict[str, list[Any]] = {}
    for round_ in range(rounds + 1):
        for name in list(runs)[:: 1 if round_ % 2 else -1]:
            written = await runs[name]()
            if round_:
                found[name].append(written)
            else:
                texts[name] = written.texts
        progress(f"{label}: round {round_} of {rounds}")
    return found, texts


def compare(values: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and how many times the peer's and one device's each is."""
    result: dict[str, Any] = {name: {"per_s": round(statistics.median(v), 1)} for name, v in values.items()}
    for name, entry in result.items():
        for peer, key in ((PEER, "over_llama_cpp"), ("1 device", "over_1_device")):
            if peer in values and peer != name and name != PEER:
                entry[key] = round(statistics.median(a / b for a, b in zip(values[name], values[peer], strict=True)), 3)
    return result


async def measure(
    options: argparse.Namespace, loaded: Any, kind: str, worker: Worker | None, rounds: int, streams: Sequence[int]
) -> dict[str, Any]:
    """One file: texts for each number of streams, then prompts, in the generators of the last number."""
    config, params = loaded
    backends = dict(list(BACKENDS.items())[: 2 if kind == "f32" else 1])  # for more there is no further question
    result: dict[str, Any] = {}
    for n in streams:
        async with contextlib.AsyncExitStack() as stack_:
            generators: dict[str, Generator] = {}
            for name, devices in backends.items():
                groups = min(len(devices), n)
                made = Generator(config, params, devices=devices, rows=-(-n // groups), groups=groups, n_ctx=N_CTX)
                generators[name] = await stack_.enter_async_context(made)
            texts = prompts(n, PROMPT)
            runs: dict[str, Any] = {g: partial(write, generators[g], texts, options.tokens) for g in generators}
            if worker is not None:
                runs[PEER] = partial(ask, worker, n, texts, options.tokens)
            found, first = await take_turns(runs, rounds, f"{kind}, {n} streams")
            entry = {
                "tokens_per_s": compare({g: [w.rate for w in ws] for g, ws in found.items()}),
                "with_prompts_per_s": compare({g: [w.n_tokens / w.seconds for w in ws] for g, ws in found.items()}),
                "equal_texts": equal(first),
            }
            result[f"{n} streams"] = entry
            if n == streams[-1]:
                long = prompts(N_LONG, LONG_PROMPT)
                runs = {g: partial(write, generators[g], long, 1) for g in generators}
                if worker is not None:
                    runs[PEER] = partial(ask, worker, n, long, 1)
                found, _ = await take_turns(runs, rounds, f"{kind}, prompts")
                size = N_LONG * LONG_PROMPT
                result["prompts"] = compare({name: [size / w.seconds for w in ws] for name, ws in found.items()})
    return result


def equal(first: dict[str, list[Any]]) -> dict[str, float]:
    """The share of texts that are those of one device, to the last token."""
    tokenizer = Tokenizer()
    plain = {
        name: [text if isinstance(text, str) else tokenizer.decode(text) for text in texts]
        for name, texts in first.items()
    }
    want = plain.pop("1 device")
    return {
        name: round(statistics.fmean(a.strip() == b.strip() for a, b in zip(texts, want, strict=True)), 2)
        for name, texts in plain.items()
    }


async def latency_of_copies(options: argparse.Namespace, loaded: Any) -> float:
    """The time for a token of a single text on two devices with four copies, over that with one."""
    config, params = loaded
    async with contextlib.AsyncExitStack() as stack_:
        runs: dict[str, Any] = {}
        for copies in (4, 1):
            made = Generator(config, params, devices=BACKENDS["2 devices"], rows=1, n_ctx=N_CTX, n_copies=copies)
            generator = await stack_.enter_async_context(made)
            runs[str(copies)] = partial(write, generator, prompts(1, PROMPT), options.tokens)
        found, _ = await take_turns(runs, options.rounds, "4 copies and 1")
    return statistics.median(b.rate / a.rate for a, b in zip(found["4"], found["1"], strict=True))


async def growth(n_texts: int) -> dict[str, Any]:
    """What a token costs after many evaluations, with a tiny model, where everything is overhead."""
    config, params = weights.load(TINY)
    async with Generator(config, params, devices=BACKENDS["2 devices"], rows=2, groups=1, n_ctx=N_CTX) as generator:
        text, rates = prompts(1, 8)[0], []
        text = [token % config.n_vocab for token in text]
        for i in range(n_texts):
            rates.append((await write(generator, [text], 240)).rate)
            if i % 20 == 0:
                progress(f"growth: text {i} of {n_texts}")
        steps_done = generator.statistics().decode_steps
    part = n_texts // 4
    late, early = statistics.median(rates[-part:]), statistics.median(rates[part : 2 * part])
    return {"decode_steps": steps_done, "us_per_token": round(1e6 / late, 1), "late_over_early": round(early / late, 3)}


def bare_steps(loaded: Any, repetitions: int, batches: Sequence[int]) -> dict[str, float]:
    """Milliseconds of the compiled steps by themselves on one device, cache of `N_CTX`."""
    config, params = loaded[0], jax.device_put(loaded[1])
    result = {}
    for rows in (*batches, 0):
        state = steps.new_state(config, max(rows, 1), N_CTX)
        if rows:
            numbers = np.full(rows, 60, np.int32)
            args: tuple[Any, ...] = (numbers, numbers, np.ones(rows, bool), stack([Sampling()] * rows))
            step: Any = partial(steps.decode, config=config, n_kv=128)
        else:
            one = single(Sampling())
            args = (np.full(64, 60, np.int32), *np.int32([0, 0, 64]), one)
            step = partial(steps.prefill, config=config, n_kv=128)
        compiled = jax.jit(step, donate_argnums=1).lower(params, state, *args).compile()
        times = []
        for _ in range(repetitions + 1):
            began = time.perf_counter()
            out, state = compiled(params, state, *args)
            jax.block_until_ready((out, state))
            times.append((time.perf_counter() - began) * 1e3)
        name = f"{rows} rows by a token" if rows else "64 tokens of a prompt"
        result[name] = round(statistics.median(times[1:]), 1)
        progress(f"step of {name}: {result[name]} ms")
    return result


def against_llama_cpp(found: dict[str, Any], streams: int) -> list[Check]:
    """The better of one device and two."""
    entries = {"prompt": found["prompts"], f"{streams}-stream": found[f"{streams} streams"]["tokens_per_s"]}
    best = {name: max(entry[b]["over_llama_cpp"] for b in BACKENDS) for name, entry in entries.items()}
    return [Check(f"{name} tokens a second over llama.cpp's, F32", value, ">=", 0.5) for name, value in best.items()]


async def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Check]]:
    start_jax(BACKENDS["2 devices"])
    source, f32 = weights.model_path(), ROOT / ".bench" / "smollm2-f32.gguf"
    f32.parent.mkdir(exist_ok=True)
    if not f32.exists():
        progress(f"writing {f32}")
        part = f32.with_suffix(".part")
        weights.write_f32(source, part)
        part.rename(f32)
    result: dict[str, Any] = {"benchmark": "generate", "threads": threads(), "tokens": options.tokens}
    checks: list[Check] = []
    files = {"f32": str(f32), "q4_1": str(source)}
    sizes = {kind: options.streams if kind == "f32" else options.streams[-1:] for kind in files}
    for kind in (kind for kind in files if kind in options.parts):
        async with llama_cpp(files[kind], sizes[kind]) as worker:
            loaded = weights.load(files[kind], quantized=kind != "f32")
            rounds = options.rounds if kind == "f32" else max(2, options.rounds // 2)
            result[kind] = await measure(options, loaded, kind, worker, rounds, sizes[kind])
            if worker is not None and kind == "f32":
                checks += against_llama_cpp(result[kind], options.streams[-1])
    loaded = weights.load(f32)
    if "copies" in options.parts:
        copies = await latency_of_copies(options, loaded)
        result["latency_4_copies_over_1"] = round(copies, 3)
        checks.append(Check("time for a token of one stream, 4 copies over 1", copies, "<=", 1.05))
    if "growth" in options.parts:
        result["growth"] = found = await growth(20 if options.quick else 80)
        checks.append(Check("time for a token late over early", found["late_over_early"], "<=", 1.05))
    if "steps" in options.parts:
        result["steps_ms"] = bare_steps(loaded, 10, (1, 8) if options.quick else (1, 4, 8, 16))
    return result, checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], help="default: 1,4,16")
    parser.add_argument("--tokens", type=int, help="of each text (default: 32)")
    parser.add_argument("--rounds", type=int, help="default: 4")
    parser.add_argument("--parts", type=lambda text: text.split(","), help=f"default: {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="1 and 16 streams, 2 short rounds, without q4_1 and steps")
    options = parser.parse_args()
    options.parts = options.parts or [part for part in PARTS if part not in ("q4_1", "steps") or not options.quick]
    options.streams = options.streams or ([1, 16] if options.quick else [1, 4, 16])
    options.tokens = options.tokens or (16 if options.quick else 32)
    options.rounds = options.rounds or (2 if options.quick else 4)
    finish(*asyncio.run(run(options)))


if __name__ == "__main__":
    main()
