"""A request as the service takes it, and `Generation`: the one outbox in which all text of a request arrives.

The dispatcher puts pieces in; the response takes them out, at its client's pace. Nothing is held across a socket
write: a client that does not read only lets its own outbox grow, and past `MAX_BACKLOG` pieces its request ends.
Knows nothing of HTTP, slots and other processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from inferserve.errors import RequestError, RequestFailed
from inferserve.protocol.messages import TopLogprobs
from inferserve.protocol.sampling import SamplingParams

MAX_BACKLOG = 4096


class Disconnected(Exception):
    """The client is gone; there is nobody to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What to generate.

    Attributes:
        prompts: token ids of each prompt.
        n: sequences of each prompt. Choice number = prompt number * n + sequence number.
        params: validated. `max_tokens` is clipped to what each prompt leaves of the context; sibling i of a prompt gets
            a seed made from `seed` and i.
        drawn_seed: `seed` is not the client's, so choices are numbered over all prompts and equal ones draw differently.
        want_tokens: pieces carry ids and logprobs.
        request_id, session_id: for the log. `name` is the public id (`chatcmpl-…`).
        arrival_ns: CLOCK_MONOTONIC when the request arrived.
    """

    prompts: tuple[list[int], ...]
    params: SamplingParams
    n: int = 1
    drawn_seed: bool = False
    want_tokens: bool = False
    request_id: str = ""
    session_id: str = ""
    name: str = ""
    arrival_ns: int = 0


class TokenDetails(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ids and logprobs of the tokens of one piece; `tops` is empty or parallel to them."""

    ids: list[int]
    logprobs: list[float]
    tops: tuple[TopLogprobs, ...] = ()


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """New text of one choice. `tokens` is the choice's token count so far; `finish` is a `Finish`, set on its last."""

    choice: int
    text: str
    tokens: int
    finish: int = 0
    stop_reason: str | int | None = None
    details: TokenDetails | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of a request; `prompt_tokens` counts each prompt once, `completion_tokens` every choice."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Generation:
    """Pieces of all choices of one request, with one waiter.

    Args:
        on_close: called once when it ended in any way; gives back whatever the request still holds.
    """

    __slots__ = ("_error", "_gone", "_on_close", "_pieces", "_waiter", "request", "running", "usage")

    def __init__(self, request: GenerateRequest, on_close: Callable[[Generation], None]) -> None:
        self.request = request
        self.running = len(request.prompts) * request.n
        self.usage = Usage(prompt_tokens=sum(map(len, request.prompts)))
        self._on_close: Callable[[Generation], None] | None = on_close
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: RequestError | None = None
        self._gone = False

    def put(self, piece: Piece) -> None:
        """Add a piece; called by the dispatcher only."""
        self._pieces.append(piece)
        if piece.finish:
            self.running -= 1
            if not self.running:
                self.close()
        if self._waiter is not None:
            self._wake()
        elif len(self._pieces) > MAX_BACKLOG:
            self.fail(RequestFailed("The client does not read its stream.", code="client_too_slow"))

    def fail(self, error: RequestError) -> None:
        """End it with `error` (the first one counts), after the pieces that are there, and give back what it holds."""
        if self._error is None and self.running:
            self._error = error
        self._wake()
        self.close()

    def disconnect(self) -> None:
        """The client is gone: end at once."""
        self._gone = True
        self._wake()
        self.close()

    def close(self) -> None:
        """Give back what it holds. May be called any number of times, from anywhere."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)

    @property
    def failed(self) -> RequestError | None:
        """The error that ended it."""
        return self._error

    async def next(self) -> list[Piece]:
        """Pieces that arrived since the last call, at least one; [] after the end of all choices.

        Raises what it failed with (after the pieces before that), or Disconnected.
        """
        while not self._pieces or self._gone:
            if self._gone:
                raise Disconnected
            if self._error is not None:
                raise self._error
            if not self.running:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def finish_name(finish: int) -> str | None:
    """`finish_reason` of the public APIs for a `Finish`, None while it runs."""
    return _FINISH_NAMES[finish]


_FINISH_NAMES = (None, "stop", "length", "abort", "error")
