"""Launch choices of the kernels as frozen rows, measured on an H200. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowConfig:
    """Kernels that handle whole rows: `rows` of them in one program of `warps` warps."""

    rows: int
    warps: int


@dataclass(frozen=True)
class DecodeConfig:
    """Decode attention: KV tokens per tile, fewest KV tokens per program (`split`), warps, pipeline depth, and most
    programs per row and KV head, which bounds the space for their results.

    How a row is split follows from its own length, not from the batch, so that its sums are formed in the same order
    whatever else runs beside it.
    """

    block_n: int
    split: int
    warps: int
    stages: int
    max_splits: int = 32


@dataclass(frozen=True)
class PrefillConfig:
    """Prefill attention: query rows (tokens x grouped heads) and KV tokens per tile, warps, pipeline depth."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class FilterConfig:
    """Sampling filter: vocabulary entries per tile, warps."""

    block: int
    warps: int


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (n >= 1): tile sides of Triton tensors."""
    return 1 << (n - 1).bit_length()


def row_config(width: int) -> RowConfig:
    """For a row of `width` elements: about 4096 elements a program, one row at least."""
    block = next_power_of_2(width)
    rows = max(1, 1024 // block)
    return RowConfig(rows, 4 if block * rows <= 4096 else 8)


def decode_config(head_dim: int, itemsize: int) -> DecodeConfig:
    """By head size and bytes per element: K and V tiles must fit in shared memory, float32 dots in registers."""
    if itemsize > 2:
        return DecodeConfig(block_n=16, split=256, warps=4, stages=2)
    if head_dim <= 128:
        return DecodeConfig(block_n=128, split=256, warps=4, stages=2)
    return DecodeConfig(block_n=32, split=256, warps=4, stages=2)


def prefill_config(head_dim: int, itemsize: int) -> PrefillConfig:
    """By head size and bytes per element; float32 (tests, debugging) has no tensor cores and takes small tiles."""
    if itemsize > 2:
        return PrefillConfig(block_m=32, block_n=16, warps=8, stages=2)
    if head_dim > 128:
        return PrefillConfig(block_m=64, block_n=32, warps=4, stages=2)
    if head_dim <= 64:
        return PrefillConfig(block_m=64, block_n=64, warps=4, stages=3)
    return PrefillConfig(block_m=128, block_n=128, warps=8, stages=2)


FILTER = FilterConfig(block=8192, warps=32)
SILU_BLOCK = 1024
