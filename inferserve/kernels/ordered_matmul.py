"""y = x Wᵀ in which every number is summed in the same order, however many rows x has: for `--deterministic`.

One tile shape for all sizes and no split of K, so a row's result depends on that row alone. The weights are the left
operand of the matrix unit; rows of x that a tile lacks are zeros. Slower than cuBLAS, which picks its order by size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class OrderedConfig:
    """Rows of x, rows of W and values of K in a tile; pipeline depth; warps. Another one is another order."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


CONFIG = OrderedConfig(block_m=64, block_n=128, block_k=64, stages=4, warps=4)


# Not recompiled for other numbers of rows and tiles.
@triton.jit(do_not_specialize=["rows", "tiles_m"])
def _ordered_matmul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    tiles_m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    # Neighbouring programs read the same weights.
    tile = tl.program_id(0)
    row = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weights = weight + col.to(tl.int64)[:, None] * k + inner[None, :]
    inputs = x + row.to(tl.int64)[:, None] * stride + inner[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(0, k, BLOCK_K):
        inside = (at + inner < k)[None, :]
        w = tl.load(weights + at, mask=(col < n)[:, None] & inside, other=0.0)
        value = tl.load(inputs + at, mask=(row < rows)[:, None] & inside, other=0.0)
        total = tl.dot(w, tl.trans(value), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)[:, None]
    live = (row < rows)[None, :] & (col < n)[:, None]
    offset = row.to(tl.int64)[None, :] * n + col[:, None]
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=live)


def ordered_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: OrderedConfig = CONFIG
) -> torch.Tensor:
    """The product.

    Args:
        x: [T, K], last dimension contiguous; float dtype.
        weight: [N, K], contiguous, same dtype.
        bias: [N] or None.

    Returns: [T, N], same dtype, summed in float32.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tiles_m = triton.cdiv(rows, config.block_m)
    _ordered_matmul_kernel[(tiles_m * triton.cdiv(outputs, config.block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        tiles_m,
        outputs,
        inputs,
        x.stride(0),
        BIAS=bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def ordered_matmul_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: OrderedConfig = CONFIG
) -> torch.Tensor:
    """Torch twin of `ordered_matmul`; its own order is torch's."""
    total = x.float() @ weight.float().T
    return (total if bias is None else total + bias.float()).to(x.dtype)
