"""`Matmul`: y = x Wᵀ + b in the layout that suits the device. On x86 CPUs that is oneDNN's blocked one.

torch's own path for a few rows (decode) reads a row-major matrix 2 to 4 times slower than oneDNN reads one in blocks
(measured on EPYC, 1 to 16 rows, float32 and bfloat16; never slower up to 512). The operations are those that
torch's compiler emits for frozen weights; where they are missing, the plain product is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

Matmul = Callable[[torch.Tensor], torch.Tensor]
"""[T, inputs] → [T, outputs]."""

_ROWS = 8
"""Rows that the blocks are chosen for."""
_DTYPES = (torch.float32, torch.bfloat16)


def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Matmul:
    """The product with `weight` [outputs, inputs] as it is."""
    return partial(functional.linear, weight=weight, bias=bias)


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Matmul | None:
    """The product with a blocked copy of `weight` [outputs, inputs], or None where that is not to be had."""
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
