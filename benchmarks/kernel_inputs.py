"""Inputs of `kernels_gpu`: fresh random tensors, ragged rows over a shuffled page table, sampling params of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from inferserve.attention.base import AttentionBatch
from inferserve.kv.pool import KvPool, KvShape
from inferserve.protocol.sampling import SamplingParams

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Fresh standard normal numbers at each call."""
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def poison() -> None:
    """Fill the allocator's free memory with NaN, so that an output element that nobody writes shows."""
    for size in (2**16, 2**20, 2**24, 2**28):
        blocks = [torch.full((size // 4,), torch.nan, device=DEVICE) for _ in range(4)]
        del blocks


@dataclass(frozen=True)
class Pages:
    """A pool with ragged rows at shuffled pages; unused entries are NaN."""

    pool: KvPool
    table: torch.Tensor
    rows: torch.Tensor
    kv_len: torch.Tensor
    query_start: torch.Tensor
    lengths: list[tuple[int, int]]

    @property
    def kv_tokens(self) -> int:
        """Over all rows."""
        return sum(n for _, n in self.lengths)


def make_pages(lengths: list[tuple[int, int]], shape: KvShape) -> Pages:
    """From (query length, kv length) rows."""
    total = sum(n for _, n in lengths)
    pool = KvPool((shape,), total + 1000, BF16, DEVICE)
    order = torch.randperm(total + 1000, device=DEVICE)[:total]
    for tensor in (pool.k[0], pool.v[0]):
        tensor.fill_(torch.nan)
        tensor[order] = random(total, *tensor.shape[1:])
    table = torch.full((len(lengths), max(n for _, n in lengths)), 2**30, dtype=torch.int32, device=DEVICE)
    taken = 0
    rows = torch.randperm(len(lengths))
    for row, (_, n) in zip(rows.tolist(), lengths, strict=True):
        table[row, :n] = order[taken : taken + n]
        taken += n
    starts = np.cumsum([0, *(q for q, _ in lengths)])
    return Pages(
        pool,
        table,
        rows.to(DEVICE, torch.int32),
        torch.tensor([n for _, n in lengths], dtype=torch.int32, device=DEVICE),
        torch.from_numpy(starts).to(DEVICE, torch.int32),
        lengths,
    )


def ragged(count: int, mean: int) -> list[tuple[int, int]]:
    """Decode rows of uniform lengths around a mean."""
    return [(1, int(n)) for n in np.random.default_rng().integers(1, 2 * mean, count)]


def run_decode(op: Callable[..., None], pages: Pages, q: torch.Tensor, **options: float) -> torch.Tensor:
    """Decode attention into a poisoned output."""
    out = torch.full((*q.shape[:2], pages.pool.v[0].shape[2]), torch.nan, dtype=BF16, device=DEVICE)
    longest = max(n for _, n in pages.lengths)
    pool = pages.pool
    op(q, pool.k[0], pool.v[0], pages.table, pages.rows, pages.kv_len, out, max_kv_len=longest, **options)
    return out


def run_prefill(op: Callable[..., None], pages: Pages, q: torch.Tensor, **options: float) -> torch.Tensor:
    """Prefill attention into a poisoned output."""
    out = torch.full((*q.shape[:2], pages.pool.v[0].shape[2]), torch.nan, dtype=BF16, device=DEVICE)
    longest, pool = max(n for n, _ in pages.lengths), pages.pool
    op(
        q,
        pool.k[0],
        pool.v[0],
        pages.table,
        pages.rows,
        pages.query_start,
        pages.kv_len,
        out,
        max_query_len=longest,
        **options,
    )
    return out


def mixed_batch(pages: Pages, num_decode: int) -> AttentionBatch:
    """The pages as a step."""
    query_len, kv_len = zip(*pages.lengths, strict=True)
    last = [pages.table[row, n - q : n] for row, (q, n) in zip(pages.rows.tolist(), pages.lengths, strict=True)]
    return AttentionBatch(
        rows=pages.rows,
        num_decode=num_decode,
        query_start=pages.query_start,
        kv_len=pages.kv_len,
        positions=torch.cat([torch.arange(n - q, n, device=DEVICE) for q, n in pages.lengths]),
        kv_index=torch.cat(last).to(torch.int64),
        table=pages.table,
        max_query_len=max(query_len),
        max_kv_len=max(kv_len),
        query_len_host=np.array(query_len, np.int32),
        kv_len_host=np.array(kv_len, np.int32),
    )


def sampling_mix(row: int) -> SamplingParams:
    """Params of all kinds, by row."""
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(logprobs=0),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.2, top_k=50, logprobs=5),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.02),
        SamplingParams(temperature=0.9, frequency_penalty=0.5, presence_penalty=0.3, logit_bias={11: 3.0}),
        SamplingParams(temperature=0.0, min_tokens=3, max_tokens=9, stop_token_ids=(9,)),
    )
    return msgspec.structs.replace(kinds[row % len(kinds)], seed=row)
