"""`TorchBackend` on the CPU over a config.json alone: how K and V are stored follows the flag, and so does the pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from inferserve.config.resolve import resolve
from inferserve.config.schema import EnginePart, ModelPart, SchedulePart, ServerConfig
from inferserve.engine.torch_backend import TorchBackend
from tests.fakes.tiny_decoder import random_prompts
from tests.parity.driver import Driver

ROWS, LENGTH, TOKENS = 6, 64, 600
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("kind", "stored"), [("auto", torch.float32), ("fp8", torch.float8_e4m3fn), ("int8", torch.int8)]
)
def test_how_keys_and_values_are_stored(folder: Path, kind: str, stored: torch.dtype) -> None:
    config = resolve(
        ServerConfig(
            model=ModelPart(model_dir=str(folder), load_format="dummy", max_req_total_len=LENGTH),
            engine=EnginePart(device="cpu", cpu_threads=1, max_total_token_num=TOKENS, llm_kv_type=kind),
            schedule=SchedulePart(running_max_req_size=ROWS),
        )
    )
    backend = TorchBackend(config, ROWS)
    facts = backend.start()
    assert facts.kv_tokens == TOKENS
    pool = backend._ready().attention.pool
    assert {tensor.dtype for tensor in (*pool.k, *pool.v)} == {stored}
    assert pool.k[0].shape == (TOKENS + 1, 2, 16)
    driver = Driver(backend, kv_tokens=TOKENS, max_rows=ROWS, max_len=LENGTH, prefix_cache=True, chunk=9)
    texts = driver.generate(random_prompts(7, 25, 0), 6, batch=4)
    assert all(len(text) == 6 and max(text) < MODEL["vocab_size"] for text in texts)


@pytest.mark.parametrize("tokens", [2, 8, 40])
def test_a_pool_smaller_than_the_steps_of_warm_up(folder: Path, tokens: int) -> None:
    config = resolve(
        ServerConfig(
            model=ModelPart(model_dir=str(folder), load_format="dummy"),
            engine=EnginePart(device="cpu", cpu_threads=1, max_total_token_num=tokens),
            schedule=SchedulePart(running_max_req_size=ROWS),
        )
    )
    backend = TorchBackend(config, ROWS)
    assert backend.start().kv_tokens == tokens
    driver = Driver(backend, kv_tokens=tokens, max_rows=ROWS, max_len=tokens, prefix_cache=True, chunk=9)
    assert len(driver.generate([[5]], 1, batch=1)[0]) == 1
