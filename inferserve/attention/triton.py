"""`TritonAttention`: paged decode and prefill kernels over the pool; the default on CUDA. Knows no requests.

What attends to what reaches the kernels through work lists, one for each shape of layer in the model, so that a launch
depends on the size of a step alone. Long chunks of steps that are not captured may go through a dense kernel instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from inferserve.attention.base import AttentionBatch, AttentionPlan, Bucket, HostRows, Ints, LayerSpec
from inferserve.attention.dense import DenseChunk, DensePrefill
from inferserve.attention.work import Capacity, WorkLists, WorkShape
from inferserve.kernels.decode_attention import DecodeSpace, decode_attention
from inferserve.kernels.kv_write import kv_write
from inferserve.kernels.launch_config import DECODE_PROGRAMS_PER_SM, PrefillConfig, prefill_config
from inferserve.kernels.paged_kv import HEADER, ITEM, Scores
from inferserve.kernels.prefill_attention import prefill_attention
from inferserve.kernels.rope_write import PackedHeads, Rotation, rope_write
from inferserve.kv.pool import KvPool, KvShape

_INTERPRETER_MULTIPROCESSORS = 8


@dataclass(frozen=True)
class ListPlan:
    """One work list on the device.

    Attributes:
        work: int32 [capacity.size].
        capacity: what launches are sized to.
        space: for the partial results of its decode items.
        programs: to launch for the decode items, and for the tiles.
    """

    work: Tensor
    capacity: Capacity
    space: DecodeSpace
    programs: tuple[int, int]


@dataclass(frozen=True)
class TritonPlan:
    """A step: its batch, its work lists in the order of the backend's shapes, and the chunks that are in none of them."""

    batch: AttentionBatch
    lists: tuple[ListPlan, ...]
    dense: tuple[DenseChunk, ...]


