"""`AttentionBackend`: attention over the paged KV pool, planned once a step and called once a layer.

The backend also writes the step's K and V into the pool, so that fused implementations are possible. Nothing here
knows models, requests or the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class AttentionBatch:
    """Device view of a step's rows; see `engine.step.StepBatch` for the host side.

    Attributes:
        rows: int32 [R], rows of the page table; the first `num_decode` have one query token.
        num_decode: number of decode rows.
        query_start: int32 [R + 1], cumulative query lengths.
        kv_len: int32 [R], KV tokens including this step's.
        positions: int64 [T].
        kv_index: int64 [T], pool index to write each token's K and V to.
        table: int32 [max_rows, max_len], page table on the device.
        max_query_len, max_kv_len: host ints over all rows.
        query_len_host, kv_len_host: int32 [R], the same lengths on the host, for implementations that loop.
    """

    rows: torch.Tensor
    num_decode: int
    query_start: torch.Tensor
    kv_len: torch.Tensor
    positions: torch.Tensor
    kv_index: torch.Tensor
    table: torch.Tensor
    max_query_len: int
    max_kv_len: int
    query_len_host: NDArray[np.int32]
    kv_len_host: NDArray[np.int32]


@dataclass(frozen=True)
class LayerSpec:
    """What is constant for attention in one layer.

    Attributes:
        layer: index into the pool.
        scale: multiplies q·k.
        window: sliding window in tokens (a query sees itself and the window - 1 before it); 0 = all.
        softcap: tanh soft cap of the scores; 0 = none.
    """

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0


class AttentionPlan(Protocol):
    """Opaque: whatever a backend precomputes for a step."""


class AttentionBackend(Protocol):
    """One implementation."""

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Precompute for a step, before the first layer."""
        ...

    def forward(
        self, spec: LayerSpec, plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write k, v to the pool at the step's kv_index, attend causally, return [T, q_heads, head_dim].

        Args:
            q: [T, q_heads, head_dim], rotary applied.
            k, v: [T, kv_heads, head_dim] (v's head_dim may differ).
        """
        ...
