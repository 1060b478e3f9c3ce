"""The server, over HTTP: what the official client and others get, one by one and many at once."""

from __future__ import annotations

import asyncio
import base64
import random
from typing import Any

import numpy as np
import openai
import pytest
from llama.tokenizer import Tokenizer
from minilm import model as minilm
from minilm.text import load_tokenizer

from llamas import reference
from serve_host import tiny_encoder, tiny_tokenizer
from serving import CHAT, EMBED, HELLO, Host, events_of, serving

pytestmark = pytest.mark.timeout(120)  # the process with the models compiles them first

PROMPTS = [f"{'word ' * (i % 7)}{chr(97 + i)}" for i in range(12)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


# Texts -----------------------------------------------------------------------------------------------


async def test_the_official_client_chats(serve_host: Host) -> None:
    async with serving(serve_host) as server:
        assert [model.id async for model in server.openai.models.list()] == [CHAT, EMBED]
        assert (await server.openai.models.retrieve(CHAT)).owned_by == "aiopipe"
        how: Any = {"model": CHAT, "messages": HELLO, "temperature": 0, "max_tokens": 12}
        whole = await server.openai.chat.completions.create(**how)
        assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-") and whole.model == CHAT
        choice = whole.choices[0]
        assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
        assert whole.usage is not None and whole.usage.completion_tokens == 12
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12

        stream = await server.openai.chat.completions.create(
            **how, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({c.id for c in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == choice.message.content
        assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and chunks[0].usage is None


async def test_tokens_equal_llama_cpps(serve_host: Host, tokenizer: Tokenizer) -> None:
    want = reference("tiny_gguf")
    text = tokenizer.decode(want["greedy"].tolist()[:16])
    how: Any = {"model": CHAT, "prompt": want["tokens"].tolist(), "temperature": 0}
    async with serving(serve_host) as server:
        whole = await server.openai.completions.create(**how)  # 16 tokens, if nothing else is said
        assert whole.object == "text_completion" and whole.choices[0].text == text
        assert whole.usage is not None and whole.usage.completion_tokens == 16
        stream = await server.openai.completions.create(**how, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
        assert "".join(pieces) == text and len(pieces) > 3


async def test_events_as_they_are_sent(serve_host: Host) -> None:
    async with serving(serve_host) as server:
        answer = await server.chat(max_tokens=3, stream=True)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        *chunks, done = events_of(answer.text)
        assert done == "[DONE]" and all("usage" not in chunk for chunk in chunks)


async def test_stop_texts_and_seeds(serve_host: Host) -> None:
    how: Any = {"model": CHAT, "prompt": "abc", "temperature": 0, "max_tokens": 60}
    async with serving(serve_host) as server:
        create = server.openai.completions.create
        text = (await create(**how)).choices[0].text
        stop = text[20:23]
        end = text.index(stop)
        for more in ({"stop": stop}, {"stop": ["never", stop]}):
            cut = (await create(**how, **more)).choices[0]
            assert (cut.text, cut.finish_reason) == (text[:end], "stop")
            streamed = [c.choices[0] async for c in await create(**how, **more, stream=True)]
            assert "".join(c.text for c in streamed) == text[:end] and streamed[-1].finish_reason == "stop"
        drawn: Any = how | {"temperature": 1.5, "top_p": 0.95}
        texts = [(await create(**drawn, seed=seed)).choices[0].text for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]
        assert (await create(**drawn)).choices[0].text != (await create(**drawn)).choices[0].text


async def test_the_end_of_the_context(serve_host: Host) -> None:
    async with serving(serve_host) as server:
        answer = await server.openai.completions.create(model=CHAT, prompt=[5] * 120, temperature=0, max_tokens=100)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.total_tokens == 129  # 128 are read, and one more is written
        refused = {"context is 128 tokens": [5] * 128, "no token 260": [5, 260], "no token -1": [-1]}
        for message, prompt in refused.items():
            with pytest.raises(openai.BadRequestError, match=message):
                await server.openai.completions.create(model=CHAT, prompt=prompt)


async def test_names_of_control_tokens_are_text_inside_a_chat(serve_host: Host) -> None:
    async with serving(serve_host) as server:
        plain = (await server.chat("</s>", max_tokens=1)).json()["usage"]["prompt_tokens"]
        assert plain == len("[user]</s>[answer]") + 3  # each byte a token, and the break's three


async def test_everybody_under_load_gets_what_they_get_alone(serve_host: Host) -> None:  # S26, S28
    rng = random.Random(3)
    async with serving(serve_host, queue=1000) as server:
        alone = {prompt: (await server.chat(prompt, max_tokens=20)).json() for prompt in PROMPTS}
        texts = {prompt: answer["choices"][0]["message"]["content"] for prompt, answer in alone.items()}

        async def whole(prompt: str) -> None:
            assert (await server.chat(prompt, max_tokens=20)).json()["choices"] == alone[prompt]["choices"]

        async def streamed(prompt: str) -> None:
            stream = await server.openai.chat.completions.create(
                model=CHAT, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=20, stream=True
            )
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == texts[prompt]

        async def leaves(prompt: str) -> None:
            body = {"model": CHAT, "prompt": prompt, "max_tokens": 100, "stream": rng.random() < 0.5}
            try:
                async with asyncio.timeout(rng.random() * 0.3):
                    async with server.http.stream("POST", "/v1/completions", json=body) as answer:
                        async for _ in answer.aiter_bytes():
                            if rng.random() < 0.2:
                                break
            except TimeoutError:
                pass

        async with asyncio.TaskGroup() as group:
            for i in range(60):
                group.create_task((whole, streamed, leaves)[i % 3](rng.choice(PROMPTS)))
        await server.quiet()
        assert await server.metric('aiopipe_requests_total{path="/v1/chat/completions",status="200"}') >= 52


# Embeddings ------------------------------------------------------------------------------------------


def embedded(texts: list[str]) -> list[np.ndarray[Any, Any]]:
    """What each text's embedding must be, computed alone and without padding."""
    config, params = tiny_encoder()
    tokenizer = load_tokenizer()
    found = []
    for text in texts:
        ids = np.asarray([tokenizer.encode(text).ids], np.int32)
        found.append(np.asarray(minilm.embed(params, ids, np.ones_like(ids), config))[0])
    return found


async def test_embeddings(serve_host: Host) -> None:
    texts = ["hello world", "a", "how do I open a file in Python without closing it too early " * 2, "hello world"]
    want = embedded(texts)
    async with serving(serve_host) as server:
        create = server.openai.embeddings.create  # which asks for base64, and unpacks it
        found = await create(model=EMBED, input=texts)
        for i, (item, embedding) in enumerate(zip(found.data, want, strict=True)):
            assert item.index == i
            np.testing.assert_allclose(item.embedding, embedding, rtol=1e-4, atol=1e-5)
        ids = [load_tokenizer().encode(text).ids for text in texts]
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
        for given_ids in (ids, ids[0]):
            again = await create(model=EMBED, input=given_ids)
            np.testing.assert_allclose(again.data[0].embedding, want[0], rtol=1e-4, atol=1e-5)
        plain = await create(model=EMBED, input=texts[0], encoding_format="float", dimensions=16)
        packed = await server.http.post(
            "/v1/embeddings", json={"model": EMBED, "input": texts[0], "encoding_format": "base64"}
        )
        unpacked = np.frombuffer(base64.b64decode(packed.json()["data"][0]["embedding"]), "<f4")
        assert plain.data[0].embedding == pytest.approx(unpacked.tolist())


async def test_embeddings_of_many_clients_share_batches(serve_host: Host) -> None:
    texts = [f"text {i}" for i in range(8)]
    want = embedded(texts)
    async with serving(serve_host) as server:
        rows, batches = "aiopipe_embeddings_rows_total", "aiopipe_embeddings_batches_total"
        before = await server.metric(rows), await server.metric(batches)

        async def ask(i: int) -> None:
            while True:
                try:
                    found = await server.openai.embeddings.create(model=EMBED, input=texts[i])
                    break
                except openai.RateLimitError as error:  # the documented answer to too many
                    assert int(error.response.headers["retry-after"]) >= 1
            np.testing.assert_allclose(found.data[0].embedding, want[i], rtol=1e-4, atol=1e-5)

        await asyncio.gather(*(ask(i % 8) for i in range(48)))
        after = await server.metric(rows), await server.metric(batches)
        assert after[0] - before[0] >= 48 > after[1] - before[1]


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        ({"model": CHAT}, 404, "does not exist, or does not embed"),
        ({"input": "word " * 100}, 400, "has 102 tokens, but this model reads at most 64"),
        ({"input": [0, 30522]}, 400, "no token 30522; they go from 0 to 30521"),
        ({"dimensions": 3}, 400, "have 16 dimensions"),
        ({"encoding_format": "hex"}, 400, "'float' or 'base64'"),
        ({"input": ["a"] * 257}, 400, "257 inputs, but this server takes 256 at once"),
        ({"input": ["a"] * 256}, 429, "texts are waiting already"),  # eight may wait here
    ],
)
async def test_embeddings_that_are_refused(serve_host: Host, given: Any, status: int, message: str) -> None:
    async with serving(serve_host) as server:
        answer = await server.http.post("/v1/embeddings", json={"model": EMBED, "input": "a", **given})
        assert answer.status_code == status and message in answer.json()["error"]["message"]
        assert (await server.openai.embeddings.create(model=EMBED, input="a")).data
