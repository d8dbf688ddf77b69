"""Random weights: every tensor is there, the same each time, and a step's values stay sane."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inferserve.config.schema import ModelFacts, ModelPart, ServerConfig
from inferserve.models.decoder import Decoder
from inferserve.models.generic import GenericModel
from inferserve.models.registry import load_model
from tests.fakes.model_folder import CONFIG

SHAPE: dict[str, Any] = {**CONFIG, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
QWEN3 = {**SHAPE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
QWEN2 = {**SHAPE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
GEMMA2 = {**SHAPE, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 16}


def loaded(folder: Path, config: dict[str, Any]) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    server = replace(
        ServerConfig(),
        model=ModelPart(load_format="dummy", max_req_total_len=64),
        facts=ModelFacts(folder=str(folder), vocab_size=config["vocab_size"]),
    )
    return load_model(server, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("config", [SHAPE, QWEN2, QWEN3], ids=lambda c: c["model_type"])
def test_our_stack(tmp_path: Path, config: dict[str, Any]) -> None:
    first, second = loaded(tmp_path, config), loaded(tmp_path, config)
    assert isinstance(first, Decoder)
    pairs = list(zip(first.named_parameters(), second.named_parameters(), strict=True))
    assert pairs
    for (name, one), (_, two) in pairs:
        assert torch.equal(one, two) and one.isfinite().all(), name
    weight = first.embedding.weight
    assert weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert torch.equal(first.norm.weight, torch.ones(64))
    hidden = torch.randn(32, 64)
    assert first.head.forward(hidden).std().item() == pytest.approx(1.0, rel=0.2)
    assert first.layers[3].mlp.down.forward(torch.randn(32, 128)).std().item() == pytest.approx(1.0, rel=0.2)


def test_through_transformers(tmp_path: Path) -> None:
    first, second = loaded(tmp_path, GEMMA2), loaded(tmp_path, GEMMA2)
    assert isinstance(first, GenericModel)
    for one, two in zip(first._model.parameters(), second._model.parameters(), strict=True):
        assert torch.equal(one, two)
