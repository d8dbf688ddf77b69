"""`TritonAttention` against the reference backend on whole steps."""

from __future__ import annotations

import pytest
import torch

from inferserve.attention.base import LayerSpec
from inferserve.attention.reference import ReferenceAttention
from inferserve.attention.triton import TritonAttention
from inferserve.kv.pool import KvShape
from tests.fakes.paged import paged_step
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
