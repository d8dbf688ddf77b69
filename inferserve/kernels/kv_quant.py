"""K and V in 8 bits: e4m3 or int8 numbers and one float32 scale for each (token, head).

number = round(x / scale) with scale = largest |x| of the head / largest number of the format, 1 for a head of zeros.
In torch, for the CPU path and as what the kernels must agree with. Knows no pool.
"""

from __future__ import annotations

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest number of each format (e4m3: Micikevicius et al., arXiv 2209.05433)."""


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether K and V stored as `dtype` come with scales."""
    return dtype in LARGEST


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, heads, dim] → numbers of `dtype`, same shape, and scales float32 [T, heads]."""
    largest = LARGEST[dtype]
    x = x.float()
    scale = x.abs().amax(-1) / largest
    scale = torch.where(scale > 0.0, scale, 1.0)
    number = (x / scale[..., None]).clamp(-largest, largest)
    return (number.round() if dtype == torch.int8 else number).to(dtype), scale


def dequantise(number: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `quantise`, rounded to `dtype`: number [T, heads, dim], scale [T, heads]."""
    return (number.float() * scale[..., None]).to(dtype)
