"""Logprobs in OpenAI's two shapes. Values are finite: what is masked or unknown shows as -9999, as in vLLM.

The lists match the text that the client has: a token comes with the first character it is part of, so none comes for
text that is still held back, and none ever for text that a stop string or stop token cut off. A token's `bytes` are
what it adds to the text, so joined they are the text's UTF-8 (up to a cut inside a token); a special token that is left
out of the text has none. A token that is no text by itself shows as `bytes:\\xe2\\x80`. Knows no HTTP.
"""

from __future__ import annotations

import codecs
from typing import Any, NamedTuple

from inferserve.http.generation import Piece
from inferserve.http.prompts import TextTokenizer
from inferserve.protocol.messages import Finish, TopLogprobs

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

    def raw(self, token_id: int, first: bool = False) -> bytes:
        """What a token adds to the text, as its `first` one or inside it."""
        return b"" if token_id in self._silent else self._tokenizer.token_bytes(token_id, first)


class Token(NamedTuple):
    """A token, the bytes it adds to the text, and the characters before it."""

    id: int
    logprob: float
    tops: list[tuple[int, float]]
    raw: bytes
    offset: int


class _Text:
    """One choice: tokens whose text is not shown yet, and how far text and tokens have come, in characters."""

    __slots__ = ("decoder", "held", "shown", "taken")

    def __init__(self) -> None:
        self.held: list[Token] = []
        self.shown = 0
        self.taken = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")


class ShownTokens:
    """The tokens of each choice as their text is shown."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._choices: dict[int, _Text] = {}

    def take(self, piece: Piece) -> list[Token]:
        """The tokens whose text begins in this piece or, at the end, that have none."""
        choice = self._choices.setdefault(piece.choice, _Text())
        choice.shown += len(piece.text)
        self._hold(choice, piece)
        count = sum(token.offset < choice.shown for token in choice.held)
        if piece.finish and not isinstance(piece.stop_reason, str):
            # Text that has no end of its own: all but a stop token that is text and was cut off.
            cut = piece.finish == Finish.STOP and len(choice.held) > count and bool(choice.held[-1].raw)
            count = len(choice.held) - cut
        shown, choice.held = choice.held[:count], choice.held[count:]
        return shown

    def _hold(self, choice: _Text, piece: Piece) -> None:
        details = piece.details
        if details is None:
            return
        for position, (token_id, logprob) in enumerate(zip(details.ids, details.logprobs, strict=True)):
            raw = self._texts.raw(token_id, first=not choice.taken)
            tops = _pairs(details.tops[position])[: self._texts.top] if position < len(details.tops) else []
            choice.held.append(Token(token_id, logprob, tops, raw, choice.taken))
            choice.taken += len(choice.decoder.decode(raw))


class ChatLogprobs:
    """`logprobs` of the choices of a chat."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._tokens = ShownTokens(texts)

    def part(self, piece: Piece) -> dict[str, list[Any]]:
        """The object for the tokens that `piece` shows."""
        return {"content": [self._token(token) for token in self._tokens.take(piece)]}

    def _token(self, token: Token) -> dict[str, Any]:
        tops = [self._entry(i, logprob, self._texts.raw(i)) for i, logprob in token.tops]
        return self._entry(token.id, token.logprob, token.raw) | {"top_logprobs": tops}

    def _entry(self, token_id: int, logprob: float, raw: bytes) -> dict[str, Any]:
        return {"token": self._texts.text(token_id), "logprob": finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """`logprobs` of the choices of a completion."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._tokens = ShownTokens(texts)

    def part(self, piece: Piece) -> dict[str, list[Any]]:
        """The object for the tokens that `piece` shows."""
        tokens = self._tokens.take(piece)
        return {
            "tokens": [self._texts.text(token.id) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: Token) -> dict[str, float]:
        """Alternatives and the chosen token; of two ids with one text the likelier counts."""
        out: dict[str, float] = {}
        for token_id, logprob in (*token.tops, (token.id, token.logprob)):
            out.setdefault(self._texts.text(token_id), finite(logprob))
        return out


def finite(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if logprob > FLOOR else FLOOR


def _pairs(tops: TopLogprobs) -> list[tuple[int, float]]:
    return list(zip(tops.token_ids, tops.logprobs, strict=True))
