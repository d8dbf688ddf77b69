"""The product whose order does not depend on its size: against its twin, and against itself with other rows around."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.ordered_matmul import OrderedConfig, ordered_matmul, ordered_matmul_ref
from tests.kernels.compare import DTYPES, assert_matches, random

SMALL = OrderedConfig(block_m=16, block_n=32, block_k=32, stages=2, warps=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 128, 64), (17, 200, 70), (70, 96, 33), (0, 64, 64)])
def test_ordered_matmul(
    rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = random(rows, 2 * inputs, dtype=dtype, device=device, seed=1)[:, :inputs]
    weight = random(outputs, inputs, dtype=dtype, device=device, seed=2)
    offset = random(outputs, dtype=dtype, device=device, seed=3) if bias else None
    for out in (ordered_matmul(x, weight, offset, SMALL), ordered_matmul(x, weight, offset)):
        assert_matches(out, ordered_matmul_ref(x, weight, offset), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_whatever_is_around_it(dtype: torch.dtype, device: torch.device) -> None:
    x = random(150, 512, dtype=dtype, device=device, seed=1)
    weight = random(200, 512, dtype=dtype, device=device, seed=2)
    together = ordered_matmul(x, weight, None)
    for rows in (slice(0, 1), slice(149, 150), slice(3, 67), slice(60, 150)):
        assert torch.equal(ordered_matmul(x[rows], weight, None), together[rows])
    poisoned = x.clone()
    poisoned[1:] = torch.nan
    assert torch.equal(ordered_matmul(poisoned, weight, None)[0], together[0])
