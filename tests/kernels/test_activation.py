"""SiLU-mul kernel against its twin, and the twin against the formula."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.activation import silu_mul, silu_mul_ref
from tests.kernels.compare import DTYPES, assert_matches, random


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 3072), (3, 2500), (0, 64), (300, 7000)], ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    gate_up = 4 * random(*shape, dtype=dtype, device=device)
    out = silu_mul(gate_up)
    assert out.shape == (shape[0], shape[1] // 2)
    assert_matches(out, silu_mul_ref(gate_up), dtype)


def test_large_magnitudes_do_not_overflow(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]], device=device)
    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([[0.0, 600.0, 0.0]], device=device))


def test_the_twin_is_the_formula() -> None:
    x = random(4, 10, dtype=torch.float64, device=torch.device("cpu"))
    expected = x[:, :5] * torch.sigmoid(x[:, :5]) * x[:, 5:]
    torch.testing.assert_close(silu_mul_ref(x.float()).double(), expected, rtol=1e-5, atol=1e-6)
