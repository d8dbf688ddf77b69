"""Guessed tokens and calibration through captured steps: more results than rows, contexts of many lengths."""

from __future__ import annotations

import time

import numpy as np
import pytest

from inferserve.attention.base import Bucket
from inferserve.engine.calibration import MadeUp, calibrate
from inferserve.engine.runner import Runner
from inferserve.engine.worker import Worker
from inferserve.kv.pool import KvPool
from tests.fakes.engine import Rig, engine_config
from tests.fakes.listed_attention import ListedAttention
from tests.fakes.tiny_decoder import CPU, LENGTH, ROWS, TOKENS, VOCAB, RunnerBackend, captured_runner, plain_runner
from tests.unit.engine.test_graphs import CountingRecorder


def listed(pool: KvPool) -> ListedAttention:
    return ListedAttention(pool, CPU)


def captured() -> Runner:
    return captured_runner(listed, CountingRecorder(), wanted=(Bucket(32, ROWS, ROWS), Bucket(4, 4, 0)))


def texts(runner: Runner, *, depth: int, drafts: int) -> tuple[list[list[int]], Rig, RunnerBackend]:
    rows = ROWS - 1
    config = engine_config(rows=rows, max_len=LENGTH, chunk=9, batch=24, depth=depth, vocab=VOCAB, drafts=drafts)
    rig, backend = Rig(config=config), RunnerBackend(runner)
    rig.worker = Worker(config, rig.slots, backend, TOKENS)
    random = np.random.default_rng(1)
    prompts = [random.integers(0, VOCAB, int(n)).tolist() for n in random.integers(2, 12, 8)]
    refs = []
    for prompt in (*prompts, *(p * 2 for p in prompts)):
        while rig.worker.sequences.count == rows:
            rig.step()
        refs.append(rig.submit(prompt, temperature=0.0, max_tokens=12, ignore_eos=True))
    rig.run()
    return [rig.output(ref) for ref in refs], rig, backend


@pytest.mark.parametrize("depth", [0, 1])
def test_guesses_in_captured_steps(depth: int) -> None:
    usual, _, _ = texts(plain_runner(listed), depth=0, drafts=0)
    guessed, rig, backend = texts(captured(), depth=depth, drafts=4)
    assert guessed == usual
    assert sum(sum(r.accepted) for r in rig.reports) > 0
    assert any(len(step.sample) > len(step.rows) for step in backend.steps)


def test_steps_of_calibration_in_captured_steps() -> None:
    backend = RunnerBackend(captured())
    steps = [MadeUp(1, LENGTH), MadeUp(4, 30), MadeUp(0, 1, 28), MadeUp(0, 1, 12, 20), MadeUp(6, 20, 17), MadeUp(3, 5)]
    model = calibrate(backend, steps, time.monotonic_ns, limit_s=5.0)
    assert all(model.milliseconds(step.cost) > 0 for step in steps)
    assert texts(backend.runner, depth=1, drafts=4)[0] == texts(plain_runner(listed), depth=0, drafts=0)[0]
