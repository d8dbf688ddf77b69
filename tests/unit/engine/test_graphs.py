"""Captured steps, replayed by calling them again: the same tokens and logits as steps launched as they are.

Rows that decode, chunks, padding, prefix hits, pauses and rows taken by others all pass through the static buffers here;
what only a CUDA graph can get wrong is in `test_graphs_gpu`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferserve.attention.base import Bucket
from inferserve.attention.reference import ReferenceAttention
from inferserve.config.schema import EnginePart
from inferserve.engine.graphs import Graphs, Parts, buckets, measure
from inferserve.engine.recorder import EagerRecorder, Run
from inferserve.engine.runner import Runner
from inferserve.engine.staging import DeviceRows
from inferserve.engine.step import FROM_DEVICE, StepBatch
from inferserve.kernels.dispatch import kernels_for
from inferserve.kv.pool import KvPool
from tests.fakes.listed_attention import ListedAttention
from tests.fakes.tiny_decoder import (
    BUCKETS,
    CPU,
    LENGTH,
    ROWS,
    TOKENS,
    captured_runner,
    generate,
    plain_runner,
    random_decoder,
)


class CountingRecorder(EagerRecorder):
    """Counts replays; the result moves to one place, as a graph's does, and is poisoned before each replay."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, run: Run) -> Run:
        place = run().clone()

        def again() -> torch.Tensor:
            self.replays += 1
            place.fill_(torch.nan)
            return place.copy_(run())

        return again


def listed(pool: KvPool) -> ListedAttention:
    return ListedAttention(pool, CPU)


def reference(pool: KvPool) -> ReferenceAttention:
    return ReferenceAttention(pool, CPU)


def captured(wanted: tuple[Bucket, ...] = BUCKETS) -> tuple[Runner, CountingRecorder]:
    recorder = CountingRecorder()
    runner = captured_runner(listed, recorder, wanted=wanted)
    recorder.replays = 0
    return runner, recorder


@pytest.mark.parametrize(("seed", "chunk"), [(0, 6), (1, 30), (2, 3), (3, 11)])
def test_the_same_tokens_and_logits(seed: int, chunk: int) -> None:
    plain, (replayed, recorder) = plain_runner(reference), captured()
    tokens, backend, driver = generate(plain, seed, chunk)
    assert generate(replayed, seed, chunk)[0] == tokens
    assert driver.hits > 0 and any(step.new_prefix for step in backend.steps)
    assert any((step.token_ids == FROM_DEVICE).any() for step in backend.steps)
    assert recorder.replays == sum(len(step.token_ids) <= BUCKETS[0].tokens for step in backend.steps) > 0
    for expected, logits in zip(plain.sampler.logits, replayed.sampler.logits, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_steps_larger_than_any_bucket_are_launched_as_they_are_between_others() -> None:
    small = (Bucket(8, 7, 7), Bucket(2, 2, 0))
    replayed, recorder = captured(small)
    tokens, backend, _ = generate(replayed, 5, 20)
    assert tokens == generate(plain_runner(reference), 5, 20)[0]
    assert 0 < recorder.replays < len(backend.steps)


def step(rows: int, decode: int, tokens: int) -> StepBatch:
    none = np.empty(0, np.int32)
    return StepBatch(0, np.arange(rows), decode, none, none, np.zeros(tokens), none, none, none, (), none, none)


def test_memory_of_graphs_is_foreseen_from_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10_000]

    class Taking(EagerRecorder):
        def record(self, run: Run) -> Run:
            free[0] -= 10 * run().shape[0]
            return run

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 10_000))
    model = random_decoder(max_len=LENGTH)
    pool = KvPool(model.kv_shapes, TOKENS, torch.float32, CPU)
    parts = Parts(model, listed(pool), kernels_for(CPU), DeviceRows.make(ROWS, LENGTH, CPU), pool.spare)
    with torch.inference_mode():
        needed = measure(parts, BUCKETS, Taking())
    # (24, mixed) and (7, decode) are the largest; of 16, 4, 2, 1 those but the first are tried.
    assert needed == 240 + 70 + (40 + 20 + 10) * 4 * 5 // (4 * 3)


def test_which_bucket_serves_a_step() -> None:
    graphs = captured()[0].graphs
    assert isinstance(graphs, Graphs) and len(graphs) == len(BUCKETS)

    def found(*numbers: int) -> Bucket | None:
        place = graphs.find(step(*numbers))
        return place and place.bucket

    assert found(1, 1, 1) == Bucket(1, 1, 0)
    assert found(3, 3, 3) == Bucket(4, 4, 0)
    assert found(7, 7, 7) == Bucket(7, 7, 0)
    assert found(8, 8, 8) == Bucket(16, 7, 7)
    assert found(2, 1, 5) == found(1, 0, 16) == Bucket(16, 7, 7)
    assert found(3, 0, 17) == Bucket(24, 7, 7)
    assert found(3, 1, 25) is None


def test_what_is_captured() -> None:
    found = buckets(EnginePart(), 256, 8448)
    decode = [b.tokens for b in found if not b.chunks]
    assert list(found) == sorted(found, reverse=True) and len(set(found)) == len(found)
    assert decode[::-1] == [1, 2, 3, 4, *range(8, 257, 8)]
    mixed = [b for b in found if b.chunks]
    assert mixed[0] == Bucket(2048, 256, 256) and mixed[-1] == Bucket(16, 16, 16)
    assert all(b.tokens % 64 == 0 for b in mixed if b.tokens > 32)
    assert all(b.rows == b.tokens for b in found if not b.chunks)


def test_what_is_captured_follows_the_flags() -> None:
    lightllm = EnginePart(graph_split_batch_size=32, graph_grow_step_size=16, graph_max_batch_size=70)
    decode = [b.tokens for b in buckets(lightllm, 256, 8448) if not b.chunks]
    assert decode[::-1] == [*range(1, 33), 48, 64, 70]
    assert not any(b.chunks for b in buckets(EnginePart(prefill_cudagraph_max_handle_token=0), 256, 8448))
    assert buckets(EnginePart(disable_cudagraph=True), 256, 8448) == ()
    few = buckets(EnginePart(), 3, 100)
    assert few == (*(Bucket(n, 3, 3) for n in (100, 64, 32, 16)), Bucket(3, 3, 0), Bucket(2, 2, 0), Bucket(1, 1, 0))
    assert buckets(EnginePart(), 1, 1) == (Bucket(1, 1, 1), Bucket(1, 1, 0))
