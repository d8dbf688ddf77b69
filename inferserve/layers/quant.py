"""`Fp8Weight`: a matrix as 8-bit floats (e4m3) with scales, filled from float or from fp8 tensors, and its product.

Scales are for output channels, activations then for tokens; or for blocks of 128 × 128 counted from the start of each
part, partial ones at its end, activations then for groups of 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3.1). Weights
that come as floats are quantised part by part as they arrive, and what rounding did to the mean of each output is then
taken back by a bias (see `models/bias_correction.py`). Head and embedding are no business of this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from inferserve.kernels.fp8_matmul import QUANTISED_INSIDE, fp8_matmul
from inferserve.kernels.fp8_quant import GROUP, LARGEST, SMALLEST, fp8_dequant_ref, fp8_quant, fp8_quant_ref
from inferserve.layers.packed import Matmul, counters, packed, plain

FP8 = torch.float8_e4m3fn
LIBRARY_FROM = QUANTISED_INSIDE + 1
"""Tokens from which cuBLAS multiplies, where scales are for channels; by `benchmarks/quant_gpu.py`."""


@dataclass(frozen=True)
class Fp8Scheme:
    """Which scales, and where they come from.

    Attributes:
        blocks: of 128 × 128, else one for each output channel.
        leaf: what a checkpoint calls the scales beside `weight`; '' = weights come as floats and are quantised.
    """

    blocks: bool
    leaf: str = ""


class Slot(Protocol):
    """Where a tensor of a checkpoint goes: a view into a parameter, or something that converts."""

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of what it takes; any float in place of another."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that is filled."""
        ...

    def copy_(self, source: torch.Tensor, /) -> object:
        """Take the values, whatever device they are on."""
        ...


@dataclass(frozen=True)
class Means:
    """Of a matrix's inputs over some tokens, float32 [inputs]: as they came, and as they were quantised."""

    exact: torch.Tensor
    quantised: torch.Tensor


