"""Logits equal transformers' within 1e-4 relative, in fp32 on the CPU: whole prompts, and chunks over cached prefixes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from inferserve.attention.reference import ReferenceAttention
from inferserve.engine.staging import CpuStaging
from inferserve.engine.step import StepBatch
from inferserve.kernels.dispatch import TORCH
from inferserve.kv.pool import KvPool
from inferserve.layers.context import ForwardContext
from inferserve.models.decoder import Decoder
from inferserve.models.generic import GenericModel
from inferserve.models.registry import FAMILIES, load_model
from inferserve.models.spec import CausalModel
from tests.parity.conftest import server_config
from tests.parity.tiny import BY_NAME, LONGEST, MODELS, VOCAB, Oracle, logits

CPU = torch.device("cpu")


def whole_logits(
    model: CausalModel, tokens: tuple[int, ...], chunk: int, stored: torch.dtype | None = None
) -> torch.Tensor:
    """Logits of every position: chunks in random places of the pool, one sampled token each call at the end."""
    pool = KvPool(model.kv_shapes, 2 * LONGEST, torch.float32, CPU, stored)
    attention = ReferenceAttention(pool, CPU)
    places = np.random.default_rng(3).permutation(2 * LONGEST)[: len(tokens)].astype(np.int32)
    table = np.zeros((1, LONGEST), np.int32)
    rows = []
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk):
            stop = min(start + chunk, len(tokens))
            table[0, start:stop] = places[start:stop]
            batch = StepBatch(
                step=0,
                rows=np.zeros(1, np.int32),
                num_decode=int(stop - start == 1),
                query_len=np.array([stop - start], np.int32),
                kv_len=np.array([stop], np.int32),
                token_ids=np.array(tokens[start:stop], np.int32),
                positions=np.arange(start, stop, dtype=np.int32),
                kv_index=places[start:stop],
                table=table,
                new_prefix=(),
                sample=np.zeros(1, np.int32),
                out_position=np.zeros(1, np.int32),
            )
            step = CpuStaging(1).put(batch)
            every = torch.arange(stop - start)
            ctx = ForwardContext(step.attention, attention, attention.plan(step.attention), TORCH, every)
            rows.append(model.forward(step.token_ids, ctx))
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [1000, 7, 1])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_logits(oracle: Callable[[str], Oracle], name: str, chunk: int) -> None:
    truth = oracle(name)
    model = load_model(server_config(truth.folder), torch.float32, CPU)
    assert isinstance(model, Decoder if BY_NAME[name].native else GenericModel)
    tokens = (truth.prompts[0] + truth.prompts[1] + truth.prompts[2])[:90]
    wanted, got = logits(truth.model, tokens), whole_logits(model, tokens, chunk)
    assert got.shape == (len(tokens), VOCAB)
    error = (got - wanted).abs().max() / wanted.abs().max()
    assert error < 1e-4, f"relative error {error:.1e}"


@pytest.mark.parametrize(("stored", "limit"), [(torch.float8_e4m3fn, 0.1), (torch.int8, 0.025)], ids=str)
@pytest.mark.parametrize("name", [tiny.name for tiny in MODELS if tiny.native])
def test_logits_over_8_bits(oracle: Callable[[str], Oracle], name: str, stored: torch.dtype, limit: float) -> None:
    """Rounding K and V moves the logits (of weights as wild as these, by more than a trained model's), and by about the
    same however the prompt is cut: a number next to a half may be rounded the other way."""
    truth = oracle(name)
    model = load_model(server_config(truth.folder), torch.float32, CPU)
    tokens = (truth.prompts[0] + truth.prompts[1] + truth.prompts[2])[:90]
    wanted, got = logits(truth.model, tokens), whole_logits(model, tokens, 7, stored)
    error = float((got - wanted).norm() / wanted.norm())
    assert 1e-5 < error < limit, f"relative error {error:.1e}"
    assert float((whole_logits(model, tokens, 1000, stored) - got).norm() / wanted.norm()) < error / 4


def test_dynamic_rope_beyond_its_length(oracle: Callable[[str], Oracle]) -> None:
    """Longer than the original context, a prompt in one chunk is scaled by its own length, as transformers does."""
    truth = oracle("llama-dynamic")
    model = load_model(server_config(truth.folder), torch.float32, CPU)
    assert isinstance(model, Decoder)
    model.rotary.max_position = 64
    truth.model.config.max_position_embeddings = 64
    rotary = truth.model.model.rotary_emb
    before = rotary.original_max_seq_len
    rotary.original_max_seq_len = rotary.max_seq_len_cached = 64
    try:
        tokens = sum(truth.prompts[:6], ())[:150]
        wanted, got = logits(truth.model, tokens), whole_logits(model, tokens, 1000)
    finally:
        truth.model.config.max_position_embeddings = before
        rotary.original_max_seq_len = rotary.max_seq_len_cached = before
        rotary.inv_freq = rotary.original_inv_freq
    assert (got - wanted).abs().max() / wanted.abs().max() < 1e-4


def test_every_family_is_covered() -> None:
    assert {tiny.config().model_type for tiny in MODELS if tiny.native} == set(FAMILIES)
    assert sum(not tiny.native for tiny in MODELS) >= 3
