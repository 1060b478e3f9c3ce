"""Serves texts and embeddings over HTTP, as OpenAI's interface has it, and a page that shows the devices at work."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arguments import check_devices, n_cpus, names, positive, ratios
from command import run

EXAMPLES = """\
examples:
  %(prog)s                                      SmolLM2 and MiniLM on two CPU devices, at http://127.0.0.1:8000
  %(prog)s --devices gpu:0,gpu:1 --rows 32      on two GPUs, 64 texts at the same time
  %(prog)s --model my.gguf --name my-model      another language model

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello"}]}'
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for; the defaults are in `parse`."""

    host: str
    port: int
    devices: tuple[str, ...]
    split: str | tuple[float, ...]
    model: Path | None
    name: str | None
    rows: int
    n_ctx: int
    chunk: int
    embeddings: bool
    max_tokens: int
    queue: int
    grace: float
    cache: Path | None
    json: bool


def parse(argv: Sequence[str] | None = None) -> Options:
    """Reads the command line; exits with a message where it makes no sense."""

    def split(text: str) -> str | tuple[float, ...]:
        return ratios(text, ("auto", "layers"))

    def port(text: str) -> int:
        if not text.isdecimal() or int(text) > 65535:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a port, or 0 for a free one")
        return int(text)

    def seconds(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e6:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds")
        return value

    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_argument_group("where it listens")
    add = where.add_argument
    add("--host", default="127.0.0.1", metavar="H", help="0.0.0.0 for every address (default: %(default)s)")
    add("--port", type=port, default=8000, metavar="P", help="0 takes a free one (default: %(default)s)")
    what = parser.add_argument_group("the models, and where they run")
    add = what.add_argument
    add("--devices", type=names, default="cpu:0,cpu:1", metavar="A,B", help="in this order (default: %(default)s)")
    add("--split", type=split, default="auto", metavar="R,S", help="auto, layers, or a share for each (default: auto)")
    add("--model", type=Path, metavar="FILE", help="a GGUF file (default: SmolLM2-135M-Instruct, from its package)")
    add("--name", metavar="NAME", help="what clients call it (default: the name of the file)")
    add("--rows", type=positive, default=8, metavar="N", help="texts at once, for each device (default: %(default)s)")
    add("--n-ctx", type=positive, default=1024, metavar="N", help="tokens of a text at most (default: %(default)s)")
    add("--chunk", type=positive, default=64, metavar="N", help="tokens of a prompt in a step (default: %(default)s)")
    add("--no-embeddings", dest="embeddings", action="store_false", help="serve the language model alone")
    add("--cache", type=Path, metavar="DIR", help="where compiled steps are kept, so that the next start is quick")
    add("--json", action="store_true", help="when it is ready, print one JSON object and nothing else")
    limits = parser.add_argument_group("what clients may ask for (docs/serving.md has all limits)")
    add = limits.add_argument
    add("--max-tokens", type=positive, default=1024, metavar="N", help="of one answer (default: %(default)s)")
    add("--queue", type=positive, default=64, metavar="N", help="texts that may wait (default: %(default)s)")
    add("--grace", type=seconds, default=20.0, metavar="S", help="seconds to end what has begun (default: %(default)s)")
    options = Options(**vars(parser.parse_args(argv)))
    check_devices(parser, options.devices, options.split)
    return options


async def serve(options: Options) -> None:
    """Opens the models, and serves them until a signal comes."""
    # Loading takes a minute or two: whether it will be possible to listen then is better known before.
    loop = asyncio.get_running_loop()
    (await loop.create_server(asyncio.Protocol, options.host, options.port, start_serving=False)).close()

    # Imported late, so that --help is quick, and Ctrl-C works while this takes its second.
    import jax
    from serve.limits import Limits
    from serve.models import Sizes
    from serve.server import CHAT_NAME, Server, open_service

    if n_cpus(options.devices):
        jax.config.update("jax_num_cpu_devices", n_cpus(options.devices))  # before JAX starts its CPU client
    if options.cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.cache.resolve()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    began = time.perf_counter()
    name = options.name or (CHAT_NAME if options.model is None else options.model.stem)
    async with open_service(
        options.devices,
        model=options.model,
        chat_name=name,
        split=options.split,
        sizes=Sizes(rows=options.rows, n_ctx=options.n_ctx, chunk=options.chunk),
        limits=Limits(max_tokens=options.max_tokens, queue=options.queue, grace_s=options.grace),
        embeddings=options.embeddings,
    ) as service:

        def ready(server: Server) -> None:
            took_s = time.perf_counter() - began
            if options.json:
                found = {"command": "serve", "address": server.address, "devices": options.devices, "ready_s": took_s}
                print(json.dumps({**found, "models": list(service.names)}), flush=True)
            else:
                print(f"ready after {took_s:.0f} s: {server.address} (Ctrl-C ends it)", flush=True)

        await Server(service, options.host, options.port, ready).serve()


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 2 for wrong usage, as argparse has it."""
    options = parse(argv)

    def show(_: None) -> None:
        if not options.json:
            print("closed")

    return run(lambda: serve(options), show, expected=(OSError, ValueError))


if __name__ == "__main__":
    sys.exit(main())
