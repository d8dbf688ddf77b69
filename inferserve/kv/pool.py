"""`KvPool`: K and V of all layers, addressed by token index. One tensor pair a layer: [tokens, kv_heads, head_dim]."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KvShape:
    """KV heads and head sizes of one layer."""

    kv_heads: int
    head_dim: int
    v_head_dim: int = 0

    @property
    def value_dim(self) -> int:
        """Head size of V."""
        return self.v_head_dim or self.head_dim

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes one token takes in this layer."""
        return self.kv_heads * (self.head_dim + self.value_dim) * dtype.itemsize


class KvPool:
    """`k[layer]` and `v[layer]` are [tokens + 1, kv_heads, head_dim], uninitialised: only written tokens are ever read.

    `tokens` are given out; the one after them, `spare`, takes what the padding of captured steps writes.
    """

    def __init__(self, shapes: tuple[KvShape, ...], tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = shapes
        self.tokens = self.spare = tokens
        self.k = [torch.empty((tokens + 1, s.kv_heads, s.head_dim), dtype=dtype, device=device) for s in shapes]
        self.v = [torch.empty((tokens + 1, s.kv_heads, s.value_dim), dtype=dtype, device=device) for s in shapes]

    @staticmethod
    def bytes_per_token(shapes: tuple[KvShape, ...], dtype: torch.dtype) -> int:
        """Bytes one token takes over all layers."""
        return sum(s.bytes_per_token(dtype) for s in shapes)
