"""RMSNorm over the last dimension, alone or after adding a residual. Knows nothing of layers.

Formula: y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, arXiv 1910.07467), summed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import next_power_of_2


@dataclass(frozen=True)
class NormConfig:
    """Rows in one program, warps of it."""

    rows: int
    warps: int


def _config_of(width: int) -> NormConfig:
    """By the width alone: the sum of a row's squares is formed in the same order whatever rows are beside it."""
    block = next_power_of_2(width)
    return NormConfig(max(1, 256 // block), min(16, max(1, block // 512)))


# Not recompiled when a step has one row, or a multiple of 16.
@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    new_residual: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    live = (row < rows)[:, None] & (col < WIDTH)[None, :]
    packed = row.to(tl.int64)[:, None] * WIDTH + col[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * stride + col[None, :], mask=live, other=0.0).to(tl.float32)
    # Asked for before the sum is formed, so that its way through the caches overlaps the others'.
    gain = tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + packed, mask=live, other=0.0).to(tl.float32)
        # The norm sees the sum as stored: the twin and transformers add in the model's dtype.
        stored = value.to(new_residual.dtype.element_ty)
        tl.store(new_residual + packed, stored, mask=live)
        value = stored.to(tl.float32)
    mean_square = tl.sum(value * value, axis=1) / WIDTH
    scale = 1.0 / tl.sqrt(mean_square + eps)
    normed = value * scale[:, None] * gain[None, :]
    tl.store(out + packed, normed.to(out.dtype.element_ty), mask=live)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, config: NormConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width).contiguous()
    rows = flat.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = out if residual is None else torch.empty_like(out)
    if rows:
        config = config or _config_of(width)
        _rms_norm_kernel[(triton.cdiv(rows, config.rows),)](
            flat,
            x if residual is None else residual.contiguous(),
            weight,
            out,
            new_residual,
            rows,
            flat.stride(0),
            eps,
            WIDTH=width,
            ADD=residual is not None,
            ROWS=config.rows,
            BLOCK=next_power_of_2(width),
            num_warps=config.warps,
        )
    return out, new_residual


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension.

    Args:
        x: [..., N], float; one copy is saved if it is [T, N] with a contiguous last dimension.
        weight: [N].

    Returns: contiguous, x's shape and dtype.
    """
    return _launch(x, None, weight, eps)[0]


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Torch twin of `rms_norm`."""
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)` in one pass.

    Args:
        x, residual: [T, N], same dtype; neither is changed.
        weight: [N].
    """
    return _launch(x, residual, weight, eps)


def fused_add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch twin of `fused_add_rms_norm`."""
    total = x + residual
    return rms_norm_ref(total, weight, eps), total
