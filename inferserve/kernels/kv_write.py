"""Scatter a step's K and V into the paged pool. Knows nothing of rows: one index a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import next_power_of_2


# The index lies anywhere in one upload of many arrays.
@triton.jit(do_not_specialize_on_alignment=["index"])
def _kv_write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    pool_k: tl.tensor,
    pool_v: tl.tensor,
    index: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    k_width: tl.tensor,
    v_width: tl.tensor,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(index + token).to(tl.int64)
    col = tl.arange(0, K_BLOCK)
    tl.store(pool_k + slot * k_width + col, tl.load(k + token * k_stride + col, mask=col < k_width), mask=col < k_width)
    col = tl.arange(0, V_BLOCK)
    tl.store(pool_v + slot * v_width + col, tl.load(v + token * v_stride + col, mask=col < v_width), mask=col < v_width)


def _token_major(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def kv_write(
    k: torch.Tensor, v: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor, kv_index: torch.Tensor
) -> None:
    """Copy k[t], v[t] to pool_k[kv_index[t]], pool_v[kv_index[t]].

    Args:
        k, v: [T, kv_heads, head_dim], the pool's dtype; head sizes of k and v may differ.
        pool_k, pool_v: [tokens, kv_heads, head_dim], contiguous.
        kv_index: int64 [T], in [0, tokens), no two alike.
    """
    if not k.shape[0]:
        return
    k, v = _token_major(k), _token_major(v)
    k_width, v_width = k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]
    _kv_write_kernel[(k.shape[0],)](
        k,
        v,
        pool_k,
        pool_v,
        kv_index,
        k.stride(0),
        v.stride(0),
        k_width,
        v_width,
        K_BLOCK=next_power_of_2(k_width),
        V_BLOCK=next_power_of_2(v_width),
        num_warps=4,
    )


def kv_write_ref(
    k: torch.Tensor, v: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor, kv_index: torch.Tensor
) -> None:
    """Torch twin of `kv_write`."""
    pool_k.index_copy_(0, kv_index, k)
    pool_v.index_copy_(0, kv_index, v)
