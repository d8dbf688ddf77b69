"""Token ids to text, a few at a time: the joined deltas equal `tokenizer.decode` of all ids, always.

Nothing is decoded twice and no delta ends inside a character: bytes that may still become a character are held, bytes
that cannot are replaced by U+FFFD at once. Knows nothing of slots, stop strings or messages.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable
from typing import Protocol

from inferserve.tokenize.load import Tokenizer
from inferserve.tokenize.token_bytes import ByteLevelTable, PieceTable, strip_spaces

REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 64
"""A decoder that still shows nothing, or U+FFFD, after so many tokens is not waiting for a character."""


class TextStream(Protocol):
    """The growing text of one sequence."""

    def push(self, token_id: int) -> str:
        """Text that this id completes; '' when it must wait for more."""
        ...

    def flush(self) -> str:
        """What is still held, as `decode` would end it. The stream takes no more ids."""
        ...


class TextStreams:
    """Opens streams for one tokenizer; what ids mean is looked up once an id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._open: dict[bool, Callable[[], TextStream]] = {
            skip: _opener(tokenizer, tokenizer.special_ids if skip else frozenset()) for skip in (False, True)
        }

    def open(self, skip_special_tokens: bool) -> TextStream:
        """A stream at the start of a text."""
        return self._open[skip_special_tokens]()


def _opener(tokenizer: Tokenizer, skipped: frozenset[int]) -> Callable[[], TextStream]:
    table = tokenizer.table
    if isinstance(table, ByteLevelTable) and not tokenizer.cleans_up:
        spellings = _Spellings(table, skipped)
        return lambda: ByteLevelText(spellings)
    if isinstance(table, PieceTable) and not tokenizer.cleans_up:
        pieces = _Pieces(table, skipped)
        return lambda: PieceText(pieces)
    return lambda: WindowText(lambda ids: tokenizer.decode(ids, skip_special_tokens=bool(skipped)))


class _Spellings(dict[int, str | bytes]):
    """Of a byte-level id: its text where it is one by itself, else its bytes. Filled as ids are met."""

    def __init__(self, table: ByteLevelTable, skipped: frozenset[int]) -> None:
        super().__init__()
        self._table = table
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | bytes:
        raw = b"" if token_id in self._skipped else self._table.token_bytes(token_id)
        try:
            self[token_id] = raw.decode()
        except UnicodeDecodeError:
            self[token_id] = raw
        return self[token_id]


class ByteLevelText:
    """Byte-level tokenizers: incremental UTF-8 over the bytes of the ids."""

    __slots__ = ("_pending", "_spellings")

    def __init__(self, spellings: _Spellings) -> None:
        self._spellings = spellings
        self._pending = b""

    def push(self, token_id: int) -> str:
        """See TextStream."""
        spelling = self._spellings[token_id]
        if isinstance(spelling, str):
            if not self._pending:
                return spelling
            spelling = spelling.encode()
        data = self._pending + spelling
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """See TextStream."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class _Pieces(dict[int, str | int | None]):
    """Of a piece id: its text, its byte, or None where it adds nothing (skipped, unknown). Filled as ids are met."""

    def __init__(self, table: PieceTable, skipped: frozenset[int]) -> None:
        super().__init__()
        self.table = table
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | int | None:
        entry: str | int | None = None
        if token_id not in self._skipped:
            byte = self.table.byte(token_id)
            entry = self.table.piece(token_id) if byte is None else byte
        self[token_id] = entry
        return entry


class PieceText:
    """Tokenizers whose ids are pieces of text, some perhaps single bytes.

    A run of byte tokens is held until it ends: their decoder turns a run that is no UTF-8 into one U+FFFD for each byte,
    its good characters included, so nothing of a run is certain before its end.
    """

    __slots__ = ("_pieces", "_run", "_started", "_strip")

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._started = False
        self._strip = pieces.table.strip_left

    def push(self, token_id: int) -> str:
        """See TextStream."""
        entry = self._pieces[token_id]
        if entry is None:
            return ""
        if isinstance(entry, int):
            self._started = True
            self._run.append(entry)
            return ""
        if not self._started:
            self._started = True
            entry = self._pieces.table.piece(token_id, first=True) or ""
        if self._run:
            entry = self._end_run() + entry
        return self._stripped(entry) if self._strip else entry

    def flush(self) -> str:
        """See TextStream."""
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        """Take away leading spaces of the whole text, as many as are still to go."""
        rest = strip_spaces(text, self._strip)
        self._strip = 0 if rest else self._strip - len(text)
        return rest


class WindowText:
    """For decoders that only show whole texts: decode a short window with and without the new ids, take the difference.

    Exact as far as the decoder looks back no further than the window; it is the fallback, not a rule.
    """

    __slots__ = ("_decode", "_shown", "_window")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """See TextStream."""
        self._window.append(token_id)
        delta = self._delta()
        incomplete = not delta or delta.endswith(REPLACEMENT)
        if incomplete and len(self._window) - self._shown < _WINDOW_TOKENS:
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return delta

    def flush(self) -> str:
        """See TextStream."""
        delta = self._delta()
        self._shown = len(self._window)
        return delta

    def _delta(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._shown])) :]
