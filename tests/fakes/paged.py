"""Made-up attention steps: ragged rows over a shuffled or contiguous page table, unused pool entries poisoned with NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inferserve.attention.base import AttentionBatch
from inferserve.kv.pool import KvPool, KvShape


@dataclass(frozen=True)
class PagedStep:
    """A step and what a backend needs for it; the chunk's own K and V are not in the pool yet."""

    batch: AttentionBatch
    pool: KvPool
    q: Tensor
    k: Tensor
    v: Tensor


def paged_step(
    rows: Sequence[tuple[int, int]],
    shape: KvShape,
    q_heads: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    layout: str = "shuffled",
) -> PagedStep:
    """A step of `rows` (query length, kv length), decode rows (query length 1) first.

    Args:
        layout: "shuffled" pages, "descending" or "contiguous" (ascending) ones.
    """
    device = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    used = sum(n for _, n in rows)
    pool = KvPool((shape,), used + 13, dtype, device)
    for tensor in (*pool.k, *pool.v):
        tensor.fill_(torch.nan)
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
        for tensor in (pool.k[0], pool.v[0]):
            tensor[before] = torch.randn((len(before), *tensor.shape[1:]), generator=generator).to(device, dtype)
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


def expected_attention(step: PagedStep, *, scale: float, window: int = 0, softcap: float = 0.0) -> Tensor:
    """The definition, in float64: for each query, softmax over the keys it sees."""
    batch, group = step.batch, step.q.shape[1] // step.k.shape[1]
    pool_k, pool_v = step.pool.k[0].double(), step.pool.v[0].double()
    pool_k[batch.kv_index] = step.k.double()
    pool_v[batch.kv_index] = step.v.double()
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
    pool = KvPool(step.pool.shapes, step.pool.tokens, step.q.dtype, step.q.device)
    for mine, theirs in ((pool.k[0], step.pool.k[0]), (pool.v[0], step.pool.v[0])):
        mine.fill_(torch.nan)
        mine[pages] = theirs[pages]
    tokens = []
    for tensor in (step.q, step.k, step.v):
        alone = torch.full_like(tensor, torch.nan)
        alone[start:stop] = tensor[start:stop]
        tokens.append(alone)
    return PagedStep(batch, pool, *tokens), slice(start, stop)
