"""The one decoder stack. Families differ by `DecoderSpec` and by the names of their weights, never by a forward."""

from __future__ import annotations

import torch
from torch import nn

from inferserve.attention.base import LayerSpec
from inferserve.kernels.rope_write import Rotation
from inferserve.kv.pool import KvShape
from inferserve.layers.attention import Attention, AttentionShape
from inferserve.layers.context import ForwardContext
from inferserve.layers.embedding import Embedding, Head
from inferserve.layers.linear import Linear
from inferserve.layers.mlp import GatedMlp
from inferserve.layers.norm import RmsNorm
from inferserve.layers.rotary import Rotary
from inferserve.models.spec import DecoderSpec
from inferserve.parallel.ranks import ALONE, Ranks


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream.

    The stream travels as (x, residual), whose sum is only taken inside the next norm.
    """

    def __init__(self, spec: DecoderSpec, index: int, ranks: Ranks) -> None:
        super().__init__()
        shape = AttentionShape(
            size=spec.size,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            qkv_bias=spec.qkv_bias,
            o_bias=spec.o_bias,
            qk_norm_eps=spec.norm_eps if spec.qk_norm else 0.0,
            quant=spec.layer_quant(index),
        )
        self.attention_norm = RmsNorm(spec.size, spec.norm_eps)
        self.attention = Attention(shape, LayerSpec(index, spec.head_dim**-0.5, spec.windows[index]), ranks)
        self.mlp_norm = RmsNorm(spec.size, spec.norm_eps)
        self.mlp = GatedMlp(spec.size, spec.inner, spec.mlp_bias, spec.layer_quant(index), ranks)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, size] twice (residual None in the first layer) → the same pair after this layer."""
        if residual is None:
            x, residual = self.attention_norm.forward(x, ctx), x
        else:
            x, residual = self.attention_norm.add(x, residual, ctx)
        x = self.attention.forward(x, rotation, ctx)
        x, residual = self.mlp_norm.add(x, residual, ctx)
        return self.mlp.forward(x, ctx), residual


class Decoder(nn.Module):
    """Embedding, layers, final norm, head. `spec` is of the whole model, of which this holds the share of a rank."""

    def __init__(self, spec: DecoderSpec, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.spec = spec
        own = spec.share(ranks.size)
        self.kv_shapes = (KvShape(own.kv_heads, own.head_dim, group=own.heads // own.kv_heads),) * own.layers
        self.embedding = Embedding(spec.vocab, spec.size, ranks)
        self.rotary = Rotary(spec.rope, spec.head_dim, spec.max_position)
        self.layers = nn.ModuleList(DecoderLayer(own, i, ranks) for i in range(spec.layers))
        self.norm = RmsNorm(spec.size, spec.norm_eps)
        self.head = Head(spec.vocab, spec.size, self.embedding if spec.tied else None, ranks)

    def prepare(self, max_len: int, device: torch.device, ordered: bool = False) -> None:
        """After loading: weights laid out for the device (see `Linear.pack`), rotations for positions below `max_len`."""
        for module in self.modules():
            if isinstance(module, Linear | Head):
                module.pack(ordered)
        self.rotary.prepare(max_len, device)

    @property
    def capturable(self) -> bool:
        """See CapturableModel. Dynamic rope looks at lengths on the host."""
        return self.spec.rope.kind != "dynamic"

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Int64 [T] → logits [S, vocab] of the tokens in `ctx.logits_index`."""
        x, residual = self._through_layers(token_ids, ctx)
        x, residual = x.index_select(0, ctx.logits_index), residual.index_select(0, ctx.logits_index)
        return self.logits(self.norm.add(x, residual, ctx)[0])

    def hidden(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See CapturableModel."""
        return self.norm.add(*self._through_layers(token_ids, ctx), ctx)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See CapturableModel."""
        return self.head.forward(hidden)

    def _through_layers(self, token_ids: torch.Tensor, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        rotation = self.rotary.forward(ctx.batch)
        x, residual = self.embedding.forward(token_ids), None
        for layer in self.layers:
            x, residual = layer.forward(x, residual, rotation, ctx)
        assert residual is not None
        return x, residual
