"""`--deterministic` on a GPU: tokens and logprobs are equal bit by bit, whatever runs beside a request and however."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from inferserve.config.schema import SchedulePart, ServerConfig
from inferserve.engine.torch_backend import TorchBackend
from inferserve.engine.worker import Worker
from tests.fakes.engine import Rig
from tests.parity.conftest import server_config
from tests.parity.tiny import VOCAB, Oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS = 64
TOKENS = 24
POOL = 16_384
Texts = list[tuple[bytes, bytes]]
"""Of each prompt the tokens and the bits of their logprobs."""


def config_of(truth: Oracle, *, chunk: int = 256, graphs: bool = True) -> ServerConfig:
    config = server_config(
        truth.folder,
        device="cuda",
        data_type="bfloat16",
        deterministic=True,
        disable_cudagraph=not graphs,
        pipeline_depth=1,
        kv_tokens=POOL,
    )
    schedule = SchedulePart(running_max_req_size=ROWS, batch_max_tokens=512, chunked_prefill_size=chunk)
    return replace(config, schedule=schedule, facts=replace(config.facts, vocab_size=VOCAB))


def texts(config: ServerConfig, backend: TorchBackend, prompts: list[tuple[int, ...]], together: int) -> Texts:
    """All prompts, at most `together` at once. Half of them draw their tokens."""
    rig = Rig(config=config)
    rig.worker = Worker(config, rig.slots, backend, POOL)
    refs = []
    for i, prompt in enumerate(prompts):
        while rig.worker.sequences.count >= together:
            rig.step()
        temperature = 0.8 * (i % 2)
        refs.append(rig.submit(prompt, temperature=temperature, seed=i, logprobs=0, max_tokens=TOKENS, ignore_eos=True))
    rig.run()
    ids, logprobs = rig.slots.output_ids, rig.slots.logprobs
    return [(ids[r.index, :TOKENS].tobytes(), logprobs[r.index, :TOKENS].tobytes()) for r in refs]


def test_equal_bits(oracle: Callable[[str], Oracle]) -> None:
    truth = oracle("llama")
    random = np.random.default_rng(3)
    prompts = [tuple(random.integers(3, VOCAB, int(n)).tolist()) for n in random.integers(3, 150, ROWS)]
    config = config_of(truth)
    backend = TorchBackend(config, ROWS)
    backend.start()
    alone = texts(config, backend, prompts, together=1)
    assert len(set(alone)) == ROWS
    assert texts(config, backend, prompts, together=ROWS) == alone, "in a batch"
    assert texts(config_of(truth, chunk=7), backend, prompts, together=ROWS) == alone, "in chunks"
    eager = config_of(truth, graphs=False)
    backend = TorchBackend(eager, ROWS)
    backend.start()
    assert texts(eager, backend, prompts, together=ROWS) == alone, "without graphs"
