"""`Attention`: project to heads, attend over the paged pool, project back.

What becomes of the heads in between (norms, rotation, where K and V lie) is the `AttentionBackend`'s business, so that
it can be one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from inferserve.attention.base import LayerSpec
from inferserve.kernels.rope_write import PackedHeads, Rotation
from inferserve.layers.context import ForwardContext
from inferserve.layers.linear import Linear
from inferserve.layers.norm import RmsNorm
from inferserve.layers.quant import Fp8Scheme
from inferserve.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class AttentionShape:
    """Heads and options of one attention layer.

    Attributes:
        size: width of the residual stream.
        heads, kv_heads, head_dim: grouped-query heads (Ainslie et al., arXiv 2305.13245).
        qkv_bias, o_bias: biases of the projections.
        qk_norm_eps: RMSNorm over each head of q and k before rotation; 0 = none.
        quant: of the projections; None = float.
    """

    size: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    qk_norm_eps: float
    quant: Fp8Scheme | None = None


class Attention(nn.Module):
    """Self-attention of one layer. Several ranks hold some heads each, and add up what those contribute."""

    def __init__(self, shape: AttentionShape, spec: LayerSpec, ranks: Ranks = ALONE) -> None:
        super().__init__()
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape = shape
        self.spec = spec
        self._ranks = ranks
        self.sizes = (q_size, kv_size, kv_size)
        self.qkv = Linear(shape.size, *self.sizes, bias=shape.qkv_bias, quant=shape.quant)
        self.out = Linear(q_size, shape.size, bias=shape.o_bias, quant=shape.quant)
        if shape.qk_norm_eps:
            self.q_norm = RmsNorm(shape.head_dim, shape.qk_norm_eps)
            self.k_norm = RmsNorm(shape.head_dim, shape.qk_norm_eps)

    def forward(self, x: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """[T, size] → [T, size]."""
        attended = ctx.attention.forward_packed(self.spec, ctx.plan, self.qkv.forward(x), self._heads(), rotation)
        return self._ranks.sum(self.out.forward(attended.view(x.shape[0], self.sizes[0])))

    def _heads(self) -> PackedHeads:
        shape = self.shape
        if not shape.qk_norm_eps:
            return PackedHeads(shape.heads, shape.kv_heads, shape.head_dim)
        norms = self.q_norm.weight, self.k_norm.weight
        return PackedHeads(shape.heads, shape.kv_heads, shape.head_dim, *norms, shape.qk_norm_eps)
