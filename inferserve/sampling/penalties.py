"""Histories of the rows that have penalties, kept on the device; `kernels.penalties` says what becomes of them.

A row's history is the distinct tokens of its prompt (if it has a repetition penalty) and then every output token. It
grows on the device as tokens are sampled, so a step can be launched before the host has seen the last one. Rows
without penalties have no history.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from inferserve.kernels.dispatch import kernels_for
from inferserve.kernels.penalties import PenaltyParams
from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling.upload import upload

_FIRST_ROWS, _FIRST_COLUMNS = 8, 256

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


def has_penalties(params: SamplingParams) -> bool:
    """True unless all three are off."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class Penalties:
    """Histories of the rows that have penalties, one line of a growing table each."""

    def __init__(self, max_rows: int, max_len: int, vocab_size: int, device: torch.device) -> None:
        self._most = (max_rows, max_len)
        self._vocab_size = vocab_size
        self._device = device
        self._kernels = kernels_for(device)
        self._history = torch.zeros((_FIRST_ROWS, _FIRST_COLUMNS), dtype=torch.int64, device=device)
        # Rows of `PenaltyParams.table` from the fourth on, by slot: prompt, total, and the bits of three strengths.
        self._columns = np.zeros((5, _FIRST_ROWS), np.int32)
        self._slot_of = np.full(max_rows, -1, np.int32)
        self._free = list(range(_FIRST_ROWS))

    def open(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """Start a history from what was said so far."""
        self.close(row)
        distinct = np.unique(prompt) if params.repetition_penalty != 1.0 else prompt[:0]
        tokens = np.concatenate((distinct, output)).astype(np.int64)
        # An id that the model cannot emit has no logit to penalise; entry `vocab_size` is the spare one.
        tokens[(tokens < 0) | (tokens >= self._vocab_size)] = self._vocab_size
        if not self._free:
            self._grow(min(2 * self._history.shape[0], self._most[0]), self._history.shape[1])
        slot = self._slot_of[row] = self._free.pop()
        self._reserve(len(tokens))
        self._columns[:2, slot] = len(distinct), len(tokens)
        strengths = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._columns[2:, slot] = np.array(strengths, np.float32).view(np.int32)
        self._history[slot, : len(tokens)] = upload(tokens, self._device)

    def close(self, row: int) -> None:
        """Forget `row`."""
        if self._slot_of[row] >= 0:
            self._free.append(int(self._slot_of[row]))
            self._slot_of[row] = -1

    def apply(self, work: torch.Tensor, where: Longs, sampled: Longs, rows: Ints) -> PenaltyParams:
        """Penalise in place; returns what `append` needs.

        Args:
            work: float32 [P, width], contiguous, width > vocab_size: entry vocab_size of each row is spare.
            where: int64 [N], indexes into P. sampled: int64 [N], indexes into the step's results.
            rows: int32 [N], their rows, each with a history and no two alike.
        """
        slots = self._slot_of[rows]
        table = np.empty((8, len(rows)), np.int32)
        table[0], table[1], table[2] = where, sampled, slots
        table[3:] = self._columns[:, slots]
        longest = int(table[4].max())
        self._reserve(longest + 1)
        params = PenaltyParams(upload(table, self._device), longest)
        self._kernels.penalise(work, params, self._history)
        self._columns[1, slots] += 1
        return params

    def append(self, params: PenaltyParams, token_ids: torch.Tensor) -> None:
        """Add the newest token of the rows that `apply` has seen; int64 [S] on the device."""
        self._kernels.append_tokens(self._history, params, token_ids)

    def _reserve(self, columns: int) -> None:
        if columns > self._history.shape[1]:
            self._grow(self._history.shape[0], max(columns, min(2 * self._history.shape[1], self._most[1])))

    def _grow(self, rows: int, columns: int) -> None:
        history = torch.zeros((rows, columns), dtype=torch.int64, device=self._device)
        history[: self._history.shape[0], : self._history.shape[1]] = self._history
        self._free += range(self._history.shape[0], rows)
        self._columns = np.pad(self._columns, ((0, 0), (0, rows - self._history.shape[0])))
        self._history = history
