"""The product of few rows against its twin."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.skinny_matmul import MAX_ROWS, SkinnyConfig, skinny_matmul, skinny_matmul_ref
from tests.kernels.compare import DTYPES, assert_matches, random

SMALL = SkinnyConfig(block_n=64, block_k=64, stages=2, programs=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 256, 128), (5, 200, 70), (MAX_ROWS, 512, 64), (3, 16, 200), (0, 64, 64)]
)
def test_skinny_matmul(
    rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = random(rows, 2 * inputs, dtype=dtype, device=device, seed=1)[:, :inputs]
    weight = random(outputs, inputs, dtype=dtype, device=device, seed=2)
    offset = random(outputs, dtype=dtype, device=device, seed=3) if bias else None
    counters = torch.zeros(8, dtype=torch.int32, device=device)
    for config in (SMALL, SkinnyConfig(block_n=64, block_k=128, stages=2, programs=1)):
        out = skinny_matmul(x, weight, offset, counters, config)
        assert_matches(out, skinny_matmul_ref(x, weight, offset, counters), dtype)
        assert not counters.any(), "the next launch needs zeros"


def test_twice_is_the_same(device: torch.device) -> None:
    """Whoever ends last adds the parts in their order."""
    x = random(4, 1024, dtype=torch.float32, device=device)
    weight = random(96, 1024, dtype=torch.float32, device=device)
    counters = torch.zeros(2, dtype=torch.int32, device=device)
    first = skinny_matmul(x, weight, None, counters, SMALL)
    assert all(torch.equal(skinny_matmul(x, weight, None, counters, SMALL), first) for _ in range(3))
