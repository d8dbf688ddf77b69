"""`TokenRun`: a stretch of a sequence, token ids beside their KV indexes, that grows and splits without copying.

Runs that were split off one another share a buffer; only the one that ends where the buffer's used part ends may grow
in place. The radix tree keeps one in each node. Knows nothing of trees.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

_TOKENS, _INDICES = 0, 1
_SMALL = 1024
"""Buffers of this many columns are never worth leaving."""


class TokenRun:
    """Columns [start, stop) of an int32 [2, capacity] buffer; columns up to `limit` are this run's to grow into."""

    __slots__ = ("_buffer", "_limit", "_start", "_stop")

    def __init__(self, tokens: Ints, indices: Ints) -> None:
        self._buffer: Ints = np.stack((tokens, indices)).astype(np.int32, copy=False)
        self._start, self._stop, self._limit = 0, len(tokens), len(tokens)

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def tokens(self) -> Ints:
        """Token ids, int32 [n]; a view."""
        return self._buffer[_TOKENS, self._start : self._stop]

    @property
    def indices(self) -> Ints:
        """KV indexes, int32 [n]; a view."""
        return self._buffer[_INDICES, self._start : self._stop]

    @property
    def first(self) -> int:
        """The first token id."""
        return int(self._buffer[_TOKENS, self._start])

    def common(self, tokens: Ints) -> int:
        """How many leading tokens are the same as in `tokens`, int32 [n]."""
        n = min(len(self), len(tokens))
        equal = self._buffer[_TOKENS, self._start : self._start + n] == tokens[:n]
        return n if equal.all() else int(equal.argmin())

    def append(self, tokens: Ints, indices: Ints) -> None:
        """Add to the end; amortised O(len(tokens))."""
        stop = self._stop + len(tokens)
        if stop > self._limit:
            self._grow(len(self) + len(tokens))
            stop = self._stop + len(tokens)
        self._buffer[_TOKENS, self._stop : stop] = tokens
        self._buffer[_INDICES, self._stop : stop] = indices
        self._stop = stop

    def _grow(self, size: int) -> None:
        buffer = np.empty((2, 2 * size), dtype=np.int32)
        buffer[:, : len(self)] = self._buffer[:, self._start : self._stop]
        self._buffer, self._start, self._stop, self._limit = buffer, 0, len(self), 2 * size

    def split(self, at: int) -> TokenRun:
        """Cut off and return the first `at` tokens; this run keeps the rest (and the room to grow)."""
        head = TokenRun.__new__(TokenRun)
        head._buffer = self._buffer
        head._start, head._stop = self._start, self._start + at
        head._limit = head._stop
        self._start = head._stop
        return head

    def absorb(self, tail: TokenRun) -> None:
        """Append `tail`, which is given up; O(1) if it was once split off this run's end."""
        if tail._buffer is self._buffer and tail._start == self._stop:
            self._stop, self._limit = tail._stop, tail._limit
        else:
            self.append(tail.tokens, tail.indices)

    def trim(self, n: int) -> Ints:
        """Drop the last `n` tokens; returns their KV indexes (a copy)."""
        self._stop -= n
        gone = self._buffer[_INDICES, self._stop : self._stop + n].copy()
        self.fit()
        return gone

    def fit(self) -> None:
        """Leave a buffer that is much too large; it would live as long as this run does."""
        if max(_SMALL, 4 * len(self)) < self._buffer.shape[1]:
            self._buffer = self._buffer[:, self._start : self._stop].copy()
            self._start, self._stop, self._limit = 0, len(self), len(self)
