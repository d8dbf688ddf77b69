"""`KvPool`: K and V of all layers, addressed by token index. One tensor pair a layer: [tokens, kv_heads, head_dim].

Stored in the model's dtype, or in 8 bits with one float32 scale for each (token, head) beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferserve.kernels.kv_quant import is_quantised
from inferserve.kernels.paged_kv import PagedKv

SCALE = torch.float32


@dataclass(frozen=True)
class KvShape:
    """KV heads and head sizes of one layer; `group` query heads share each KV head."""

    kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    group: int = 1

    @property
    def value_dim(self) -> int:
        """Head size of V."""
        return self.v_head_dim or self.head_dim

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes one token takes in this layer when stored as `dtype`, scales included."""
        scales = 2 * SCALE.itemsize if is_quantised(dtype) else 0
        return self.kv_heads * ((self.head_dim + self.value_dim) * dtype.itemsize + scales)


class KvPool:
    """K and V of every layer.

    Attributes:
        tokens: how many are given out. One more, index `tokens`, is the spare place: tokens that only fill up a step
            are written there, and nobody reads them.
        dtype: of the model, in which K and V come.
        k, v: by layer, [tokens + 1, kv_heads, head_dim]; uninitialised: only written tokens are ever read.
        k_scale, v_scale: by layer, float32 [tokens + 1, kv_heads], what the stored 8-bit numbers are multiplied with;
            None for a pool in the model's own dtype.
    """

    def __init__(
        self,
        shapes: tuple[KvShape, ...],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ) -> None:
        """Room for `tokens` of a model in `dtype`, stored as that or as `stored` (torch.float8_e4m3fn, torch.int8)."""
        self.shapes = shapes
        self.tokens = tokens
        self.dtype = dtype
        dtype, places = stored or dtype, tokens + 1
        self.k = [torch.empty((places, s.kv_heads, s.head_dim), dtype=dtype, device=device) for s in shapes]
        self.v = [torch.empty((places, s.kv_heads, s.value_dim), dtype=dtype, device=device) for s in shapes]
        self.k_scale, self.v_scale = (
            [
                torch.empty((places, s.kv_heads), dtype=SCALE, device=device) if is_quantised(dtype) else None
                for s in shapes
            ]
            for _ in "kv"
        )

    @property
    def spare(self) -> int:
        """Index of the place that is never given out."""
        return self.tokens

    def layer(self, layer: int) -> PagedKv:
        """K and V of one layer."""
        return PagedKv(self.k[layer], self.v[layer], self.k_scale[layer], self.v_scale[layer])

    @staticmethod
    def bytes_per_token(shapes: tuple[KvShape, ...], dtype: torch.dtype) -> int:
        """Bytes one token takes over all layers when stored as `dtype`, scales included."""
        return sum(s.bytes_per_token(dtype) for s in shapes)
