"""What clients may send: OpenAI's parameters, checked. What is not supported is refused unless it asks for nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["ChatRequest", "CompletionRequest", "EmbeddingRequest", "TextRequest"]

Ids = list[int]


def _asks_for_nothing(value: Any) -> Any:
    if value not in (None, False, 0, "", "none", "auto") and value != [] and value != {}:
        raise ValueError("this server does not support it; leave it out")
    return value


def _only_one(value: int | None) -> int | None:
    if value not in (None, 1):
        raise ValueError(f"got {value}, but this server writes one text for a request; ask {value} times")
    return value


def _text_of(value: Any) -> str:
    """The text of a message: a string, or parts of which each is text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("expected a text, or a list of parts of the type 'text'")
    for part in value:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError("expected parts such as {'type': 'text', 'text': '…'}: this model reads text alone")
    return "".join(part["text"] for part in value)


def _stops(value: Any) -> list[str]:
    found = [] if value is None else [value] if isinstance(value, str) else value
    good = isinstance(found, list) and len(found) <= 4
    if not good or not all(isinstance(text, str) and 0 < len(text) <= 256 for text in found):
        raise ValueError("expected a text, or up to four of them, each of 1 to 256 characters")
    return found


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _prompt(value: Any) -> str | Ids:
    """A prompt, alone or as the only one of a list."""
    found = value[0] if isinstance(value, list) and len(value) == 1 and not _is_ids(value) else value
    if (isinstance(found, str) and found) or _is_ids(found):
        return found
    if isinstance(value, list) and len(value) > 1:
        raise ValueError(f"got {len(value)} prompts, but this server takes one for a request")
    raise ValueError("expected a text or a list of token ids, not empty")


def _inputs(value: Any) -> list[str | Ids]:
    """What to embed, one by one."""
    found = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(found, list) or not found or not all((isinstance(x, str) and x) or _is_ids(x) for x in found):
        raise ValueError("expected a text, a list of token ids, or a list of either, none empty")
    return found


Unsupported = Annotated[Any, AfterValidator(_asks_for_nothing)]
Harmless = Any
"""Changes nothing of what is answered."""


class _Base(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str
    user: Harmless = None
    metadata: Harmless = None
    safety_identifier: Harmless = None
    prompt_cache_key: Harmless = None
    service_tier: Harmless = None
    store: Harmless = None


class StreamOptions(BaseModel):
    """How a stream is written."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class TextRequest(_Base):
    """What both kinds of text have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    n: Annotated[int | None, AfterValidator(_only_one)] = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    frequency_penalty: Unsupported = None
    presence_penalty: Unsupported = None
    logit_bias: Unsupported = None
    logprobs: Unsupported = None
    # Not OpenAI's, but common.
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None

    @model_validator(mode="after")
    def _options_belong_to_a_stream(self) -> TextRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' is only allowed when 'stream' is true")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of)]
    name: Harmless = None
    # What answers contain, and clients send back.
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Unsupported = None


def _text_alone(value: Any) -> Any:
    if value not in (None, ["text"]):
        raise ValueError("this server writes text alone; leave it out")
    return value


def _plain_text(value: Any) -> Any:
    if value is not None and not (isinstance(value, dict) and value.get("type") == "text"):
        raise ValueError("this server writes plain text alone; leave it out")
    return value


class ChatRequest(TextRequest):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: Annotated[Any, AfterValidator(_plain_text)] = None
    modalities: Annotated[Any, AfterValidator(_text_alone)] = None
    top_logprobs: Unsupported = None
    tools: Unsupported = None
    tool_choice: Unsupported = None
    parallel_tool_calls: Harmless = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None


class CompletionRequest(TextRequest):
    """``/v1/completions``."""

    prompt: Annotated[str | Ids, BeforeValidator(_prompt)]
    best_of: Annotated[int | None, AfterValidator(_only_one)] = None
    echo: Unsupported = None
    suffix: Unsupported = None


class EmbeddingRequest(_Base):
    """``/v1/embeddings``."""

    input: Annotated[list[str | Ids], BeforeValidator(_inputs)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