class Fp8Weight:
    """[sum(parts), inputs] in fp8. `offset` [sum(parts)] is added to the product; at first it is zero."""

    def __init__(self, inputs: int, parts: Sequence[int], scheme: Fp8Scheme) -> None:
        """Make room on the default device."""
        self.scheme = scheme
        self._starts = (0, *accumulate(parts))
        self._blocks = (0, *accumulate(-(-part // GROUP) for part in parts)) if scheme.blocks else self._starts
        groups = -(-inputs // GROUP) if scheme.blocks else 1
        self.values = torch.empty((self._starts[-1], inputs), dtype=FP8)
        self.scales = torch.empty((self._blocks[-1], groups), dtype=torch.float32)
        self.offset = torch.zeros(self._starts[-1])

    def slots(self, part: int) -> Mapping[str, Slot]:
        """By leaf name, what fills part `part`."""
        rows = slice(self._starts[part], self._starts[part + 1])
        values = self.values[rows]
        scales = self.scales[self._blocks[part] : self._blocks[part + 1]]
        if self.scheme.leaf:
            return {"weight": values, self.scheme.leaf: scales}
        return {"weight": QuantisingSlot(values, scales, self.offset[rows], self)}

    def matmul(self, bias: torch.Tensor | None) -> Matmul:
        """The product, once filled. On a CPU the matrix is turned into floats for it, since no CPU multiplies fp8."""
        if not self.scheme.leaf:
            bias = self.offset if bias is None else self.offset.add_(bias)
        if self.values.device.type == "cpu":
            weight = fp8_dequant_ref(self.values, self.rows_of_scales()).to(self.offset.dtype)
            return _simulated(packed(weight, bias) or plain(weight, bias), self.scheme.blocks)
        return on_gpu(self.values, self.rows_of_scales(), bias, self.scheme.blocks)

    def means(self, x: torch.Tensor) -> Means:
        """Of inputs [T, inputs]."""
        seen = fp8_dequant_ref(*fp8_quant_ref(x, GROUP if self.scheme.blocks else 0))
        return Means(x.float().mean(0), seen.mean(0))

    def rows_of_scales(self) -> torch.Tensor:
        """Scales as kernels take them: [R, 1]; by block; or, where a part ends inside a block, a row for each row."""
        if all(start % GROUP == 0 for start in self._starts[:-1]) or not self.scheme.blocks:
            return self.scales
        rows = torch.diff(torch.tensor(self._starts))
        spread = [
            self.scales[first:last].repeat_interleave(GROUP, 0)[:count]
            for first, last, count in zip(self._blocks, self._blocks[1:], rows.tolist(), strict=False)
        ]
        return torch.cat(spread)


@dataclass(frozen=True)
class QuantisingSlot:
    """Rows of `weight`; quantises what it takes. `values`, `scales` and `offset` are those of the rows."""

    values: torch.Tensor
    scales: torch.Tensor
    offset: torch.Tensor
    weight: Fp8Weight
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        """See Slot."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """See Slot."""
        return self.values.nbytes

    def copy_(self, source: torch.Tensor, /) -> object:
        """See Slot."""
        values, scales = quantised(source.to(self.values.device), self.weight.scheme.blocks)
        self.scales.copy_(scales)
        return self.values.copy_(values)

    def correct(self, source: torch.Tensor, means: Means) -> None:
        """Add to the offset what the rows, given as floats once more, miss for inputs of these means."""
        wanted = source.to(self.values.device).float() @ means.exact
        self.offset.add_(wanted - fp8_dequant_ref(self.values, self.scales) @ means.quantised)


def quantised(weight: torch.Tensor, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in fp8.

    Args:
        weight: [R, K], float.
        blocks: of 128 × 128, padded with zeros; else rows.

    Returns: float8_e4m3fn [R, K], and float32 scales [ceil(R / 128), ceil(K / 128)] or [R, 1].
    """
    if not blocks:
        return fp8_quant_ref(weight, 0)
    rows, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % GROUP, 0, -rows % GROUP))
    tiles = padded.view(-(-rows // GROUP), GROUP, -(-inputs // GROUP), GROUP)
    scales = tiles.abs().amax((1, 3)).clamp(min=SMALLEST.value) / LARGEST.value
    values = (tiles / scales[:, None, :, None]).clamp(-LARGEST.value, LARGEST.value).to(FP8)
    return values.view(padded.shape)[:rows, :inputs].contiguous(), scales


def _simulated(multiply: Matmul, blocks: bool) -> Matmul:
    """`multiply` what the quantised activations stand for."""

    def matmul(x: torch.Tensor) -> torch.Tensor:
        return multiply(fp8_dequant_ref(*fp8_quant_ref(x, GROUP if blocks else 0)).to(x.dtype))

    return matmul


def on_gpu(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, blocks: bool) -> Matmul:
    """Few tokens in one launch that quantises them in groups; more are quantised by a launch of their own."""
    spare = counters(values)
    w_scale = scales if blocks else scales.view(-1)
    library = not blocks and _library_multiplies(values, scales, bias)

    def matmul(x: torch.Tensor) -> torch.Tensor:
        if len(x) <= QUANTISED_INSIDE:
            return fp8_matmul(x, None, values, w_scale, bias, spare, x.dtype)
        q, q_scale = fp8_quant(x, GROUP if blocks else 0)
        if library and len(x) >= LIBRARY_FROM and x.dtype == torch.bfloat16:
            return _scaled(q, q_scale, values, scales, bias)
        return fp8_matmul(q, q_scale, values, w_scale, bias, spare, x.dtype)

    return matmul


def _scaled(
    q: torch.Tensor, q_scale: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """cuBLAS: bfloat16 [T, N] from scales [T, 1] and [N, 1]."""
    result: torch.Tensor = torch._scaled_mm(
        q, values.t(), q_scale, scales.view(1, -1), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return result


def _library_multiplies(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether this torch has products with a scale for each row on this device, and in this shape."""
    q = torch.zeros((2 * QUANTISED_INSIDE, values.shape[1]), dtype=FP8, device=values.device)
    try:
        _scaled(q, torch.ones((len(q), 1), device=q.device, dtype=torch.float32), values, scales, bias)
    except (RuntimeError, ValueError, TypeError):
        return False
    return True
