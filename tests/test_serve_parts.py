"""The parts of the server that need no server: what is refused, where texts stop, the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import server as command
from hypothesis import given
from hypothesis import strategies as st
from serve.answers import event
from serve.errors import ApiError, busy, closing, error_response, failed, wrong
from serve.limits import _refusal
from serve.schema import ChatRequest, CompletionRequest, EmbeddingRequest
from serve.stops import Stops
from serve.texts import sampling_of
from starlette.exceptions import HTTPException

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}

# Stops -----------------------------------------------------------------------------------------------


def letter_by_letter(text: str, stops: list[str]) -> tuple[str, bool]:
    """Where a text ends, found the slow way."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(st.lists(st.text("abc", max_size=4)), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_a_text_ends_at_the_first_stop_however_it_comes(pieces: list[str], texts: list[str]) -> None:
    stops = Stops(texts)
    shown = ""
    for piece in pieces:
        shown += stops.push(piece)
    shown += stops.finish()
    assert (shown, stops.found) == letter_by_letter("".join(pieces), texts)


def test_only_what_may_be_a_stop_is_held_back() -> None:
    stops = Stops(["\n\n", "END"])
    assert [stops.push(piece) for piece in ("a\n", "b", "\nE", "x", "EN")] == ["a", "\nb", "\n", "Ex", ""]
    assert stops.finish() == "EN" and not stops.found
    assert [Stops([]).push("anything"), Stops(["q"]).push("anything")] == ["anything"] * 2


# Requests --------------------------------------------------------------------------------------------


