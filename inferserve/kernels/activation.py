"""SiLU-gated product of a fused gate-and-up projection (SwiGLU, Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class SiluConfig:
    """Values of the result in one program, warps of it."""

    block: int
    warps: int


FEW, MANY = SiluConfig(block=512, warps=2), SiluConfig(block=2048, warps=4)
"""For results of up to, and of more than,"""
_FEW_VALUES = 2**20
"""values: enough programs to fill the device come first, then work for each."""


@triton.jit
def _silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, stride: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < WIDTH
    gate = tl.load(gate_up + row * stride + col, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + col, mask=live, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + col, value.to(out.dtype.element_ty), mask=live)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [T, 2I], gate first; last dimension contiguous.

    Returns: [T, I], same dtype.
    """
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        config = FEW if tokens * width <= _FEW_VALUES else MANY
        grid = (tokens, triton.cdiv(width, config.block))
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=config.block, num_warps=config.warps)
    return out


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """Torch twin of `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return torch.nn.functional.silu(gate).mul_(up)
    return torch.nn.functional.silu(gate.float()).mul_(up).to(gate_up.dtype)
