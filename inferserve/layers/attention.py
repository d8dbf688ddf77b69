"""`Attention`: project to heads, normalise and rotate them, attend over the paged pool, project back.

The attending itself, and where K and V lie, is the `AttentionBackend`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from inferserve.attention.base import LayerSpec
from inferserve.layers.context import ForwardContext
from inferserve.layers.linear import Linear
from inferserve.layers.norm import RmsNorm
from inferserve.layers.quant import Fp8Scheme
from inferserve.layers.rotary import Rotation


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
    """Self-attention of one layer."""

    def __init__(self, shape: AttentionShape, spec: LayerSpec) -> None:
        super().__init__()
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape = shape
        self.spec = spec
        self.sizes = (q_size, kv_size, kv_size)
        self.qkv = Linear(shape.size, *self.sizes, bias=shape.qkv_bias, quant=shape.quant)
        self.out = Linear(q_size, shape.size, bias=shape.o_bias, quant=shape.quant)
        if shape.qk_norm_eps:
            self.q_norm = RmsNorm(shape.head_dim, shape.qk_norm_eps)
            self.k_norm = RmsNorm(shape.head_dim, shape.qk_norm_eps)

    def forward(self, x: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """[T, size] → [T, size]."""
        tokens, shape = x.shape[0], self.shape
        q, k, v = self.qkv.forward(x).split(self.sizes, dim=-1)
        q = q.view(tokens, shape.heads, shape.head_dim)
        k = k.view(tokens, shape.kv_heads, shape.head_dim)
        v = v.view(tokens, shape.kv_heads, shape.head_dim)
        if shape.qk_norm_eps:
            q, k = self.q_norm.forward(q, ctx), self.k_norm.forward(k, ctx)
        q, k = ctx.kernels.apply_rotary(q, k, rotation.cos, rotation.sin)
        attended = ctx.attention.forward(self.spec, ctx.plan, q, k, v)
        return self.out.forward(attended.view(tokens, self.sizes[0]))
