"""Guessed tokens leave greedy text as it is: 20 prompts x 64 tokens of a real model, however they are batched and paused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from inferserve.config.schema import SchedulePart, ServerConfig
from inferserve.engine.torch_backend import TorchBackend
from inferserve.engine.worker import Worker
from tests.fakes.engine import Rig
from tests.parity.conftest import ROWS, server_config
from tests.parity.tiny import NEW_TOKENS, VOCAB, Oracle, is_greedy

Prompts = Sequence[tuple[int, ...]]


def repetitive(count: int) -> Prompts:
    """Prompts that say the same few tokens again and again."""
    random = np.random.default_rng(5)
    return [tuple(random.integers(3, VOCAB, 4 + i).tolist()) * (90 // (4 + i)) for i in range(count)]


def config_of(truth: Oracle, *, depth: int, drafts: int, kv: int, chunk: int) -> ServerConfig:
    config = server_config(truth.folder, kv_tokens=kv, pipeline_depth=depth, warmup=False)
    spec = "ngram" if drafts else "none"
    return replace(
        config,
        engine=replace(config.engine, spec_mode=spec, spec_tokens=drafts),
        facts=replace(config.facts, vocab_size=VOCAB),
        schedule=SchedulePart(running_max_req_size=ROWS, batch_max_tokens=96, chunked_prefill_size=chunk),
    )


def generate(config: ServerConfig, prompts: Prompts) -> tuple[list[tuple[int, ...]], Rig]:
    """Greedy texts, at most ROWS at once; and the rig that made them."""
    rig, backend = Rig(config=config), TorchBackend(config, ROWS)
    rig.worker = Worker(config, rig.slots, backend, backend.start().kv_tokens)
    refs, waiting = [], list(prompts)
    while waiting or rig.worker.busy:
        while waiting and rig.worker.sequences.count < ROWS:
            refs.append(rig.submit(waiting.pop(0), temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True))
        rig.step()
    return [tuple(rig.output(ref)) for ref in refs], rig


@pytest.mark.parametrize(
    ("depth", "drafts", "kv", "chunk"), [(0, 4, 4096, 96), (1, 4, 4096, 7), (0, 7, 400, 20), (1, 3, 400, 96)]
)
def test_the_text_stays_the_same(oracle: Callable[[str], Oracle], depth: int, drafts: int, kv: int, chunk: int) -> None:
    truth = oracle("llama")
    prompts = [*truth.prompts[:14], *repetitive(6)]
    answers, rig = generate(config_of(truth, depth=depth, drafts=drafts, kv=kv, chunk=chunk), prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NEW_TOKENS
        assert is_greedy(truth.model, prompt, answer)
    assert sum(sum(r.accepted) for r in rig.reports) > 100
    assert (sum(r.preempted for r in rig.reports) > 0) == (kv == 400)


def test_fewer_steps(oracle: Callable[[str], Oracle]) -> None:
    truth = oracle("llama")
    steps = {}
    for drafts in (0, 4):
        settings = config_of(truth, depth=0, drafts=drafts, kv=4096, chunk=96)
        answers, rig = generate(settings, repetitive(6))
        steps[drafts] = len(rig.reports), answers
    assert steps[4][0] < 0.8 * steps[0][0]
    assert steps[4][1] == steps[0][1]
