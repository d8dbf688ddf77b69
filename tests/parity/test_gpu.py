"""The torch backend on a CUDA device: right tokens, steps launched ahead, no wait for the device, a pool that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from inferserve.config.schema import SchedulePart
from inferserve.engine import warmup
from inferserve.engine.step import PendingStep, StepBatch
from inferserve.engine.torch_backend import TorchBackend
from tests.parity.conftest import ROWS, server_config
from tests.parity.driver import GREEDY, Driver
from tests.parity.tiny import LONGEST, NEW_TOKENS, Oracle, logits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MARGIN = {"float32": 0.02, "bfloat16": 0.25}
"""How far below the likeliest a chosen token's logit may lie; logits spread over some +-10."""


ROUNDING = 2**25
"""Bytes by which the driver may round up the tensors of a pool."""


def cuda_backend(truth: Oracle, **settings: Any) -> TorchBackend:
    config = server_config(truth.folder, device="cuda", data_type=settings.pop("data_type", "float32"), **settings)
    return TorchBackend(config, ROWS)


@pytest.mark.parametrize("data_type", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["llama-llama3", "llama-dynamic", "mistral-window", "qwen2", "qwen3", "gemma2", "phi3"]
)
def test_tokens(oracle: Callable[[str], Oracle], name: str, data_type: str) -> None:
    truth = oracle(name)
    backend = cuda_backend(truth, data_type=data_type)
    facts = backend.start()
    driver = Driver(backend, kv_tokens=facts.kv_tokens, max_rows=ROWS, max_len=LONGEST, prefix_cache=True, chunk=7)
    answers = driver.generate(truth.prompts, NEW_TOKENS, batch=8, pause_every=13)
    assert driver.hits > 0
    for prompt, answer in zip(truth.prompts, answers, strict=True):
        truly = logits(truth.model, prompt + answer)[len(prompt) - 1 : -1]
        chosen = truly.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (truly.amax(1) - chosen).max() < MARGIN[data_type]


def decode_steps(count: int, rows: int, prompt: int) -> list[StepBatch]:
    """Decode steps after prefills of `prompt` tokens; every id comes from the device."""
    steps = []
    index = np.arange(rows, dtype=np.int32)
    table = np.zeros((ROWS, LONGEST), np.int32)
    table[:rows] = index[:, None] * LONGEST + np.arange(LONGEST, dtype=np.int32)
    for i in range(count):
        steps.append(
            StepBatch(
                step=i,
                rows=index,
                num_decode=rows,
                query_len=np.ones(rows, np.int32),
                kv_len=np.full(rows, prompt + i + 1, np.int32),
                token_ids=np.full(rows, -1, np.int32),
                positions=np.full(rows, prompt + i, np.int32),
                kv_index=table[:rows, prompt + i].copy(),
                table=table,
                new_prefix=tuple((row, prompt) for row in range(rows)) if i == 0 else (),
                sample=index,
                out_position=np.full(rows, i + 1, np.int32),
            )
        )
    return steps


def prefill(backend: TorchBackend, row: int, prompt: tuple[int, ...]) -> int:
    places = np.arange(len(prompt), dtype=np.int32)
    table = np.zeros((ROWS, LONGEST), np.int32)
    table[row, : len(prompt)] = row * LONGEST + places
    batch = StepBatch(
        step=0,
        rows=np.array([row], np.int32),
        num_decode=0,
        query_len=np.array([len(prompt)], np.int32),
        kv_len=np.array([len(prompt)], np.int32),
        token_ids=np.array(prompt, np.int32),
        positions=places,
        kv_index=row * LONGEST + places,
        table=table,
        new_prefix=(),
        sample=np.zeros(1, np.int32),
        out_position=np.zeros(1, np.int32),
    )
    backend.open_row(row, GREEDY, np.array(prompt, np.int32), np.empty(0, np.int32))
    return int(backend.launch(batch).result().token_ids[0])


def test_steps_ahead_without_waiting(oracle: Callable[[str], Oracle]) -> None:
    """Twelve decode steps are launched before any result is read, and no launch synchronises with the device."""
    truth = oracle("llama")
    backend = cuda_backend(truth)
    backend.start()
    prompts = [p[:16] for p in truth.prompts if len(p) >= 16][:4]
    first = [prefill(backend, row, prompt) for row, prompt in enumerate(prompts)]
    backend.launch(warmup.step(np.zeros((ROWS, LONGEST), np.int32), 2, 4, ())).result()
    again = [prefill(backend, row, prompt) for row, prompt in enumerate(prompts)]
    assert again == first
    pending: list[PendingStep] = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending.extend(backend.launch(step) for step in decode_steps(12, len(prompts), 16))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    columns = [step.result().token_ids for step in pending]
    for row, prompt in enumerate(prompts):
        answer = (first[row], *(int(column[row]) for column in columns))
        truly = logits(truth.model, prompt + answer)[len(prompt) - 1 : -1]
        assert (truly.amax(1) - truly.gather(1, torch.tensor(answer)[:, None])[:, 0]).max() < MARGIN["float32"]


def test_the_pool_takes_its_share(oracle: Callable[[str], Oracle]) -> None:
    config = server_config(oracle("llama").folder, device="cuda", kv_tokens=0, mem_fraction=0.25, data_type="bfloat16")
    config = type(config)(
        model=config.model,
        engine=config.engine,
        schedule=SchedulePart(batch_max_tokens=512, running_max_req_size=ROWS),
        facts=config.facts,
    )
    before = torch.cuda.memory_reserved()
    backend = TorchBackend(config, ROWS)
    facts = backend.start()
    total = torch.cuda.mem_get_info()[1]
    per_token = 3 * 2 * 16 * 2 * 2
    assert 0.15 * total < facts.kv_tokens * per_token + before <= 0.25 * total
    for _ in warmup.phases(backend, np.zeros((ROWS, LONGEST), np.int32), warmup.largest(config, ROWS)):
        pass
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    assert total - free <= 0.25 * total + ROUNDING
