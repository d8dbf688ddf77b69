"""Models in fp8: quantised at load or stored so, the same numbers either way, near the float model; scales that do not fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inferserve.config.quantization import BLOCK, CHANNEL
from inferserve.config.schema import ServerConfig
from inferserve.engine.torch_backend import TorchBackend
from inferserve.errors import ConfigError
from inferserve.kernels.fp8_quant import fp8_dequant_ref
from inferserve.layers.quant import FP8, quantised
from inferserve.models import weights
from inferserve.models.bias_correction import input_means
from inferserve.models.decoder import Decoder
from inferserve.models.registry import load_model
from tests.parity.conftest import ROWS, server_config
from tests.parity.driver import Driver
from tests.parity.test_logits import whole_logits
from tests.parity.tiny import LONGEST
from tests.unit.models.test_model_weights import CONFIG, tensors

CPU = torch.device("cpu")
BIG: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 200, "num_attention_heads": 4, "vocab_size": 256}
STORED: dict[str, dict[str, Any]] = {
    BLOCK: {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    CHANNEL: {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    },
}
LEAF = {BLOCK: "weight_scale_inv", CHANNEL: "weight_scale"}


def whole() -> dict[str, torch.Tensor]:
    """A float checkpoint with partial blocks: matrices of 160 and 200."""
    torch.manual_seed(5)
    sides = {40: 256, 16: 160, 24: 200, 8: 80}
    shapes = {name: tuple(sides[side] for side in tensor.shape) for name, tensor in tensors().items()}
    return {
        name: 1 + 0.3 * torch.randn(shape) if len(shape) == 1 else torch.randn(shape) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }


def stored(kind: str) -> dict[str, torch.Tensor]:
    """The same checkpoint as somebody quantised it: matrices of layers in fp8, their scales beside them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in whole().items():
        if "_proj" in name:
            values, scales = quantised(tensor, kind == BLOCK)
            found[name] = values
            found[name.replace("weight", LEAF[kind])] = scales
        else:
            found[name] = tensor
    return found


def save(folder: Path, checkpoint: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(checkpoint, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | BIG | config))
    return folder


def configured(folder: Path, quant_type: str = "none", **settings: Any) -> ServerConfig:
    config = server_config(folder, **settings)
    return replace(config, model=replace(config.model, quant_type=quant_type))


def load(folder: Path, quant_type: str = "none") -> Decoder:
    model = load_model(configured(folder, quant_type), torch.float32, CPU)
    assert isinstance(model, Decoder)
    return model


TOKENS = tuple(range(3, 90))


@pytest.mark.parametrize("kind", [CHANNEL, BLOCK])
def test_quantised_at_load_or_before_is_near_the_float_model(kind: str, tmp_path: Path) -> None:
    floats = save(tmp_path / "float", whole())
    exact = whole_logits(load(floats), TOKENS, 1000)
    at_load = load(floats, quant_type=kind)
    before = load(save(tmp_path / "fp8", stored(kind), quantization_config=STORED[kind]))
    ours, theirs = at_load.layers[0], before.layers[0]
    for a, b in ((ours.attention.qkv, theirs.attention.qkv), (ours.mlp.down, theirs.mlp.down)):
        assert torch.equal(a.quantised.values.view(torch.uint8), b.quantised.values.view(torch.uint8))
        assert torch.equal(a.quantised.scales, b.quantised.scales)
        assert a.quantised.offset.any() and not b.quantised.offset.any()
    for model in (at_load, before):
        error = whole_logits(model, TOKENS, 1000) - exact
        assert 1e-3 < float(error.norm() / exact.norm()) < 0.2


