"""RMSNorm kernels against their twins, and the twins against the formula."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.norm import fused_add_rms_norm, fused_add_rms_norm_ref, rms_norm, rms_norm_ref
from tests.kernels.compare import DTYPES, assert_matches, random

SHAPES = [(1, 64), (5, 576), (3, 100), (33, 8), (600, 40), (2, 3, 128), (4, 9, 80)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = random(*shape, dtype=dtype, device=device)
    weight = random(shape[-1], dtype=dtype, device=device, seed=1)
    out = rms_norm(x, weight, 1e-5)
    assert out.is_contiguous()
    assert_matches(out, rms_norm_ref(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_a_fused_projection(dtype: torch.dtype, device: torch.device) -> None:
    """Query-key norm reads a strided view."""
    x = random(7, 5 * 32, dtype=dtype, device=device)[:, 32:128].view(7, 3, 32)
    weight = random(32, dtype=dtype, device=device, seed=1)
    assert_matches(rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_fused_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (random(*shape, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = random(shape[-1], dtype=dtype, device=device, seed=2)
    given = x.clone(), residual.clone()
    out, total = fused_add_rms_norm(x, residual, weight, 1e-5)
    ref, ref_total = fused_add_rms_norm_ref(x, residual, weight, 1e-5)
    assert_matches(out, ref, dtype)
    assert torch.equal(total, ref_total)
    assert torch.equal(x, given[0])
    assert torch.equal(residual, given[1])


def test_no_tokens(device: torch.device) -> None:
    x = torch.empty(0, 64, device=device)
    assert rms_norm(x, torch.ones(64, device=device), 1e-5).shape == (0, 64)


def test_the_twin_is_the_formula() -> None:
    x, weight = random(5, 96, dtype=torch.float64, device=torch.device("cpu")), torch.linspace(-1, 2, 96)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm_ref(x.float(), weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)