class TritonAttention:
    """Implements `CapturableAttention`."""

    def __init__(self, pool: KvPool, deterministic: bool = False, dense: DensePrefill | None = None) -> None:
        """Deterministic: a row's result does not depend on the rows beside it. `dense` takes the long chunks of layers
        that have neither windows nor caps."""
        self.pool = pool
        self._dense = dense
        device = pool.k[0].device
        cuda = device.type == "cuda"
        multiprocessors = (
            torch.cuda.get_device_properties(device).multi_processor_count if cuda else _INTERPRETER_MULTIPROCESSORS
        )
        self._side = torch.cuda.Stream(device, priority=-1) if cuda else None
        self._slots = multiprocessors * DECODE_PROGRAMS_PER_SM
        self._prefill = [self._prefill_config(shape) for shape in pool.shapes]
        self._shapes = [
            WorkShape(shape.kv_heads, shape.group, config.block_m, self._slots, deterministic)
            for shape, config in zip(pool.shapes, self._prefill, strict=True)
        ]
        distinct = tuple(dict.fromkeys(self._shapes))
        longest = dense.least - 1 if dense else None
        self._lists = tuple(WorkLists(shape, longest) for shape in distinct)
        self._list_of = [distinct.index(shape) for shape in self._shapes]

    def work_size(self, bucket: Bucket) -> int:
        """See `CapturableAttention`."""
        return sum(lists.capacity(bucket).size for lists in self._lists)

    def work(self, rows: HostRows, bucket: Bucket | None) -> Ints:
        """See `CapturableAttention`."""
        if len(self._lists) == 1:
            return self._lists[0].make(rows, bucket)
        return np.concatenate([lists.make(rows, bucket) for lists in self._lists])

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        """See `AttentionBackend`."""
        assert batch.work is not None, "the step has no work list"
        if batch.bucket:
            capacities = [lists.capacity(batch.bucket) for lists in self._lists]
        else:
            assert batch.work_host is not None
            capacities = list(_capacities(batch.work_host))
        starts = accumulate((capacity.size for capacity in capacities), initial=0)
        parts = zip(range(len(self._lists)), starts, capacities, strict=False)
        return TritonPlan(batch, tuple(self._part(batch, *part) for part in parts), self._dense_chunks(batch))

    def _dense_chunks(self, batch: AttentionBatch) -> tuple[DenseChunk, ...]:
        if self._dense is None or batch.bucket or batch.max_query_len < self._dense.least:
            return ()
        first = np.cumsum(batch.query_len_host) - batch.query_len_host
        found = []
        for i in np.flatnonzero(batch.query_len_host >= self._dense.least).tolist():
            pages = batch.table.index_select(0, batch.rows[i : i + 1])[0, : batch.kv_len_host[i]]
            found.append(DenseChunk.of(int(first[i]), int(batch.query_len_host[i]), pages))
        return tuple(found)

    def _part(self, batch: AttentionBatch, index: int, start: int, capacity: Capacity) -> ListPlan:
        assert batch.work is not None
        lists, work = self._lists[index], batch.work[start : start + capacity.size]
        return ListPlan(work, capacity, self._space(index, capacity.items), lists.programs(batch.bucket, capacity))

    def forward(self, spec: LayerSpec, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        assert isinstance(plan, TritonPlan)
        kv = self.pool.layer(spec.layer)
        kv_write(k, v, kv.k, kv.v, plan.batch.kv_index, kv.k_scale, kv.v_scale)
        return self._attend(spec, plan, q)

    def forward_packed(
        self, spec: LayerSpec, plan: AttentionPlan, qkv: Tensor, heads: PackedHeads, rotation: Rotation
    ) -> Tensor:
        """See `AttentionBackend`."""
        assert isinstance(plan, TritonPlan)
        kv = self.pool.layer(spec.layer)
        q = rope_write(qkv, heads, rotation, kv.k, kv.v, plan.batch.kv_index, kv.k_scale, kv.v_scale)
        return self._attend(spec, plan, q)

    def _attend(self, spec: LayerSpec, plan: TritonPlan, q: Tensor) -> Tensor:
        """Over the pool, which holds this step's K and V already."""
        kv, shape = self.pool.layer(spec.layer), self.pool.shapes[spec.layer]
        assert q.shape[1] == shape.kv_heads * shape.group, "the work lists are made for other heads"
        part, table = plan.lists[self._list_of[spec.layer]], plan.batch.table
        scores = Scores(spec.scale, spec.window, spec.softcap)
        if plan.dense and plan.dense[0].queries == len(q):
            return self._attend_dense(spec, plan.dense[0], q)
        out = torch.empty((*q.shape[:2], shape.value_dim), dtype=q.dtype, device=q.device)
        items, tiles = part.capacity
        with self._beside(plan.batch.bucket is not None and items > 0 and tiles > 0) as side:
            with side:
                prefill_attention(
                    q,
                    kv,
                    table,
                    part.work,
                    out,
                    scores,
                    first_tile=HEADER + ITEM * items,
                    tiles=tiles,
                    programs=part.programs[1],
                    config=self._prefill[spec.layer],
                )
            decode_attention(q, kv, table, part.work, out, part.space, scores, items=items, programs=part.programs[0])
        for chunk in plan.dense:
            out[chunk.first : chunk.first + chunk.queries] = self._attend_dense(spec, chunk, q)
        return out

    @contextmanager
    def _beside(self, wanted: bool) -> Iterator[AbstractContextManager[object]]:
        """Gives what puts launches on a stream of their own, beside those that follow; both are done at the end.

        Tiles are bound by arithmetic, decode items by memory. Tiles go first: few of them fill few multiprocessors, and
        the others read as fast as all.
        """
        side = self._side
        if not wanted or side is None:
            yield nullcontext()
            return
        main = torch.cuda.current_stream(side.device)
        side.wait_stream(main)
        yield torch.cuda.stream(side)
        main.wait_stream(side)

    def _attend_dense(self, spec: LayerSpec, chunk: DenseChunk, q: Tensor) -> Tensor:
        assert self._dense is not None and not spec.window and not spec.softcap
        return self._dense.attend(chunk, q, self.pool.layer(spec.layer), spec.scale)

    def _prefill_config(self, shape: KvShape) -> PrefillConfig:
        size = max(shape.head_dim, shape.value_dim)
        return prefill_config(size, self.pool.k[0].element_size(), self.pool.dtype.itemsize)

    def _space(self, index: int, items: int) -> DecodeSpace:
        shape = self._lists[index].shape
        of_list = zip(self.pool.shapes, self._list_of, strict=True)
        value_dim = max(layer.value_dim for layer, list_of in of_list if list_of == index)
        return DecodeSpace.empty(items, shape.kv_heads, shape.group, value_dim, self.pool.k[0].device)


def _capacities(work: Ints) -> list[Capacity]:
    """Of the lists in `work`, int32: each says its own."""
    found, start = [], 0
    while start < len(work):
        found.append(Capacity(int(work[start + 2]), int(work[start + 3])))
        start += found[-1].size
    return found
