"""What decode and prefill attention share: one tile of keys and values, and the arguments of a launch.

Keys and values are gathered by token through the page table. In 8-bit pools the scale of a key multiplies its scores and
that of a value its weights, so numbers go into the products as they are stored. Knows no work lists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from inferserve.kernels.kv_quant import LARGEST, dequantise, is_quantised
from inferserve.kernels.launch_config import next_power_of_2

_LOG2_E = 1.4426950408889634

HEADER = 8
"""Int32s before the items of a work list: decode items, tiles, room for decode items, room for tiles, unused."""
ITEM = 8
"""Int32s of an item of a work list."""

ALL_SEEN = tl.constexpr(0)
"""Every query of the tile sees every key of the tile."""
UP_TO_END = tl.constexpr(1)
"""Every query sees the keys before `end`."""
CAUSAL = tl.constexpr(2)
"""A query sees the keys up to its own position, `window` at most."""


class PagedKv(NamedTuple):
    """One layer's part of the pool, all contiguous.

    Attributes:
        k, v: [places, kv_heads, D] and [places, kv_heads, D'], in q's dtype, float8_e4m3fn or int8.
        k_scale, v_scale: float32 [places, kv_heads]; None unless k and v are in 8 bits.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of pages int64 [n] as float32, for the twins."""
        if self.k_scale is None or self.v_scale is None:
            return self.k[pages].float(), self.v[pages].float()
        # torch indexes no 8-bit floats on every device, but their bits.
        k, v = (x.view(torch.uint8)[pages].view(x.dtype) for x in (self.k, self.v))
        scales = self.k_scale[pages], self.v_scale[pages]
        return dequantise(k, scales[0], torch.float32), dequantise(v, scales[1], torch.float32)


class Scores(NamedTuple):
    """From q·k to weights.

    Attributes:
        scale: multiplies q·k; > 0.
        window: visible keys, counted back from the query and itself included; 0 = all.
        softcap: scores become softcap * tanh(score / softcap); 0 = off.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0

    def launch(self) -> tuple[float, float, int]:
        """(factor, cap, window) as `attend_tile` takes them: scores in powers of two."""
        if self.softcap:
            return 2.0 * self.scale / self.softcap, self.softcap * _LOG2_E, self.window
        return self.scale * _LOG2_E, 0.0, self.window


def constants(q: torch.Tensor, kv: PagedKv, scores: Scores) -> dict[str, int | bool]:
    """Compile-time arguments that both kernels take: what follows from q [T, q_heads, D], the pool and the scores."""
    head_dim, value_dim = kv.k.shape[2], kv.v.shape[2]
    return {
        "KV_HEADS": kv.k.shape[1],
        "GROUP": q.shape[1] // kv.k.shape[1],
        "D": head_dim,
        "DV": value_dim,
        "D_BLOCK": next_power_of_2(head_dim),
        "DV_BLOCK": next_power_of_2(value_dim),
        "LARGEST": int(LARGEST[kv.k.dtype]) if is_quantised(kv.k.dtype) else 0,
        "SOFTCAP": scores.softcap > 0,
        "WINDOWED": scores.window > 0,
    }


def attend_ref(
    q: torch.Tensor, kv: PagedKv, pages: torch.Tensor, position: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attention of some queries of one row in float32, for the twins: q [n, q_heads, D] at position int64 [n],
    pages int64 [m] of the row's positions from 0 → [n, q_heads, D']."""
    key, value = (x.repeat_interleave(q.shape[1] // kv.k.shape[1], dim=1) for x in kv.read(pages))
    score = torch.einsum("qhd,nhd->hqn", q.float(), key) * scores.scale
    if scores.softcap:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    n = torch.arange(len(pages), device=q.device)[None, :]
    hidden = n > position[:, None]
    if scores.window:
        hidden |= n <= position[:, None] - scores.window
    # Weights of 0 do not hide what is not a number.
    value = value.masked_fill(hidden.all(0)[:, None, None], 0.0)
    return torch.einsum("hqn,nhd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), value)


@triton.jit
def tokens_at(pages: tl.tensor, at: tl.tensor, end: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Places in the pool of positions [at, at + BLOCK_N) of a row, those before `end`."""
    n = at + tl.arange(0, BLOCK_N)
    return tl.load(pages + n, mask=n < end, other=0)


@triton.jit
def attend_tile(
    query: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    token: tl.tensor,
    at: tl.tensor,
    end: tl.tensor,
    position: tl.tensor,
    kv_head: tl.tensor,
    factor: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_BLOCK: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LARGEST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    SEEN: tl.constexpr,
    SUM_LATER: tl.constexpr,
) -> tl.tensor:
    """One step of the online softmax, in powers of two, over the keys at positions [at, at + BLOCK_N) of a row, whose
    places in the pool are `token` [BLOCK_N].

    `total` are the sums of weights by query, or with SUM_LATER by query and place in the tile: few queries are spread over
    all warps, which would have to wait for each other. `acc` holds LARGEST times the sum in 8-bit pools: weight x largest |value| of the head stays in float16's range.
    """
    n = at + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_BLOCK)
    dv = tl.arange(0, DV_BLOCK)
    live = n < end
    slot = token.to(tl.int64) * KV_HEADS + kv_head
    k_at = k_pool + slot[None, :] * D + d[:, None]
    v_at = v_pool + slot[:, None] * DV + dv[None, :]
    if SEEN != ALL_SEEN:
        key = tl.load(k_at, mask=live[None, :] & (d < D)[:, None], other=0.0)
        value = tl.load(v_at, mask=live[:, None] & (dv < DV)[None, :], other=0.0)
    else:
        if D == D_BLOCK:
            key = tl.load(k_at)
        else:
            key = tl.load(k_at, mask=(d < D)[:, None], other=0.0)
        if DV == DV_BLOCK:
            value = tl.load(v_at)
        else:
            value = tl.load(v_at, mask=(dv < DV)[None, :], other=0.0)
    score = tl.dot(query, key.to(query.dtype), input_precision="ieee")
    if LARGEST:
        if SEEN == ALL_SEEN:
            of_key = tl.load(k_scale + slot)
            of_value = tl.load(v_scale + slot)
        else:
            of_key = tl.load(k_scale + slot, mask=live, other=0.0)
            of_value = tl.load(v_scale + slot, mask=live, other=0.0)
        score = score * of_key[None, :]
    if SOFTCAP:
        score = cap * (2.0 * tl.sigmoid(score * factor) - 1.0)
    if SEEN != ALL_SEEN:
        seen = live[None, :]
        if SEEN == CAUSAL:
            seen = seen & (n[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (n[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    peak = tl.max(score, axis=1)
    if not SOFTCAP:
        peak = peak * factor
    peak = tl.maximum(best, peak)
    anchor = peak
    if WINDOWED and SEEN == CAUSAL:
        # A query whose window starts in a later tile has seen nothing yet: -inf - -inf must not become NaN.
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
    if SOFTCAP:
        weight = tl.exp2(score - anchor[:, None])
    else:
        weight = tl.exp2(score * factor - anchor[:, None])
    decay = tl.exp2(best - anchor)
    if SUM_LATER:
        total = total * decay[:, None] + weight
    else:
        total = total * decay + tl.sum(weight, axis=1)
    if LARGEST:
        weight = weight * (of_value * LARGEST)[None, :]
    acc = acc * decay[:, None]
    acc = tl.dot(weight.to(query.dtype), value.to(query.dtype), acc, input_precision="ieee")
    return peak, total, acc
