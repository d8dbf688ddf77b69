"""`Quantization`: how a checkpoint says its weights are stored (`quantization_config` of config.json), in our words.

Read here: fp8 (e4m3) weights with a scale for each output channel or for each 128 × 128 block, and activations quantised
while serving. Everything else keeps its name, so that whoever cannot read it can say so. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferserve.errors import ConfigError

CHANNEL = "fp8w8a8"
BLOCK = "fp8w8a8-b128"
QUANT_TYPES = (CHANNEL, BLOCK)
ALIASES = {"vllm-fp8w8a8": CHANNEL, "vllm-fp8w8a8-b128": BLOCK}
"""LightLLM's longer names for the same."""
_BLOCK_SIZE = [128, 128]


@dataclass(frozen=True)
class Quantization:
    """A quantised checkpoint.

    Attributes:
        method: its own name for it.
        quant_type: ours (a value of --quant-type), '' = our stack cannot read it.
        scale: what the tensor of scales beside a `weight` is called.
    """

    method: str
    quant_type: str = ""
    scale: str = ""

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> Quantization | None:
        """From a config.json; None when it says nothing. Raises ConfigError for something that is no object."""
        raw = config.get("quantization_config")
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            raise ConfigError(f"config.json: quantization_config must be an object, not {raw!r}")
        method = str(raw.get("quant_method") or "without quant_method")
        if method == "fp8" and raw.get("activation_scheme", "dynamic") == "dynamic":
            if raw.get("weight_block_size") == _BLOCK_SIZE:
                return Quantization(method, BLOCK, "weight_scale_inv")
        elif method == "compressed-tensors":
            return Quantization(method, _compressed(raw), "weight_scale")
        return Quantization(method)


def _compressed(raw: Mapping[str, Any]) -> str:
    """Of the library compressed-tensors: one group of settings for all linear layers."""
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return ""
    group = next(iter(groups.values()))
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    fp8 = all(side.get("type") == "float" and side.get("num_bits") == 8 for side in (weights, inputs))
    if group.get("targets") != ["Linear"] or not fp8 or not inputs.get("dynamic"):
        return ""
    if weights.get("strategy") == "channel" and inputs.get("strategy") == "token":
        return CHANNEL
    blocks = weights.get("strategy") == "block" and weights.get("block_structure") == _BLOCK_SIZE
    return BLOCK if blocks and inputs.get("strategy") == "group" and inputs.get("group_size") == 128 else ""
