"""Paged attention of one query token a row (decode), grouped heads packed, split over the context.

A program takes one KV head of one item of a work list: a stretch of one row's context, with all query heads of the group
as the rows of its tile (grouped-query attention, arXiv 2305.13245; split over keys as in Flash-Decoding, Dao et al. 2023).
Of a row's programs the one that ends last joins the stretches by their log-sum-exp, in the order of the context, so the
sums do not depend on who that is. How rows are cut is the list's business.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import DecodeConfig, decode_config, next_power_of_2
from inferserve.kernels.paged_kv import (
    ALL_SEEN,
    HEADER,
    ITEM,
    UP_TO_END,
    PagedKv,
    Scores,
    attend_ref,
    attend_tile,
    constants,
    tokens_at,
)

_LEAST_DOT_ROWS = 16
"""tl.dot wants at least this many rows."""

_ITEM = tl.constexpr(ITEM)


class DecodeSpace(NamedTuple):
    """Where stretches leave their results until a row's last program joins them; one for all layers of a step.

    Attributes:
        part: float32 [items x q_heads x D'].
        lse: float32 [items x q_heads], log2 of the sums of the weights.
        arrived: int32 [items x kv_heads]; zeros before and after each launch.
    """

    part: torch.Tensor
    lse: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def empty(items: int, kv_heads: int, group: int, value_dim: int, device: torch.device) -> DecodeSpace:
        """Room for work lists of up to `items` decode items."""
        heads = items * kv_heads * group
        return DecodeSpace(
            torch.empty(heads * value_dim, dtype=torch.float32, device=device),
            torch.empty(heads, dtype=torch.float32, device=device),
            torch.zeros(items * kv_heads, dtype=torch.int32, device=device),
        )


@triton.jit
def _join(
    part: tl.tensor,
    lse: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
    S_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Sum of the partial results [first, stop) of one KV head, float32 [G_BLOCK, DV_BLOCK]."""
    head = tl.minimum(tl.arange(0, G_BLOCK), GROUP - 1)
    dv = tl.arange(0, DV_BLOCK)
    best = tl.full((G_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((G_BLOCK,), tl.float32)
    acc = tl.zeros((G_BLOCK, DV_BLOCK), tl.float32)
    for at in range(first, stop, S_BLOCK):
        slot = at + tl.arange(0, S_BLOCK)
        source = (slot[:, None] * KV_HEADS + kv_head) * GROUP + head[None, :]
        # Other programs wrote them during this launch: around the first-level cache.
        log = tl.load(lse + source, mask=(slot < stop)[:, None], other=float("-inf"), cache_modifier=".cg")
        value = tl.load(
            part + source.to(tl.int64)[:, :, None] * DV + dv[None, None, :],
            mask=(slot < stop)[:, None, None] & (dv < DV)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        peak = tl.maximum(best, tl.max(log, axis=0))
        decay, weight = tl.exp2(best - peak), tl.exp2(log - peak[None, :])
        acc = acc * decay[:, None] + tl.sum(value * weight[:, :, None], axis=0)
        total = total * decay + tl.sum(weight, axis=0)
        best = peak
    return acc / total[:, None]


# The list lies anywhere in one upload of many arrays.
@triton.jit(do_not_specialize_on_alignment=["work"])
def _decode_kernel(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    table: tl.tensor,
    work: tl.tensor,
    out: tl.tensor,
    part: tl.tensor,
    lse: tl.tensor,
    arrived: tl.tensor,
    factor: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    table_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LARGEST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    FIRST_ITEM: tl.constexpr,
    G_BLOCK: tl.constexpr,
    S_BLOCK: tl.constexpr,
) -> None:
    head = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, D_BLOCK)
    dv = tl.arange(0, DV_BLOCK)
    kept = (head < GROUP)[:, None] & (dv < DV)[None, :]
    # Neighbouring programs read neighbouring heads of the same tokens.
    for unit in range(tl.program_id(0), tl.load(work) * KV_HEADS, tl.num_programs(0)):
        kv_head = unit % KV_HEADS
        item = work + FIRST_ITEM + unit // KV_HEADS * _ITEM
        row = tl.load(item)
        token = tl.load(item + 1)
        length = tl.load(item + 2)
        stretch = tl.load(item + 3)
        number = tl.load(item + 4)
        slot = tl.load(item + 5)
        first = 0
        if WINDOWED:
            first = tl.maximum(length - window, 0)
        unseen = first // stretch
        if number >= unseen:
            begin = tl.maximum(number * stretch, first)
            end = tl.minimum(number * stretch + stretch, length)
            whole = begin + (end - begin) // BLOCK_N * BLOCK_N
            pages = table + row.to(tl.int64) * table_stride
            at_query = token.to(tl.int64) * q_stride_token + kv_head * GROUP * q_stride_head
            query = tl.load(
                q + at_query + head[:, None] * q_stride_head + d[None, :],
                mask=(head < GROUP)[:, None] & (d < D)[None, :],
                other=0.0,
            )
            if LARGEST and query.dtype == tl.bfloat16:
                query = query.to(tl.float16)
            best = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
            sums = tl.zeros((GROUP_BLOCK, BLOCK_N), tl.float32)
            acc = tl.zeros((GROUP_BLOCK, DV_BLOCK), tl.float32)
            # The places of a tile are there one tile before its keys are asked for.
            tokens = tokens_at(pages, begin, end, BLOCK_N)
            for at in range(begin, whole, BLOCK_N):
                following = tokens_at(pages, at + BLOCK_N, end, BLOCK_N)
                best, sums, acc = attend_tile(
                    query, best, sums, acc, k_pool, v_pool, k_scale, v_scale, tokens, at, end, head, kv_head,
                    factor, cap, window, KV_HEADS, D, DV, D_BLOCK, DV_BLOCK, BLOCK_N, LARGEST, SOFTCAP, WINDOWED, ALL_SEEN, True,
                )  # fmt: skip
                tokens = following
            for at in tl.range(whole, end, BLOCK_N, num_stages=1):
                best, sums, acc = attend_tile(
                    query, best, sums, acc, k_pool, v_pool, k_scale, v_scale, tokens, at, end, head, kv_head,
                    factor, cap, window, KV_HEADS, D, DV, D_BLOCK, DV_BLOCK, BLOCK_N, LARGEST, SOFTCAP, WINDOWED, UP_TO_END, True,
                )  # fmt: skip
            total = tl.sum(sums, axis=1)
            acc = acc / total[:, None]
            if LARGEST:
                acc = acc * (1.0 / LARGEST)
            at_out = (token.to(tl.int64) * KV_HEADS + kv_head) * GROUP
            stretches = tl.cdiv(length, stretch) - unseen
            if stretches == 1:
                tl.store(out + (at_out + head)[:, None] * DV + dv[None, :], acc.to(out.dtype.element_ty), mask=kept)
            else:
                source = ((slot + number) * KV_HEADS + kv_head).to(tl.int64) * GROUP + head
                tl.store(part + source[:, None] * DV + dv[None, :], acc, mask=kept)
                tl.store(lse + source, best + tl.log2(total), mask=head < GROUP)
                # All threads' stores before one thread's release, and that one's acquire before all threads' loads.
                tl.debug_barrier()
                counter = arrived + slot * KV_HEADS + kv_head
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == stretches - 1:
                    joined = _join(
                        part, lse, slot + unseen, slot + unseen + stretches, kv_head,
                        KV_HEADS, GROUP, DV, DV_BLOCK, G_BLOCK, S_BLOCK,
                    )  # fmt: skip
                    g = tl.arange(0, G_BLOCK)
                    tl.store(
                        out + (at_out + g)[:, None] * DV + dv[None, :],
                        joined.to(out.dtype.element_ty),
                        mask=(g < GROUP)[:, None] & (dv < DV)[None, :],
                    )
                    tl.store(counter, 0)


def decode_attention(
    q: torch.Tensor,
    kv: PagedKv,
    table: torch.Tensor,
    work: torch.Tensor,
    out: torch.Tensor,
    space: DecodeSpace,
    scores: Scores,
    *,
    items: int,
    programs: int,
    config: DecodeConfig | None = None,
) -> None:
    """Attend with single tokens over their rows' pages, as the decode items of a work list say.

    Args:
        q: [T, q_heads, D], last dimension contiguous.
        kv: the layer's pool; the K and V of every key that is attended to are there.
        table: int32 [max_rows, max_len], pool index of each position of each row.
        work: int32, HEADER numbers of which the first is the count of decode items, then ITEM numbers an item: row of
            the table, token of q and out, length (the token stands at position length - 1), keys of a stretch, number
            of this stretch, where the row's partial results begin, 0, 0. A row has all its cdiv(length, stretch) items.
        out: [T, q_heads, D'], contiguous; the items' tokens are written, others left alone.
        space: room for `items` items.
        items: at least the count in the list; 0 launches nothing.
        programs: most programs to launch; they share the items.
    """
    if not items:
        return
    kv_heads, group = kv.k.shape[1], q.shape[1] // kv.k.shape[1]
    config = config or decode_config(max(q.shape[2], out.shape[2]), kv.k.element_size(), q.element_size())
    g_block, dv_block = next_power_of_2(group), next_power_of_2(out.shape[2])
    _decode_kernel[(min(items * kv_heads, programs),)](
        q,
        kv.k,
        kv.v,
        kv.k_scale if kv.k_scale is not None else kv.k,
        kv.v_scale if kv.v_scale is not None else kv.v,
        table,
        work,
        out,
        *space,
        *scores.launch(),
        q.stride(0),
        q.stride(1),
        table.stride(0),
        GROUP_BLOCK=max(_LEAST_DOT_ROWS, g_block),
        BLOCK_N=config.block_n,
        FIRST_ITEM=HEADER,
        G_BLOCK=g_block,
        S_BLOCK=max(1, min(16, config.join // (g_block * dv_block))),
        num_warps=config.warps,
        num_stages=config.stages,
        **constants(q, kv, scores),
    )


def decode_attention_ref(
    q: torch.Tensor,
    kv: PagedKv,
    table: torch.Tensor,
    work: torch.Tensor,
    out: torch.Tensor,
    space: DecodeSpace,
    scores: Scores,
    *,
    items: int,
    programs: int,
    config: DecodeConfig | None = None,
) -> None:
    """Torch twin of `decode_attention`, in float32, a row at a time, whatever the stretches."""
    listed = work[HEADER : HEADER + ITEM * int(work[0])].view(-1, ITEM).tolist()
    for row, token, length, _, number, *_ in listed:
        if number == 0:
            pages = table[row, :length].to(torch.int64)
            position = torch.tensor([length - 1], device=q.device)
            out[token] = attend_ref(q[token, None], kv, pages, position, scores)[0].to(out.dtype)
