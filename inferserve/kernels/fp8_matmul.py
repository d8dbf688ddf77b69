"""y = x Wᵀ with fp8 (e4m3) operands and float32 scales: per token and output channel, or per group of 128 values.

Scales that change along K are applied to the product of each 128 values, which also keeps the matrix unit's short
accumulator short of work (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Up to 16 tokens come unquantised and are
quantised on the way, which saves a launch where launches count. Few tokens are the right operand of the matrix unit and K
is split over programs, as in `skinny_matmul`. Knows nothing of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferserve.kernels.fp8_quant import GROUP, LARGEST, SMALLEST, fp8_dequant_ref, fp8_quant_ref
from inferserve.kernels.skinny_matmul import sum_over_splits

QUANTISED_INSIDE = 16
"""Most tokens that may come unquantised."""


@dataclass(frozen=True)
class Fp8Tiles:
    """Launch of products with up to `rows` tokens.

    Attributes:
        block_m, block_n: tokens and rows of W in a tile.
        swap: W is the left operand.
        warps, stages: as in Triton.
        programs: K is split until the launch has about as many.
    """

    rows: int
    block_m: int
    block_n: int
    swap: bool
    warps: int
    stages: int
    programs: int


TILES = (
    Fp8Tiles(16, 16, 64, True, 4, 4, 528),
    Fp8Tiles(32, 32, 64, True, 4, 4, 396),
    Fp8Tiles(64, 64, 64, True, 4, 4, 396),
    Fp8Tiles(128, 128, 64, False, 4, 4, 132),
    Fp8Tiles(256, 128, 64, False, 4, 4, 1),
    Fp8Tiles(2**31, 128, 128, False, 8, 4, 1),
)


# Not recompiled for other numbers of rows, tiles and splits.
@triton.jit(do_not_specialize=["rows", "tiles_m", "tiles_k", "splits"])
def _fp8_matmul_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    w_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    counters: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    tiles_m: tl.tensor,
    tiles_k: tl.tensor,
    splits: tl.tensor,
    QUANTISE: tl.constexpr,
    TOKEN_GROUPS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """SCALE_ROWS: rows of W that share the scales of their groups along K; 0 = a row has one scale for all of K."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_n = tile // tiles_m
    row = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weights = weight + col.to(tl.int64)[:, None] * k + inner[None, :]
    inputs = x + row.to(tl.int64)[:, None] * stride + inner[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for step in range(split * tiles_k // splits, (split + 1) * tiles_k // splits):
        at = step * BLOCK_K
        if EVEN:
            w = tl.load(weights + at)
            value = tl.load(inputs + at, mask=(row < rows)[:, None], other=0.0)
        else:
            inside = (at + inner < k)[None, :]
            w = tl.load(weights + at, mask=(col < n)[:, None] & inside, other=0.0)
            value = tl.load(inputs + at, mask=(row < rows)[:, None] & inside, other=0.0)
        if QUANTISE:
            value = value.to(tl.float32)
            peak = tl.maximum(tl.max(tl.abs(value), axis=1), SMALLEST)
            token_scale = peak * (1.0 / LARGEST)
            value = (value * tl.div_rn(LARGEST, peak)[:, None]).to(w.dtype)
        elif TOKEN_GROUPS:
            token_scale = tl.load(x_scale + row * tiles_k + step, mask=row < rows, other=0.0)
        if TOKEN_GROUPS:
            part = tl.dot(w, tl.trans(value)) if SWAP else tl.dot(value, tl.trans(w))
            if SCALE_ROWS >= BLOCK_N:
                token_scale *= tl.load(w_scale + (tile_n * BLOCK_N // SCALE_ROWS) * tiles_k + step)
            elif SCALE_ROWS > 0:
                row_scale = tl.load(w_scale + (col // SCALE_ROWS) * tiles_k + step, mask=col < n, other=0.0)
                part *= row_scale[:, None] if SWAP else row_scale[None, :]
            total += part * (token_scale[None, :] if SWAP else token_scale[:, None])
        else:
            total = tl.dot(w, tl.trans(value), total) if SWAP else tl.dot(value, tl.trans(w), total)
    # A prompt that is not cut times a wide matrix has more than 2^31 results.
    if SWAP:
        offset = row.to(tl.int64)[None, :] * n + col[:, None]
        live = (row < rows)[None, :] & (col < n)[:, None]
    else:
        offset = row.to(tl.int64)[:, None] * n + col[None, :]
        live = (row < rows)[:, None] & (col < n)[None, :]
    total, last = sum_over_splits(total, partial, counters, tile, split, offset, live, rows * n, splits, SPLIT)
    if last:
        if not TOKEN_GROUPS:
            token_scale = tl.load(x_scale + row, mask=row < rows, other=0.0)
            total *= token_scale[None, :] if SWAP else token_scale[:, None]
        if SCALE_ROWS == 0:
            row_scale = tl.load(w_scale + col, mask=col < n, other=0.0)
            total *= row_scale[:, None] if SWAP else row_scale[None, :]
        if BIAS:
            added = tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)
            total += added[:, None] if SWAP else added[None, :]
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=live)


def fp8_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    dtype: torch.dtype,
    tiles: Fp8Tiles | None = None,
) -> torch.Tensor:
    """The scaled product.

    Args:
        x: [T, K], last dimension contiguous: float8_e4m3fn; or float, T <= QUANTISED_INSIDE, where x_scale is None.
        x_scale: float32 [T, 1], or [T, ceil(K / 128)] for groups.
        weight: float8_e4m3fn [N, K], contiguous.
        w_scale: float32 [N]; or, with groups in x, [ceil(N / 128), ceil(K / 128)] or [N, ceil(K / 128)].
        bias: [N] or None.
        counters: int32, zeros before the call and after it, at least ceil(N / 64); not shared between streams.
        dtype: of the result.
        tiles: the launch, else that of `TILES`.

    Returns: [T, N], summed in float32.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if not rows:
        return out
    tiles = tiles or next(t for t in TILES if rows <= t.rows)
    tiles_m, tiles_n = triton.cdiv(rows, tiles.block_m), triton.cdiv(outputs, tiles.block_n)
    tiles_k = triton.cdiv(inputs, GROUP)
    splits = max(1, min(tiles.programs // (tiles_m * tiles_n), tiles_k // 4, 16))
    partial = torch.empty((splits, rows, outputs) if splits > 1 else (1,), dtype=torch.float32, device=x.device)
    _fp8_matmul_kernel[(tiles_m * tiles_n, splits)](
        x,
        w_scale if x_scale is None else x_scale,
        weight,
        w_scale,
        w_scale if bias is None else bias,
        out,
        partial,
        counters,
        rows,
        outputs,
        inputs,
        x.stride(0),
        tiles_m,
        tiles_k,
        splits,
        QUANTISE=x_scale is None,
        TOKEN_GROUPS=x_scale is None or x_scale.shape[1] > 1 or tiles_k == 1,
        SCALE_ROWS=0 if w_scale.dim() == 1 else 1 if w_scale.shape[0] == outputs else GROUP,
        BIAS=bias is not None,
        SPLIT=splits > 1,
        EVEN=outputs % tiles.block_n == 0 and inputs % GROUP == 0,
        SWAP=tiles.swap,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=GROUP,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def fp8_matmul_ref(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    dtype: torch.dtype,
    tiles: Fp8Tiles | None = None,
) -> torch.Tensor:
    """Torch twin of `fp8_matmul`: the product of the dequantised operands in float32."""
    if x_scale is None:
        x, x_scale = fp8_quant_ref(x, GROUP)
    if w_scale.dim() == 1:
        w_scale = w_scale[:, None]
    total = fp8_dequant_ref(x, x_scale) @ fp8_dequant_ref(weight, w_scale).T
    return (total if bias is None else total + bias.float()).to(dtype)
