"""Activation quantisation against its twin, and the twin against what fp8 promises."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.fp8_quant import fp8_quant, fp8_quant_ref
from tests.kernels.compare import DTYPES, random

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [0, 16, 128])
@pytest.mark.parametrize("shape", [(1, 16), (5, 384), (3, 200), (2, 5000), (0, 64)], ids=str)
def test_fp8_quant(shape: tuple[int, int], group: int, dtype: torch.dtype, device: torch.device) -> None:
    x = random(*shape, dtype=dtype, device=device) * torch.logspace(-3, 3, max(shape[0], 1)).to(device, dtype)[:, None]
    if shape[0] > 1:
        x[1, ::7] = 0
    wide = torch.cat((x, x), 1)[:, : shape[1]]
    values, scales = fp8_quant(wide, group)
    expected, expected_scales = fp8_quant_ref(wide, group)
    assert values.dtype == torch.float8_e4m3fn
    assert torch.equal(scales, expected_scales) and torch.equal(values.float(), expected.float())


def test_zeros_stay_zeros_and_nan_stays_nan(device: torch.device) -> None:
    x = torch.zeros(3, 256, device=device)
    x[1, 200] = torch.nan
    x[2] = 1e38
    for quantise in (fp8_quant, fp8_quant_ref):
        values, scales = quantise(x, 128)
        assert not values[0].float().any() and scales[0].isfinite().all()
        assert not (values[1, 128:].float() * scales[1, 1]).isfinite().all()
        assert (values[2].float() == 448).all()


@pytest.mark.parametrize("group", [0, 128])
def test_the_error_is_half_a_step(group: int) -> None:
    """e4m3 keeps 3 bits after the leading one: 1/16 of a number's size, or half the smallest step of its group."""
    x = random(64, 1000, dtype=torch.float64, device=CPU)
    values, scales = fp8_quant_ref(x.float(), group)
    scale = scales.double().repeat_interleave(group or 1000, 1)[:, :1000]
    error = (values.double() * scale - x).abs()
    assert (error <= (x.abs() / 16).clamp(min=2.0**-10 * scale) * (1 + 1e-6)).all()
