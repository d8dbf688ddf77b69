"""`PeakEstimate`: the most KV tokens that the running rows will need at any moment of their future, and with one more.

Rows grow by one token a step and free everything at their end, so usage falls only where a row ends: it is enough to
look at those moments (LightLLM's future-peak estimate, lightllm.md 6.2). A row whose first token has not been reported
yet may start any time later; it is counted as growing at once and as never leaving, which is never too little. Hence
the moments to look at do not change while rows are admitted: a question is a binary search in prepared maxima, O(log n),
and an admission one pass over an array. Knows nothing of requests, prompts or the pool's size.
"""

from __future__ import annotations

from copy import copy

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max // 4


class PeakEstimate:
    """The future of a set of rows.

    Args:
        held: int64 [n], KV tokens that only this row holds now.
        left: int64 [n], steps until it ends; it grows by a token in each.
        starting: bool [n], True for rows that may begin to grow later than now.
        shared: KV tokens that several rows hold together, counted to the end.
    """

    def __init__(self, held: Longs, left: Longs, starting: NDArray[np.bool_], shared: int = 0) -> None:
        self._left = left
        self._starting = starting
        ending = np.flatnonzero(~starting)
        order = ending[np.argsort(left[ending], kind="stable")]
        alive = held[order][::-1].cumsum()[::-1]
        self._moments = np.append(left[order], _NEVER)
        """int64 [m], rising: steps from now at which a row ends, and the far future."""
        self._usage = np.full(len(self._moments), shared, dtype=np.int64)
        """int64 [m]: tokens in use at that moment, just before the row leaves."""
        self._usage[:-1] += alive + np.arange(len(order), 0, -1) * self._moments[:-1]
        if len(order) < len(held):
            self._usage += held[starting].sum() + _grown(left[starting], self._moments)
        self._forget()

    def peak(self) -> int:
        """KV tokens at the worst moment."""
        return int(self._falling_maxima()[0])

    def peak_with(self, tokens: int, left: int, rows: int = 1) -> int:
        """The peak if `rows` more rows were to start that hold `tokens` together and live `left` steps each."""
        after = int(self._moments.searchsorted(left, "right"))
        peak = int(self._falling_maxima()[after]) + rows * left
        if after:
            peak = max(peak, int(self._rising_maxima(rows)[after - 1]))
        return peak + tokens

    def add(self, tokens: int, left: int, rows: int = 1) -> None:
        """Those rows start."""
        after = int(self._moments.searchsorted(left, "right"))
        self._usage[:after] += rows * self._moments[:after] + tokens
        self._usage[after:] += rows * left + tokens
        self._forget()

    def keeping(self, sole: tuple[tuple[int, int], ...]) -> PeakEstimate:
        """The estimate if some tokens are not freed at their holder's end, because a new row shares them.

        Args:
            sole: (position in `held`, tokens) of each row that so far holds some of its tokens alone.
        """
        kept = [(int(self._left[position]), tokens) for position, tokens in sole if not self._starting[position]]
        if not kept:
            return self
        changed = copy(self)
        changed._usage = self._usage.copy()
        for left, tokens in kept:
            changed._usage[int(self._moments.searchsorted(left, "right")) :] += tokens
        changed._forget()
        return changed

    def _forget(self) -> None:
        self._falling: Longs | None = None
        self._rising: dict[int, Longs] = {}

    def _falling_maxima(self) -> Longs:
        """[k] = the most used at moment k or later."""
        if self._falling is None:
            self._falling = np.maximum.accumulate(self._usage[::-1])[::-1]
        return self._falling

    def _rising_maxima(self, rows: int) -> Longs:
        """[k] = the most used at moment k or earlier if `rows` more rows had grown until then."""
        if rows not in self._rising:
            self._rising[rows] = np.maximum.accumulate(self._usage[:-1] + rows * self._moments[:-1])
        return self._rising[rows]


def _grown(left: Longs, moments: Longs) -> Longs:
    """Tokens that rows with `left` steps to go have grown by at each of the rising `moments`: Σ min(left, moment)."""
    rising = np.sort(left)
    finished = rising.searchsorted(moments, "right")
    return np.append(0, rising.cumsum())[finished] + (len(rising) - finished) * moments
