"""`GatedMlp`: down(silu(gate(x)) · up(x)), gate and up in one matrix. Formula: Shazeer, arXiv 2002.05202 (SwiGLU)."""

from __future__ import annotations

import torch
from torch import nn

from inferserve.layers.context import ForwardContext
from inferserve.layers.linear import Linear


class GatedMlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, size: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_up = Linear(size, inner, inner, bias=bias)
        self.down = Linear(inner, size, bias=bias)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, size] → [T, size]."""
        return self.down.forward(ctx.kernels.silu_mul(self.gate_up.forward(x)))
