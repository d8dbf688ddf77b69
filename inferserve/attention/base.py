"""`AttentionBackend`: attention over the paged KV pool, planned once a step and called once a layer.

The backend also writes the step's K and V into the pool, so that fused implementations are possible. Nothing here
knows models, requests or the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from inferserve.kernels.rope_write import PackedHeads, Rotation

Ints = NDArray[np.int32]


class Bucket(NamedTuple):
    """The size of a captured step: it serves every step that needs no more.

    Attributes:
        tokens: query tokens, padding included.
        rows: most rows.
        chunks: most prefill rows among them; 0 = every token is a decode row.
    """

    tokens: int
    rows: int
    chunks: int


class HostRows(NamedTuple):
    """A step's rows on the host, from which work lists are made.

    Attributes:
        rows: int32 [R], rows of the page table; the first `num_decode` have one query token. R may be 0.
        num_decode: number of decode rows.
        query_len: int32 [R], query tokens of each row; row i's first one is token sum(query_len[:i]) of the step.
        kv_len: int32 [R], KV tokens including this step's.
    """

    rows: Ints
    num_decode: int
    query_len: Ints
    kv_len: Ints


@dataclass(frozen=True)
class AttentionBatch:
    """Device view of a step's rows; see `engine.step.StepBatch` for the host side.

    In a captured step (`bucket` set) the tensors lie at fixed addresses and their contents change from replay to replay:
    tokens are padded to `bucket.tokens`, and what attends to what is in `work` alone (`rows`, `query_start`, `kv_len`
    and the host's lengths are empty, `num_decode` and the maxima are 0). Padding tokens have position 0, write their K
    and V to the pool's spare token, and appear in no work list: whatever attention leaves in their place is never read.

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
        work: int32 [W], the device's copy of `CapturableAttention.work`; None for backends that have no such list.
        work_host: int32 [W], the same on the host; None in a captured step, whose list is not known yet.
        bucket: size of the captured step; None = a step launched as it is, sized to its rows.
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
    query_len_host: Ints
    kv_len_host: Ints
    work: torch.Tensor | None = None
    work_host: Ints | None = None
    bucket: Bucket | None = None


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

    def forward_packed(
        self, spec: LayerSpec, plan: AttentionPlan, qkv: torch.Tensor, heads: PackedHeads, rotation: Rotation
    ) -> torch.Tensor:
        """The same from the fused projection, [T, (q_heads + 2 kv_heads) * head_dim]: heads are normalised and rotated
        as `kernels.rope_write` says."""
        ...


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A backend whose launches depend on the bucket alone: rows and lengths reach its kernels through the work list.

    `plan` and `forward` of a captured step run once, under capture: nothing in them may read device memory on the host,
    copy between host and device, or choose a grid from anything but `bucket`.
    """

    def work_size(self, bucket: Bucket) -> int:
        """Int32s in the work list of any step that fits the bucket."""
        ...

    def work(self, rows: HostRows, bucket: Bucket | None) -> Ints:
        """The work list of a step, made without torch: int32 [work_size(bucket)], its unused items marked as such.

        With no bucket it is as long as the step needs (`plan` finds it in `work` and `work_host`).
        """
        ...
