"""`Linear`: a matrix made of parts that share their input, multiplied at once (q, k, v; gate, up).

A checkpoint holds the parts one by one; `part()` says where each goes. This is the one place that owns the layout of
a weight, so a quantised layout or a rank's share of the rows replaces this class and nothing around it.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from inferserve.layers.packed import packed, plain


class Linear(nn.Module):
    """y = x Wᵀ + b. `weight` is [sum(parts), inputs], `bias` is [sum(parts)] or None."""

    def __init__(self, inputs: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.starts = (0, *accumulate(parts))
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(sum(parts), inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self._matmul = plain(self.weight, self.bias)

    def part(self, leaf: str, index: int) -> torch.Tensor:
        """The rows of `weight` or `bias` that part `index` of a checkpoint fills; a view."""
        tensor: torch.Tensor = getattr(self, leaf)
        return tensor[self.starts[index] : self.starts[index + 1]]

    def pack(self) -> None:
        """Lay the filled weight out for the device. Where that makes a copy, `weight` is given up."""
        assert self.weight is not None
        matmul = packed(self.weight, self.bias)
        if matmul is not None:
            self._matmul, self.weight = matmul, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] → [T, sum(parts)]."""
        return self._matmul(x)