@pytest.mark.parametrize("kind", [CHANNEL, BLOCK])
def test_biases_take_back_the_mean_error(kind: str, tmp_path: Path) -> None:
    """Exactly for the first matrix; the others' inputs are moved a little by the corrections before them."""
    checkpoint = whole()
    model = load(save(tmp_path / "float", checkpoint), quant_type=kind)
    with torch.inference_mode():
        means = input_means(model, LONGEST, CPU)
    first, later = model.layers[0].attention.qkv.quantised, model.layers[0].mlp.down.quantised
    q, k, v = (checkpoint[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    down = checkpoint["model.layers.0.mlp.down_proj.weight"]
    for stored, weight, left in ((first, torch.cat((q, k, v)), 1e-3), (later, down, 0.5)):
        seen = fp8_dequant_ref(stored.values, stored.rows_of_scales()) @ means[stored].quantised
        error = weight @ means[stored].exact - seen
        assert float((error - stored.offset).norm()) < left * float(error.norm())


@pytest.mark.parametrize("kind", [CHANNEL, BLOCK])
def test_generation_in_batches_is_that_of_one_alone(kind: str, tmp_path: Path) -> None:
    """Activations are quantised token by token: who else is in the batch, and how it is chunked, changes nothing."""
    config = configured(save(tmp_path / "float", whole()), kind)
    prompts = [list(range(3 + i, 60 + 3 * i)) for i in range(6)]

    def generated(batch: int, chunk: int) -> list[tuple[int, ...]]:
        backend = TorchBackend(config, ROWS)
        tokens = backend.start().kv_tokens
        driver = Driver(backend, kv_tokens=tokens, max_rows=ROWS, max_len=LONGEST, prefix_cache=True, chunk=chunk)
        return driver.generate(prompts, 12, batch)

    assert generated(6, 64) == generated(1, 7)


def test_no_float_copy_is_kept(tmp_path: Path) -> None:
    """What a layer holds before it is packed: one byte a weight, and the scales."""
    model = load(save(tmp_path / "float", whole()), quant_type=BLOCK)
    others, last = (
        (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down) for layer in model.layers
    )
    assert all(m.weight is None and m.quantised.values.dtype == FP8 for m in others)
    assert all(m.quantised is None for m in last), "the last layer stays float"
    assert model.embedding.weight.dtype == torch.float32


def drop(checkpoint: dict[str, torch.Tensor]) -> None:
    del checkpoint["model.layers.1.self_attn.k_proj.weight_scale_inv"]


def add(checkpoint: dict[str, torch.Tensor]) -> None:
    checkpoint["lm_head.weight_scale_inv"] = torch.ones(2, 2)


def float_weight(checkpoint: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    checkpoint[name] = checkpoint[name].float()


def bytes_norm(checkpoint: dict[str, torch.Tensor]) -> None:
    checkpoint["model.norm.weight"] = checkpoint["model.norm.weight"].to(FP8)


def other_bytes(checkpoint: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    checkpoint[name] = checkpoint[name].float().to(torch.float8_e5m2)


def wrong_blocks(checkpoint: dict[str, torch.Tensor]) -> None:
    checkpoint["model.layers.0.mlp.down_proj.weight_scale_inv"] = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop, r"lacks tensors: layers\.1\.self_attn\.k_proj\.weight_scale_inv"),
        (add, r"no place for: lm_head\.weight_scale_inv"),
        (float_weight, r"layers\.0\.mlp\.up_proj\.weight is torch\.float32"),
        (other_bytes, r"layers\.0\.mlp\.up_proj\.weight is torch\.float8_e5m2"),
        (bytes_norm, r"norm\.weight is torch\.float8_e4m3fn"),
        (wrong_blocks, r"down_proj\.weight_scale_inv is \(1, 2\), config\.json says \(2, 2\)"),
    ],
)
def test_what_does_not_fit_is_named(
    change: Callable[[dict[str, torch.Tensor]], None], said: str, tmp_path: Path
) -> None:
    checkpoint = stored(BLOCK)
    change(checkpoint)
    with pytest.raises(ConfigError, match=said):
        load(save(tmp_path / "fp8", checkpoint, quantization_config=STORED[BLOCK]))


def test_scales_without_a_quantization_config_are_left_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no place for: model\.layers\.0\..*weight_scale_inv"):
        load(save(tmp_path / "fp8", stored(BLOCK)))


def test_long_loads_show_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights, "_PROGRESS_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "inferserve"):
        load(save(tmp_path / "float", whole()))
    lines = [record.fields["gib"] for record in caplog.records if record.getMessage() == "loading weights"]
    done = [float(line.partition("/")[0]) for line in lines]
    assert len(lines) > 10 and done == sorted(done)
    assert lines[-1].partition("/")[0] == lines[-1].partition("/")[2]
