"""SiLU-gated product of a fused gate-and-up projection (SwiGLU, Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import SILU_BLOCK


@triton.jit
def _silu_mul_kernel(gate_up: tl.tensor, out: tl.tensor, stride: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < n
    gate = tl.load(gate_up + row * stride + col, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + n + col, mask=live, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * n + col, value.to(out.dtype.element_ty), mask=live)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [T, 2I], gate first; last dimension contiguous.

    Returns: [T, I], same dtype.
    """
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, triton.cdiv(width, SILU_BLOCK))
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), width, BLOCK=SILU_BLOCK, num_warps=4)
    return out


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """Torch twin of `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return torch.nn.functional.silu(gate).mul_(up)
    return torch.nn.functional.silu(gate.float()).mul_(up).to(gate_up.dtype)
