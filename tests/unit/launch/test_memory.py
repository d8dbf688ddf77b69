"""The memory estimate: what it counts, and the sentence it refuses with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferserve.config.schema import EnginePart, ModelFacts, ModelPart, ServerConfig
from inferserve.errors import ConfigError
from inferserve.launch import memory

GIB = 2**30
LLAMA_8B = ServerConfig(
    model=ModelPart(data_type="bfloat16", max_req_total_len=8192),
    engine=EnginePart(device="cuda"),
    facts=ModelFacts(num_layers=32, num_kv_heads=8, head_dim=128, weights=8_030_261_248),
)


def test_a_known_model() -> None:
    need = memory.memory_need(LLAMA_8B)
    assert need.weights == 2 * 8_030_261_248
    assert need.kv == GIB  # 128 KiB a token
    assert need.slots == pytest.approx((64 * 1024 + 3 * 4 * 8192) * 1280, rel=0.01)


def test_a_fixed_pool_counts_whole() -> None:
    config = replace(LLAMA_8B, engine=EnginePart(device="cuda", max_total_token_num=81920))
    assert memory.memory_need(config).kv == 10 * GIB


def test_a_pool_of_8_bits_has_scales() -> None:
    config = replace(LLAMA_8B, engine=EnginePart(device="cuda", llm_kv_type="fp8"))
    assert memory.memory_need(config).kv == memory.memory_need(LLAMA_8B).kv * (128 + 4) // 256


def test_the_fake_engine_takes_no_model_memory() -> None:
    config = replace(LLAMA_8B, engine=EnginePart(engine="fake"), facts=ModelFacts(num_layers=32))
    need = memory.memory_need(config)
    assert need.weights == need.kv == 0


def test_gpu_and_host_are_asked_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_memory", lambda: (15 * GIB, 16 * GIB))
    monkeypatch.setattr(memory, "available_memory", lambda: 100 * GIB)
    with pytest.raises(ConfigError) as caught:
        memory.check_memory(LLAMA_8B)
    (problem,) = caught.value.problems
    assert problem.startswith("too little GPU memory: 15.96 GiB needed, 15.00 GiB available")
    monkeypatch.setattr(memory, "gpu_memory", lambda: (80 * GIB, 80 * GIB))
    memory.check_memory(LLAMA_8B)
    monkeypatch.setattr(memory, "gpu_memory", lambda: None)
    memory.check_memory(LLAMA_8B)
    monkeypatch.setattr(memory, "available_memory", lambda: GIB // 2)
    with pytest.raises(ConfigError, match="too little host memory"):
        memory.check_memory(LLAMA_8B)


def test_on_cpu_everything_is_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(LLAMA_8B, engine=EnginePart(device="cpu"))
    monkeypatch.setattr(memory, "available_memory", lambda: 16 * GIB)
    with pytest.raises(ConfigError, match=r"too little host memory: 17\.\d+ GiB needed, 16\.00 GiB available"):
        memory.check_memory(config)
