"""The likeliest token of each row in one pass over the logits, and whether the row makes sense at all.

Rows are cut into pieces so that few rows keep the device busy too; a second, tiny kernel joins the pieces. Ties go to
the lowest index whatever the cut, so the answer does not depend on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferserve.kernels.logit_pieces import ARGMAX, PIECES, cut


@triton.jit(do_not_specialize=["piece", "pieces"])
def _piece_kernel(
    logits: tl.tensor,
    peaks: tl.tensor,
    places: tl.tensor,
    stride: tl.tensor,
    n: tl.tensor,
    piece: tl.tensor,
    pieces: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    # Pieces are whole tiles, so the end of the row is the only mask; knowing that keeps loads 16 bytes wide.
    start = tl.multiple_of(tl.program_id(1) * piece, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), 0, tl.int32) + start
    broken = tl.zeros((BLOCK,), tl.int32)
    for step in range(0, tl.minimum(piece, n - start), BLOCK):
        col = start + tl.multiple_of(step, BLOCK) + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + col, mask=col < n, other=float("-inf")).to(tl.float32)
        broken |= ((value != value) | (value == float("inf"))).to(tl.int32)
        better = value > best
        best = tl.where(better, value, best)
        place = tl.where(better, col, place)
    peak = tl.max(best, axis=0)
    first = tl.min(tl.where(best == peak, place, 0x7FFFFFFF), axis=0)
    at = row * pieces + tl.program_id(1)
    # A piece that is not finite says so by a NaN in place of its peak.
    tl.store(peaks + at, tl.where(tl.max(broken, axis=0) > 0, float("nan"), peak))
    tl.store(places + at, first)


@triton.jit(do_not_specialize=["pieces"])
def _join_kernel(
    peaks: tl.tensor,
    places: tl.tensor,
    token_ids: tl.tensor,
    failed: tl.tensor,
    pieces: tl.tensor,
    PIECES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PIECES)
    peak = tl.load(peaks + row * pieces + at, mask=at < pieces, other=float("-inf"))
    place = tl.load(places + row * pieces + at, mask=at < pieces, other=0x7FFFFFFF)
    broken = tl.max((peak != peak).to(tl.int32), axis=0)
    peak = tl.where(peak == peak, peak, float("-inf"))
    highest = tl.max(peak, axis=0)
    first = tl.min(tl.where(peak == highest, place, 0x7FFFFFFF), axis=0)
    tl.store(token_ids + row, first.to(tl.int64))
    tl.store(failed + row, (broken > 0) | (highest == float("-inf")))


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index of the largest entry of each row.

    Args:
        logits: [S, V] float, last dimension contiguous, V >= 1.

    Returns: int64 [S], always in [0, V); bool [S], whether the row holds NaN or +inf, or nothing but -inf: its index
    is meaningless then.
    """
    rows, vocab = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    failed = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        pieces, piece = cut(rows, vocab, ARGMAX.block)
        peaks = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
        places = torch.empty((rows, pieces), dtype=torch.int32, device=logits.device)
        _piece_kernel[(rows, pieces)](
            logits,
            peaks,
            places,
            logits.stride(0),
            vocab,
            piece,
            pieces,
            BLOCK=ARGMAX.block,
            num_warps=ARGMAX.warps,
        )
        _join_kernel[(rows,)](peaks, places, token_ids, failed, pieces, PIECES=PIECES, num_warps=1)
    return token_ids, failed


def argmax_ref(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch twin of `argmax`."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # NumPy's argmax is vectorised and stops at NaN; torch's on the CPU is neither (7 times slower at 8 x 49152).
        token_ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
        peak = logits.gather(1, token_ids[:, None])[:, 0]
    else:
        peak, token_ids = logits.max(dim=-1)
    return token_ids, torch.isfinite(peak).logical_not_()
