"""The unstreamed body of an OpenAI answer; chat and completions differ in how a choice carries its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferserve.http.generation import Piece, Usage, finish_name
from inferserve.http.openai.chunks import usage_object
from inferserve.http.openai.identity import Identity
from inferserve.http.streams import Choice

Logprobs = Callable[[Piece], Mapping[str, list[Any]]]


class Answer:
    """A `WholeFormat`.

    Args:
        kind: the body's `object`.
        content: text to the fields of a choice that carry it.
        logprobs: a piece's logprobs; None when nobody asked.
    """

    def __init__(
        self, kind: str, identity: Identity, content: Callable[[str], dict[str, Any]], logprobs: Logprobs | None
    ) -> None:
        self._kind = kind
        self._identity = identity
        self._content = content
        self._logprobs = logprobs

    def details(self, piece: Piece) -> Mapping[str, list[Any]] | None:
        """Logprobs, if asked for."""
        return self._logprobs(piece) if self._logprobs is not None else None

    def answer(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body."""
        return {
            "id": self._identity["id"],
            "object": self._kind,
            **self._identity,
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage_object(usage),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            **self._content(choice.text),
            "logprobs": choice.details,
            "finish_reason": finish_name(choice.finish),
            "stop_reason": choice.stop_reason,
        }