def refusal(model: Any, body: Any) -> dict[str, Any]:
    """What a client is told."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ValueError) as info:
        model.model_validate_json(raw, strict=True)
    error = _refusal(info.value)  # type: ignore[arg-type]
    assert error.status == 400
    return error.body()["error"]


@pytest.mark.parametrize(
    ("changed", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "Hi"}, "messages", "valid array"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role", "'system', 'developer', 'user'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "Missing required"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content", "expected a text, or a list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content", "reads text alone"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages.0.tool_calls", "support"),
        ({"model": None}, "model", "valid string"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "valid integer"),
        ({"seed": "x"}, "seed", "valid integer"),
        ({"n": 2}, "n", "one text for a request; ask 2 times"),
        ({"stop": ["a"] * 5}, "stop", "up to four"),
        ({"stop": ""}, "stop", "1 to 256 characters"),
        ({"stop": [3]}, "stop", "up to four"),
        ({"logprobs": True}, "logprobs", "does not support it"),
        ({"tools": [{"type": "function"}]}, "tools", "does not support it"),
        ({"presence_penalty": 0.5}, "presence_penalty", "does not support it"),
        ({"response_format": {"type": "json_object"}}, "response_format", "plain text alone"),
        ({"modalities": ["text", "audio"]}, "modalities", "writes text alone"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, None, "only allowed when 'stream' is true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unrecognized request argument"),
        ({"frequency": 1}, "frequency", "Unrecognized request argument supplied: frequency"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ],
)
def test_chats_that_are_refused(changed: dict[str, Any], param: str | None, message: str) -> None:
    error = refusal(ChatRequest, CHAT | changed)
    assert error["param"] == param and message in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "m", "messages": [' + b"[" * 500, b'{"a": NaN}'],
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    assert refusal(ChatRequest, body)["message"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "not empty"),
        ([], "not empty"),
        (["a", "b"], "got 2 prompts"),
        ([[1], [2]], "got 2 prompts"),
        ([1, "a"], "got 2 prompts"),
        ([True], "not empty"),
        (3, "a text or a list of token ids"),
    ],
)
def test_prompts_that_are_refused(value: Any, message: str) -> None:
    error = refusal(CompletionRequest, {"model": "m", "prompt": value})
    assert error["param"] == "prompt" and message in error["message"]


@pytest.mark.parametrize("value", ["", [], [""], ["a", 3], [[]], [1, [2]], None, {"a": 1}])
def test_inputs_that_are_refused(value: Any) -> None:
    error = refusal(EmbeddingRequest, {"model": "m", "input": value})
    assert error["param"] == "input" and "none empty" in error["message"]


def test_what_is_taken() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {"role": "assistant", "content": "", "refusal": None, "tool_calls": None}
    given = {"temperature": 1, "top_p": None, "stop": "x", "n": 1, "logprobs": False, "tools": [], "user": "me"}
    given |= {"stream": None, "stream_options": None, "modalities": ["text"]}
    body = CHAT | given | {"messages": [{"role": "developer", "content": parts}, answer]}
    chat = ChatRequest.model_validate_json(json.dumps(body), strict=True)
    assert [m.content for m in chat.messages] == ["ab", ""] and chat.stop == ["x"] and not chat.wants_usage

    def prompt(value: Any) -> Any:
        return CompletionRequest(model="m", prompt=value).prompt

    assert [prompt(p) for p in ("a", ["a"], [1, 2], [[1, 2]], [7])] == ["a", "a", [1, 2], [1, 2], [7]]

    def inputs(value: Any) -> Any:
        return EmbeddingRequest(model="m", input=value).input

    assert [inputs(i) for i in ("a", ["a", "b"], [1, 2], [[1], "a"])] == [["a"], ["a", "b"], [[1, 2]], [[1], "a"]]


def test_how_tokens_are_chosen() -> None:
    def sampling(**given: Any) -> Any:
        return sampling_of(ChatRequest.model_validate(CHAT | given))

    assert sampling().temperature == 1.0 and sampling().seed != sampling().seed
    assert sampling(temperature=0).temperature == 0.0 and sampling(top_p=0).temperature == 0.0
    found = sampling(temperature=0.5, top_p=0.9, seed=-1, top_k=5, min_p=0.1, repetition_penalty=1.1)
    assert (found.temperature, found.top_p, found.seed) == (0.5, 0.9, 2**32 - 1)
    assert (found.top_k, found.min_p, found.repetition_penalty) == (5, 0.1, 1.1)


# Errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry_after"),
    [
        (wrong("no", "x", "y"), 400, "invalid_request_error", "y", None),
        (busy("later", 2.1), 429, "overloaded_error", "queue_full", "3"),
        (busy("later", 0.0), 429, "overloaded_error", "queue_full", "1"),
        (closing(), 503, "server_error", "shutting_down", "5"),
        (failed(ExceptionGroup("all", [KeyError("secret")])), 500, "server_error", None, None),
        (KeyError("secret"), 500, "server_error", None, None),
        (HTTPException(404), 404, "invalid_request_error", "not_found", None),
        (HTTPException(405, headers={"Allow": "GET"}), 405, "invalid_request_error", "method_not_allowed", None),
        (ApiError(413, "large"), 413, "invalid_request_error", None, None),
    ],
)
def test_errors_have_openais_form(error: Any, status: int, kind: str, code: Any, retry_after: Any) -> None:
    response = error_response(error)
    found = json.loads(bytes(response.body))["error"]
    assert set(found) == {"message", "type", "param", "code"} and found["message"]
    assert (response.status_code, found["type"], found["code"]) == (status, kind, code)
    assert response.headers.get("retry-after") == retry_after and "secret" not in found["message"]
    assert (response.headers.get("connection") == "close") == (status == 413)
    assert (response.headers.get("allow") == "GET") == (status == 405)


def test_events() -> None:
    assert event({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'.encode()


# The command ------------------------------------------------------------------------------------------


def test_options() -> None:
    options = command.parse([])
    assert (options.host, options.port, options.devices) == ("127.0.0.1", 8000, ("cpu:0", "cpu:1"))
    assert options.embeddings and not command.parse(["--no-embeddings"]).embeddings


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "65536"], "expected a port"),
        (["--grace", "-1"], "expected seconds"),
        (["--grace", "soon"], "expected seconds"),
        (["--devices", "cpu:0,cpu:0"], "different devices"),
        (["--split", "1,2,3"], "3 ratios for 2 devices"),
    ],
)
def test_options_that_make_no_sense(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        command.parse(argv)
    assert info.value.code == 2 and message in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        command.parse(["--help"])
    out = capsys.readouterr().out
    assert info.value.code == 0 and "--devices" in out and "curl" in out
