"""How much clients may ask for, and reading what they send within these limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from .errors import ApiError, wrong

__all__ = ["Limits", "off_loop", "read"]

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")

SHORT = 4096
"""Texts of so many characters are tokenized on the event loop: it takes less than handing them over."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is refused, and when.

    Attributes:
        body_nbytes: a request is larger: 413.
        body_s: sending it takes longer: 408.
        max_tokens: it asks for more tokens: 400.
        queue: so many texts wait already: 429.
        wait_s: a text has waited for so long without its first token: 503.
        text_s: a text has taken so long: it ends as if `max_tokens` were reached.
        inputs: it asks for more embeddings at once: 400.
        rows: so many embeddings wait already: 429.
        watchers: so many pages watch already: 503.
        grace_s: what is not done so long after SIGTERM is cut: 503, or an error in the stream.
    """

    body_nbytes: int = 256 * 1024
    body_s: float = 10.0
    max_tokens: int = 1024
    queue: int = 64
    wait_s: float = 60.0
    text_s: float = 300.0
    inputs: int = 256
    rows: int = 1024
    watchers: int = 16
    grace_s: float = 20.0


async def read(request: Request, model: type[Model], limits: Limits) -> Model:
    """The request's body, checked.

    Raises:
        ApiError: it is too large, takes too long, is no JSON, or is not as the model has it.
        ClientDisconnect: the client left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"The content type is {kind or 'missing'!r}, expected 'application/json'.")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_nbytes:
                    message = f"The request is larger than {limits.body_nbytes} bytes. Send less at a time."
                    raise ApiError(413, message, code="request_too_large")
    except TimeoutError:
        raise ApiError(408, f"The request was not complete after {limits.body_s:g} seconds.") from None
    try:
        return await off_loop(lambda: model.model_validate_json(bytes(body), strict=True), len(body))
    except ValidationError as error:
        raise _refusal(error) from None


async def off_loop(work: Callable[[], T], size: int) -> T:
    """Do something that takes longer the larger it is: here, or in a thread."""
    return work() if size <= SHORT else await asyncio.to_thread(work)


def _refusal(error: ValidationError) -> ApiError:
    """The first thing that is wrong, in words."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = [str(part) for part in first["loc"] if not str(part).startswith(("function-", "list[", "constrained-"))]
    param = ".".join(where) or None
    if first["type"] == "json_invalid":
        return wrong(f"The request is no JSON: {first['ctx']['error']}.", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return wrong(f"Unrecognized request argument supplied: {param}.", param, "unknown_parameter")
    if first["type"] == "missing":
        return wrong(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return wrong(f"Invalid value for '{param}': {message}." if param else f"{message}.", param, "invalid_value")
