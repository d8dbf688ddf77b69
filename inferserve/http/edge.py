"""`Edge`: the outermost ASGI layer. Limits, deadlines, request ids and the in-flight count, before FastAPI sees anything.

Bodies are read here, whole and bounded, so that no route can forget a limit, and so that a refused body never fills
Hypercorn's queue (which would hang the connection's task). Only what no inner layer can do is here.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferserve.errors import RequestError, RequestFailed
from inferserve.http import problems
from inferserve.http.connections import ChunkWriter
from inferserve.http.generation import Disconnected
from inferserve.http.problems import Refused
from inferserve.http.service import GenerationService
from inferserve.http.streams import SUBMITTED
from inferserve.log import event

log = logging.getLogger(__name__)

Route = Callable[[Request], Awaitable[Response]]

MAX_HEADER_BYTES = 16 * 1024
MAX_HEADERS = 100
MAX_ID_CHARS = 128
BODY_DEADLINE_S = 30.0
BODY_BYTES_PER_S = 64 * 1024
DISCARD_BYTES = 64 * 2**20
DISCARD_DEADLINE_S = 2.0

_CLOSE = {"connection": "close"}
_FRAMED = (b"content-length", b"transfer-encoding")
_JSON_TYPES = ("", "application/json", "application/octet-stream")


class Edge:
    """Wraps the FastAPI app.

    Args:
        app: the app.
        generation: its POST routes that generate, by path. They are called from here: they need nothing of the layers in
            between, which would cost something on each token and, cold after a quiet moment, on the first.
        service: its gate and failure counter are used.
        max_body_bytes: larger bodies get 413.
    """

    def __init__(
        self, app: ASGIApp, generation: Mapping[str, Route], service: GenerationService, max_body_bytes: int
    ) -> None:
        self._app = app
        self._generation = generation
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _single_headers(scope)
        state = scope.setdefault("state", {})
        state["arrival_ns"] = time.monotonic_ns()
        state["request_id"] = _printable(headers.get(b"x-request-id")) or uuid.uuid4().hex
        state["session_id"] = _printable(headers.get(b"x-session-id"))
        answer = _Answer(
            send, state["request_id"], chunked=scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        )
        route = self._generation.get(scope["path"]) if scope["method"] == "POST" else None
        entered = False
        try:
            if route is not None:
                self._service.serving.enter()
                entered = True
            body = await self._checked_body(scope, headers, receive)
        except RequestError as error:
            await _discard(receive)
            await problems.response(error, _CLOSE)(scope, receive, answer)
        except Disconnected:
            return
        else:
            await self._inner(route, scope, _Replay(body, receive), answer)
        finally:
            if route is not None and answer.status >= 400 and SUBMITTED not in state:
                self._service.refused(problems.failure_reason(answer.status))
            if entered:
                self._service.serving.leave()

    async def _inner(self, route: Route | None, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """The border of a request: it may fail."""
        try:
            inner = self._app if route is None else await route(Request(scope, receive))
            await inner(scope, receive, answer)
        except Disconnected:
            return
        except RequestError as error:
            await problems.response(error)(scope, receive, answer)
        except Exception:
            log.exception("request %s failed", scope["state"]["request_id"])
            if not answer.status:
                await problems.response(RequestFailed("Internal server error."))(scope, receive, answer)

    async def _checked_body(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body. Raises Refused, or Disconnected."""
        if scope["http_version"] not in ("1.0", "1.1"):
            raise Refused(505, "Only HTTP/1.1 is served.")
        raw = scope["headers"]
        if len(raw) > MAX_HEADERS or sum(len(n) + len(v) for n, v in raw) > MAX_HEADER_BYTES:
            raise Refused(431, f"At most {MAX_HEADERS} headers of together {MAX_HEADER_BYTES} bytes are accepted.")
        length = headers.get(b"content-length", b"")
        if length and b"transfer-encoding" in headers:
            raise Refused(400, "Content-Length and Transfer-Encoding exclude each other.")
        declared = int(length[:20]) if length.isdigit() else 0
        if declared > self._max_body_bytes:
            raise self._too_large()
        if not declared and b"transfer-encoding" not in headers:
            return b""
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if kind not in _JSON_TYPES and not kind.endswith("+json"):
            raise Refused(415, f"Content-Type must be application/json, not {kind}.")
        try:
            async with asyncio.timeout(BODY_DEADLINE_S + (declared or self._max_body_bytes) / BODY_BYTES_PER_S):
                return await self._read(receive)
        except TimeoutError as error:
            raise Refused(408, "The body did not arrive in time.") from error

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > self._max_body_bytes:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self) -> Refused:
        return Refused(413, f"The body is larger than {self._max_body_bytes} bytes.", code="body_too_large")


class _Answer:
    """`send` that adds the request id to the response's head, remembers the status, and lets chunks take the short way."""

    __slots__ = ("_chunked", "_chunks", "_request_id", "_send", "status")

    def __init__(self, send: Send, request_id: str, *, chunked: bool) -> None:
        """`chunked`: a response without a length is sent in chunks."""
        self._chunked = chunked
        self._send = send
        self._request_id = request_id.encode("latin-1")
        self._chunks: ChunkWriter | None = None
        self.status = 0

    async def __call__(self, message: Message) -> None:
        try:
            if self._chunks is not None and message.get("more_body") and message["body"]:
                await self._chunks.write(message["body"])
                return
            if message["type"] == "http.response.start":
                self._begin(message)
            await self._send(message)
        except OSError as error:  # the kernel gave the connection up
            raise Disconnected from error

    def _begin(self, message: Message) -> None:
        self.status = message["status"]
        headers = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
        message["headers"] = headers
        if self._chunked and not any(name.lower() in _FRAMED for name, _ in headers):
            self._chunks = ChunkWriter.behind(self._send)


class _Replay:
    """`receive` that gives the body that was read, then goes on with the connection (so: waits for its end)."""

    __slots__ = ("_body", "_receive")

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _discard(receive: Receive) -> None:
    """Read on for a while, so that a client that is still sending sees the answer and not a reset."""
    size = 0
    try:
        async with asyncio.timeout(DISCARD_DEADLINE_S):
            while size < DISCARD_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
                size += len(message.get("body", b""))
    except TimeoutError:
        event(log, "a refused body was cut off", logging.DEBUG, bytes=size)


def _single_headers(scope: Scope) -> dict[bytes, bytes]:
    found: dict[bytes, Any] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.lower(), value)
    return found


def _printable(value: bytes | None) -> str:
    """A client's id if it is short printable ASCII without spaces, else ''."""
    if not value or len(value) > MAX_ID_CHARS or not all(0x21 <= c <= 0x7E for c in value):
        return ""
    return value.decode("ascii")
