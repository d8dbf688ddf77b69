"""Answers of generation routes, as ASGI responses: server-sent events and whole JSON, both ended by a disconnect.

A response submits its request, so nothing can be lost between the two. The head is held back until the first text or
error is there: what fails before has a status of its own. One task per request waits for the client to leave; per
token there is one wake-up, one `send`, no task and no timer. Formats know the public shapes; this module does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferserve.errors import InvalidRequest, RequestError, RequestFailed
from inferserve.http import problems
from inferserve.http.generation import Disconnected, GenerateRequest, Generation, Piece, Usage
from inferserve.http.service import GenerationService

log = logging.getLogger(__name__)

# Set in the scope's state once a request is submitted.
SUBMITTED = "submitted"
DONE = b"data: [DONE]\n\n"
# What an unstreamed answer may hold of its tokens (logprobs); 20 alternatives take 1.5 KB a token.
MAX_DETAILS_BYTES = 64 * 2**20
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encode = msgspec.json.Encoder().encode


class EventFormat(Protocol):
    """A public stream format. Events are complete: `data: …` and a blank line."""

    def event(self, piece: Piece) -> bytes:
        """The event of one piece, b'' for nothing to say."""

    def end(self, usage: Usage) -> bytes:
        """What follows the last piece, the terminal marker included."""

    def error(self, error: RequestError) -> bytes:
        """An error event and the terminal marker."""


@dataclass(slots=True)
class Choice:
    """All of one choice. What is said of its tokens is kept as JSON: a twentieth of the size of its objects."""

    texts: list[str] = field(default_factory=list)
    lists: dict[str, list[bytes]] = field(default_factory=dict)
    tokens: int = 0
    finish: int = 0
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(self.texts)

    @property
    def details(self) -> dict[str, msgspec.Raw] | None:
        """The joined lists of its tokens by name, ready to be encoded; None if tokens were not asked for."""
        joined = {name: msgspec.Raw(b"[" + b",".join(parts) + b"]") for name, parts in self.lists.items()}
        return joined or None

    def add(self, piece: Piece, details: Mapping[str, list[Any]] | None) -> int:
        """Take in one piece and what is to be said of its tokens; how many bytes that took."""
        self.texts.append(piece.text)
        self.tokens = piece.tokens
        size = 0
        for name, values in (details or {}).items():
            parts = self.lists.setdefault(name, [])
            if values:
                parts.append(_encode(values)[1:-1])
                size += len(parts[-1])
        if piece.finish:
            self.finish = piece.finish
            self.stop_reason = piece.stop_reason
        return size


class WholeFormat(Protocol):
    """A public format of unstreamed answers."""

    def details(self, piece: Piece) -> Mapping[str, list[Any]] | None:
        """Lists with what is to be said of the tokens of `piece`; called once for each piece, in order."""

    def answer(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body."""


class GenerationResponse(Response):
    """What a generation route returns; `Edge` runs it."""

    def __init__(self, service: GenerationService, request: GenerateRequest) -> None:
        super().__init__()
        self._service = service
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry: submit the request and answer with what comes of it.

        Raises the RequestError of a request that failed before anything was sent; Disconnected when the client left.
        """
        generation = self._service.submit(self._request)
        scope["state"][SUBMITTED] = True
        watch = asyncio.create_task(_watch(receive, generation))
        try:
            await self._answer(generation, send)
        finally:
            watch.cancel()
            generation.close()

    async def _answer(self, generation: Generation, send: Send) -> None:
        raise NotImplementedError


class StreamedResponse(GenerationResponse):
    """Server-sent events in `events`' format."""

    def __init__(self, service: GenerationService, request: GenerateRequest, events: EventFormat) -> None:
        super().__init__(service, request)
        self._events = events

    async def _answer(self, generation: Generation, send: Send) -> None:
        pieces = await generation.next()
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        try:
            await self._stream(generation, pieces, send)
            last = self._events.end(generation.usage)
        except RequestError as error:
            last = self._events.error(error)
        except Disconnected:
            raise
        except Exception:
            log.exception("stream %s failed", self._request.name)
            last = self._events.error(RequestFailed("Internal server error."))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _stream(self, generation: Generation, pieces: list[Piece], send: Send) -> None:
        event, take = self._events.event, generation.next
        while pieces:
            body = event(pieces[0]) if len(pieces) == 1 else b"".join(map(event, pieces))
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            pieces = await take()


class WholeResponse(GenerationResponse):
    """One JSON body in `whole`'s format."""

    def __init__(self, service: GenerationService, request: GenerateRequest, whole: WholeFormat) -> None:
        super().__init__(service, request)
        self._whole = whole

    async def _answer(self, generation: Generation, send: Send) -> None:
        choices = [Choice() for _ in range(generation.running)]
        size = 0
        while pieces := await generation.next():
            for piece in pieces:
                size += choices[piece.choice].add(piece, self._whole.details(piece))
            if size > MAX_DETAILS_BYTES:
                raise InvalidRequest(
                    f"logprobs of this answer exceed {MAX_DETAILS_BYTES} bytes; stream it, or ask for fewer",
                    param="logprobs",
                    code="answer_too_large",
                )
        body = _encode(self._whole.answer(choices, generation.usage))
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def _watch(receive: Receive, generation: Generation) -> None:
    """End `generation` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.disconnect()


def error_event(error: RequestError, prefix: bytes = b"data: ") -> bytes:
    """`{"error": …}` as an event."""
    return prefix + json_line(problems.error_object(error)) + b"\n\n"


def json_line(value: Any) -> bytes:
    """`value` as JSON that no line splitter cuts: U+0085, U+2028 and U+2029 are escaped too."""
    raw = _encode(value)
    if not raw.isascii() and (b"\xe2\x80" in raw or b"\xc2\x85" in raw):
        raw = raw.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        raw = raw.replace(b"\xc2\x85", b"\\u0085")
    return raw
