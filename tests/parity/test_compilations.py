"""Whatever comes while serving, no kernel is compiled then, and nothing but results is waited for."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.runtime.jit import JITFunction

from inferserve import kernels
from inferserve.config.schema import SchedulePart
from inferserve.engine import warmup
from inferserve.engine.step import EngineBackend, PendingStep, StepBatch
from inferserve.engine.torch_backend import TorchBackend
from inferserve.protocol.sampling import SamplingParams
from tests.parity.conftest import ROWS, server_config
from tests.parity.tiny import BY_NAME, Tiny, make

LONGEST = 1000
MODELS = [
    BY_NAME["qwen3"],
    BY_NAME["mistral-window"],
    BY_NAME["llama-dynamic"],
    BY_NAME["gemma2"],
    Tiny("odd", "LlamaConfig", {"vocab_size": 259}),
]
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(seed=4, top_p=0.8),
    SamplingParams(seed=5, top_k=9, min_p=0.1, logprobs=2),
    SamplingParams(temperature=0.0, logit_bias={5: 2.0}),
    SamplingParams(seed=6, presence_penalty=0.5, logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(seed=7, min_tokens=8, max_tokens=9),
)
CHUNKS = ((), (1,), (16,), (5, 3), (32, 1, 7), (150, 64), (333,))


def jit_functions() -> Iterator[JITFunction]:
    """Every kernel of the package."""
    for module in pkgutil.iter_modules(kernels.__path__):
        found = vars(importlib.import_module(f"{kernels.__name__}.{module.name}")).values()
        yield from (value for value in found if isinstance(value, JITFunction))


def compiled() -> dict[str, int]:
    """Variants of each kernel so far."""
    return {f.__qualname__: sum(len(cache[0]) for cache in f.device_caches.values()) for f in jit_functions()}


def varied_steps(backend: EngineBackend, launch: Callable[[StepBatch], PendingStep], count: int) -> None:
    """Steps of all sizes and mixtures over rows with all kinds of params."""
    random = np.random.default_rng(5)
    table = np.zeros((ROWS, LONGEST), np.int32)
    for number in range(count):
        chunks = CHUNKS[number % len(CHUNKS)]
        decode = int(random.integers(0 if chunks else 1, ROWS + 1 - len(chunks)))
        length = int(random.choice([2, 16, 17, 255, 256, 257, 300, 511, 513, 700, 900]))
        rows = decode + len(chunks)
        first = int(random.integers(len(PARAMS)))
        for row in range(rows):
            said = np.full(int(random.integers(0, 40)), 7, np.int32)
            backend.open_row(row, PARAMS[(first + row * (number % 3)) % len(PARAMS)], said, said)
        step = warmup.step(table, length, decode, chunks)
        sample = np.flatnonzero(random.random(rows) < random.choice([0.0, 0.5, 1.0])).astype(np.int32)
        launch(replace(step, sample=sample, out_position=sample * 0 + 1)).result()
        for row in range(rows):
            backend.close_row(row)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("data_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_none_while_serving(tiny: Tiny, data_type: str, tmp_path: Path) -> None:
    folder = make(tiny, tmp_path).folder
    config = server_config(
        folder, device="cuda", data_type=data_type, max_req_total_len=LONGEST, kv_tokens=0, mem_fraction=0.2
    )
    schedule = SchedulePart(running_max_req_size=ROWS, batch_max_tokens=512, chunked_prefill_size=333)
    for function in jit_functions():
        function.device_caches.clear()
    backend = TorchBackend(replace(config, schedule=schedule), ROWS)
    backend.start()
    warm = compiled()
    assert warm["_decode_kernel"] >= 1

    def launch(step: StepBatch) -> PendingStep:
        # transformers' own forward is its own affair.
        torch.cuda.set_sync_debug_mode("error" if tiny.native else "default")
        try:
            return backend.launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    varied_steps(backend, launch, 60)
    assert compiled() == warm
