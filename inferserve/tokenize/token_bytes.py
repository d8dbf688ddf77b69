"""What one token id contributes to a text: raw bytes, or a piece of text, read off the tokenizer's decoder.

Three kinds cover every `tokenizers` decoder. Byte-level: ids are byte strings and the text is their concatenation.
Pieces: ids are strings, perhaps with byte tokens `<0xE4>` among them and another form for the first token. Opaque: only
the decoder itself knows. Knows nothing of streams; `detokenize/incremental.py` builds texts from these tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

IdToToken = Callable[[int], str | None]


@dataclass(frozen=True)
class ByteLevelTable:
    """GPT-2 style: each character of a token stands for one byte."""

    id_to_token: IdToToken
    alphabet: dict[str, int]

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:  # noqa: ARG002 as PieceTable's
        """Bytes of the id; a token with a character outside the alphabet (an added token) is its own UTF-8."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([self.alphabet[c] for c in token])
        except KeyError:
            return token.encode()


@dataclass(frozen=True)
class PieceTable:
    """Tokens are text. Sentencepiece with byte fallback, Metaspace, WordPiece, and no decoder at all.

    Attributes:
        id_to_token: the vocabulary.
        rest, start: text of a token inside a text, and of the first token of one.
        byte_fallback: `<0xE4>` means a byte. A run of byte tokens that is no UTF-8 becomes one U+FFFD a byte.
        strip_left: how many leading spaces the whole text loses.
    """

    id_to_token: IdToToken
    rest: Callable[[str], str]
    start: Callable[[str], str]
    byte_fallback: bool = False
    strip_left: int = 0

    def byte(self, token_id: int) -> int | None:
        """The byte of a byte token, None for others."""
        token = self.id_to_token(token_id) if self.byte_fallback else None
        return None if token is None else _byte_of(self.rest(token))

    def piece(self, token_id: int, first: bool = False) -> str | None:
        """Text of an id that is no byte token, None for an unknown id. Leading spaces are still there."""
        token = self.id_to_token(token_id)
        return None if token is None else (self.start if first else self.rest)(token)

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        """Bytes of the id; of the first token of a text when `first`."""
        byte = self.byte(token_id)
        if byte is not None:
            return bytes((byte,))
        piece = self.piece(token_id, first) or ""
        return (strip_spaces(piece, self.strip_left) if first else piece).encode()


@dataclass(frozen=True)
class OpaqueTable:
    """A decoder whose tokens have no text of their own; `decode` is the whole decoder."""

    decode: Callable[[list[int]], str]

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:  # noqa: ARG002 as PieceTable's
        """What the id alone decodes to: the best that can be said."""
        return self.decode([token_id]).encode()


TokenTable = ByteLevelTable | PieceTable | OpaqueTable


def token_table(backend: Any) -> TokenTable:
    """The table of a `tokenizers.Tokenizer`."""
    known = backend.id_to_token
    if backend.decoder is None:  # tokens are joined with spaces
        return PieceTable(known, rest=lambda token: " " + token, start=lambda token: token)
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    match kinds:
        case ["ByteLevel"] | ["ByteLevel", "Fuse"]:
            return ByteLevelTable(known, byte_alphabet())
        case ["Metaspace"] | ["WordPiece"]:
            return _by_decoder(known, backend.decoder)
    table = _sentencepiece(known, steps)
    return table or OpaqueTable(lambda ids: str(backend.decode(ids, skip_special_tokens=False)))


def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE (`bytes_to_unicode` of OpenAI's GPT-2 encoder, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def strip_spaces(text: str, at_most: int) -> str:
    """`text` without its first spaces, `at_most` of them."""
    spaces = len(text) - len(text.lstrip(" "))
    return text[min(spaces, at_most) :]


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _by_decoder(known: IdToToken, decoder: Any) -> PieceTable:
    """For decoders that treat each token by itself except the first: ask the decoder for both forms."""
    head = "x"
    skip = len(decoder.decode([head]))
    return PieceTable(
        known,
        rest=lambda token: str(decoder.decode([head, token])[skip:]),
        start=lambda token: str(decoder.decode([token])),
    )


def _sentencepiece(known: IdToToken, steps: list[dict[str, Any]]) -> PieceTable | None:
    """`Replace* ByteFallback? Fuse? Strip?`, in this order; None for anything else."""
    replacements: list[tuple[str, str]] = []
    byte_fallback, fused, strip_left = False, False, 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not byte_fallback and not fused:
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                strip_left += start
            case _:
                return None

    def replaced(token: str) -> str:
        for old, new in replacements:
            token = token.replace(old, new)
        return token

    return PieceTable(known, rest=replaced, start=replaced, byte_fallback=byte_fallback, strip_left=strip_left)


def _byte_of(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None
