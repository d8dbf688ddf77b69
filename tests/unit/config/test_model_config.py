"""config.json in its many spellings."""

from __future__ import annotations

from typing import Any

import pytest

from inferserve.config.model_config import ModelConfig
from inferserve.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "eos_token_id": [2, 3],
    "torch_dtype": "bfloat16",
}


def test_llama() -> None:
    config = ModelConfig.from_json(LLAMA)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert config.architecture == "LlamaForCausalLM"
    assert config.eos_ids == (2, 3)
    assert config.dtype == "bfloat16"
    assert config.windows == (0, 0, 0)
    assert not config.tie_word_embeddings
    assert config.rope.kind == "default"
    assert config.rope.theta == 10000.0


def test_rope_in_both_spellings() -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 128
    old = ModelConfig.from_json(LLAMA | {"rope_scaling": rope, "rope_theta": 5e5})
    new = ModelConfig.from_json(LLAMA | {"rope_parameters": rope | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope.kind == "llama3"
    assert old.rope.theta == 5e5
    assert old.rope.original_max_position == 128
    older = ModelConfig.from_json(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert older.rope.kind == "linear"
    assert older.context_length == 1024


def test_yarn_factor_follows_from_lengths() -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    assert ModelConfig.from_json(LLAMA | {"rope_parameters": rope}).rope.factor == 4.0


def test_windows_of_qwen_need_their_switch() -> None:
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 2}
    assert ModelConfig.from_json(qwen).windows == (0, 0, 0)
    assert ModelConfig.from_json(qwen | {"use_sliding_window": True}).windows == (0, 0, 32)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert ModelConfig.from_json(qwen | {"use_sliding_window": True, "layer_types": types}).windows == (32, 0, 32)
    assert ModelConfig.from_json(LLAMA | {"model_type": "mistral", "sliding_window": 16}).windows == (16, 16, 16)
    assert ModelConfig.from_json(LLAMA | {"model_type": "mistral", "sliding_window": None}).windows == (0, 0, 0)


def test_family_defaults() -> None:
    assert ModelConfig.from_json(LLAMA | {"model_type": "qwen3"}).head_dim == 128
    biased = ModelConfig.from_json(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (biased.attention_bias, biased.mlp_bias) == (True, True)
    assert ModelConfig.from_json(LLAMA | {"model_type": "gemma2"}).tie_word_embeddings


def test_nested_text_config_and_other_names() -> None:
    nested = ModelConfig.from_json(
        {"architectures": ["X"], "model_type": "llava", "text_config": LLAMA | {"architectures": None}}
    )
    assert (nested.model_type, nested.architecture) == ("llama", "X")
    gpt = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 99}
    config = ModelConfig.from_json(gpt)
    assert (config.hidden_size, config.num_layers, config.num_kv_heads, config.max_position) == (32, 2, 4, 64)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"model_type": ""}, "model_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ],
)
def test_errors_name_the_key(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_json(LLAMA | change)
