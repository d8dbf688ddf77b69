"""Mistral: Llama's block without biases; the sliding window is in the config."""

from __future__ import annotations

from inferserve.config.model_config import ModelConfig
from inferserve.models import llama
from inferserve.models.family import Family
from inferserve.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    """No biases, no q/k norm."""
    return DecoderSpec.of(config, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False)


FAMILY = Family(model_type="mistral", spec=spec, names=llama.NAMES, gguf_rotary_pairs=True)
