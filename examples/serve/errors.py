"""What clients are told when something goes wrong, in OpenAI's form."""

from __future__ import annotations

import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

__all__ = ["ApiError", "busy", "closing", "error_response", "handlers", "too_slow", "wrong"]


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for whoever reads it.
        kind: OpenAI's ``type``.
        code: a word that programs can compare.
        param: what in the request is wrong.
        retry_after_s: when to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status in (408, 413):
            headers["Connection"] = "close"  # what is left of the body is not read
        return JSONResponse(self.body(), self.status, headers)


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request makes no sense, or asks for what there is not."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, retry_after_s: float) -> ApiError:
    """So many are waiting that this one may not."""
    return ApiError(429, message, kind="overloaded_error", code="queue_full", retry_after_s=retry_after_s)


def too_slow(message: str, retry_after_s: float) -> ApiError:
    """It has waited for as long as it may."""
    return ApiError(503, message, kind="overloaded_error", code="waited_too_long", retry_after_s=retry_after_s)


def closing() -> ApiError:
    """The server ends."""
    message = "The server is shutting down. Try again in a moment; another one may answer."
    return ApiError(503, message, kind="server_error", code="shutting_down", retry_after_s=5)


def failed(error: BaseException) -> ApiError:
    """It is not the client's fault."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return ApiError(500, f"The server failed to answer this request: {type(error).__name__}.", kind="server_error")


def error_response(error: Exception) -> JSONResponse:
    """What a client is told of any error."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        shown = {404: "There is nothing at this address.", 405: "This address takes another method."}
        message = shown.get(error.status_code, error.detail)
        response = ApiError(error.status_code, message, code=code).response()
        response.headers.update(error.headers or {})
        return response
    return failed(error).response()


async def _answer(request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


async def _nobody_is_there(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # as nginx has it in its log


handlers: dict[Any, Any] = {
    ApiError: _answer,
    HTTPException: _answer,
    ClientDisconnect: _nobody_is_there,
    Exception: _answer,
}
"""For Starlette."""
