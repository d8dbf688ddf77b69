"""`TritonAttention`: paged decode and prefill kernels over the pool; the default on CUDA. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, empty

from inferserve.attention.base import AttentionBatch, AttentionPlan, LayerSpec
from inferserve.kernels.decode_attention import decode_attention
from inferserve.kernels.kv_write import kv_write
from inferserve.kernels.prefill_attention import prefill_attention
from inferserve.kernels.rope_write import PackedHeads, Rotation, rope_write
from inferserve.kv.pool import KvPool


@dataclass(frozen=True)
class TritonPlan:
    """A step split at `num_decode`: device views of each part."""

    batch: AttentionBatch
    decode_rows: Tensor
    decode_kv_len: Tensor
    prefill_rows: Tensor
    prefill_kv_len: Tensor
    prefill_start: Tensor
    max_decode_kv_len: int


class TritonAttention:
    """Implements `AttentionBackend`."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        """See `AttentionBackend`."""
        n = batch.num_decode
        return TritonPlan(
            batch,
            batch.rows[:n],
            batch.kv_len[:n],
            batch.rows[n:],
            batch.kv_len[n:],
            batch.query_start[n:],
            int(batch.kv_len_host[:n].max(initial=0)),
        )

    def forward(self, spec: LayerSpec, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        assert isinstance(plan, TritonPlan)
        pool, layer = self.pool, spec.layer
        kv_write(k, v, pool.k[layer], pool.v[layer], plan.batch.kv_index, pool.k_scale[layer], pool.v_scale[layer])
        return self._attend(spec, plan, q)

    def forward_packed(
        self, spec: LayerSpec, plan: AttentionPlan, qkv: Tensor, heads: PackedHeads, rotation: Rotation
    ) -> Tensor:
        """See `AttentionBackend`."""
        assert isinstance(plan, TritonPlan)
        pool, layer, index = self.pool, spec.layer, plan.batch.kv_index
        scales = pool.k_scale[layer], pool.v_scale[layer]
        return self._attend(spec, plan, rope_write(qkv, heads, rotation, pool.k[layer], pool.v[layer], index, *scales))

    def _attend(self, spec: LayerSpec, plan: TritonPlan, q: Tensor) -> Tensor:
        """Over the pool, which holds this step's K and V already."""
        batch, n = plan.batch, plan.batch.num_decode
        pool_k, pool_v = self.pool.k[spec.layer], self.pool.v[spec.layer]
        out = empty((q.shape[0], q.shape[1], pool_v.shape[2]), dtype=q.dtype, device=q.device)
        decode_attention(
            q[:n],
            pool_k,
            pool_v,
            batch.table,
            plan.decode_rows,
            plan.decode_kv_len,
            out,
            max_kv_len=plan.max_decode_kv_len,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        prefill_attention(
            q,
            pool_k,
            pool_v,
            batch.table,
            plan.prefill_rows,
            plan.prefill_start,
            plan.prefill_kv_len,
            out,
            max_query_len=batch.max_query_len,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        return out
