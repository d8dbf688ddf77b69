"""Made-up attention steps: ragged rows over a shuffled or contiguous page table, unused pool entries poisoned with NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inferserve.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlan,
    Bucket,
    CapturableAttention,
    HostRows,
)
from inferserve.kernels.kv_write import kv_write_ref
from inferserve.kv.pool import KvPool, KvShape


@dataclass(frozen=True)
class PagedStep:
    """A step and what a backend needs for it; the chunk's own K and V are not in the pool yet."""

    batch: AttentionBatch
    pool: KvPool
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def host_rows(self) -> HostRows:
        """What work lists are made from."""
        batch = self.batch
        return HostRows(batch.rows.cpu().numpy(), batch.num_decode, batch.query_len_host, batch.kv_len_host)


def planned(backend: AttentionBackend, step: PagedStep, bucket: Bucket | None = None) -> AttentionPlan:
    """The backend's plan, with a work list on the device if it wants one, sized for `bucket` if there is one."""
    batch = step.batch
    if isinstance(backend, CapturableAttention):
        work = backend.work(step.host_rows, bucket)
        device_work = torch.from_numpy(work).to(step.q.device)
        batch = replace(batch, work=device_work, work_host=None if bucket else work, bucket=bucket)
    return backend.plan(batch)


def paged_step(
    rows: Sequence[tuple[int, int]],
    shape: KvShape,
    q_heads: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    layout: str = "shuffled",
    stored: torch.dtype | None = None,
) -> PagedStep:
    """A step of `rows` (query length, kv length), decode rows (query length 1) first.

    Args:
        layout: "shuffled" pages, "descending" or "contiguous" (ascending) ones.
        stored: dtype of the pool; the step's own by default.
    """
    device = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    used = sum(n for _, n in rows)
    pool = poisoned_pool(replace(shape, group=q_heads // shape.kv_heads), used + 13, dtype, device, stored)
    order = torch.randperm(used + 13, generator=generator)[:used] if layout == "shuffled" else torch.arange(used)
    table = torch.full((len(rows) + 3, max(n for _, n in rows) + 5), 2**30, dtype=torch.int32)
    numbers = torch.randperm(len(rows) + 3, generator=generator)[: len(rows)].to(torch.int32)
    kv_index, positions = [], []
    taken = 0
    for number, (queries, length) in zip(numbers.tolist(), rows, strict=True):
        pages = order[taken : taken + length]
        pages = pages.flip(0) if layout == "descending" else pages
        taken += length
        table[number, :length] = pages.to(torch.int32)
        before = pages[: length - queries].to(device)
        old = [
            torch.randn((len(before), *t.shape[1:]), generator=generator).to(device, dtype)
            for t in (pool.k[0], pool.v[0])
        ]
        kv_write_ref(*old, pool.k[0], pool.v[0], before, pool.k_scale[0], pool.v_scale[0])
        kv_index.append(pages[length - queries :])
        positions.append(torch.arange(length - queries, length))
    query_len, kv_len = [q for q, _ in rows], [n for _, n in rows]
    tokens = sum(query_len)
    batch = AttentionBatch(
        rows=numbers.to(device),
        num_decode=sum(1 for q in query_len if q == 1),
        query_start=torch.tensor([0, *query_len]).cumsum(0).to(device, torch.int32),
        kv_len=torch.tensor(kv_len, dtype=torch.int32, device=device),
        positions=torch.cat(positions).to(device),
        kv_index=torch.cat(kv_index).to(device),
        table=table.to(device),
        max_query_len=max(query_len),
        max_kv_len=max(kv_len),
        query_len_host=np.array(query_len, np.int32),
        kv_len_host=np.array(kv_len, np.int32),
    )

    def random(heads: int, size: int) -> Tensor:
        return torch.randn((tokens, heads, size), generator=generator).to(device, dtype)

    return PagedStep(
        batch,
        pool,
        random(q_heads, shape.head_dim),
        random(shape.kv_heads, shape.head_dim),
        random(shape.kv_heads, shape.value_dim),
    )


def poisoned_pool(
    shape: KvShape, tokens: int, dtype: torch.dtype, device: torch.device, stored: torch.dtype | None = None
) -> KvPool:
    """One layer of NaN: in numbers, or in scales where the numbers know none."""
    pool = KvPool((shape,), tokens, dtype, device, stored)
    for tensor in (*pool.k, *pool.v):
        if tensor.dtype == torch.int8:
            tensor.fill_(99)
        elif tensor.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(torch.nan)
    for scale in (*pool.k_scale, *pool.v_scale):
        if scale is not None:
            scale.fill_(torch.nan)
    return pool


def expected_attention(step: PagedStep, *, scale: float, window: int = 0, softcap: float = 0.0) -> Tensor:
    """The definition, in float64: for each query, softmax over the keys it sees."""
    batch, group = step.batch, step.q.shape[1] // step.k.shape[1]
    kv_write_ref(step.k, step.v, *(step.pool.layer(0)[:2]), batch.kv_index, *(step.pool.layer(0)[2:]))
    every = torch.arange(step.pool.tokens, device=step.q.device)
    pool_k, pool_v = (x.double() for x in step.pool.layer(0).read(every))
    out = torch.empty((*step.q.shape[:2], step.v.shape[2]), dtype=torch.float64, device=step.q.device)
    token = 0
    for row, queries, length in zip(
        batch.rows.tolist(), batch.query_len_host.tolist(), batch.kv_len_host.tolist(), strict=True
    ):
        for position in range(length - queries, length):
            first = max(0, position - window + 1) if window else 0
            pages = batch.table[row, first : position + 1].long()
            for head in range(step.q.shape[1]):
                score = pool_k[pages, head // group] @ step.q[token, head].double() * scale
                score = softcap * torch.tanh(score / softcap) if softcap else score
                out[token, head] = score.softmax(0) @ pool_v[pages, head // group]
            token += 1
    return out


def among_strangers(step: PagedStep, row: int) -> tuple[PagedStep, slice]:
    """The step with NaN in all that the `row`-th of its rows does not own, pool and new tokens; and its tokens."""
    batch = step.batch
    start, stop = batch.query_start[row : row + 2].tolist()
    pages = batch.table[int(batch.rows[row]), : int(batch.kv_len[row])].long()
    theirs = step.pool
    pool = poisoned_pool(theirs.shapes[0], theirs.tokens, theirs.dtype, step.q.device, theirs.k[0].dtype)
    for mine, other in zip(pool.layer(0), theirs.layer(0), strict=True):
        if mine is not None and other is not None:
            bits = torch.uint8 if mine.itemsize == 1 else mine.dtype
            mine.view(bits)[pages] = other.view(bits)[pages]
    tokens = []
    for tensor in (step.q, step.k, step.v):
        alone = torch.full_like(tensor, torch.nan)
        alone[start:stop] = tensor[start:stop]
        tokens.append(alone)
    return PagedStep(batch, pool, *tokens), slice(start, stop)
