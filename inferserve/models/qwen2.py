"""Qwen2 and Qwen2.5: Llama's block with biases on q, k and v."""

from __future__ import annotations

from inferserve.config.model_config import ModelConfig
from inferserve.models import llama
from inferserve.models.family import Family
from inferserve.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    """Biases on q, k, v whatever the config says."""
    return DecoderSpec.of(config, qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False)


FAMILY = Family(model_type="qwen2", spec=spec, names=llama.NAMES)
