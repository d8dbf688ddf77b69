"""Logprobs of the chosen tokens and the likeliest alternatives, for the rows that ask and without a copy of the logits.

The normaliser is an online log-sum-exp (Milakov and Gimelshein, arXiv 1805.02867) over pieces of a row, joined by a
second kernel. Alternatives are the best of each tile, and of those the best; a value and its index travel as one
integer that orders by value, then by lower index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.launch_config import next_power_of_2
from inferserve.kernels.logit_pieces import LOGPROBS, PIECES, cut

LOWEST_LOGPROB = -9999.0
"""Stands for the logprob of an impossible token: -inf has no JSON form."""

_NO_KEY = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["piece", "pieces"])
def _norm_kernel(
    logits: tl.tensor,
    index: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    stride: tl.tensor,
    n: tl.tensor,
    piece: tl.tensor,
    pieces: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.load(index + tl.program_id(0)).to(tl.int64)
    start = tl.multiple_of(tl.program_id(1) * piece, BLOCK)
    # Finite, so that -inf minus it is -inf.
    peak = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tl.minimum(piece, n - start), BLOCK):
        col = start + tl.multiple_of(step, BLOCK) + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + col, mask=col < n, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, value)
        total = total * tl.exp(peak - higher) + tl.exp(value - higher)
        peak = higher
    highest = tl.max(peak, axis=0)
    at = tl.program_id(0) * pieces + tl.program_id(1)
    tl.store(peaks + at, highest)
    tl.store(sums + at, tl.sum(total * tl.exp(peak - highest), axis=0))


@triton.jit(do_not_specialize=["count"])
def _best_kernel(
    logits: tl.tensor,
    index: tl.tensor,
    keys: tl.tensor,
    stride: tl.tensor,
    n: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Keys of the `count` best of each tile."""
    row = tl.load(index + tl.program_id(0)).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + col, mask=col < n, other=float("-inf")).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    # Floats as integers of the same order: the lower bits of negative ones count backwards.
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(col < n, (bits.to(tl.int64) << 32) | (0x7FFFFFFF - col).to(tl.int64), _NO_KEY)
    at = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * count
    for i in range(count):
        best = tl.max(key, axis=0)
        tl.store(keys + at + i, best)
        key = tl.where(key == best, _NO_KEY, key)


@triton.jit(do_not_specialize=["pieces", "count"])
def _join_kernel(
    logits: tl.tensor,
    index: tl.tensor,
    token_ids: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    keys: tl.tensor,
    logprobs: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    stride: tl.tensor,
    pieces: tl.tensor,
    tiles: tl.tensor,
    count: tl.tensor,
    LOWEST: tl.constexpr,
    PIECES: tl.constexpr,
    TILES: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    asker = tl.program_id(0).to(tl.int64)
    row = tl.load(index + asker).to(tl.int64)
    at = tl.arange(0, PIECES)
    peak = tl.load(peaks + asker * pieces + at, mask=at < pieces, other=-3.0e38)
    total = tl.load(sums + asker * pieces + at, mask=at < pieces, other=0.0)
    highest = tl.max(peak, axis=0)
    norm = highest + tl.log(tl.sum(total * tl.exp(peak - highest), axis=0))
    chosen = tl.load(logits + row * stride + tl.load(token_ids + row)).to(tl.float32)
    tl.store(logprobs + row, tl.maximum(chosen - norm, LOWEST))
    if count > 0:
        tile = tl.arange(0, TILES)[:, None]
        place = tl.arange(0, COUNT)[None, :]
        live = (tile < tiles) & (place < count)
        key = tl.load(keys + (asker * tiles + tile) * count + place, mask=live, other=_NO_KEY)
        for i in range(count):
            best = tl.max(key)
            key = tl.where(key == best, _NO_KEY, key)
            bits = (best >> 32).to(tl.int32)
            value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            tl.store(top_ids + asker * count + i, 0x7FFFFFFF - (best & 0x7FFFFFFF))
            tl.store(top_logprobs + asker * count + i, tl.maximum(value - norm, LOWEST))


MAX_COUNT = 32
"""Most alternatives a row may ask for."""


def logprobs(
    logits: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the logprobs of chosen tokens, find alternatives.

    Args:
        logits: [S, V] float, last dimension contiguous.
        index: int64 [L], rows that ask.
        token_ids: int64 [S], the chosen tokens, in [0, V).
        out: float32 [S], written at `index`; at least LOWEST_LOGPROB.
        count: alternatives wanted, 0 to min(V, MAX_COUNT).

    Returns: int64 [L, count] token ids of the likeliest, likeliest first, and float32 [L, count] their logprobs.
    """
    askers, vocab, device = index.shape[0], logits.shape[1], logits.device
    top_ids = torch.empty((askers, count), dtype=torch.int64, device=device)
    top_logprobs = torch.empty((askers, count), dtype=torch.float32, device=device)
    if not askers:
        return top_ids, top_logprobs
    block, stride = LOGPROBS.block, logits.stride(0)
    # As for a single row: how a sum is split must not depend on the rows beside it.
    pieces, piece = cut(1, vocab, block)
    peaks = torch.empty((askers, pieces), dtype=torch.float32, device=device)
    sums = torch.empty_like(peaks)
    _norm_kernel[(askers, pieces)](
        logits, index, peaks, sums, stride, vocab, piece, pieces, BLOCK=block, num_warps=LOGPROBS.warps
    )
    tiles = triton.cdiv(vocab, block)
    keys = torch.empty((askers, tiles, count), dtype=torch.int64, device=device)
    if count:
        _best_kernel[(askers, tiles)](logits, index, keys, stride, vocab, count, BLOCK=block, num_warps=LOGPROBS.warps)
    _join_kernel[(askers,)](
        logits,
        index,
        token_ids,
        peaks,
        sums,
        keys,
        out,
        top_ids,
        top_logprobs,
        stride,
        pieces,
        tiles,
        count,
        LOWEST=LOWEST_LOGPROB,
        PIECES=PIECES,
        TILES=next_power_of_2(tiles),
        COUNT=MAX_COUNT,
        num_warps=4,
    )
    return top_ids, top_logprobs


def logprobs_ref(
    logits: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch twin of `logprobs`."""
    raw = logits.index_select(0, index).float()
    norm = raw.logsumexp(-1, keepdim=True)
    chosen = raw.gather(1, token_ids.index_select(0, index)[:, None]) - norm
    out.index_copy_(0, index, chosen[:, 0].clamp_(min=LOWEST_LOGPROB))
    if not count:
        return token_ids.new_empty((len(index), 0)), norm[:, :0]
    values, ids = raw.topk(count, dim=-1)
    return ids, (values - norm).clamp_(min=LOWEST_LOGPROB)
