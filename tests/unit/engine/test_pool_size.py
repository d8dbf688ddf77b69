"""How many KV tokens a configuration gets, and the errors when they do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inferserve.config.schema import EnginePart, ModelFacts, ModelPart, SchedulePart, ServerConfig
from inferserve.engine import memory
from inferserve.errors import ConfigError


def config(longest: int = 100, rows: int = 10, **engine: Any) -> ServerConfig:
    return ServerConfig(
        model=ModelPart(max_req_total_len=longest),
        engine=EnginePart(**engine),
        schedule=SchedulePart(running_max_req_size=rows),
        facts=ModelFacts(weights=1000),
    )


def test_host_pool_is_a_quarter_of_the_share() -> None:
    assert memory.host_tokens(config(mem_fraction=0.8), 10, 100_000) == 2000


def test_host_pool_holds_no_more_than_is_useful() -> None:
    assert memory.host_tokens(config(rows=2), 10, 10**9) == 2 * 2048
    assert memory.host_tokens(config(rows=1, longest=4096), 10, 10**9) == 4 * 4096


def test_asked_for_pool() -> None:
    assert memory.host_tokens(config(max_total_token_num=5000), 10, 60_000) == 5000
    with pytest.raises(ConfigError, match=r"--max-total-token-num 7000 takes .* GiB .*--mem-fraction"):
        memory.host_tokens(config(max_total_token_num=7000), 10, 60_000)


def test_pool_smaller_than_one_request() -> None:
    with pytest.raises(ConfigError, match=r"holds 50 tokens, --max-req-total-len is 100: .*--max-total-token-num"):
        memory.device_tokens(config(max_total_token_num=50), 10, 10_000)
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        memory.device_tokens(config(), 10, -5)


def test_device_pool() -> None:
    assert memory.device_tokens(config(), 10, 12_345) == 1234


def test_weights_too_large() -> None:
    memory.check_weights(config(), torch.float16, 2000, "the host")
    with pytest.raises(ConfigError, match=r"1000 weights take .* as float32 \(--data-type\), the host has"):
        memory.check_weights(config(), torch.float32, 2000, "the host")


def test_graphs_that_do_not_fit_name_every_way_out() -> None:
    told = memory.graphs_do_not_fit(config(mem_fraction=0.95), 5000, 49, 2**28)
    for flag in ("--mem-fraction 0.95", "--graph-max-batch-size 256", "--disable-cudagraph", "5000 tokens", "0.25 GiB"):
        assert flag in told
    assert "--prefill-cudagraph-max-handle-token 2048" in told


def test_out_of_memory_names_flags_and_numbers() -> None:
    asked = ServerConfig(facts=ModelFacts(weights=8 * memory.GIB))
    said = memory.weights_do_not_fit(asked, torch.bfloat16, 12 * memory.GIB, memory.GIB // 2)
    assert "16.0 GiB as bfloat16 (--data-type)" in said and "12.0 GiB" in said and "0.5 GiB" in said
    model, engine = ModelPart(quant_type="fp8w8a8"), EnginePart(device="cuda")
    said = memory.weights_do_not_fit(replace(asked, model=model, engine=engine), torch.bfloat16, 0, 0)
    assert "8.0 GiB as fp8w8a8 (--quant-type)" in said
    said = memory.steps_do_not_fit(asked, 130 * memory.GIB, memory.GIB, 140 * memory.GIB)
    assert "130.0 GiB" in said and "1.0 of the device's 140.0 GiB" in said
    for flag in ("--mem-fraction 0.9", "--batch-max-tokens 0", "--running-max-req-size 256", "--max-req-total-len 0"):
        assert flag in said
