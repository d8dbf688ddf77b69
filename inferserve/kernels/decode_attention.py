"""Paged attention of one query token a row (decode), grouped heads packed, split over the context.

Each program reads one KV head of one fixed-length stretch of one row's context, with all query heads of the group as
the rows of its tile (grouped-query attention, arXiv 2305.13245; split over keys as in Flash-Decoding, Dao et al. 2023).
A second kernel joins the stretches by their log-sum-exp. How long a stretch is follows from the row's own length, so
its result does not depend on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import decode_config, next_power_of_2

_LEAST_DOT_ROWS = 16
"""tl.dot wants at least this many rows."""

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _stretch(visible: tl.tensor, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr) -> tl.tensor:
    """Keys per program of a row: SPLIT, or the multiple of it that needs no more than MAX_SPLITS programs."""
    return tl.cdiv(tl.cdiv(visible, MAX_SPLITS), SPLIT) * SPLIT


# Rows lie anywhere in one upload of many arrays; the number of stretches changes from step to step.
@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["rows", "kv_len"])
def _decode_kernel(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    kv_len: tl.tensor,
    out: tl.tensor,
    part: tl.tensor,
    part_lse: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    q_stride_row: tl.tensor,
    q_stride_head: tl.tensor,
    table_stride: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WHOLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    length = tl.load(kv_len + row)
    first = tl.maximum(length - window, 0) if window > 0 else 0
    stretch = _stretch(length - first, SPLIT, MAX_SPLITS)
    begin = first + split * stretch
    end = tl.minimum(begin + stretch, length)
    if begin >= length:
        return
    pages = table + tl.load(rows + row).to(tl.int64) * table_stride
    head = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, D_BLOCK)
    dv = tl.arange(0, DV_BLOCK)
    q_offset = row.to(tl.int64) * q_stride_row + (kv_head * GROUP + head)[:, None] * q_stride_head + d[None, :]
    query = tl.load(q + q_offset, mask=(head < GROUP)[:, None] & (d < D)[None, :], other=0.0)
    best = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    acc = tl.zeros((GROUP_BLOCK, DV_BLOCK), tl.float32)
    for position in range(begin, end, BLOCK_N):
        n = position + tl.arange(0, BLOCK_N)
        live = n < end
        token = tl.load(pages + n, mask=live, other=0).to(tl.int64) * kv_heads + kv_head
        key = tl.load(k_pool + token[None, :] * D + d[:, None], mask=live[None, :] & (d < D)[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee")
        if SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score * scale / softcap) - 1.0) * LOG2_E
        else:
            score = score * (scale * LOG2_E)
        score = tl.where(live[None, :], score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp2(score - peak[:, None])
        decay = tl.exp2(best - peak)
        value = tl.load(v_pool + token[:, None] * DV + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0.0)
        acc = acc * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * decay + tl.sum(weight, axis=1)
        best = peak
    acc = acc / total[:, None]
    target = row.to(tl.int64) * (kv_heads * GROUP) + kv_head * GROUP + head
    kept = (head < GROUP)[:, None] & (dv < DV)[None, :]
    if WHOLE:
        tl.store(out + target[:, None] * DV + dv[None, :], acc.to(out.dtype.element_ty), mask=kept)
    else:
        target = target * splits + split
        tl.store(part + target[:, None] * DV + dv[None, :], acc, mask=kept)
        tl.store(part_lse + target, best + tl.log2(total), mask=head < GROUP)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["kv_len"])
def _combine_kernel(
    part: tl.tensor,
    part_lse: tl.tensor,
    kv_len: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    splits: tl.tensor,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    target = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(kv_len + row)
    visible = tl.minimum(length, window) if window > 0 else length
    dv = tl.arange(0, DV_BLOCK)
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((DV_BLOCK,), tl.float32)
    for split in range(tl.cdiv(visible, _stretch(visible, SPLIT, MAX_SPLITS))):
        lse = tl.load(part_lse + target * splits + split)
        value = tl.load(part + (target * splits + split) * DV + dv, mask=dv < DV, other=0.0)
        peak = tl.maximum(best, lse)
        decay, weight = tl.exp2(best - peak), tl.exp2(lse - peak)
        acc = acc * decay + value * weight
        total = total * decay + weight
        best = peak
    tl.store(out + target * DV + dv, (acc / total).to(out.dtype.element_ty), mask=dv < DV)


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    kv_len: torch.Tensor,
    out: torch.Tensor,
    *,
    max_kv_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Attend with the newest token of each row over its pages.

    Args:
        q: [R, q_heads, D], last dimension contiguous; row r stands at position kv_len[r] - 1.
        k_pool, v_pool: [tokens, kv_heads, D] and [tokens, kv_heads, D'], contiguous, q's dtype.
        table: int32 [max_rows, max_len], pool index of each position of each row.
        rows, kv_len: int32 [R]; kv_len >= 1 counts the newest token, whose K and V are already in the pool.
        out: [R, q_heads, D'], contiguous; every element is written.
        max_kv_len: at least max(kv_len).
        window: visible keys, counted back from the newest; 0 = all.
        softcap: scores become softcap * tanh(score / softcap); 0 = off.
    """
    count, q_heads, head_dim = q.shape
    if not count:
        return
    kv_heads, value_dim = k_pool.shape[1], v_pool.shape[2]
    group = q_heads // kv_heads
    config = decode_config(max(head_dim, value_dim), q.element_size())
    visible = min(max_kv_len, window) if window else max_kv_len
    splits = min(triton.cdiv(visible, config.split), config.max_splits)
    part = part_lse = out
    if splits > 1:
        part = torch.empty((count, q_heads, splits, value_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((count, q_heads, splits), dtype=torch.float32, device=q.device)
    _decode_kernel[(count, kv_heads, splits)](
        q,
        k_pool,
        v_pool,
        table,
        rows,
        kv_len,
        out,
        part,
        part_lse,
        scale,
        softcap,
        window,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        splits,
        GROUP=group,
        GROUP_BLOCK=max(_LEAST_DOT_ROWS, next_power_of_2(group)),
        D=head_dim,
        DV=value_dim,
        D_BLOCK=next_power_of_2(head_dim),
        DV_BLOCK=next_power_of_2(value_dim),
        BLOCK_N=config.block_n,
        SPLIT=config.split,
        MAX_SPLITS=config.max_splits,
        WHOLE=splits == 1,
        SOFTCAP=softcap > 0,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if splits > 1:
        _combine_kernel[(count, q_heads)](
            part,
            part_lse,
            kv_len,
            out,
            window,
            splits,
            DV=value_dim,
            DV_BLOCK=next_power_of_2(value_dim),
            SPLIT=config.split,
            MAX_SPLITS=config.max_splits,
            num_warps=2,
        )


def decode_attention_ref(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    kv_len: torch.Tensor,
    out: torch.Tensor,
    *,
    max_kv_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Torch twin of `decode_attention`, in float32, a row at a time."""
    group = q.shape[1] // k_pool.shape[1]
    for r, (row, length) in enumerate(zip(rows.tolist(), kv_len.tolist(), strict=True)):
        pages = table[row, max(0, length - window) if window else 0 : length].to(torch.int64)
        key = k_pool[pages].float().repeat_interleave(group, dim=1)
        value = v_pool[pages].float().repeat_interleave(group, dim=1)
        score = torch.einsum("hd,nhd->hn", q[r].float(), key) * scale
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        out[r] = torch.einsum("hn,nhd->hd", score.softmax(-1), value).to(out.dtype)
