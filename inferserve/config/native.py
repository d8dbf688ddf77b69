"""Which models our own decoder stack runs, and what is refused for those that run through transformers. Knows no tensors."""

from __future__ import annotations

from inferserve.config.model_config import ModelConfig
from inferserve.config.schema import ServerConfig

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Families of `models/registry.py`, as config.json calls them."""
_ROPE_KINDS = frozenset({"default", "linear", "dynamic", "yarn", "llama3"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def obstacle(model: ModelConfig) -> str:
    """What in the config our stack does not do, or ''."""
    if model.model_type not in MODEL_TYPES:
        return f"model type {model.model_type!r} is not one of {', '.join(MODEL_TYPES)}"
    if model.architecture and not model.architecture.endswith("ForCausalLM"):
        return f"architecture {model.architecture}"
    if model.rope.kind not in _ROPE_KINDS or model.rope.by_layer_type:
        return f"rope type {model.rope.kind}" + (" by layer type" if model.rope.by_layer_type else "")
    if model.quantization and not model.quantization.quant_type:
        return f"quantisation {model.quantization.method}, or its settings"
    if model.hidden_act != "silu":
        return f"hidden_act {model.hidden_act}"
    unknown = set(model.layer_types) - _LAYER_TYPES
    return f"layer types {', '.join(sorted(unknown))}" if unknown else ""


def check_native(config: ServerConfig, model: ModelConfig) -> list[str]:
    """Flags that need our stack, where transformers runs `model`."""
    backend, reason = config.engine.model_backend, obstacle(model)
    if backend == "native":
        return [f"--model-backend native: {reason}"] if reason else []
    if backend == "auto" and not reason:
        return []
    problem = (
        "contradicts --model-backend transformers" if backend == "transformers" else "needs a model of our own stack"
    )
    tp, quant = config.parallel.tp, config.model.quant_type
    flags = {
        f"--tp {tp}": tp > 1,
        f"--quant-type {quant}": quant != "none" and model.quantization is None,
        "--deterministic": config.engine.deterministic,
    }
    return [f"{flag} {problem}" + (f": {reason}" if reason else "") for flag, used in flags.items() if used]
