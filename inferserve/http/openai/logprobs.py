"""Logprobs in OpenAI's two shapes. Values are finite: what is masked or unknown shows as -9999, as in vLLM.

A token's `bytes` are what it adds to the text, so joined they are the text's UTF-8; a special token that is left out of
the text has none. A token that is no text by itself shows as `bytes:\\xe2\\x80`. Knows no HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from inferserve.http.generation import TokenDetails
from inferserve.http.prompts import TextTokenizer

FLOOR = -9999.0


class TokenTexts:
    """Texts and bytes of single tokens.

    Args:
        skip_special: special tokens are not part of the text.
        top: alternatives to show.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special: bool, top: int) -> None:
        self.top = top
        self._tokenizer = tokenizer
        self._silent = tokenizer.special_ids if skip_special else frozenset[int]()

    def text(self, token_id: int) -> str:
        """How a token is shown."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def raw(self, token_id: int) -> bytes:
        """What a token adds to the text."""
        return b"" if token_id in self._silent else self._tokenizer.token_bytes(token_id)


def chat_content(texts: TokenTexts, details: TokenDetails) -> list[dict[str, Any]]:
    """`logprobs.content` entries of some tokens."""
    out = []
    for position, (token_id, logprob) in enumerate(zip(details.ids, details.logprobs, strict=True)):
        entry = _chat_entry(texts, token_id, logprob)
        entry["top_logprobs"] = [_chat_entry(texts, *pair) for pair in _tops(texts.top, details, position)]
        out.append(entry)
    return out


class CompletionLogprobs:
    """`logprobs` of one choice of /v1/completions; offsets go on from part to part."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def part(self, parts: Iterable[TokenDetails]) -> dict[str, Any]:
        """The object for the tokens of `parts`."""
        tokens: list[str] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for details in parts:
            for position, (token_id, logprob) in enumerate(zip(details.ids, details.logprobs, strict=True)):
                shown = self._texts.text(token_id)
                tokens.append(shown)
                logprobs.append(finite(logprob))
                tops.append(self._top(details, position, shown, logprob))
                offsets.append(self._offset)
                self._offset += len(self._decoder.decode(self._texts.raw(token_id)))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, details: TokenDetails, position: int, shown: str, logprob: float) -> dict[str, float]:
        """Alternatives and the chosen token; of two ids with one text the likelier counts."""
        out: dict[str, float] = {}
        for token_id, value in _tops(self._texts.top, details, position):
            out.setdefault(self._texts.text(token_id), finite(value))
        out.setdefault(shown, finite(logprob))
        return out


def finite(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if logprob > FLOOR else FLOOR


def _tops(top: int, details: TokenDetails, position: int) -> Iterable[tuple[int, float]]:
    if not top or position >= len(details.tops):
        return ()
    alternatives = details.tops[position]
    return list(zip(alternatives.token_ids, alternatives.logprobs, strict=True))[:top]


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": finite(logprob), "bytes": list(texts.raw(token_id))}
