"""`Ranks`: the processes that hold one model together, as one of them sees the others.

Layers, loader and sampler ask for sums, gathers and copies here and do not care how they are carried. Every rank makes
the same calls in the same order with the same shapes. Knows neither models nor steps.
"""

from __future__ import annotations

from typing import Protocol

import torch

LEADER = 0
"""The rank that decides: it samples, reads the clock and answers to the router."""


class Ranks(Protocol):
    """One rank of `size`; on CUDA the operations are ordered on the current stream and can be captured in graphs."""

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, of the same shape; `x` may be overwritten."""
        ...

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every rank's `x`, all of the same shape, in the order of the ranks."""
        ...

    def from_leader(self, x: torch.Tensor) -> torch.Tensor:
        """The leader's `x`; the others give a contiguous tensor of the same shape and dtype, which is overwritten."""
        ...

    def least(self, number: int) -> int:
        """The smallest of every rank's `number`. Waits for all of them."""
        ...


class Alone:
    """One process holds the whole model."""

    rank = LEADER
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        return x

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See Ranks."""
        return (x,)

    def from_leader(self, x: torch.Tensor) -> torch.Tensor:
        """See Ranks."""
        return x

    def least(self, number: int) -> int:
        """See Ranks."""
        return number


ALONE = Alone()
