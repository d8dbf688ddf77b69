"""`TokenAllocator`: which indexes of the KV pool are free. A stack in one numpy array; knows nothing of rows or prefixes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferserve.errors import KvExhausted

PAGE_SIZE = 1
"""Tokens that are allocated together. Everything above works in token indexes; only this module may know pages."""


class TokenAllocator:
    """Hands out indexes of [0, total), most recently freed first."""

    def __init__(self, total: int) -> None:
        self.total = total // PAGE_SIZE * PAGE_SIZE
        self._stack: NDArray[np.int32] = np.arange(self.total, dtype=np.int32)[::-1].copy()
        self._top = self.total

    @property
    def free_count(self) -> int:
        """How many tokens can be allocated."""
        return self._top

    def alloc(self, n: int) -> NDArray[np.int32]:
        """Take `n` indexes, int32 [n]. Raises KvExhausted, taking nothing, when there are fewer."""
        if n > self._top:
            raise KvExhausted(f"{n} tokens asked for, {self._top} of {self.total} free")
        self._top -= n
        return self._stack[self._top : self._top + n].copy()

    def free(self, indices: NDArray[np.int32]) -> None:
        """Give back `indices`, int32 [n], each of which was allocated."""
        end = self._top + len(indices)
        if end > self.total:
            raise AssertionError(f"{end} free tokens in a pool of {self.total}: something was freed twice")
        self._stack[self._top : end] = indices
        self._top = end

    def free_indices(self) -> NDArray[np.int32]:
        """The free indexes, for audits: a read-only view, next to be handed out last."""
        view = self._stack[: self._top]
        view.flags.writeable = False
        return view

    def check(self) -> None:
        """Raise AssertionError unless the free indexes are distinct and in range. O(total)."""
        free = self.free_indices()
        seen = np.bincount(free, minlength=self.total) if len(free) else np.zeros(0, dtype=np.int64)
        assert len(seen) <= self.total, "a free index lies outside the pool"
        assert not (seen > 1).any(), "an index is free twice"
