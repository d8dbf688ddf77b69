"""What quantization_config of a checkpoint says, and the flag --quant-type beside it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from inferserve.config.quantization import BLOCK, CHANNEL, Quantization
from inferserve.config.resolve import resolve
from inferserve.config.schema import EnginePart, ModelPart, ServerConfig
from inferserve.errors import ConfigError
from tests.fakes.model_folder import write_model

DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}},
    "ignore": ["lm_head"],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """COMPRESSED with one setting of its group replaced."""
    whole = copy.deepcopy(COMPRESSED)
    at: Any = whole["config_groups"]["group_0"]  # type: ignore[index]
    *above, last = path.split(".")
    for name in above:
        at = at[name]
    at[last] = value
    return whole


@pytest.mark.parametrize(
    ("raw", "quant_type", "scale"),
    [
        (DEEPSEEK, BLOCK, "weight_scale_inv"),
        (COMPRESSED, CHANNEL, "weight_scale"),
        ({**DEEPSEEK, "weight_block_size": [64, 64]}, "", ""),
        ({**DEEPSEEK, "activation_scheme": "static"}, "", ""),
        ({"quant_method": "fp8"}, "", ""),
        ({"quant_method": "gptq", "bits": 4}, "", ""),
        (changed("weights.num_bits", 4), "", "weight_scale"),
        (changed("weights.type", "int"), "", "weight_scale"),
        (changed("weights.strategy", "tensor"), "", "weight_scale"),
        (changed("input_activations.dynamic", False), "", "weight_scale"),
        (changed("input_activations", None), "", "weight_scale"),
        ({**COMPRESSED, "config_groups": {}}, "", "weight_scale"),
    ],
)
def test_checkpoints(raw: dict[str, Any], quant_type: str, scale: str) -> None:
    assert Quantization.from_json({"quantization_config": raw}) == Quantization(
        str(raw["quant_method"]), quant_type, scale
    )


def test_compressed_blocks() -> None:
    raw = changed("weights", {**WEIGHTS, "strategy": "block", "block_structure": [128, 128]})
    raw["config_groups"]["group_0"]["input_activations"] = {**INPUTS, "strategy": "group", "group_size": 128}
    assert Quantization.from_json({"quantization_config": raw}) == Quantization(
        "compressed-tensors", BLOCK, "weight_scale"
    )


def test_no_quantisation() -> None:
    assert Quantization.from_json({}) is None
    assert Quantization.from_json({"quantization_config": None}) is None
    with pytest.raises(ConfigError, match="quantization_config must be an object"):
        Quantization.from_json({"quantization_config": "fp8"})


def resolved(folder: Path, quant_type: str) -> str:
    asked = ServerConfig(
        model=ModelPart(model_dir=str(folder), quant_type=quant_type), engine=EnginePart(engine="fake", device="cpu")
    )
    return resolve(asked).model.quant_type


def test_the_flag(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain")
    assert resolved(folder, "none") == "none"
    assert resolved(folder, CHANNEL) == CHANNEL
    assert resolved(folder, "vllm-fp8w8a8-b128") == BLOCK


def test_the_flag_beside_a_quantised_checkpoint(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "fp8")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": DEEPSEEK}))
    assert resolved(folder, "none") == BLOCK
    assert resolved(folder, BLOCK) == BLOCK
    with pytest.raises(
        ConfigError, match=r"--quant-type fp8w8a8: the checkpoint is quantised already \(fp8w8a8-b128\)"
    ):
        resolved(folder, CHANNEL)


def test_the_flag_is_for_our_layers(tmp_path: Path) -> None:
    model = ModelPart(model_dir=str(write_model(tmp_path / "plain")), quant_type=CHANNEL)
    asked = ServerConfig(model=model, engine=EnginePart(device="cpu", model_backend="transformers"))
    with pytest.raises(ConfigError, match="--quant-type fp8w8a8 contradicts --model-backend transformers"):
        resolve(asked)
