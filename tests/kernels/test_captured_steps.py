"""The triton backend in captured steps: lists sized for a bucket, padding, one list for any mix of rows."""

from __future__ import annotations

import torch

from inferserve.attention.base import Bucket
from inferserve.attention.triton import TritonAttention
from inferserve.engine.recorder import EagerRecorder
from inferserve.kv.pool import KvPool
from tests.fakes.tiny_decoder import captured_runner, generate, plain_runner

WANTED = (Bucket(24, 7, 7), Bucket(16, 7, 7), Bucket(7, 7, 0), Bucket(4, 4, 0), Bucket(1, 1, 0))


def test_the_same_tokens_and_logits(device: torch.device) -> None:
    def triton(pool: KvPool) -> TritonAttention:
        return TritonAttention(pool)

    plain = plain_runner(triton, device=device)
    texts, backend, _ = generate(plain, 0, 14, prompts=6, new_tokens=4)
    replayed = captured_runner(triton, EagerRecorder(), device=device, wanted=WANTED, forced=plain.sampler.tokens)
    assert generate(replayed, 0, 14, prompts=6, new_tokens=4)[0] == texts
    assert any(len(step.token_ids) not in (24, 16, 7, 4, 1) for step in backend.steps)
    for logits, expected in zip(replayed.sampler.logits, plain.sampler.logits, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
