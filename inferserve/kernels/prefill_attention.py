"""Paged causal attention of chunks of query tokens over cached prefix and chunk (prefill), grouped heads packed.

A tile's rows are (token, head of the group) pairs that share one KV head, so each gathered key serves the whole group.
The online softmax is FlashAttention-2's (Dao, arXiv 2307.08691).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import next_power_of_2, prefill_config

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_tile(
    query: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    pages: tl.tensor,
    key_start: tl.tensor,
    end: tl.tensor,
    position: tl.tensor,
    kv_head: tl.tensor,
    kv_heads: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """One step of the online softmax, in powers of two. Not MASKED: every query sees every key of the tile."""
    n = key_start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_BLOCK)
    dv = tl.arange(0, DV_BLOCK)
    live = n < end
    slot = tl.load(pages + n, mask=live, other=0).to(tl.int64) * kv_heads + kv_head
    k_at = k_pool + slot[None, :] * D + d[:, None]
    v_at = v_pool + slot[:, None] * DV + dv[None, :]
    if MASKED:
        key = tl.load(k_at, mask=live[None, :] & (d < D)[:, None], other=0.0)
        value = tl.load(v_at, mask=live[:, None] & (dv < DV)[None, :], other=0.0)
    else:
        key = tl.load(k_at, mask=(d < D)[:, None], other=0.0)
        value = tl.load(v_at, mask=(dv < DV)[None, :], other=0.0)
    score = tl.dot(query, key, input_precision="ieee")
    if SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score * scale / softcap) - 1.0) * LOG2_E
    else:
        score = score * (scale * LOG2_E)
    if MASKED:
        seen = live[None, :] & (n[None, :] <= position[:, None])
        if window > 0:
            seen = seen & (n[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    peak = tl.maximum(best, tl.max(score, axis=1))
    anchor = peak
    if MASKED:
        # A query whose window starts in a later tile has seen nothing yet: -inf - -inf must not become NaN.
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score - anchor[:, None])
    decay = tl.exp2(best - anchor)
    acc = acc * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    total = total * decay + tl.sum(weight, axis=1)
    return peak, total, acc


# Rows lie anywhere in one upload of many arrays, behind the decode rows.
@triton.jit(do_not_specialize_on_alignment=["rows", "query_start", "kv_len"])
def _prefill_kernel(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    query_start: tl.tensor,
    kv_len: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of a chunk start first
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    start = tl.load(query_start + row)
    queries = tl.load(query_start + row + 1) - start
    if tile * BLOCK_M >= queries * GROUP:
        return
    length = tl.load(kv_len + row)
    before = length - queries
    pages = table + tl.load(rows + row).to(tl.int64) * table_stride
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP
    real = token < queries
    position = before + token
    d = tl.arange(0, D_BLOCK)
    dv = tl.arange(0, DV_BLOCK)
    q_offset = (start + token).to(tl.int64)[:, None] * q_stride_token + head[:, None] * q_stride_head + d[None, :]
    query = tl.load(q + q_offset, mask=real[:, None] & (d < D)[None, :], other=0.0)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DV_BLOCK), tl.float32)
    oldest = before + (tile * BLOCK_M) // GROUP
    begin = tl.maximum(oldest - window + 1, 0) if window > 0 else 0
    end = tl.minimum(before + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, length)
    # Tiles of keys that even the oldest query sees whole need no mask; with a window, every tile may need one.
    diagonal = begin if window > 0 else (oldest + 1) // BLOCK_N * BLOCK_N
    for key_start in range(begin, diagonal, BLOCK_N):
        best, total, acc = _attend_tile(
            query, best, total, acc, k_pool, v_pool, pages, key_start, end, position, kv_head, kv_heads,
            scale, softcap, window, D, DV, D_BLOCK, DV_BLOCK, BLOCK_N, SOFTCAP, False,
        )  # fmt: skip
    for key_start in range(diagonal, end, BLOCK_N):
        best, total, acc = _attend_tile(
            query, best, total, acc, k_pool, v_pool, pages, key_start, end, position, kv_head, kv_heads,
            scale, softcap, window, D, DV, D_BLOCK, DV_BLOCK, BLOCK_N, SOFTCAP, True,
        )  # fmt: skip
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = ((start + token).to(tl.int64) * (kv_heads * GROUP) + head)[:, None] * DV + dv[None, :]
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    kv_len: torch.Tensor,
    out: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Attend causally with each row's chunk over all its pages, the chunk's own included.

    Args:
        q: [T, q_heads, D], last dimension contiguous; tokens query_start[r]..query_start[r + 1] are the last ones of
            row r's kv_len[r] positions.
        k_pool, v_pool: [tokens, kv_heads, D] and [tokens, kv_heads, D'], contiguous, q's dtype; the chunk's K and V
            are already there.
        table: int32 [max_rows, max_len], pool index of each position of each row.
        rows, kv_len: int32 [R]. query_start: int32 [R + 1].
        out: [T, q_heads, D'], contiguous; the tokens of these rows are written, others left alone.
        max_query_len: at least the longest chunk.
        window: a query sees itself and the window - 1 keys before it; 0 = all.
        softcap: scores become softcap * tanh(score / softcap); 0 = off.
    """
    q_heads, head_dim = q.shape[1], q.shape[2]
    count, kv_heads, value_dim = rows.shape[0], k_pool.shape[1], v_pool.shape[2]
    if not count:
        return
    group = q_heads // kv_heads
    config = prefill_config(max(head_dim, value_dim), q.element_size())
    _prefill_kernel[(triton.cdiv(max_query_len * group, config.block_m), kv_heads, count)](
        q,
        k_pool,
        v_pool,
        table,
        rows,
        query_start,
        kv_len,
        out,
        scale,
        softcap,
        window,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        GROUP=group,
        D=head_dim,
        DV=value_dim,
        D_BLOCK=next_power_of_2(head_dim),
        DV_BLOCK=next_power_of_2(value_dim),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SOFTCAP=softcap > 0,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def prefill_attention_ref(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    kv_len: torch.Tensor,
    out: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Torch twin of `prefill_attention`, in float32, a row at a time."""
    group = q.shape[1] // k_pool.shape[1]
    starts = query_start.tolist()
    for r, (row, length) in enumerate(zip(rows.tolist(), kv_len.tolist(), strict=True)):
        span = slice(starts[r], starts[r + 1])
        pages = table[row, :length].to(torch.int64)
        key = k_pool[pages].float().repeat_interleave(group, dim=1)
        value = v_pool[pages].float().repeat_interleave(group, dim=1)
        score = torch.einsum("qhd,nhd->hqn", q[span].float(), key) * scale
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        n = torch.arange(length, device=q.device)[None, :]
        position = torch.arange(length - (starts[r + 1] - starts[r]), length, device=q.device)[:, None]
        hidden = n > position
        if window:
            hidden |= n <= position - window
        score.masked_fill_(hidden, -torch.inf)
        out[span] = torch.einsum("hqn,nhd->qhd", score.softmax(-1), value).to(out.dtype)
