"""`RmsNorm`, alone or with the residual addition before it. Formula: Zhang and Sennrich, arXiv 1910.07467."""

from __future__ import annotations

import torch
from torch import nn

from inferserve.layers.context import ForwardContext


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, reduced in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[..., size] → the same shape."""
        return ctx.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of x + residual, and that sum. Both [T, size]; the inputs may be overwritten."""
        return ctx.kernels.fused_add_rms_norm(x, residual, self.weight, self.eps)
