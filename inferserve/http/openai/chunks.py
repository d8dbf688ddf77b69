"""Chunks of the two OpenAI streams. All of a chunk but its text is the same from token to token and is made once.

One event a piece; the role comes with a choice's first event, the finish reason with its last; usage as asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inferserve.errors import RequestError
from inferserve.http.generation import Piece, Usage, finish_name
from inferserve.http.openai.identity import Identity
from inferserve.http.openai.schema import StreamOptions
from inferserve.http.streams import DONE, error_event, json_line


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs between the routes: the `object` name and what stands around the text."""

    object: str
    first: bytes
    before: bytes
    after: bytes


CHAT = Shape("chat.completion.chunk", b'"delta":{"role":"assistant","content":', b'"delta":{"content":', b"}")
COMPLETION = Shape("text_completion", b'"text":', b'"text":', b"")


class Chunks:
    """`EventFormat` of one stream.

    Args:
        identity: `id`, `created` and `model`.
        choices: how many there are.
        prompt_tokens: for running usage.
        logprobs: the logprobs object of a piece, None if not asked for; its lists are empty if no token is to be shown.
    """

    def __init__(
        self,
        shape: Shape,
        identity: Identity,
        choices: int,
        options: StreamOptions | None,
        prompt_tokens: int,
        logprobs: Callable[[Piece], Mapping[str, list[Any]]] | None,
    ) -> None:
        head = {"id": identity["id"], "object": shape.object, **identity}
        self._head = b"data: " + json_line(head)[:-1]
        starts = [self._head + b',"choices":[{"index":%d,' % i for i in range(choices)]
        # The opening of each choice's next event; the first one has the role.
        self._next = [start + shape.first for start in starts]
        self._opening = [start + shape.before for start in starts]
        self._usage = bool(options and options.include_usage)
        self._running_usage = bool(self._usage and options and options.continuous_usage_stats)
        self._after = shape.after + b',"logprobs":'
        self._end = b'}],"usage":null}\n\n' if self._usage else b"}]}\n\n"
        self._plain = self._after + b'null,"finish_reason":null' + self._end
        self._logprobs = logprobs
        self._counts = _Counts(prompt_tokens, [0] * choices)

    def event(self, piece: Piece) -> bytes:
        """The chunk of one piece; b'' for a token that completed no text, unless more than text was asked for."""
        choice, text = piece.choice, piece.text
        if piece.finish or piece.details is not None or self._running_usage:
            return self._full(piece)
        if not text:
            return b""
        opening = self._next[choice]
        self._next[choice] = self._opening[choice]
        return opening + json_line(text) + self._plain

    def end(self, usage: Usage) -> bytes:
        """The usage chunk if it was asked for, and `[DONE]`."""
        if not self._usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + json_line(usage_object(usage)) + b"}\n\n" + DONE

    def error(self, error: RequestError) -> bytes:
        """The error event and `[DONE]`."""
        return error_event(error) + DONE

    def _full(self, piece: Piece) -> bytes:
        """A chunk with a finish reason, logprobs or running usage."""
        choice = piece.choice
        logprobs = self._logprobs(piece) if self._logprobs is not None else {}
        news = any(logprobs.values()) or (self._running_usage and piece.tokens > self._counts.tokens[choice])
        self._counts.tokens[choice] = piece.tokens
        if not piece.text and not piece.finish and not news:
            return b""
        opening = self._next[choice]
        self._next[choice] = self._opening[choice]
        finish = b',"finish_reason":' + json_line(finish_name(piece.finish))
        if piece.finish:
            finish += b',"stop_reason":' + json_line(piece.stop_reason)
        end = self._end
        if self._running_usage:
            end = b'}],"usage":' + json_line(usage_object(self._counts.usage())) + b"}\n\n"
        return opening + json_line(piece.text) + self._after + json_line(logprobs or None) + finish + end


@dataclass(slots=True)
class _Counts:
    """Token counts as the events written so far show them."""

    prompt: int
    tokens: list[int]

    def usage(self) -> Usage:
        return Usage(self.prompt, sum(self.tokens))


def usage_object(usage: Usage) -> dict[str, Any]:
    """`usage` of answers and chunks."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
