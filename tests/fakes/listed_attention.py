"""The reference attention as a backend that can be captured: all it knows of a step's rows is in the work list.

What no row covers (padding) comes out as NaN, as a kernel without work items might leave it.
"""

from __future__ import annotations

import numpy as np
import torch

from inferserve.attention.base import AttentionBatch, AttentionPlan, Bucket, HostRows, LayerSpec
from inferserve.attention.reference import ReferenceAttention
from inferserve.kernels.rope_write import PackedHeads, Rotation, rotated_heads_ref
from inferserve.kv.pool import KvPool

_HEAD = 2


class ListedAttention:
    """Implements `CapturableAttention`; the list is (rows, decode rows), then row, query length and KV length of each."""

    def __init__(self, pool: KvPool, device: torch.device) -> None:
        self.pool = pool
        self._inner = ReferenceAttention(pool, device)

    def work_size(self, bucket: Bucket) -> int:
        return _HEAD + 3 * bucket.rows

    def work(self, rows: HostRows, bucket: Bucket | None) -> np.ndarray:
        count = len(rows.rows)
        if bucket is not None:
            chunks = count - rows.num_decode
            assert count <= bucket.rows and chunks <= bucket.chunks and rows.query_len.sum() <= bucket.tokens
        work = np.full(self.work_size(bucket) if bucket else _HEAD + 3 * count, -(2**30), np.int32)
        work[:_HEAD] = count, rows.num_decode
        work[_HEAD : _HEAD + 3 * count] = np.stack((rows.rows, rows.query_len, rows.kv_len), axis=1).flatten()
        return work

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return batch

    def forward_packed(
        self, spec: LayerSpec, plan: AttentionPlan, qkv: torch.Tensor, heads: PackedHeads, rotation: Rotation
    ) -> torch.Tensor:
        return self.forward(spec, plan, *rotated_heads_ref(qkv, heads, rotation))

    def forward(
        self, spec: LayerSpec, plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(plan, AttentionBatch) and plan.work is not None
        work = plan.work.numpy()
        count, num_decode = work[:_HEAD]
        rows, query_len, kv_len = work[_HEAD : _HEAD + 3 * count].reshape(-1, 3).T.copy()
        tokens = int(query_len.sum())
        step = AttentionBatch(
            rows=torch.from_numpy(rows),
            num_decode=int(num_decode),
            query_start=torch.tensor([0, *query_len]).cumsum(0).int(),
            kv_len=torch.from_numpy(kv_len),
            positions=plan.positions[:tokens],
            kv_index=plan.kv_index[:tokens],
            table=plan.table,
            max_query_len=int(query_len.max(initial=0)),
            max_kv_len=int(kv_len.max(initial=0)),
            query_len_host=query_len,
            kv_len_host=kv_len,
        )
        padding = plan.kv_index[tokens:]
        assert (padding == self.pool.spare).all() and (plan.positions[tokens:] == 0).all()
        out = torch.full((*q.shape[:2], v.shape[2]), torch.nan, dtype=q.dtype)
        self.pool.k[spec.layer][padding], self.pool.v[spec.layer][padding] = k[tokens:], v[tokens:]
        if tokens:
            parts = (t[:tokens] for t in (q, k, v))
            out[:tokens] = self._inner.forward(spec, self._inner.plan(step), *parts)
        return out
