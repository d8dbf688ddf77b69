"""Several ranks, each with a share of the model, give transformers' greedy tokens: as threads, as processes, on GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inferserve.config.env import child_environment
from inferserve.config.schema import ParallelPart
from inferserve.engine.torch_backend import TorchBackend
from inferserve.parallel.ranks import Ranks
from tests.fakes.ranks import side_by_side
from tests.parity.conftest import ROWS, server_config
from tests.parity.driver import Driver
from tests.parity.test_gpu import MARGIN
from tests.parity.tiny import LONGEST, Oracle, is_greedy, logits

TOKENS = 16
PROMPTS = 8


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 2),
        ("llama", 4),
        ("llama-sharded-tied", 2),
        ("llama-mha-biased", 2),
        ("qwen2", 4),
        ("qwen3", 2),
        ("mistral-window", 2),
    ],
)
def test_greedy(oracle: Callable[[str], Oracle], name: str, tp: int) -> None:
    """With --tp 4 two ranks each hold the same of two KV heads."""
    truth = oracle(name)
    prompts = truth.prompts[:PROMPTS]

    def rank(ranks: Ranks) -> list[tuple[int, ...]]:
        # Every rank has room for another number of tokens; all must take the smallest.
        config = replace(server_config(truth.folder, kv_tokens=2048 + 100 * ranks.rank), parallel=ParallelPart(tp=tp))
        backend = TorchBackend(config, ROWS, ranks)
        assert backend.start().kv_tokens == 2048
        driver = Driver(backend, kv_tokens=2048, max_rows=ROWS, max_len=LONGEST, prefix_cache=True, chunk=7)
        return driver.generate(prompts, TOKENS, batch=5, pause_every=11)

    first, *others = side_by_side(tp, rank)
    assert all(other == first for other in others)
    for prompt, answer in zip(prompts, first, strict=True):
        assert len(answer) == TOKENS
        assert is_greedy(truth.model, prompt, answer)


TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")]


@pytest.mark.parametrize(
    ("device", "data_type", "all_reduce"),
    [
        ("cpu", "float32", "nccl"),
        *(pytest.param("cuda", kind, way, marks=TWO_GPUS) for kind in MARGIN for way in ("nccl", "symmetric")),
    ],
)
def test_two_processes(
    oracle: Callable[[str], Oracle], tmp_path: Path, device: str, data_type: str, all_reduce: str
) -> None:
    """On GPUs the sums are inside CUDA graphs."""
    truth = oracle("llama")
    prompts = truth.prompts[:PROMPTS]
    command = [sys.executable, "-m", "tests.fakes.driven_rank"]
    about = [str(tmp_path), str(truth.folder), device, data_type, all_reduce]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", *about],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(one_thread=False) | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(json.dumps(prompts))
        rank.stdin.close()
        rank.stdin = None
    first, second = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    assert first == second
    for prompt, answer in zip(prompts, first, strict=True):
        truly = logits(truth.model, (*prompt, *answer))[len(prompt) - 1 : -1]
        chosen = truly.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (truly.amax(1) - chosen).max() < MARGIN[data_type]
