"""Errors as clients see them: `{"error": {message, type, param, code}}` with the right status, on every route.

Client mistakes are 4xx (never 422 or 417), ours 5xx; 429 and 503 carry Retry-After. Knows nothing of the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from inferserve.errors import InvalidRequest, Overloaded, RequestError, RequestFailed, Unavailable

JSON = "application/json"
_MAX_SHOWN_ERRORS = 3


class Refused(RequestError):
    """Refused at the HTTP border with a status of its own (404, 405, 408, 413, 415, 431, 505)."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code or HTTPStatus(status).phrase.lower().replace(" ", "_"))
        self.status = status


def error_object(error: RequestError) -> dict[str, Any]:
    """The body of a failed request, also the data of an in-stream error event."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The whole answer for `error`."""
    extra = dict(headers or {})
    if isinstance(error, Overloaded | Unavailable):
        extra["retry-after"] = str(error.retry_after)
    return Response(msgspec.json.encode(error_object(error)), error.status, extra, media_type=JSON)


def failure_reason(status: int) -> str:
    """The label of the failure counter for an error status."""
    if status >= 500:
        return "unavailable" if status == 503 else "error"
    return "overloaded" if status == 429 else "invalid"


def from_validation(error: ValidationError, prefix: str = "") -> InvalidRequest:
    """The first few faults of a body in one line; `param` names the first field."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    paths = [_path(prefix, fault["loc"]) for fault in faults]
    shown = [
        f"{path}: {fault['msg'].removeprefix('Value error, ')}"
        for path, fault in zip(paths, faults[:_MAX_SHOWN_ERRORS], strict=False)
    ]
    more = f" (and {len(faults) - len(shown)} more)" if len(faults) > len(shown) else ""
    return InvalidRequest("; ".join(shown) + more, param=paths[0] or None)


def _path(prefix: str, loc: tuple[int | str, ...]) -> str:
    out = prefix
    for part in loc:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def install(app: FastAPI) -> None:
    """Make `app` answer every error in this form."""

    async def on_request_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.scope['path']}"
        text = {404: f"Unknown route: {what}", 405: f"Method not allowed: {what}"}.get(error.status_code)
        return response(Refused(error.status_code, text or str(error.detail)), error.headers)

    async def on_bug(_: Request, __: Exception) -> Response:
        return response(RequestFailed("Internal server error."))

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_bug)
