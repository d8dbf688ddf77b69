"""Joins attention over two disjoint sets of keys by their log-sum-exp (Flash-Decoding, Dao et al. 2023)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import next_power_of_2

_TOKENS = 16


@triton.jit
def _merge_kernel(
    out: tl.tensor,
    lse: tl.tensor,
    part: tl.tensor,
    part_lse: tl.tensor,
    tokens: tl.tensor,
    out_stride: tl.tensor,
    lse_stride: tl.tensor,
    part_stride: tl.tensor,
    part_lse_stride: tl.tensor,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D_BLOCK)
    real = token < tokens
    live = real[:, None] & (d < D)[None, :]
    mine = tl.load(lse + head * lse_stride + token, mask=real, other=0.0)
    theirs = tl.load(part_lse + head * part_lse_stride + token, mask=real, other=0.0)
    peak = tl.maximum(mine, theirs)
    my_weight, their_weight = tl.exp(mine - peak), tl.exp(theirs - peak)
    total = my_weight + their_weight
    at = out + token[:, None] * out_stride + head * D + d[None, :]
    value = tl.load(at, mask=live, other=0.0).to(tl.float32) * (my_weight / total)[:, None]
    other = tl.load(part + token[:, None] * part_stride + head * D + d[None, :], mask=live, other=0.0).to(tl.float32)
    value += other * (their_weight / total)[:, None]
    tl.store(at, value.to(out.dtype.element_ty), mask=live)
    tl.store(lse + head * lse_stride + token, peak + tl.log(total), mask=real)


def merge_attention(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Take a part's result into `out` and `lse`, in place.

    Args:
        out, part: [S, heads, D], the heads of a token contiguous.
        lse, part_lse: float32 [heads, S], log-sum-exp of the scores (natural logarithm), finite; tokens contiguous.
    """
    tokens, heads, dim = out.shape
    if not tokens:
        return
    _merge_kernel[(triton.cdiv(tokens, _TOKENS), heads)](
        out,
        lse,
        part,
        part_lse,
        tokens,
        out.stride(0),
        lse.stride(0),
        part.stride(0),
        part_lse.stride(0),
        D=dim,
        D_BLOCK=next_power_of_2(dim),
        TOKENS=_TOKENS,
        num_warps=4,
    )


def merge_attention_ref(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Torch twin of `merge_attention`."""
    total = torch.logaddexp(lse, part_lse)
    mine, theirs = ((x - total).exp().transpose(0, 1)[..., None] for x in (lse, part_lse))
    out.copy_(out.float() * mine + part.float() * theirs)
    lse.copy_(total)
