"""Llama 1 to 3.x and what shares its shape: Vicuna, Code Llama, Yi, SmolLM2."""

from __future__ import annotations

from inferserve.config.model_config import ModelConfig
from inferserve.models.family import Family
from inferserve.models.spec import DecoderSpec
from inferserve.models.weights import WeightRow

NAMES = (
    WeightRow("embed_tokens", "embedding"),
    WeightRow("layers.{i}.input_layernorm", "layers.{i}.attention_norm"),
    WeightRow("layers.{i}.self_attn.q_proj", "layers.{i}.attention.qkv", 0),
    WeightRow("layers.{i}.self_attn.k_proj", "layers.{i}.attention.qkv", 1),
    WeightRow("layers.{i}.self_attn.v_proj", "layers.{i}.attention.qkv", 2),
    WeightRow("layers.{i}.self_attn.q_norm", "layers.{i}.attention.q_norm"),
    WeightRow("layers.{i}.self_attn.k_norm", "layers.{i}.attention.k_norm"),
    WeightRow("layers.{i}.self_attn.o_proj", "layers.{i}.attention.out"),
    WeightRow("layers.{i}.post_attention_layernorm", "layers.{i}.mlp_norm"),
    WeightRow("layers.{i}.mlp.gate_proj", "layers.{i}.mlp.gate_up", 0),
    WeightRow("layers.{i}.mlp.up_proj", "layers.{i}.mlp.gate_up", 1),
    WeightRow("layers.{i}.mlp.down_proj", "layers.{i}.mlp.down"),
    WeightRow("norm", "norm"),
    WeightRow("lm_head", "head"),
)


def spec(config: ModelConfig) -> DecoderSpec:
    """Biases as the config says, no q/k norm."""
    return DecoderSpec.of(
        config,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=False,
    )


FAMILY = Family(model_type="llama", spec=spec, names=NAMES, gguf_rotary_pairs=True)
