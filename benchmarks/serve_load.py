"""What happens when far more clients ask the server than it can serve, for a minute?

    python benchmarks/serve_load.py [--clients 200] [--seconds 60] [-- options of examples/server.py]

A server (`examples/server.py`) runs in a process of its own. This one has many clients that ask for chats, most of
them as streams, again and again; one in ten leaves in the middle of its text. A third process asks for `/health` all
the time, so that what it measures is the server and not the clients. On two cores, all of them share these with the
devices.

Each text is compared with what the server answered to the same question when nobody else was there. The only refusals
that count as right are the documented ones, 429 and 503 with ``Retry-After`` and OpenAI's error, after which a client
waits as long as it was told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _common import Check, finish, progress

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = (
    "What is the capital of Japan?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "How many days has a week?",
    "What do bees make?",
    "Say hello in French.",
    "What is water made of?",
    "Who wrote Hamlet?",
)
PROBE_EVERY_S = 0.02
LEAVES = 0.1
"""The share of clients that leave in the middle."""


class Answer:
    """What came back: status, headers and body; the body of a stream as its text."""

    def __init__(self, raw: bytes) -> None:
        head, _, body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin1").split("\r\n")
        self.status = int(first.split(" ")[1])
        fields = [line.partition(":") for line in lines]
        self.headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        self.text, self.complete, self.error = "", False, None
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            for line in body.split(b"\n"):  # each event is sent as one chunk, so its line is whole
                if line.startswith(b"data: [DONE]"):
                    self.complete = True
                elif line.startswith(b"data: "):
                    self._event(json.loads(line[6:]))
        else:
            found = json.loads(body)
            self.error = found.get("error")
            if self.error is None:
                self.complete = True
                self.text = found["choices"][0]["message"]["content"]

    def _event(self, found: Any) -> None:
        self.error = found.get("error")
        if self.error is None:
            self.text += found["choices"][0]["delta"].get("content", "")


async def ask(port: int, question: str, *, stream: bool, max_tokens: int, leave: bool = False) -> Answer | None:
    """One chat over a connection of its own; None for a client that left."""
    body = json.dumps(
        {
            "model": "served",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": stream,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: server\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        if leave:
            first = await reader.read(300)
            if b" 200 " in first[:20]:
                return None
            return Answer(first + await reader.read())
        return Answer(await reader.read())
    finally:
        writer.close()


async def client(
    port: int, end_s: float, want: dict[str, str], max_tokens: int, counts: Counter[str], rng: random.Random
) -> None:
    """Ask until the time is over."""
    while time.monotonic() < end_s:
        question, stream = rng.choice(QUESTIONS), rng.random() < 0.8
        leave = stream and rng.random() < LEAVES / 0.8
        try:
            answer = await ask(port, question, stream=stream, max_tokens=max_tokens, leave=leave)
        except (OSError, ValueError, IndexError, KeyError) as error:
            counts[f"error: {type(error).__name__}: {error}"] += 1
            continue
        if answer is None:
            counts["left"] += 1
        elif answer.status in (429, 503) and "retry-after" in answer.headers and answer.error is not None:
            counts[f"refused with {answer.status}"] += 1
            wait_s = int(answer.headers["retry-after"]) * rng.uniform(0.8, 1.2)
            await asyncio.sleep(min(wait_s, max(0.0, end_s - time.monotonic())))
        elif answer.status != 200 or not answer.complete or answer.error is not None:
            counts[f"error: {answer.status} {answer.error}"] += 1
        elif answer.text != want[question]:
            counts["wrong"] += 1
            progress(f"{question!r}: got {answer.text!r}, expected {want[question]!r}")
        else:
            counts["right"] += 1


async def probe(port: int, seconds: float) -> None:
    """Ask for `/health` over one connection; print the milliseconds of each answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    end_s, took = time.monotonic() + seconds, []
    while time.monotonic() < end_s:
        began = time.perf_counter()
        writer.write(b"GET /health HTTP/1.1\r\nHost: server\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        took.append((time.perf_counter() - began) * 1e3)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"/health answered {head.splitlines()[0]!r}")
        await asyncio.sleep(PROBE_EVERY_S)
    writer.close()
    print(json.dumps(took))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "examples" / "server.py"), "--port", "0", "--name", "served", *args.server]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    assert server.stdout is not None
    try:
        async for line in server.stdout:
            progress(line.decode().rstrip())
            if line.startswith(b"ready after "):
                break
        else:
            raise RuntimeError(f"the server ended with {await server.wait()}")
        port = int(line.split()[4].rpartition(b":")[2])

        want = {}
        for question in QUESTIONS:
            answer = await ask(port, question, stream=False, max_tokens=args.max_tokens)
            assert answer is not None and answer.status == 200, answer and answer.error
            want[question] = answer.text

        prober = [sys.executable, __file__, "--probe", str(port), "--seconds", str(args.seconds)]
        probing = await asyncio.create_subprocess_exec(*prober, stdout=asyncio.subprocess.PIPE)
        counts: Counter[str] = Counter()
        end_s = time.monotonic() + args.seconds
        clients = [client(port, end_s, want, args.max_tokens, counts, random.Random(i)) for i in range(args.clients)]
        await asyncio.gather(*clients)
        output, _ = await probing.communicate()
        took = sorted(json.loads(output))

        began_s = time.monotonic()
        server.terminate()
        rest = await server.stdout.read()
        closed = await server.wait() == 0 and b"closed" in rest
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()
    return {
        "benchmark": "serve_load",
        "clients": args.clients,
        "seconds": args.seconds,
        "texts_per_s": round(counts["right"] / args.seconds, 2),
        "counts": dict(sorted(counts.items())),
        "errors": sum(n for what, n in counts.items() if what.startswith("error")) + (not closed),
        "wrong": counts["wrong"],
        "health_ms": {
            "p50": round(statistics.median(took), 2),
            "p99": round(took[len(took) * 99 // 100], 2),
            "max": round(took[-1], 2),
            "n": len(took),
        },
        "closing_s": round(time.monotonic() - began_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-tokens", type=int, default=16, help="of each text")
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    options = ["--no-embeddings", "--n-ctx", "128"]
    what = f"options of the server (default: {' '.join(options)})"
    parser.add_argument("server", nargs="*", default=options, help=what)
    args = parser.parse_args()
    if args.probe is not None:
        asyncio.run(probe(args.probe, args.seconds))
        return
    result = asyncio.run(measure(args))
    who = f"{args.clients} clients of the server"
    checks = [
        Check(f"{who}: answers that are neither right nor documented", result["errors"], "<=", 0),
        Check(f"{who}: texts that differ from those of a lone client", result["wrong"], "<=", 0),
        Check(f"{who}: ms until /health answers, p99", result["health_ms"]["p99"], "<=", 20),
        Check(f"{who}: texts a second", result["texts_per_s"], ">=", 1),
    ]
    finish(result, checks)


if __name__ == "__main__":
    main()
