"""Additive changes to a few logits of a row: logit bias, and the mask on ending tokens below `min_tokens`.

Rows that need neither cost nothing. Both are given as (token, value) pairs; the mask's value is -inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.upload import upload


class TokenEdits:
    """Pairs of each row that has some."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._ends: dict[int, NDArray[np.int64]] = {}

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
        self._bias.pop(row, None)
        self._ends.pop(row, None)

    def apply(self, work: torch.Tensor, biased: Sequence[tuple[int, int]], masked: Sequence[tuple[int, int]]) -> None:
        """Change `work` in place.

        Args:
            work: float32 [P, width], contiguous.
            biased: (index into P, row) of rows with a logit bias.
            masked: (index into P, row) of rows still below their min_tokens.
        """
        width = work.shape[1]
        ids = [self._bias[row][0] + i * width for i, row in biased]
        ids += [self._ends[row] + i * width for i, row in masked]
        values = [self._bias[row][1] for _, row in biased]
        values += [np.full(len(self._ends[row]), -np.inf, np.float32) for _, row in masked]
        if not ids:
            return
        index = upload(np.concatenate(ids), work.device)
        work.view(-1).index_add_(0, index, upload(np.concatenate(values), work.device))
