"""What paged attention would get wrong is refused at start, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from inferserve.errors import ConfigError
from inferserve.models import generic

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(folder: Path, config: Any, max_len: int = 64) -> generic.GenericModel:
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return generic.build(folder, "", torch.float32, torch.device("cpu"), max_len=max_len, trust_remote_code=False)


def test_dry_run_learns_the_layers(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(**SMALL, sliding_window=8, attn_logit_softcapping=30.0, query_pre_attn_scalar=64)
    model = build(tmp_path, config)
    assert [s.window for s in model.layer_specs] == [8, 0]
    assert {(s.softcap, s.scale) for s in model.layer_specs} == {(30.0, 0.125)}
    assert [(s.kv_heads, s.head_dim) for s in model.kv_shapes] == [(2, 16), (2, 16)]


def test_sinks(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ConfigError, match=r"gpt_oss.*s_aux"):
        build(tmp_path, config)


def test_attention_outside_the_interface(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
    with pytest.raises(ConfigError, match=r"bloom|Bloom"):
        build(tmp_path, config)


def test_recurrent_layers(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ConfigError, match=r"0 of its 2 layers"):
        build(tmp_path, config)


def test_chunked_attention(tmp_path: Path) -> None:
    config = transformers.Llama4TextConfig(
        **SMALL,
        intermediate_size_mlp=32,
        num_local_experts=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=16,
        layer_types=["chunked_attention", "full_attention"],
    )
    with pytest.raises(ConfigError, match="chunked_attention layers"):
        build(tmp_path, config)


def test_rope_that_depends_on_the_batch(tmp_path: Path) -> None:
    dynamic = transformers.Starcoder2Config(
        **{k: v for k, v in SMALL.items() if k != "head_dim"},
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    with pytest.raises(ConfigError, match="dynamic rope"):
        build(tmp_path / "dynamic", dynamic)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    longrope = transformers.Phi3Config(
        **{k: v for k, v in SMALL.items() if k != "head_dim"},
        original_max_position_embeddings=32,
        rope_parameters=rope | {"factor": 4.0, "original_max_position_embeddings": 32},
    )
    build(tmp_path / "short", longrope, max_len=32)
    with pytest.raises(ConfigError, match=r"--max-req-total-len 33.*at most 32"):
        build(tmp_path / "long", longrope, max_len=33)


def test_gaps_are_named(tmp_path: Path) -> None:
    config = transformers.GraniteConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"})
    model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match=r"missing keys.*layers\.1\.mlp"):
        generic.build(tmp_path, "", torch.float32, torch.device("cpu"), max_len=64, trust_remote_code=False)


def test_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows_this"}')
    with pytest.raises(ConfigError, match="nobody_knows_this"):
        generic.build(tmp_path, "", torch.float32, torch.device("cpu"), max_len=64, trust_remote_code=False)


def test_packed_sequences_must_come_out_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that ignores position ids looks right in everything but its logits."""
    config = transformers.GraniteConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}, initializer_range=0.5)
    build(tmp_path, config)
    kind = transformers.models.granite.modeling_granite.GraniteModel
    forward = kind.forward

    def ignoring(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, position_ids=None, **kwargs)

    monkeypatch.setattr(kind, "forward", ignoring)
    with pytest.raises(ConfigError, match="packed sequences"):
        build(tmp_path, config)
