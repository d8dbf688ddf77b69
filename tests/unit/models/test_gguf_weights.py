"""GGUF files: names, llama.cpp's reordering of q and k, quantised tensors, rope factors, damage."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from inferserve.config.model_config import ModelConfig
from inferserve.errors import ConfigError
from inferserve.models.decoder import Decoder
from inferserve.models.registry import FAMILIES, load_decoder
from tests.unit.models.test_model_weights import CONFIG, tensors

SHORT = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    for long, short in SHORT.items():
        name = name.replace(long, short)
    return name.replace("model.layers.", "blk.")


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write(path: Path, weights: dict[str, torch.Tensor], extra: dict[str, np.ndarray] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in weights.items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleave(array, 4 if "q_proj" in name else 2)
        writer.add_tensor(gguf_name(name), array)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> Decoder:
    config = ModelConfig.from_json(CONFIG)
    return load_decoder(
        FAMILIES["llama"], config, path.parent, str(path), torch.float16, torch.device("cpu"), max_len=32
    )


def test_same_weights_as_safetensors(tmp_path: Path) -> None:
    weights = tensors()
    model = load(write(tmp_path / "m.gguf", weights))
    q, k, v = (weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(model.layers[0].attention.qkv.weight, torch.cat((q, k, v)).half())
    assert torch.equal(model.head.weight, weights["lm_head.weight"].half())
    assert torch.equal(
        model.layers[1].mlp_norm.weight, weights["model.layers.1.post_attention_layernorm.weight"].half()
    )


def test_rope_factors_stretch_the_frequencies(tmp_path: Path) -> None:
    plain = load(write(tmp_path / "a.gguf", tensors()))
    factors = np.array([1.0, 4.0], np.float32)
    scaled = load(write(tmp_path / "b.gguf", tensors(), {"rope_freqs.weight": factors}))
    position = 8
    angle = torch.atan2(plain.rotary.tables.sin[position], plain.rotary.tables.cos[position])
    stretched = torch.atan2(scaled.rotary.tables.sin[position], scaled.rotary.tables.cos[position])
    assert float(stretched[1]) == pytest.approx(float(angle[1]) / 4, rel=1e-4)
    assert float(stretched[0]) == pytest.approx(float(angle[0]), rel=1e-4)


def test_gaps_and_leftovers_are_named(tmp_path: Path) -> None:
    weights = tensors()
    del weights["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"lacks tensors: norm\.weight"):
        load(write(tmp_path / "a.gguf", weights))
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_sinks\.weight"):
        load(write(tmp_path / "b.gguf", tensors(), {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}))


def test_damage_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tensors())
    whole = path.read_bytes()
    for damaged in (whole[:20], whole[: len(whole) // 2], b"GGUF"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"m\.gguf"):
            load(path)
