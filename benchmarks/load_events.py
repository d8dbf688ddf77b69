"""From the raw bytes of an answer to what it says: when text came, how much, how it ended. Used after the run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from benchmarks.load_client import Exchange


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None

    def words(self) -> str:
        """What the event adds to the text."""
        said = self.delta or self.message
        return self.text or (said and (said.content or said.reasoning_content)) or ""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


@dataclass
class Outcome:
    """A request as the client saw it. Times are CLOCK_MONOTONIC, ns.

    Attributes:
        sent_ns, end_ns: request written, last byte read.
        due_ns: when an open loop wanted it sent; `sent_ns` in a closed loop.
        times: arrival of each event that carries text.
        tokens: output tokens by the server's usage, where it said so; -1 if not.
        asked: output tokens asked for.
        client: number of the client that sent it.
        prompt_tokens, cached_tokens: by usage.
        turn: of a conversation, from 0.
        text: joined.
        error: why it failed, '' if it did not.
        cut: ended with the run, neither complete nor failed.
    """

    sent_ns: int
    end_ns: int
    due_ns: int
    asked: int
    client: int
    turn: int
    error: str = ""
    cut: bool = False
    times: list[int] = field(default_factory=list)
    tokens: int = -1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""


_decode = msgspec.json.Decoder(_Answer).decode


def outcome(exchange: Exchange, *, asked: int, client: int, turn: int, due_ns: int = 0) -> Outcome:
    """Make sense of an answer; what does not fit the protocol becomes `error`."""
    ended = exchange.reads[-1][0] if exchange.reads else exchange.sent_ns
    due = due_ns or exchange.sent_ns
    seen = Outcome(exchange.sent_ns, ended, due, asked, client, turn, exchange.error, exchange.cut)
    try:
        _read(exchange, seen)
    except (ValueError, msgspec.MsgspecError) as error:
        if not seen.cut:
            seen.error = seen.error or f"unreadable answer: {error}"
    if not seen.error and not seen.cut and seen.tokens >= 0 and seen.tokens != asked:
        seen.error = f"another number of tokens than asked for: {seen.tokens} of {asked}"
    return seen


def _read(exchange: Exchange, seen: Outcome) -> None:
    whole = b"".join(data for _, data in exchange.reads)
    head, found, rest = whole.partition(b"\r\n\r\n")
    if not found:
        return
    status = int(head.split(b" ", 2)[1])
    lowered = head.lower()
    parts = _chunks(rest) if b"transfer-encoding: chunked" in lowered else [(len(rest), rest)]
    body = b"".join(part for _, part in parts)
    if status != 200:
        seen.error = seen.error or f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}"
        return
    if b"text/event-stream" not in lowered:
        if not seen.cut and not seen.error:
            _take(_decode(body), seen, exchange.reads[-1][0])
        return
    finished = False
    for payload, at in _events(parts, body, _clock(exchange, len(head) + 4)):
        if payload == b"[DONE]":
            finished = True
        else:
            _take(_decode(payload), seen, at)
    if not finished and not seen.cut:
        seen.error = seen.error or "the stream ended without [DONE]"


def _take(answer: _Answer, seen: Outcome, at: int) -> None:
    if answer.error is not None:
        seen.error = seen.error or f"error event: {str(answer.error)[:200]}"
    for choice in answer.choices:
        words = choice.words()
        if words:
            seen.times.append(at)
            seen.text += words
        if choice.finish_reason not in (None, "length", "stop"):
            seen.error = seen.error or f"finish_reason {choice.finish_reason}"
    if answer.usage is not None:
        seen.tokens = answer.usage.completion_tokens or 0
        seen.prompt_tokens = answer.usage.prompt_tokens
        details = answer.usage.prompt_tokens_details
        seen.cached_tokens = (details.cached_tokens if details else 0) or 0


class _Clock:
    """When a byte of the body, counted with its chunk framing, was read."""

    def __init__(self, ends: list[int], times: list[int]) -> None:
        self._ends = ends
        self._times = times

    def at(self, offset: int) -> int:
        """Arrival of the read that brought byte `offset` - 1."""
        return self._times[min(bisect_left(self._ends, offset), len(self._times) - 1)]


def _clock(exchange: Exchange, skipped: int) -> _Clock:
    ends, total = [], -skipped
    for _, data in exchange.reads:
        total += len(data)
        ends.append(total)
    return _Clock(ends, [at for at, _ in exchange.reads])


def _chunks(framed: bytes) -> list[tuple[int, bytes]]:
    """(offset of its end in `framed`, content) of each chunk, the unfinished last one included."""
    parts: list[tuple[int, bytes]] = []
    at = 0
    while (line_end := framed.find(b"\r\n", at)) >= 0:
        size = int(framed[at:line_end].split(b";")[0], 16)
        if size == 0:
            break
        begin = line_end + 2
        parts.append((min(begin + size, len(framed)), framed[begin : begin + size]))
        at = begin + size + 2
    return parts


def _events(parts: list[tuple[int, bytes]], body: bytes, clock: _Clock) -> Iterator[tuple[bytes, int]]:
    """(payload, arrival) of each whole `data:` line."""
    ends = iter(parts)
    framed_end, part = next(ends, (0, b""))
    body_end = len(part)
    at = 0
    while (line_end := body.find(b"\n", at)) >= 0:
        line = body[at:line_end]
        at = line_end + 1
        if not line.startswith(b"data:"):
            continue
        while body_end < at:
            framed_end, part = next(ends)
            body_end += len(part)
        # The line ends within this chunk, this far before the chunk's own end.
        yield line[5:].strip(), clock.at(framed_end - (body_end - at))
