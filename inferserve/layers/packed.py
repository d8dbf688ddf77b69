"""`Matmul`: y = x Wᵀ + b in the layout that suits the device: oneDNN's blocked one on x86 CPUs, as it is on GPUs.

torch's own path for a few rows (decode) reads a row-major matrix 2 to 4 times slower than oneDNN reads one in blocks
(measured on EPYC, 1 to 16 rows, float32 and bfloat16; never slower up to 512). The operations are those that
torch's compiler emits for frozen weights; where they are missing, the plain product is used. On a GPU, `FEW_ROWS` says
which shapes have a kernel for few rows that measured faster than cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from inferserve.kernels.ordered_matmul import ordered_matmul
from inferserve.kernels.skinny_matmul import skinny_matmul

Matmul = Callable[[torch.Tensor], torch.Tensor]
"""[T, inputs] → [T, outputs]."""

_ROWS = 8
"""Rows that the blocks are chosen for."""
_DTYPES = (torch.float32, torch.bfloat16)


class FewRows(NamedTuple):
    """Matrices of `outputs` × `inputs` are multiplied by `skinny_matmul` for up to `rows` rows (at most 16)."""

    outputs: int
    inputs: int
    rows: int


FEW_ROWS: tuple[FewRows, ...] = ()
"""By `benchmarks/quant_gpu.py`; empty until a shape has been measured to gain."""


def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Matmul:
    """The product with `weight` [outputs, inputs] as it is."""
    return partial(functional.linear, weight=weight, bias=bias)


def in_order(weight: torch.Tensor, bias: torch.Tensor | None) -> Matmul:
    """The product whose sums do not depend on the number of rows, for CUDA."""
    return partial(ordered_matmul, weight=weight, bias=bias)


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Matmul | None:
    """A faster product with `weight` [outputs, inputs], which it keeps or copies; None where that is not to be had."""
    rows = next((entry.rows for entry in FEW_ROWS if (entry.outputs, entry.inputs) == weight.shape), 0)
    if rows and weight.is_cuda and weight.dtype == torch.bfloat16:
        return few_rows(weight, bias, rows)
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return None
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return None
    blocks = ops._reorder_linear_weight(weight, _ROWS)
    multiply = ops._linear_pointwise.default

    def matmul(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x, blocks, bias, "none", [], "")
        return result

    return matmul


def few_rows(weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> Matmul:
    """The product by `skinny_matmul` up to `rows` rows, by cuBLAS beyond."""
    spare, large = counters(weight), plain(weight, bias)

    def matmul(x: torch.Tensor) -> torch.Tensor:
        return skinny_matmul(x, weight, bias, spare) if x.shape[0] <= rows else large(x)

    return matmul


def counters(weight: torch.Tensor) -> torch.Tensor:
    """Int32 zeros, one for each tile that kernels cut `weight` [outputs, inputs] into: see `skinny_matmul`."""
    return torch.zeros(-(-weight.shape[0] // 64), dtype=torch.int32, device=weight.device)
