"""`GatedMlp`: down(silu(gate(x)) · up(x)), gate and up in one matrix. Formula: Shazeer, arXiv 2002.05202 (SwiGLU)."""

from __future__ import annotations

import torch
from torch import nn

from inferserve.layers.context import ForwardContext
from inferserve.layers.linear import Linear
from inferserve.layers.quant import Fp8Scheme
from inferserve.parallel.ranks import ALONE, Ranks


class GatedMlp(nn.Module):
    """SwiGLU feed-forward. Several ranks hold a part of the inner units each, and add up what those contribute."""

    def __init__(self, size: int, inner: int, bias: bool, quant: Fp8Scheme | None = None, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self._ranks = ranks
        self.gate_up = Linear(size, inner, inner, bias=bias, quant=quant)
        self.down = Linear(inner, size, bias=bias, quant=quant)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, size] → [T, size]."""
        return self._ranks.sum(self.down.forward(ctx.kernels.silu_mul(self.gate_up.forward(x))))
