"""Additive changes to a few logits of a row: logit bias, and the mask on ending tokens below `min_tokens`.

Rows that need neither cost nothing. Both are given as (token, value) pairs; the mask's value is -inf. From step to step
the same rows mostly need the same, so what was last sent to the device is used again while that holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.upload import upload

Flags = NDArray[np.bool_]
Ints = NDArray[np.int32]


class _Sent(NamedTuple):
    """Pairs on the device: index into the flat copy of the logits, and what is added there; `key` says of whom."""

    key: tuple[int, bytes, bytes, bytes]
    index: torch.Tensor
    values: torch.Tensor


class TokenEdits:
    """Pairs of each row that has some."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._ends: dict[int, NDArray[np.int64]] = {}
        self._sent: _Sent | None = None

    def open(self, row: int, params: SamplingParams) -> None:
        """Take what `row` needs from its params. Ids outside the vocabulary are left out."""
        self.close(row)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, np.int64)
            values = np.fromiter(params.logit_bias.values(), np.float32)
            inside = (ids >= 0) & (ids < self._vocab_size)
            self._bias[row] = (ids[inside], values[inside])
        if params.min_tokens:
            ends = np.unique(np.array([*self._eos_ids, *params.stop_token_ids], np.int64))
            self._ends[row] = ends[(ends >= 0) & (ends < self._vocab_size)]

    def close(self, row: int) -> None:
        """Forget `row`."""
        held = self._bias.pop(row, None), self._ends.pop(row, None)
        if held != (None, None):
            self._sent = None

    def apply(self, work: torch.Tensor, biased: Flags, masked: Flags, rows: Ints) -> None:
        """Change `work` in place.

        Args:
            work: float32 [P, width], contiguous.
            biased, masked: bool [P], lines with a logit bias, and lines still below their min_tokens.
            rows: int32 [P], their rows.
        """
        key = work.shape[1], biased.tobytes(), masked.tobytes(), rows.tobytes()
        if self._sent is None or self._sent.key != key:
            self._sent = self._send(key, work, np.flatnonzero(biased).tolist(), np.flatnonzero(masked).tolist(), rows)
        if len(self._sent.index):
            work.view(-1).index_add_(0, self._sent.index, self._sent.values)

    def _send(
        self,
        key: tuple[int, bytes, bytes, bytes],
        work: torch.Tensor,
        biased: Sequence[int],
        masked: Sequence[int],
        rows: Ints,
    ) -> _Sent:
        width = work.shape[1]
        ids = [self._bias[int(rows[i])][0] + i * width for i in biased]
        ids += [self._ends[int(rows[i])] + i * width for i in masked]
        values = [self._bias[int(rows[i])][1] for i in biased]
        values += [np.full(len(self._ends[int(rows[i])]), -np.inf, np.float32) for i in masked]
        index = np.concatenate([np.empty(0, np.int64), *ids])
        added = np.concatenate([np.empty(0, np.float32), *values])
        return _Sent(key, upload(index, work.device), upload(added, work.device))
