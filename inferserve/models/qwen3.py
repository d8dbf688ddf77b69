"""Qwen3: Llama's block with RMSNorm over each head of q and k."""

from __future__ import annotations

from inferserve.config.model_config import ModelConfig
from inferserve.models import llama
from inferserve.models.family import Family
from inferserve.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    """Attention biases as the config says."""
    return DecoderSpec.of(
        config, qkv_bias=config.attention_bias, o_bias=config.attention_bias, mlp_bias=False, qk_norm=True
    )


FAMILY = Family(model_type="qwen3", spec=spec, names=llama.NAMES)
