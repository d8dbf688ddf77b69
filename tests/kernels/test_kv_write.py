"""KV write kernel against its twin: what is written, as it is or quantised, and that nothing else is."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.kv_quant import LARGEST
from inferserve.kernels.kv_write import kv_write, kv_write_ref
from tests.kernels.compare import DTYPES, assert_codes_match, poisoned, random

SHAPES = [(1, 3, 64, 64), (9, 8, 128, 128), (5, 1, 80, 96), (2, 12, 32, 32), (0, 2, 64, 64)]


def inputs(
    tokens: int, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K (a view of something wider), V, and where they go among 40 places."""
    k = random(tokens, 2 * heads * k_dim, dtype=dtype, device=device)[:, : heads * k_dim].view(tokens, heads, k_dim)
    v = random(tokens, heads, v_dim, dtype=dtype, device=device, seed=1)
    return k, v, torch.randperm(40, generator=torch.Generator().manual_seed(2))[:tokens].to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "k_dim", "v_dim"), SHAPES)
def test_kv_write(tokens: int, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    k, v, index = inputs(tokens, heads, k_dim, v_dim, dtype, device)
    pools = [
        (poisoned(40, heads, k_dim, dtype=dtype, device=device), poisoned(40, heads, v_dim, dtype=dtype, device=device))
        for _ in range(2)
    ]
    kv_write(k, v, *pools[0], index)
    kv_write_ref(k, v, *pools[1], index)
    for written, expected in zip(*pools, strict=True):
        assert torch.equal(written.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(pools[0][0][index], k)
    assert torch.equal(pools[0][1][index], v)
    assert int(pools[0][0].isnan().all(-1).all(-1).sum()) == 40 - tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", LARGEST, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "k_dim", "v_dim"), SHAPES)
def test_quantised(
    tokens: int,
    heads: int,
    k_dim: int,
    v_dim: int,
    stored: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    k, v, index = inputs(tokens, heads, k_dim, v_dim, dtype, device)
    if tokens:
        k[0, 0] = 0.0
    results = []
    for op in (kv_write, kv_write_ref):
        pools = [torch.full((40, heads, d), 77, dtype=torch.int8, device=device).view(stored) for d in (k_dim, v_dim)]
        scales = [poisoned(40, heads, dtype=torch.float32, device=device) for _ in "kv"]
        op(k, v, *pools, index, *scales)
        results.append((*pools, *scales))
    for written, expected in zip(results[0][:2], results[1][:2], strict=True):
        assert_codes_match(written, expected)
    for written, expected in zip(results[0][2:], results[1][2:], strict=True):
        torch.testing.assert_close(written, expected, equal_nan=True, rtol=1e-6, atol=0)
        assert int(written.isnan().all(-1).sum()) == 40 - tokens
