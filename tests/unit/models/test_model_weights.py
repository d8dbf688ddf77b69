"""Checkpoints with gaps, leftovers, wrong shapes and damage end start-up with an error that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferserve.config.model_config import ModelConfig
from inferserve.config.native import MODEL_TYPES
from inferserve.errors import ConfigError
from inferserve.models.decoder import Decoder
from inferserve.models.registry import FAMILIES, family_of, load_decoder

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tensors() -> dict[str, torch.Tensor]:
    """A whole checkpoint of CONFIG under Hugging Face's names."""
    torch.manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (40, 16), "lm_head.weight": (40, 16)}
    shapes["model.norm.weight"] = (16,)
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{name}.weight": (16,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (16, 16) for name in "qo"}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (8, 16) for name in "kv"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (16, 24)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def load(folder: Path, **changes: Any) -> Decoder:
    """Our stack from the folder."""
    config = ModelConfig.from_json(CONFIG | changes)
    return load_decoder(FAMILIES[config.model_type], config, folder, "", torch.float16, torch.device("cpu"), max_len=32)


def save(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    save_file(weights, folder / "model.safetensors")
    return folder


def test_parts_are_packed_in_order(tmp_path: Path) -> None:
    weights = tensors()
    model = load(save(tmp_path, weights))
    attention, mlp = model.layers[1].attention, model.layers[1].mlp
    qkv = [weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(attention.qkv.weight, torch.cat(qkv).half())
    assert torch.equal(mlp.gate_up.weight, torch.cat(gate_up).half())
    assert torch.equal(model.head.weight, weights["lm_head.weight"].half())


def test_prefix_and_harmless_extras(tmp_path: Path) -> None:
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors().items()}
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    model = load(save(tmp_path, weights), tie_word_embeddings=True)
    assert torch.equal(model.head.weight, weights["embed_tokens.weight"].half())


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    weights = tensors()
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ConfigError, match=r"lacks tensors: layers\.1\.self_attn\.k_proj\.weight"):
        load(save(tmp_path, weights))


def test_leftover_tensors_are_named(tmp_path: Path) -> None:
    weights = tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}
    with pytest.raises(ConfigError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(save(tmp_path, weights))
    deeper = tensors() | {"model.layers.2.mlp.up_proj.weight": torch.ones(24, 16)}
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load(save(tmp_path, deeper))


def test_long_lists_are_cut(tmp_path: Path) -> None:
    weights = {name: t for name, t in tensors().items() if "layers.1" not in name}
    with pytest.raises(ConfigError, match="and 1 more"):
        load(save(tmp_path, weights))


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    weights = tensors()
    weights["model.layers.0.mlp.up_proj.weight"] = torch.ones(23, 16)
    with pytest.raises(
        ConfigError, match=r"layers\.0\.mlp\.up_proj\.weight is \(23, 16\), config\.json says \(24, 16\)"
    ):
        load(save(tmp_path, weights))


def test_shards_by_index(tmp_path: Path) -> None:
    weights = tensors()
    names = sorted(weights)
    files = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: weights[n] for n in names if files[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    model = load(tmp_path)
    assert torch.equal(model.norm.weight, weights["model.norm.weight"].half())
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"missing: model-2-of-2\.safetensors"):
        load(tmp_path)


def test_damage_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, tensors()) / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"\xff" * 64, b""):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            load(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="convert"):
        load(tmp_path)


def test_file_is_left_alone(tmp_path: Path) -> None:
    weights = tensors()
    save(tmp_path, weights)
    model = load(tmp_path)
    with torch.inference_mode():
        model.norm.weight.fill_(9.0)
    again = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ],
)
def test_what_our_stack_does_not_do_goes_to_transformers(changes: dict[str, Any], why: str) -> None:
    config = ModelConfig.from_json(CONFIG | changes)
    assert family_of(config, "auto") is None
    with pytest.raises(ConfigError, match=why):
        family_of(config, "native")


def test_the_configuration_knows_the_families() -> None:
    assert set(MODEL_TYPES) == set(FAMILIES)


def test_backend_choice() -> None:
    config = ModelConfig.from_json(CONFIG)
    assert family_of(config, "auto") is FAMILIES["llama"]
    assert family_of(config, "native") is FAMILIES["llama"]
    assert family_of(config, "transformers") is None
