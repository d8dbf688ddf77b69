"""Scatter a step's K and V into the paged pool, as they are or quantised (`kv_quant` says how). Knows nothing of rows:
one index a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.kv_quant import LARGEST, quantise
from inferserve.kernels.launch_config import next_power_of_2

_HEADS_PER_PROGRAM = 8


@triton.jit
def head_scale(peak: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Scale of heads whose largest magnitude is `peak`."""
    scale = peak / LARGEST
    return tl.where(scale > 0.0, scale, 1.0)


@triton.jit
def encode(value: tl.tensor, scale: tl.tensor, to: tl.constexpr, LARGEST: tl.constexpr) -> tl.tensor:
    """float32 `value` in the pool's format; with LARGEST = 0 `scale` is not looked at."""
    # No early return: the compiler would still look at what follows it, and `scale` may have another shape then.
    number = value
    if LARGEST > 0:
        number = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
        if LARGEST == 127:
            # Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even, as torch does.
            number = (number + 12582912.0) - 12582912.0
    return number.to(to)


@triton.jit
def copy_heads(
    source: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    token: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    stride: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Some heads of one token (HEADS heads of DIM numbers, tokens `stride` apart) to place `slot` of the pool."""
    col = tl.arange(0, BLOCK)
    live = (head < HEADS)[:, None] & (col < DIM)[None, :]
    within = head[:, None] * DIM + col[None, :]
    value = tl.load(source + token * stride + within, mask=live, other=0.0)
    target = pool + slot * (HEADS * DIM) + within
    if LARGEST == 0:
        tl.store(target, value.to(pool.dtype.element_ty), mask=live)
    else:
        wide = value.to(tl.float32)
        scale = head_scale(tl.max(tl.abs(wide), axis=1), LARGEST)
        tl.store(target, encode(wide, scale[:, None], pool.dtype.element_ty, LARGEST), mask=live)
        tl.store(scales + slot * HEADS + head, scale, mask=head < HEADS)


# The index lies anywhere in one upload of many arrays.
@triton.jit(do_not_specialize_on_alignment=["index"])
def _kv_write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    pool_k: tl.tensor,
    pool_v: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    index: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(index + token).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    copy_heads(k, pool_k, k_scale, token, slot, head, k_stride, HEADS, K_DIM, K_BLOCK, LARGEST)
    copy_heads(v, pool_v, v_scale, token, slot, head, v_stride, HEADS, V_DIM, V_BLOCK, LARGEST)


def _token_major(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    kv_index: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Copy k[t], v[t] to pool_k[kv_index[t]], pool_v[kv_index[t]].

    Args:
        k, v: [T, kv_heads, head_dim], float; head sizes of k and v may differ.
        pool_k, pool_v: [tokens, kv_heads, head_dim], contiguous; k's dtype, or one of `kv_quant.LARGEST`.
        kv_index: int64 [T], in [0, tokens). Tokens with the same index leave the numbers of any of them there.
        k_scale, v_scale: float32 [tokens, kv_heads], written beside a quantised pool; None otherwise.
    """
    tokens, heads = k.shape[:2]
    if not tokens:
        return
    k, v = _token_major(k), _token_major(v)
    _kv_write_kernel[(tokens, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        k,
        v,
        pool_k,
        pool_v,
        pool_k if k_scale is None else k_scale,
        pool_v if v_scale is None else v_scale,
        kv_index,
        k.stride(0),
        v.stride(0),
        HEADS=heads,
        K_DIM=k.shape[2],
        V_DIM=v.shape[2],
        BLOCK_HEADS=min(_HEADS_PER_PROGRAM, next_power_of_2(heads)),
        K_BLOCK=next_power_of_2(k.shape[2]),
        V_BLOCK=next_power_of_2(v.shape[2]),
        LARGEST=LARGEST.get(pool_k.dtype, 0.0),
        num_warps=4,
    )


def kv_write_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    kv_index: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Torch twin of `kv_write`."""
    if k_scale is None or v_scale is None:
        pool_k.index_copy_(0, kv_index, k)
        pool_v.index_copy_(0, kv_index, v)
        return
    for x, pool, scales in ((k, pool_k, k_scale), (v, pool_v, v_scale)):
        values, scale = quantise(x, pool.dtype)
        # As bytes: torch copies no float8 by index on the CPU.
        pool.view(torch.int8).index_copy_(0, kv_index, values.view(torch.int8))
        scales.index_copy_(0, kv_index, scale)
