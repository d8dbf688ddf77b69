"""`DecoderSpec`: the decoder stack as data. A family turns a `ModelConfig` into one; the stack knows nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from inferserve.config.model_config import ModelConfig, RopeConfig
from inferserve.errors import ConfigError
from inferserve.kv.pool import KvShape
from inferserve.layers.context import ForwardContext
from inferserve.layers.quant import Fp8Scheme


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder: RMSNorm, grouped-query attention with rotary positions, SwiGLU.

    Attributes:
        vocab, size, inner, layers: ids, width of the residual stream, width of the MLP, depth.
        heads, kv_heads, head_dim: attention.
        norm_eps: of every RMSNorm.
        rope: rotary settings; `max_position` is where the dynamic kind starts to stretch.
        windows: sliding window of each layer, tokens; 0 = all.
        qkv_bias, o_bias, mlp_bias: which projections have one.
        qk_norm: RMSNorm over each head of q and k.
        tied: the head is the embedding's matrix.
        quant: of the matrices inside layers; None = float.
    """

    vocab: int
    size: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    windows: tuple[int, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    quant: Fp8Scheme | None = None

    @staticmethod
    def of(config: ModelConfig, *, qkv_bias: bool, o_bias: bool, mlp_bias: bool, qk_norm: bool) -> DecoderSpec:
        """What the config says, and what the family says on top."""
        return DecoderSpec(
            vocab=config.vocab_size,
            size=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            rope=config.rope,
            max_position=config.max_position,
            windows=config.windows,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            tied=config.tie_word_embeddings,
        )

    def layer_quant(self, layer: int) -> Fp8Scheme | None:
        """Of the matrices of a layer. The last layer stays float when weights are quantised at load.

        Nothing after it evens errors out: its last matrix alone can cost SmolLM2 as much perplexity as all others.
        """
        return None if self.quant and not self.quant.leaf and layer == self.layers - 1 else self.quant

    def share(self, ranks: int) -> DecoderSpec:
        """What each of `ranks` holds of the layers: heads and the MLP divided, KV heads too or at least one. `vocab` stays.

        Raises ConfigError naming --tp when they cannot be divided.
        """
        if self.heads % ranks or self.inner % ranks or (self.kv_heads % ranks and ranks % self.kv_heads):
            raise ConfigError(
                f"--tp {ranks}: {self.heads} heads, {self.kv_heads} KV heads and an MLP of {self.inner} cannot be divided"
            )
        kv_heads = max(1, self.kv_heads // ranks)
        return replace(self, heads=self.heads // ranks, kv_heads=kv_heads, inner=self.inner // ranks)


class CausalModel(Protocol):
    """What the runner drives: our stack, or any other decoder through the generic backend."""

    kv_shapes: tuple[KvShape, ...]

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Int64 [T] → logits [S, vocab] of `ctx.logits_index`. Writes K and V of every token to the pool."""
        ...


@runtime_checkable
class CapturableModel(CausalModel, Protocol):
    """A model whose launches depend on the number of tokens alone, so that they can be captured and replayed."""

    @property
    def capturable(self) -> bool:
        """False where the model's settings make it look at lengths on the host after all."""
        ...

    def hidden(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Int64 [T] → [T, size]: all of `forward` but the head, for every token. Ignores `ctx.logits_index`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, size], some rows of `hidden` → logits [S, vocab]."""
        ...
