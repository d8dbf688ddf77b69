"""Activations to fp8 (e4m3) with a scale for each token, or for each group of 128 values of a token. One pass.

Scheme: x ≈ q · scale with scale = max|x| / 448, the largest e4m3 number (Micikevicius et al., arXiv 2209.05433), as in
the fp8 matrix products of DeepSeek-V3 (arXiv 2412.19437, section 3.3). Knows nothing of weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import next_power_of_2

LARGEST: tl.constexpr = tl.constexpr(448.0)
SMALLEST: tl.constexpr = tl.constexpr(1e-10)
"""Least max|x| that a scale is made of, so that zeros divide by something."""
GROUP = 128
"""Values that share a scale where scales are not for whole rows, and the side of a weight's blocks."""
_TILE = 4096


@triton.jit
def _fp8_quant_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    n: tl.tensor,
    groups: tl.tensor,
    GROUP: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * ROW_GROUPS + tl.arange(0, ROW_GROUPS)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = col < n
    value = tl.load(x + row * stride + col, mask=live, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(value), axis=1), SMALLEST)
    scale = tl.div_rn(peak, LARGEST)
    quantised = value * tl.div_rn(LARGEST, peak)[:, None]
    tl.store(out + row * n + col, quantised.to(out.dtype.element_ty), mask=live)
    if WHOLE:
        tl.store(scales + row + tl.zeros_like(group), scale)
    else:
        tl.store(scales + row * groups + group, scale, mask=group < groups)


def fp8_quant(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row, or each `group` values of it.

    Args:
        x: [T, N] float dtype, last dimension contiguous.
        group: values that share a scale, a power of two; 0 = the whole row.

    Returns: float8_e4m3fn [T, N], and float32 scales [T, ceil(N / group)] ([T, 1] for whole rows).
    """
    tokens, width = x.shape
    groups = triton.cdiv(width, group) if group else 1
    out = torch.empty((tokens, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    if tokens:
        side = group or next_power_of_2(width)
        row_groups = min(next_power_of_2(groups), max(1, _TILE // side))
        _fp8_quant_kernel[(tokens, triton.cdiv(groups, row_groups))](
            x,
            out,
            scales,
            x.stride(0),
            width,
            groups,
            GROUP=side,
            ROW_GROUPS=row_groups,
            WHOLE=not group,
            num_warps=4 if side * row_groups <= _TILE else 8,
        )
    return out, scales


def fp8_quant_ref(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch twin of `fp8_quant`."""
    tokens, width = x.shape
    side = group or width
    padded = torch.nn.functional.pad(x.float(), (0, -width % side)).view(tokens, -(-width // side), side)
    peak = padded.abs().amax(-1).clamp(min=SMALLEST.value)
    largest = torch.full_like(peak, LARGEST.value)  # with a Python number torch multiplies by a rounded reciprocal
    scaled = (padded * (largest / peak)[..., None]).clamp(-LARGEST.value, LARGEST.value)
    quantised = scaled.to(torch.float8_e4m3fn)
    return quantised.flatten(1)[:, :width].contiguous(), peak / largest


def fp8_dequant_ref(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What quantised numbers stand for; kernels never write it down.

    Args:
        values: float8_e4m3fn [R, N].
        scales: float32 [R or ceil(R / 128), 1 or ceil(N / 128)].

    Returns: float32 [R, N].
    """
    rows, width = values.shape
    if scales.shape[0] != rows:
        scales = scales.repeat_interleave(GROUP, 0)[:rows]
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(GROUP, 1)[:, :width]
    return values.float() * scales
