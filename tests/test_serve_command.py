"""The command that serves, in a process of its own, with the real language model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import server as command
from llama import weights
from llama.tokenizer import Tokenizer

from llamas import TINY, reference
from serving import CHAT

pytestmark = pytest.mark.timeout(150)  # a process of its own compiles the model first

EXAMPLES = Path(command.__file__).parent


@contextmanager
def running(*argv: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, once it is ready, and where it listens."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / "server.py"), "--port", "0", *argv],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("ready after "):
                    break
            else:
                pytest.fail(f"it ended with {process.wait()}")
            yield process, line.split()[4]
        finally:
            if process.poll() is None:
                process.kill()


async def test_smollm2_over_http_and_sigterm() -> None:
    want = reference("smollm2_llamacpp")
    prompt = want["ids"].tolist()
    text = Tokenizer(weights.model_path()).decode(want["greedy_f32"].tolist()[len(prompt) :][:20])
    argv = ("--no-embeddings", "--rows", "1", "--n-ctx", "128", "--chunk", "32", "--devices", "cpu:0")
    with running(*argv) as (process, url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model=CHAT, prompt=prompt, max_tokens=20, temperature=0, stream=True
            )
            first = await anext(aiter(stream))
            process.send_signal(signal.SIGTERM)  # what has begun ends as it would have
            rest = [chunk.choices[0].text async for chunk in stream]
        assert first.choices[0].text + "".join(rest) == text
        assert process.stdout is not None and process.stdout.read() == "closed\n"
        assert process.wait() == 0


def test_aiopipe_serve_says_where_as_json_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    model = ("--model", str(TINY), "--name", "tiny", "--no-embeddings", "--devices", "cpu:0")
    sizes = ("--rows", "1", "--n-ctx", "32", "--chunk", "8")
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "aiopipe", "serve", *model, *sizes, "--port", "0", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            assert (found["command"], found["models"]) == ("serve", ["tiny"])
            assert httpx.get(f"{found['address']}/v1/models").json()["data"][0]["id"] == "tiny"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert process.stdout.read() == ""
        finally:
            process.kill()


def test_a_model_that_is_not_there() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "server.py"), "--model", "nowhere.gguf"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "nowhere.gguf" in done.stderr


async def test_an_address_that_is_taken_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = ["--port", str(taken.getsockname()[1]), "--model", "nowhere.gguf", "--devices", "gpu:0"]
        with pytest.raises(OSError, match="in use"):
            await command.serve(command.parse(argv))
