"""`TritonAttention` against the reference backend on whole steps."""

from __future__ import annotations

import pytest
import torch

from inferserve.attention.base import LayerSpec
from inferserve.attention.reference import ReferenceAttention
from inferserve.attention.triton import TritonAttention
from inferserve.kv.pool import KvShape
from tests.fakes.paged import among_strangers, paged_step
from tests.kernels.compare import DTYPES, assert_matches

STEPS = {
    "decode only": [(1, 5), (1, 300), (1, 1)],
    "prefill only": [(30, 30), (9, 50)],
    "both": [(1, 280), (1, 2), (40, 40), (3, 90)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec", [LayerSpec(0, 0.2), LayerSpec(0, 0.2, window=20, softcap=4.0)], ids=["plain", "window, cap"]
)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_a_step(rows: list[tuple[int, int]], spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
    outs = []
    for backend in (TritonAttention, lambda pool: ReferenceAttention(pool, device)):
        step = paged_step(rows, KvShape(3, 32), 6, dtype=dtype, device=device)
        attention = backend(step.pool)
        outs.append(attention.forward(spec, attention.plan(step.batch), step.q, step.k, step.v))
        assert torch.equal(step.pool.k[0][step.batch.kv_index], step.k)
        assert torch.equal(step.pool.v[0][step.batch.kv_index], step.v)
    assert_matches(outs[0], outs[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec", [LayerSpec(0, 0.2), LayerSpec(0, 0.2, window=20, softcap=4.0)], ids=["plain", "window, cap"]
)
def test_nothing_of_other_rows_is_read(spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Not even with weight 0: freed places keep what they held, and 0 x NaN is NaN."""
    rows = STEPS["both"]
    whole = paged_step(rows, KvShape(3, 32), 6, dtype=dtype, device=device)
    attention = TritonAttention(whole.pool)
    together = attention.forward(spec, attention.plan(whole.batch), whole.q, whole.k, whole.v)
    for row in range(len(rows)):
        step = paged_step(rows, KvShape(3, 32), 6, dtype=dtype, device=device)
        alone, tokens = among_strangers(step, row)
        attention = TritonAttention(alone.pool)
        out = attention.forward(spec, attention.plan(alone.batch), alone.q, alone.k, alone.v)
        assert torch.equal(out[tokens], together[tokens])
