"""RMSNorm over the last dimension, alone or after adding a residual. Knows nothing of layers.

Formula: y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, arXiv 1910.07467), summed in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import next_power_of_2, row_config


# Not recompiled when a step has one row, or a multiple of 16.
@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    new_residual: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    live = (row < rows)[:, None] & (col < n)[None, :]
    source = (row // heads).to(tl.int64) * stride_token + (row % heads) * stride_head
    packed = row.to(tl.int64)[:, None] * n + col[None, :]
    value = tl.load(x + source[:, None] + col[None, :], mask=live, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + packed, mask=live, other=0.0).to(tl.float32)
        # The norm sees the sum as stored: the twin and transformers add in the model's dtype.
        stored = value.to(new_residual.dtype.element_ty)
        tl.store(new_residual + packed, stored, mask=live)
        value = stored.to(tl.float32)
    mean_square = tl.sum(value * value, axis=1) / n
    scale = 1.0 / tl.sqrt(mean_square + eps)
    gain = tl.load(weight + col, mask=col < n, other=0.0).to(tl.float32)
    normed = value * scale[:, None] * gain[None, :]
    tl.store(out + packed, normed.to(out.dtype.element_ty), mask=live)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = x.contiguous().view(-1, x.shape[-1])
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    rows = x.numel() // width
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = out if residual is None else torch.empty_like(out)
    config = row_config(width)
    if rows:
        _rms_norm_kernel[(triton.cdiv(rows, config.rows),)](
            x,
            x if residual is None else residual.contiguous(),
            weight,
            out,
            new_residual,
            rows,
            heads,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            width,
            eps,
            ADD=residual is not None,
            ROWS=config.rows,
            BLOCK=next_power_of_2(width),
            num_warps=config.warps,
        )
    return out, new_residual


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension.

    Args:
        x: [T, N] or [T, H, N] (query-key norm), any strides but a contiguous last dimension; float dtype.
        weight: [N].

    Returns: contiguous, x's shape and dtype.
    """
    return _launch(x, None, weight, eps)[0].view(x.shape)


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
