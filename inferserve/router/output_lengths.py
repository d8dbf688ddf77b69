"""How long outputs really get: a survival curve over finished rows, from which the expected length of a row is read.

Rows that end by themselves are events, rows cut by `max_tokens` or an abort are censored (they would have gone on),
so the curve is the Kaplan-Meier estimator over geometric bins, with exponential forgetting. A row that has produced g
tokens is judged by the rows that got beyond g. Where too few did, the answer is the row's limit: the careful one.
Knows nothing of KV or admission.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]

QUANTILE = 0.6
"""Many rows do not exceed it all at once. In benchmarks/router_sim.py 0.5 to 0.7 pause nobody in a pool of 60,000 tokens;
in one of 8,000 (12 rows), 400 requests see 4, 2 and 2 pauses."""
MEMORY = 1000
"""Finished rows after which an observation has lost 63 % of its weight."""
MIN_ROWS = 16
"""Fewer remembered rows than this say nothing."""
_BINS_PER_OCTAVE = 8
_RESCALE = 1e9


@dataclass(frozen=True)
class LengthCurve:
    """What is known at one moment.

    Attributes:
        edges: int64 [bins], rising; bin k holds lengths in (edges[k-1], edges[k]].
        survival: float64 [bins + 1], share of rows that reach bin k or would have; [0] is 1.
        reached: float64 [bins + 1], how many remembered rows reached bin k.
    """

    edges: Longs
    survival: Doubles
    reached: Doubles

    def expected(self, generated: Longs, limit: Longs) -> Longs:
        """Total output length that a row does not exceed with probability QUANTILE.

        Args:
            generated: int64 [n], output tokens so far (0 = not started).
            limit: int64 [n], max_tokens.

        Returns:
            int64 [n], in (generated, limit] where generated < limit.
        """
        beyond = self.edges.searchsorted(generated, "left") + 1
        bin_ = np.where(generated > 0, np.minimum(beyond, len(self.edges)), 0)
        target = self.survival[bin_] * (1.0 - QUANTILE)
        end = (-self.survival).searchsorted(-target, "left")
        known = (self.reached[bin_] >= MIN_ROWS) & (end <= len(self.edges))
        total = self.edges[np.minimum(end, len(self.edges)) - 1]
        return np.minimum(np.where(known, np.maximum(total, generated + 1), limit), limit)


class OutputLengths:
    """The running distribution.

    Args:
        longest: the longest output possible, tokens.
    """

    def __init__(self, longest: int) -> None:
        octaves = int(longest).bit_length() * _BINS_PER_OCTAVE
        edges = np.ceil(2.0 ** (np.arange(octaves + 1) / _BINS_PER_OCTAVE)).astype(np.int64)
        self._edges = np.unique(edges)
        self._ended = np.zeros(len(self._edges))
        self._cut = np.zeros(len(self._edges))
        self._weight = 1.0
        self._curve: LengthCurve | None = None

    def observe(self, length: int, ended: bool) -> None:
        """A row is over after `length` output tokens; `ended` is False if it was cut and would have gone on."""
        at = int(self._edges.searchsorted(max(1, length), "left"))
        (self._ended if ended else self._cut)[min(at, len(self._edges) - 1)] += self._weight
        # The newest row weighs most: growing weights forget the old ones without touching every bin.
        self._weight *= 1.0 + 1.0 / MEMORY
        if self._weight > _RESCALE:
            self._ended /= self._weight
            self._cut /= self._weight
            self._weight = 1.0
        self._curve = None

    def curve(self) -> LengthCurve:
        """The curve now; made anew only after an observation."""
        if self._curve is None:
            ended, cut = self._ended / self._weight, self._cut / self._weight
            reached = (ended + cut)[::-1].cumsum()[::-1]
            hazard = np.divide(ended, reached, out=np.zeros_like(ended), where=reached > 0)
            survival = np.append(1.0, np.cumprod(1.0 - hazard))
            self._curve = LengthCurve(self._edges, survival, np.append(reached, 0.0))
        return self._curve
