"""Several ranks, each with a share of the model, give transformers' greedy tokens; and so does a whole server of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from inferserve.config.schema import ParallelPart
from inferserve.engine.torch_backend import TorchBackend
from inferserve.parallel.ranks import Ranks
from tests.fakes.ranks import side_by_side
from tests.parity.conftest import ROWS, server_config
from tests.parity.driver import Driver
from tests.parity.tiny import LONGEST, Oracle, is_greedy

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
