"""Merging kernel against its twin, and the twin against attention over all keys at once."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.merge_attention import merge_attention, merge_attention_ref
from tests.kernels.compare import DTYPES, assert_matches, random


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    score = torch.einsum("shd,nhd->hsn", q.double(), k.double())
    return torch.einsum("hsn,nhd->shd", score.softmax(-1), v.double()), score.logsumexp(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8), (37, 3, 64), (130, 2, 80), (0, 2, 8)], ids=str)
def test_merge_attention(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    tokens, heads, dim = shape
    wide = random(tokens + 5, heads, dim, dtype=dtype, device=device, seed=1)
    out, part = wide[5:], random(tokens, heads, dim, dtype=dtype, device=device, seed=2)
    lses = 6 * random(2, heads, tokens + 3, dtype=torch.float32, device=device, seed=3)
    lse, part_lse = lses[0, :, 3:], lses[1, :, :tokens]
    expected, expected_lse = out.clone(), lse.clone()
    merge_attention_ref(expected, expected_lse, part, part_lse)
    before = wide[:5].clone()
    merge_attention(out, lse, part, part_lse)
    assert_matches(out, expected, dtype)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(wide[:5], before)


def test_the_twin_joins_parts_of_the_keys() -> None:
    device = torch.device("cpu")
    q, k, v = (random(n, 2, 16, dtype=torch.float64, device=device, seed=n) for n in (7, 50, 51))
    v = v[:50]
    whole, whole_lse = attention(q, k, v)
    out, lse = attention(q, k[:20], v[:20])
    merge_attention_ref(out, lse, *attention(q, k[20:], v[20:]))
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse)
