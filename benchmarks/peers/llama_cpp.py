"""llama.cpp's server on the CPU, inside this process: what `benchmarks/generate.py` compares with.

    {"cmd": "setup", "file": "….gguf", "streams": [1, 16], "n_ctx": 256, "threads": 2}
    {"cmd": "run", "streams": 16, "prompts": [[1, 2], …], "max_tokens": 32}

Its cache is float16, as llama.cpp chooses by itself: with float32, which aiopipe has, 16 texts at once take twice as
long. Each number of streams has a server with as many slots. All prompts are submitted at once, from threads.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from _protocol import Peer, serve


class LlamaCpp(Peer):
    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        match command["cmd"]:
            case "setup":
                size = command["n_ctx"], command["threads"]
                self.servers = {n: _server(command["file"], n, *size) for n in command["streams"]}
                return {"ok": True, "versions": {"xllamacpp": version("xllamacpp")}}
            case "run":
                return {"ok": True, **self.write(command)}
        return {"ok": True}

    def write(self, command: dict[str, Any]) -> dict[str, Any]:
        """Continue the prompts: seconds in all, the texts, and tokens a second of each by llama.cpp's own clock."""
        server = self.servers[command["streams"]]

        def one(prompt: list[int]) -> dict[str, Any]:
            request = {
                "prompt": prompt,
                "max_tokens": command["max_tokens"],
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
            found: dict[str, Any] = server.handle_completions(request)
            return found

        with ThreadPoolExecutor(len(command["prompts"])) as threads:
            began = time.perf_counter()
            found = list(threads.map(one, command["prompts"]))
            seconds = time.perf_counter() - began
        timings = [answer["timings"] for answer in found]
        return {
            "seconds": seconds,
            "texts": [answer["choices"][0]["text"] for answer in found],
            "n_tokens": [t["predicted_n"] for t in timings],
            "n_prompt": [t["prompt_n"] for t in timings],
            "rates": [t["predicted_per_second"] for t in timings],
        }


def _server(path: str, streams: int, n_ctx: int, threads: int) -> Any:
    import xllamacpp as x

    params = x.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel = n_ctx * streams, streams
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt, params.cache_ram_mib, params.fit_params, params.verbosity = False, 0, False, -1
    return x.Server(params)


if __name__ == "__main__":
    serve(LlamaCpp())
