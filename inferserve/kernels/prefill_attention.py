"""Paged causal attention of chunks of query tokens over cached prefix and chunk (prefill), grouped heads packed.

A program takes one KV head of one tile of a work list. A tile's rows are (token, head of the group) pairs that share the
KV head, so each gathered key serves the whole group. The online softmax is FlashAttention-2's (Dao, arXiv 2307.08691).
Keys are taken in tiles that start at multiples of BLOCK_N, so that a query's sums do not depend on its chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import PrefillConfig, prefill_config
from inferserve.kernels.paged_kv import (
    ALL_SEEN,
    CAUSAL,
    ITEM,
    PagedKv,
    Scores,
    attend_ref,
    attend_tile,
    constants,
    tokens_at,
)

_ITEM = tl.constexpr(ITEM)


# The list lies anywhere in one upload of many arrays, its tiles behind any number of items.
@triton.jit(do_not_specialize=["first_tile"], do_not_specialize_on_alignment=["work"])
def _prefill_kernel(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    table: tl.tensor,
    work: tl.tensor,
    out: tl.tensor,
    factor: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    first_tile: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    table_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LARGEST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    d = tl.arange(0, D_BLOCK)
    dv = tl.arange(0, DV_BLOCK)
    for unit in range(tl.program_id(0), tl.load(work + 1) * KV_HEADS, tl.num_programs(0)):
        kv_head = unit % KV_HEADS
        item = work + first_tile + unit // KV_HEADS * _ITEM
        row = tl.load(item)
        start = tl.load(item + 1)
        queries = tl.load(item + 2)
        length = tl.load(item + 3)
        tile = tl.load(item + 4)
        before = length - queries
        pages = table + row.to(tl.int64) * table_stride
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        token = m // GROUP
        head = kv_head * GROUP + m % GROUP
        real = token < queries
        position = before + token
        at_query = (start + token).to(tl.int64)
        query = tl.load(
            q + at_query[:, None] * q_stride_token + head[:, None] * q_stride_head + d[None, :],
            mask=real[:, None] & (d < D)[None, :],
            other=0.0,
        )
        if LARGEST and query.dtype == tl.bfloat16:
            query = query.to(tl.float16)
        best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, DV_BLOCK), tl.float32)
        oldest = before + (tile * BLOCK_M) // GROUP
        newest = before + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
        # Tiles of keys that all queries see whole need no mask: from `inner` to `diagonal`.
        diagonal = (oldest + 1) // BLOCK_N * BLOCK_N
        begin = 0
        inner = 0
        if WINDOWED:
            begin = tl.maximum(oldest - window + 1, 0) // BLOCK_N * BLOCK_N
            inner = tl.minimum(tl.cdiv(tl.maximum(newest - window + 1, 0), BLOCK_N) * BLOCK_N, diagonal)
        # The places of a tile are there one tile before its keys are asked for.
        if WINDOWED:
            tokens = tokens_at(pages, begin, length, BLOCK_N)
            for at in tl.range(begin, inner, BLOCK_N, num_stages=1):
                following = tokens_at(pages, at + BLOCK_N, length, BLOCK_N)
                best, total, acc = attend_tile(
                    query, best, total, acc, k_pool, v_pool, k_scale, v_scale, tokens, at, length, position, kv_head,
                    factor, cap, window, KV_HEADS, D, DV, D_BLOCK, DV_BLOCK, BLOCK_N, LARGEST, SOFTCAP, WINDOWED, CAUSAL, False,
                )  # fmt: skip
                tokens = following
        if inner < diagonal:
            tokens = tokens_at(pages, inner, length, BLOCK_N)
            for at in range(inner, diagonal, BLOCK_N):
                following = tokens_at(pages, at + BLOCK_N, length, BLOCK_N)
                best, total, acc = attend_tile(
                    query, best, total, acc, k_pool, v_pool, k_scale, v_scale, tokens, at, length, position, kv_head,
                    factor, cap, window, KV_HEADS, D, DV, D_BLOCK, DV_BLOCK, BLOCK_N, LARGEST, SOFTCAP, WINDOWED, ALL_SEEN, False,
                )  # fmt: skip
                tokens = following
        tokens = tokens_at(pages, diagonal, length, BLOCK_N)
        for at in tl.range(diagonal, newest + 1, BLOCK_N, num_stages=1):
            following = tokens_at(pages, at + BLOCK_N, length, BLOCK_N)
            best, total, acc = attend_tile(
                query, best, total, acc, k_pool, v_pool, k_scale, v_scale, tokens, at, length, position, kv_head,
                factor, cap, window, KV_HEADS, D, DV, D_BLOCK, DV_BLOCK, BLOCK_N, LARGEST, SOFTCAP, WINDOWED, CAUSAL, False,
            )  # fmt: skip
            tokens = following
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        if LARGEST:
            acc = acc * (1.0 / LARGEST)
        target = (at_query * (KV_HEADS * GROUP) + head)[:, None] * DV + dv[None, :]
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])


def prefill_attention(
    q: torch.Tensor,
    kv: PagedKv,
    table: torch.Tensor,
    work: torch.Tensor,
    out: torch.Tensor,
    scores: Scores,
    *,
    first_tile: int,
    tiles: int,
    programs: int,
    config: PrefillConfig | None = None,
) -> None:
    """Attend causally with each chunk over all its row's pages, the chunk's own included, as a work list's tiles say.

    Args:
        q: [T, q_heads, D], last dimension contiguous.
        kv: the layer's pool; the chunks' K and V are already there.
        table: int32 [max_rows, max_len], pool index of each position of each row.
        work: int32, HEADER numbers of which the second is the count of tiles; from `first_tile` on, ITEM numbers a tile:
            row of the table, the chunk's first token in q and out, its queries (the last ones of the row), the row's
            length, number of the tile within the chunk, 0, 0, 0. A chunk has all its cdiv(queries x group, tile rows).
        out: [T, q_heads, D'], contiguous; the chunks' tokens are written, others left alone.
        tiles: at least the count in the list; 0 launches nothing.
        programs: most programs to launch; they share the tiles.
    """
    if not tiles:
        return
    config = config or prefill_config(max(q.shape[2], out.shape[2]), kv.k.element_size(), q.element_size())
    _prefill_kernel[(min(tiles * kv.k.shape[1], programs),)](
        q,
        kv.k,
        kv.v,
        kv.k_scale if kv.k_scale is not None else kv.k,
        kv.v_scale if kv.v_scale is not None else kv.v,
        table,
        work,
        out,
        *scores.launch(),
        first_tile,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.warps,
        num_stages=config.stages,
        **constants(q, kv, scores),
    )


def prefill_attention_ref(
    q: torch.Tensor,
    kv: PagedKv,
    table: torch.Tensor,
    work: torch.Tensor,
    out: torch.Tensor,
    scores: Scores,
    *,
    first_tile: int,
    tiles: int,
    programs: int,
    config: PrefillConfig | None = None,
) -> None:
    """Torch twin of `prefill_attention`, in float32, a chunk at a time, whatever the tiles."""
    listed = work[first_tile : first_tile + ITEM * int(work[1])].view(-1, ITEM).tolist()
    for row, start, queries, length, tile, *_ in listed:
        if tile == 0:
            span = slice(start, start + queries)
            position = torch.arange(length - queries, length, device=q.device)
            out[span] = attend_ref(q[span], kv, table[row, :length].to(torch.int64), position, scores).to(out.dtype)
