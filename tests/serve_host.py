"""A process with small models that opens servers over them as it is told: see `serving.Host`.

Each line of standard input is a JSON object, and each has one line of standard output as its answer:

    {"open": {"queue": 1, ...}}    a server with these limits           {"url": "http://127.0.0.1:..."}
    {"close": "http://..."}        end it, as SIGTERM would             {"closing": "http://..."}
    {"ended": "http://..."}        when it has ended                    {"ended": "http://..."}
    {"hold": true}                 write nothing until told to          {"hold": true}

It ends with standard input. Then it says what it has to complain of: calls by which aiopipe blocked the event loop,
threads and tasks that are left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from llama.gguf_file import read_file  # noqa: E402
from llama.group import Group  # noqa: E402
from llama.tokenizer import Tokenizer  # noqa: E402
from minilm import model as minilm  # noqa: E402
from serve.app import Service  # noqa: E402
from serve.limits import Limits  # noqa: E402
from serve.models import Models, Sizes, open_embeddings, open_generator  # noqa: E402
from serve.server import CHAT_NAME, EMBED_NAME, Server  # noqa: E402

import aiopipe as ap  # noqa: E402
import conftest  # noqa: E402  # before JAX starts: it makes the devices

TINY = Path(__file__).parent / "data" / "tiny.gguf"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
)
SIZES = Sizes(rows=2, n_ctx=128, chunk=32, lengths=(16, 64), buckets=(1, 4))
ENCODER = minilm.Config(n_layers=2, n_heads=2, d_model=16)
N_WORDS = 30522


def tiny_tokenizer() -> Tokenizer:
    """That of the tiny model, and a template for chats, which its file lacks."""
    file = read_file(TINY)
    return Tokenizer(dataclasses.replace(file, fields={**file.fields, "tokenizer.chat_template": TEMPLATE}))


def tiny_encoder() -> tuple[minilm.Config, minilm.Params]:
    """Random weights of a sentence encoder with MiniLM's vocabulary."""
    rng = np.random.default_rng(0)
    d = ENCODER.d_model

    def dense(n: int, m: int) -> Any:
        return {"w": rng.standard_normal((n, m), np.float32) / np.float32(n**0.5), "b": np.zeros(m, np.float32)}

    def norm() -> Any:
        return {"scale": np.ones(d, np.float32), "bias": np.zeros(d, np.float32)}

    def layer() -> Any:
        attention = {name: dense(d, d) for name in ("q", "k", "v", "out")}
        return {
            "attn": {**attention, "norm": norm()},
            "mlp": {"up": dense(d, 2 * d), "down": dense(2 * d, d), "norm": norm()},
        }

    embeddings = {
        "word": rng.standard_normal((N_WORDS, d), np.float32),
        "position": rng.standard_normal((512, d), np.float32),
        "kind": np.zeros(d, np.float32),
        "norm": norm(),
    }
    return ENCODER, {"embeddings": embeddings, "layers": [layer() for _ in range(ENCODER.n_layers)]}


def hold_steps() -> asyncio.Event:
    """Have every group wait before each step until the event is set."""
    gate = asyncio.Event()
    gate.set()
    step = Group._step

    async def held(group: Group) -> None:
        await gate.wait()
        await step(group)

    Group._step = held  # type: ignore[method-assign]
    return gate


async def obey(models: Models, gate: asyncio.Event) -> None:
    """Open and close servers."""
    loop = asyncio.get_running_loop()
    running: dict[str, tuple[Server, asyncio.Task[None]]] = {}

    def say(**answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    say(ready=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order: dict[str, Any] = json.loads(line)
        if "open" in order:
            limits = Limits(**order["open"])
            service = Service(models, chat_name=CHAT_NAME, embed_name=EMBED_NAME, limits=limits)
            ready: asyncio.Future[Server] = loop.create_future()
            server = Server(service, "127.0.0.1", 0, ready.set_result)
            task = loop.create_task(server.serve())
            url = (await ready).address
            running[url] = server, task
            say(url=url)
        elif "close" in order:
            running[order["close"]][0].should_exit = True
            say(closing=order["close"])
        elif "hold" in order:
            (gate.clear if order["hold"] else gate.set)()
            say(hold=order["hold"])
        else:
            await running.pop(order["ended"])[1]
            say(ended=order["ended"])
    for server, task in running.values():
        server.should_exit = True
        await task


async def main() -> list[str]:
    conftest.pytest_sessionstart()
    gate = hold_steps()
    backends = ap.open_backends("cpu:0", "cpu:1")
    try:
        async with (
            open_generator(TINY, backends, SIZES) as (generator, _),
            open_embeddings(tiny_encoder(), backends, SIZES, 8) as models,
        ):
            await obey(dataclasses.replace(models, generator=generator, tokenizer=tiny_tokenizer()), gate)
    finally:
        for backend in backends:
            await backend.aclose()
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    return left + await threads_left() + conftest.blocking_calls


async def threads_left() -> list[str]:
    """The threads of aiopipe that do not end by themselves; one that has said its last word may take a moment."""
    until = time.monotonic() + conftest.GRACE_S
    while True:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith(conftest.THREAD_PREFIX)]
        if not left or time.monotonic() > until:
            return left
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    print(json.dumps({"complaints": asyncio.run(main())}))
