"""What the kernel tests share: dtypes of the device, tolerances, poisoned outputs."""

from __future__ import annotations

import pytest
import torch

_NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=_NEEDS_GPU)]
"""The interpreter's bf16 dot is not to be trusted, so bf16 is for the GPU."""

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest ||out - ref|| / ||ref||: rounding of the output, and of the operands of a dot in 16 bits."""


def assert_matches(out: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype) -> None:
    """`out` is finite and as near to `ref` as `dtype` allows, as a whole and in every element."""
    assert out.shape == ref.shape
    if not out.numel():
        return
    assert out.isfinite().all(), "an element was not written, or is not a number"
    out, ref = out.double(), ref.double()
    error = float((out - ref).norm() / ref.norm().clamp(min=1e-30))
    assert error <= TOLERANCE[dtype], f"relative error {error:.1e}"
    assert float((out - ref).abs().max()) <= 20 * TOLERANCE[dtype] * float(ref.abs().max())


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN everywhere: what a kernel leaves unwritten shows."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Standard normal, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_codes_match(out: torch.Tensor, ref: torch.Tensor, share: float = 0.01) -> None:
    """Quantised numbers are the same, but for a `share` that lies on the border of two neighbours.

    Triton's interpreter loses the carry when a float8's mantissa rounds up to a power of two: those are left out there.
    """
    assert out.dtype == ref.dtype
    assert out.shape == ref.shape
    if not out.numel():
        return
    codes, expected = out.view(torch.int8).int(), ref.view(torch.int8).int()
    different = codes != expected
    if ref.dtype == torch.float8_e4m3fn and not out.is_cuda:
        different &= (expected & 7) != 0
    assert float(different.float().mean()) < share
    assert int(((codes - expected).abs() * different).max()) <= 1
