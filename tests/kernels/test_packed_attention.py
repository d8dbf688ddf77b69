"""Backends over the fused projection against the same backends over separate heads, and against each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inferserve.attention.base import AttentionBackend, Bucket, LayerSpec
from inferserve.attention.reference import ReferenceAttention
from inferserve.attention.triton import TritonAttention
from inferserve.kernels.rope_write import PackedHeads, Rotation, rotated_heads_ref
from inferserve.kv.pool import KvPool, KvShape
from tests.fakes.paged import paged_step, planned
from tests.kernels.compare import DTYPES, assert_matches, random

ROWS = [(1, 280), (1, 2), (40, 40), (3, 90)]
TOKENS, PLACES = sum(queries for queries, _ in ROWS), 300


def projections(dtype: torch.dtype, device: torch.device, *, norm: bool) -> tuple[torch.Tensor, PackedHeads, Rotation]:
    """6 query heads over 3 KV heads of 32, 20 of them rotated, by a table of positions."""
    qkv = random(TOKENS, 12 * 32, dtype=dtype, device=device, seed=3)
    norms = [1 + 0.2 * random(32, dtype=dtype, device=device, seed=seed) if norm else None for seed in (4, 5)]
    angle = 9 * random(PLACES, 10, dtype=torch.float32, device=device, seed=6)
    line = torch.randint(PLACES, (TOKENS,), generator=torch.Generator().manual_seed(1)).to(device)
    return qkv, PackedHeads(6, 3, 32, *norms, 1e-6), Rotation(angle.cos(), angle.sin(), line)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
def test_packed_heads(norm: bool, stored: torch.dtype | None, dtype: torch.dtype, device: torch.device) -> None:
    spec, outs = LayerSpec(0, 0.2), []
    qkv, heads, rotation = projections(dtype, device, norm=norm)

    def reference(pool: KvPool) -> ReferenceAttention:
        return ReferenceAttention(pool, device)

    backends: list[tuple[Callable[[KvPool], AttentionBackend], Bucket | None, bool]] = [
        (TritonAttention, None, True),
        (TritonAttention, Bucket(64, 6, 3), True),
        (TritonAttention, None, False),
        (reference, None, True),
    ]
    for make, bucket, packed in backends:
        step = paged_step(ROWS, KvShape(3, 32, group=2), 6, dtype=dtype, device=device, stored=stored)
        attention = make(step.pool)
        plan = planned(attention, step, bucket)
        if packed:
            outs.append(attention.forward_packed(spec, plan, qkv, heads, rotation))
        else:
            outs.append(attention.forward(spec, plan, *rotated_heads_ref(qkv, heads, rotation)))
    for out in outs[:-1]:
        assert out.shape == (TOKENS, 6, 32)
        # Stored numbers of a kernel and of its twin may lie on either side of a border.
        assert_matches(out, outs[-1], torch.bfloat16 if stored else dtype)
