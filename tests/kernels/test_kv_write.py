"""KV write kernel against its twin: what is written, and that nothing else is."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.kv_write import kv_write, kv_write_ref
from tests.kernels.compare import DTYPES, poisoned, random


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "k_dim", "v_dim"), [(1, 3, 64, 64), (9, 8, 128, 128), (5, 1, 80, 96), (0, 2, 64, 64)]
)
def test_kv_write(tokens: int, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    k = random(tokens, 2 * heads * k_dim, dtype=dtype, device=device)[:, : heads * k_dim].view(tokens, heads, k_dim)
    v = random(tokens, heads, v_dim, dtype=dtype, device=device, seed=1)
    index = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:tokens].to(device)
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
