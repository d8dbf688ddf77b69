"""y = x Wᵀ for a few rows of x, where reading W once at the memory's rate is all that counts.

The weights are the left operand of the matrix unit (64 of their rows fill it), the few tokens its right one. So that a
matrix of 4096 rows keeps all multiprocessors busy, K is split over programs; the program that ends last adds the parts up
in their own order, so results do not depend on timing. One launch. Knows nothing of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_ROWS = 16
"""Tokens that one tile holds."""


@dataclass(frozen=True)
class SkinnyConfig:
    """Rows of W and values of K per tile, pipeline depth, programs that the launch should have at least."""

    block_n: int
    block_k: int
    stages: int
    programs: int
    warps: int = 4


CONFIG = SkinnyConfig(block_n=64, block_k=128, stages=4, programs=528)


@triton.jit
def sum_over_splits(
    total: tl.tensor,
    partial: tl.tensor,
    counters: tl.tensor,
    tile: tl.tensor,
    split: tl.tensor,
    offset: tl.tensor,
    live: tl.tensor,
    size: tl.tensor,
    splits: tl.tensor,
    SPLIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Leave this program's part in `partial` [splits, size]; the last of the tile gets (sum of all, True)."""
    last = True
    if SPLIT:
        tl.store(partial + split * size + offset, total, mask=live)
        tl.debug_barrier()  # all of the part is written before the counter says so
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(counters + tile, 0)
            total = tl.zeros_like(total)
            for part in range(splits):
                # Past the first-level cache, which does not see what other multiprocessors wrote.
                total += tl.load(partial + part * size + offset, mask=live, other=0.0, cache_modifier=".cg")
    return total, last


# Not recompiled for other numbers of rows, tiles and splits.
@triton.jit(do_not_specialize=["rows", "tiles_k", "splits"])
def _skinny_matmul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    counters: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    tiles_k: tl.tensor,
    splits: tl.tensor,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    col = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weights = weight + col.to(tl.int64)[:, None] * k + inner[None, :]
    inputs = x + row.to(tl.int64)[:, None] * stride + inner[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(split * tiles_k // splits, (split + 1) * tiles_k // splits):
        at = step * BLOCK_K
        if EVEN:
            w = tl.load(weights + at)
            value = tl.load(inputs + at, mask=(row < rows)[:, None], other=0.0)
        else:
            inside = (at + inner < k)[None, :]
            w = tl.load(weights + at, mask=(col < n)[:, None] & inside, other=0.0)
            value = tl.load(inputs + at, mask=(row < rows)[:, None] & inside, other=0.0)
        total = tl.dot(w, tl.trans(value), total, input_precision="ieee")
    offset = row[None, :] * n + col[:, None]
    live = (row < rows)[None, :] & (col < n)[:, None]
    total, last = sum_over_splits(total, partial, counters, tile, split, offset, live, rows * n, splits, SPLIT)
    if last:
        if BIAS:
            total += tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)[:, None]
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=live)


def skinny_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    config: SkinnyConfig = CONFIG,
) -> torch.Tensor:
    """The product of at most `MAX_ROWS` rows.

    Args:
        x: [T, K] with T <= MAX_ROWS, last dimension contiguous; float dtype.
        weight: [N, K], contiguous, same dtype.
        bias: [N] or None.
        counters: int32, zeros before the call and after it, at least ceil(N / 64); not shared between streams.

    Returns: [T, N], same dtype, summed in float32.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tiles, tiles_k = triton.cdiv(outputs, config.block_n), triton.cdiv(inputs, config.block_k)
    splits = max(1, min(config.programs // tiles, tiles_k // 2, 16))
    partial = torch.empty((splits, rows, outputs) if splits > 1 else (1,), dtype=torch.float32, device=x.device)
    _skinny_matmul_kernel[(tiles, splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        partial,
        counters,
        rows,
        outputs,
        inputs,
        x.stride(0),
        tiles_k,
        splits,
        BIAS=bias is not None,
        SPLIT=splits > 1,
        EVEN=outputs % config.block_n == 0 and inputs % config.block_k == 0,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def skinny_matmul_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    config: SkinnyConfig = CONFIG,
) -> torch.Tensor:
    """Torch twin of `skinny_matmul`."""
    total = x.float() @ weight.float().T
    return (total if bias is None else total + bias.float()).to(x.dtype)
