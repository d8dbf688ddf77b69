"""`Linear`: a matrix made of parts that share their input, multiplied at once (q, k, v; gate, up).

A checkpoint holds the parts one by one; `slots()` says where each goes. This is the one place that owns the layout of
a weight: float, or quantised by an `Fp8Scheme`; a rank's share of the rows would be another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import nn

from inferserve.layers.packed import Matmul, in_order, packed, plain
from inferserve.layers.quant import Fp8Scheme, Fp8Weight, Slot


class Linear(nn.Module):
    """y = x Wᵀ + b. `weight` is [sum(parts), inputs], or None where it is quantised; `bias` is [sum(parts)] or None."""

    def __init__(self, inputs: int, *parts: int, bias: bool = False, quant: Fp8Scheme | None = None) -> None:
        super().__init__()
        self.starts = (0, *accumulate(parts))
        self.quantised = Fp8Weight(inputs, parts, quant) if quant else None
        self.weight: nn.Parameter | None = (
            None if quant else nn.Parameter(torch.empty(sum(parts), inputs), requires_grad=False)
        )
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self._matmul: Matmul = _unfilled if self.weight is None else plain(self.weight, self.bias)

    def slots(self, part: int) -> Mapping[str, Slot]:
        """By leaf name in a checkpoint, what fills part `part`."""
        rows = slice(self.starts[part], self.starts[part + 1])
        bias = {} if self.bias is None else {"bias": self.bias[rows]}
        if self.quantised is not None:
            return {**self.quantised.slots(part), **bias}
        assert self.weight is not None, "packed already"
        return {"weight": self.weight[rows], **bias}

    def pack(self, ordered: bool = False) -> None:
        """Lay the filled weight out for the device. Where that makes another of it, `weight` is given up.

        Args:
            ordered: a row's product must not depend on how many there are (CUDA, float weights).
        """
        if self.quantised is not None:
            self._matmul = self.quantised.matmul(self.bias)
            return
        assert self.weight is not None
        if ordered:
            self._matmul = in_order(self.weight, self.bias)
            return
        matmul = packed(self.weight, self.bias)
        if matmul is not None:
            self._matmul, self.weight = matmul, None

    @contextmanager
    def observed(self, see: Callable[[torch.Tensor], None]) -> Iterator[None]:
        """Inside, `see` is called with every input."""
        multiply = self._matmul

        def watched(x: torch.Tensor) -> torch.Tensor:
            see(x)
            return multiply(x)

        self._matmul = watched
        try:
            yield
        finally:
            self._matmul = multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] → [T, sum(parts)]."""
        return self._matmul(x)


def _unfilled(_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a quantised weight is multiplied only after pack()")
