"""`DrawParams`: what drawing a token needs to know of each row, kept as the bits that go over to the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.uniform import streams, uniform

Ints = NDArray[np.int32]
Indexes = NDArray[np.intp]


class Columns(NamedTuple):
    """The host's side of `FilterParams`."""

    table: Ints
    filtered: bool
    max_top_k: int


class DrawParams:
    """Temperature, filters and randomness of every row."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._filters = np.zeros((3, max_rows), np.float32)
        self._top_k = np.full(max_rows, vocab_size, np.int32)
        self._filtered = np.zeros(max_rows, np.bool_)
        self._streams = np.zeros(max_rows, np.uint64)

    def open(self, row: int, params: SamplingParams) -> None:
        """Take what `row` needs from its params."""
        top_k = self._vocab_size if params.top_k < 1 else min(params.top_k, self._vocab_size)
        self._filters[:, row] = params.temperature, params.top_p, params.min_p
        self._top_k[row] = top_k
        self._filtered[row] = top_k < self._vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        self._streams[row] = streams(np.array([params.seed], np.uint64))[0]

    def columns(self, source: Indexes, target: Indexes, rows: Ints, out_position: Ints) -> Columns:
        """For the rows int32 [P]: their lines of the logits, their places in the result, their output positions."""
        table = np.empty((7, len(rows)), np.int32)
        floats = table[:4].view(np.float32)
        floats[:3] = self._filters[:, rows]
        floats[3] = uniform(self._streams[rows], out_position)
        top_k = table[4] = self._top_k[rows]
        table[5], table[6] = source, target
        filtered = bool(self._filtered[rows].any())
        return Columns(table, filtered, int(top_k[top_k < self._vocab_size].max(initial=0)) if filtered else 0)
