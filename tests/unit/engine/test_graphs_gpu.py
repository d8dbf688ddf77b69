"""CUDA graphs against the very launches they were made from (bit for bit), and against steps launched as they are.

The course of steps is random: decode rows, chunks, padding, prefix hits, rows taken by others, steps too large for any
graph. Replays run ahead of their results, so that what is overwritten too early shows.
"""

from __future__ import annotations

import pytest
import torch

from inferserve.attention.base import CapturableAttention
from inferserve.attention.registry import make_attention
from inferserve.engine.recorder import CudaRecorder, EagerRecorder, Recorder
from inferserve.engine.runner import Runner
from inferserve.engine.step import StepBatch, StepResult
from inferserve.kv.pool import KvPool
from tests.fakes.tiny_decoder import captured_runner, generate, plain_runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = torch.device("cuda")
AHEAD = 3
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Of the norm of a step's logits: products of other shapes round otherwise."""


def triton(pool: KvPool) -> CapturableAttention:
    attention = make_attention("triton", pool, DEVICE)
    assert isinstance(attention, CapturableAttention)
    return attention


def captured(recorder: Recorder, dtype: torch.dtype, forced: list[torch.Tensor] | None = None) -> Runner:
    return captured_runner(triton, recorder, device=DEVICE, dtype=dtype, forced=forced)


def run(runner: Runner, steps: list[StepBatch], ahead: int) -> list[StepResult]:
    """Results of the steps, each read when `ahead` more have been launched."""
    pending, results = [], []
    with torch.inference_mode():
        for step in steps:
            pending.append(runner.launch(step))
            if len(pending) > ahead:
                results.append(pending.pop(0).result())
        return results + [one.result() for one in pending]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_replays_are_the_launches_they_were_made_from(seed: int, dtype: torch.dtype) -> None:
    _, backend, driver = generate(plain_runner(triton, device=DEVICE, dtype=dtype), seed, chunk=5 + seed)
    assert driver.hits > 0
    replayed, called = captured(CudaRecorder(torch.cuda.Stream(DEVICE)), dtype), captured(EagerRecorder(), dtype)
    results = [run(replayed, backend.steps, AHEAD), run(called, backend.steps, 0)]
    for step, one, other in zip(backend.steps, *results, strict=True):
        assert not one.failed.any()
        assert one.token_ids.tolist() == other.token_ids.tolist(), step.step
    for one, other in zip(replayed.sampler.logits, called.sampler.logits, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replays_against_steps_launched_as_they_are(dtype: torch.dtype) -> None:
    plain = plain_runner(triton, device=DEVICE, dtype=dtype)
    texts, _, _ = generate(plain, 2, chunk=7)
    replayed = captured(CudaRecorder(torch.cuda.Stream(DEVICE)), dtype, forced=plain.sampler.tokens)
    assert generate(replayed, 2, chunk=7)[0] == texts
    for logits, expected in zip(replayed.sampler.logits, plain.sampler.logits, strict=True):
        error = (logits.double() - expected.double()).norm() / expected.double().norm()
        assert error < TOLERANCE[dtype]


def test_a_launch_does_not_wait_for_the_device() -> None:
    _, backend, _ = generate(plain_runner(triton, device=DEVICE, dtype=torch.bfloat16), 1, chunk=6)
    runner = captured(CudaRecorder(torch.cuda.Stream(DEVICE)), torch.bfloat16)
    run(runner, backend.steps[:10], 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(runner, backend.steps[10:], 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
