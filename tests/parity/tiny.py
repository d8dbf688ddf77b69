"""Tiny random models of many families, saved the way people save models, and transformers' own answers for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB = 256
PROMPTS = 20
NEW_TOKENS = 64
LONGEST = 192

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Tiny:
    """A model to be made: transformers' config class by name, settings on top of the small ones."""

    name: str
    config_class: str
    settings: dict[str, Any] = field(default_factory=dict)
    shards: bool = False
    native: bool = True

    def config(self) -> Any:
        """The transformers config."""
        return getattr(transformers, self.config_class)(**(_SMALL | self.settings))


def _rope(kind: str, **settings: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

MODELS = (
    Tiny("llama", "LlamaConfig"),
    Tiny("llama-sharded-tied", "LlamaConfig", {"tie_word_embeddings": True}, shards=True),
    Tiny("llama-mha-biased", "LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    Tiny("llama-linear", "LlamaConfig", _rope("linear", factor=4.0)),
    Tiny("llama-dynamic", "LlamaConfig", _rope("dynamic", factor=4.0)),
    Tiny("llama-yarn", "LlamaConfig", _rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    Tiny("llama-llama3", "LlamaConfig", _rope("llama3", **LLAMA3)),
    Tiny("mistral-window", "MistralConfig", {"sliding_window": 24, "head_dim": 32}),
    Tiny("qwen2", "Qwen2Config", {"tie_word_embeddings": True}),
    Tiny("qwen2-window", "Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    Tiny("qwen3", "Qwen3Config", {"head_dim": 32}, shards=True),
    Tiny(
        "gemma2",
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0},
        native=False,
    ),
    Tiny("phi3", "Phi3Config", {"sliding_window": 24, "partial_rotary_factor": 0.5}, native=False),
    Tiny("starcoder2", "Starcoder2Config", {"sliding_window": 32}, native=False),
    Tiny("granite", "GraniteConfig", {"attention_multiplier": 0.3, "residual_multiplier": 0.5}, native=False),
)
"""The last four run through the generic backend."""

BY_NAME = {model.name: model for model in MODELS}


@dataclass(frozen=True)
class Oracle:
    """A saved model, loaded in transformers, and prompts for it. Prompts share beginnings worth caching."""

    folder: Path
    model: Any
    prompts: tuple[tuple[int, ...], ...]


def make(tiny: Tiny, folder: Path) -> Oracle:
    """Build and save."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(tiny.config(), dtype=torch.float32).eval()
    spread(model)
    model.save_pretrained(folder, max_shard_size="60KB" if tiny.shards else "1GB")
    return Oracle(folder, model, make_prompts())


def spread(model: Any) -> None:
    """Fresh weights give nearly flat logits and unit norms; widen them, so that errors and ties would show."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if "norm" in name or "bias" in name else 0.12
            weight.add_(torch.randn_like(weight) * scale)


def make_prompts() -> tuple[tuple[int, ...], ...]:
    """Of 3 to 90 tokens; every third continues the one before."""
    random = np.random.default_rng(11)
    prompts: list[tuple[int, ...]] = []
    for i in range(PROMPTS):
        fresh = tuple(int(t) for t in random.integers(3, VOCAB, size=int(random.integers(3, 60))))
        prompts.append((prompts[-1] + fresh[:30])[:90] if i % 3 == 2 else fresh)
    return tuple(prompts)


def greedy(model: Any, prompt: tuple[int, ...], new_tokens: int = NEW_TOKENS) -> tuple[int, ...]:
    """transformers' own generate, eos ignored."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt) :].tolist())


def logits(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """transformers' logits of every position, [len(tokens), vocab]."""
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return result


def is_greedy(model: Any, prompt: tuple[int, ...], output: tuple[int, ...]) -> bool:
    """Whether each token of `output` is transformers' likeliest after what precedes it.

    By induction this is what greedy `generate` returns, for one forward instead of one a token.
    """
    chosen = logits(model, prompt + output).argmax(-1)[len(prompt) - 1 : -1]
    return tuple(chosen.tolist()) == output
