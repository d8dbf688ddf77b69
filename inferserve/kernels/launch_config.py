"""Launch choices of the kernels as frozen rows, measured on an H200. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """Decode attention: KV tokens per tile, warps, pipeline depth, and numbers of partial results joined at a time."""

    block_n: int
    warps: int
    stages: int
    join: int = 4096


@dataclass(frozen=True)
class PrefillConfig:
    """Prefill attention: query rows (tokens x grouped heads) and KV tokens per tile, warps, pipeline depth."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (n >= 1): tile sides of Triton tensors."""
    return 1 << (n - 1).bit_length()


DECODE_PROGRAMS_PER_SM = 2
"""Decode programs that run at once on a multiprocessor: tiles of two fill its shared memory."""


def decode_config(head_dim: int, kv_size: int, q_size: int) -> DecodeConfig:
    """By head size and bytes per number of the pool and of q: K and V tiles must fit in shared memory, float32 dots in
    registers."""
    if q_size > 2:
        return DecodeConfig(block_n=16, warps=4, stages=2)
    if head_dim <= 128:
        return DecodeConfig(block_n=64, warps=4, stages=3 if kv_size > 1 else 4)
    return DecodeConfig(block_n=32, warps=4, stages=3)


def prefill_config(head_dim: int, kv_size: int, q_size: int) -> PrefillConfig:
    """Same arguments; float32 (tests, debugging) has no tensor cores and takes small tiles."""
    if q_size > 2:
        return PrefillConfig(block_m=32, block_n=16, warps=8, stages=2)
    if head_dim > 128:
        return PrefillConfig(block_m=128, block_n=32, warps=8, stages=2)
    if head_dim <= 64 or kv_size == 1:
        return PrefillConfig(block_m=128, block_n=64, warps=8, stages=3)
    return PrefillConfig(block_m=128, block_n=128, warps=8, stages=2)
