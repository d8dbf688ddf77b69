"""Rotary position embedding of q and k, "neox" layout: the first half of the rotated part pairs with the second.

Formula: RoFormer, Su et al., arXiv 2104.09864, section 3.4.2. Where cos and sin come from (scaling kinds, positions)
is the caller's matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import next_power_of_2

_HEADS_PER_PROGRAM = 8


@triton.jit
def _rotate_heads(
    x: tl.tensor,
    out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    heads: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    half: tl.tensor,
    head_dim: tl.tensor,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    col = tl.arange(0, HALF)
    live = (head < heads)[:, None] & (col < half)[None, :]
    source = x + token * stride_token + head[:, None] * stride_head
    target = out + (token * heads + head[:, None]) * head_dim
    first = tl.load(source + col[None, :], mask=live, other=0.0).to(tl.float32)
    second = tl.load(source + half + col[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(target + col[None, :], (first * cos - second * sin).to(out.dtype.element_ty), mask=live)
    tl.store(target + half + col[None, :], (second * cos + first * sin).to(out.dtype.element_ty), mask=live)
    if REST > 0:
        tail = 2 * half + tl.arange(0, REST)
        live = (head < heads)[:, None] & (tail < head_dim)[None, :]
        tl.store(target + tail[None, :], tl.load(source + tail[None, :], mask=live, other=0.0), mask=live)


@triton.jit
def _rotary_kernel(
    q: tl.tensor,
    k: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_heads: tl.tensor,
    k_heads: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    k_stride_token: tl.tensor,
    k_stride_head: tl.tensor,
    half: tl.tensor,
    head_dim: tl.tensor,
    q_blocks: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    col = tl.arange(0, HALF)
    c = tl.load(cos + token * half + col, mask=col < half, other=0.0)[None, :]
    s = tl.load(sin + token * half + col, mask=col < half, other=0.0)[None, :]
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        _rotate_heads(q, q_out, c, s, token, head, q_heads, q_stride_token, q_stride_head, half, head_dim, HALF, REST)
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        _rotate_heads(k, k_out, c, s, token, head, k_heads, k_stride_token, k_stride_head, half, head_dim, HALF, REST)


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k.

    Args:
        q, k: [T, heads, head_dim], last dimension contiguous (views of a fused projection are fine).
        cos, sin: [T, rot_dim / 2] float32, contiguous; rot_dim <= head_dim, the rest of a head passes unchanged.

    Returns: new contiguous tensors of the same shapes and dtypes.
    """
    tokens, q_heads, head_dim = q.shape
    k_heads, half = k.shape[1], cos.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q_blocks = triton.cdiv(q_heads, _HEADS_PER_PROGRAM)
    rest = head_dim - 2 * half
    if tokens:
        _rotary_kernel[(tokens, q_blocks + triton.cdiv(k_heads, _HEADS_PER_PROGRAM))](
            q,
            k,
            q_out,
            k_out,
            cos,
            sin,
            q_heads,
            k_heads,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            half,
            head_dim,
            q_blocks,
            HEADS=_HEADS_PER_PROGRAM,
            HALF=next_power_of_2(half),
            REST=next_power_of_2(rest) if rest else 0,
            num_warps=2,
        )
    return q_out, k_out


def _rotate_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    if 2 * half < x.shape[-1]:
        rotated = _rotate_ref(x[..., : 2 * half], cos, sin)
        return torch.cat((rotated, x[..., 2 * half :]), dim=-1)
    dtype, x = x.dtype, x.float()
    first, second = x[..., :half], x[..., half:]
    # Two fused multiply-adds on halves of one product: on the CPU the number of ops is what costs at decode.
    out = torch.mul(x.unflatten(-1, (2, half)), cos[:, None, None, :])
    out[..., 0, :].addcmul_(second, sin[:, None, :], value=-1)
    out[..., 1, :].addcmul_(first, sin[:, None, :])
    return out.flatten(-2).to(dtype)


def apply_rotary_ref(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch twin of `apply_rotary`."""
    return _rotate_ref(q, cos, sin), _rotate_ref(k, cos, sin)
