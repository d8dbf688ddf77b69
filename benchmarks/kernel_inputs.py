"""Inputs of the kernel benchmarks: fresh random tensors, ragged rows over page tables, attention ready to launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inferserve.attention.base import AttentionBatch, Bucket, HostRows, Ints
from inferserve.attention.triton import TritonAttention
from inferserve.attention.work import WorkLists, WorkShape
from inferserve.kernels import decode_attention, prefill_attention
from inferserve.kernels.decode_attention import DecodeSpace
from inferserve.kernels.kv_quant import is_quantised, quantise
from inferserve.kernels.launch_config import DECODE_PROGRAMS_PER_SM, DecodeConfig, PrefillConfig, prefill_config
from inferserve.kernels.paged_kv import HEADER, ITEM, PagedKv, Scores
from inferserve.kv.pool import KvPool, KvShape

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
_ROUNDS = 4

Lengths = Sequence[tuple[int, int]]
"""(query length, kv length) of each row, decode rows first."""


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Fresh standard normal numbers at each call."""
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def poison() -> None:
    """Fill the allocator's free memory with NaN, so that an output element that nobody writes shows."""
    for size in (2**16, 2**20, 2**24, 2**28):
        blocks = [torch.full((size // 4,), torch.nan, device=DEVICE) for _ in range(4)]
        del blocks


def ragged(count: int, low: int, high: int) -> list[tuple[int, int]]:
    """Decode rows of uniform lengths in [low, high]."""
    return [(1, int(n)) for n in np.random.default_rng().integers(low, high + 1, count)]


@dataclass(frozen=True)
class Pages:
    """Layers of one pool, and ragged rows in it; places that no row owns are NaN."""

    pool: KvPool
    table: torch.Tensor
    rows: HostRows
    shape: KvShape

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return int(self.rows.query_len.sum())

    @property
    def seen_bytes(self) -> int:
        """What one layer must read of the pool."""
        return int(self.rows.kv_len.sum()) * self.shape.bytes_per_token(self.pool.k[0].dtype)


def make_pages(
    lengths: Lengths, shape: KvShape, *, stored: torch.dtype = BF16, layers: int = 1, page: int = 1
) -> Pages:
    """Rows in shuffled pages of `page` neighbouring tokens; 0 = each row in one run."""
    total = sum(n for _, n in lengths)
    pool = KvPool((shape,) * layers, total + 1000, BF16, DEVICE, stored)
    order = _order(total, page)
    for layer in range(layers):
        _fill(pool.layer(layer), order)
    width = -(-max(n for _, n in lengths) // 16) * 16 + 16
    table = torch.full((len(lengths), width), 2**30, dtype=torch.int32, device=DEVICE)
    taken = 0
    numbers = torch.randperm(len(lengths)).numpy().astype(np.int32)
    for row, (_, n) in zip(numbers.tolist(), lengths, strict=True):
        table[row, :n] = order[taken : taken + n]
        taken += n
    query_len, kv_len = (np.array(column, np.int32) for column in zip(*lengths, strict=True))
    decode = next((i for i, (q, _) in enumerate(lengths) if q > 1), len(lengths))
    return Pages(pool, table, HostRows(numbers, decode, query_len, kv_len), shape)


def _order(total: int, page: int) -> torch.Tensor:
    """Places of `total` tokens in a pool of 1000 more."""
    if not page:
        return torch.arange(total, device=DEVICE)
    pages = torch.randperm((total + 1000) // page, device=DEVICE)[: -(-total // page)]
    return (pages[:, None] * page + torch.arange(page, device=DEVICE)).flatten()[:total]


def _fill(kv: PagedKv, order: torch.Tensor) -> None:
    for pool, scales in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        if not is_quantised(pool.dtype):
            pool.fill_(torch.nan)
            pool[order] = random(len(order), *pool.shape[1:])
            continue
        assert scales is not None
        scales.fill_(torch.nan)
        pool.view(torch.uint8).fill_(0x7F)
        numbers, found = quantise(random(len(order), *pool.shape[1:]), pool.dtype)
        pool.view(torch.uint8)[order] = numbers.view(torch.uint8)
        scales[order] = found


@dataclass(frozen=True)
class Attention:
    """One kind of attention over some pages, ready to be launched again and again."""

    pages: Pages
    q: torch.Tensor
    work: torch.Tensor
    host: Ints
    out: torch.Tensor
    space: DecodeSpace
    scores: Scores

    @staticmethod
    def over(
        pages: Pages,
        scores: Scores,
        *,
        deterministic: bool = False,
        per_sm: int = DECODE_PROGRAMS_PER_SM,
        block_m: int = 0,
    ) -> Attention:
        """With fresh queries, a poisoned output and a work list of its own."""
        shape = pages.shape
        block_m = block_m or prefill_config(shape.head_dim, pages.pool.k[0].element_size(), 2).block_m
        lists = WorkLists(WorkShape(shape.kv_heads, shape.group, block_m, multiprocessors() * per_sm, deterministic))
        work = lists.make(pages.rows, None)
        q = random(pages.tokens, shape.kv_heads * shape.group, shape.head_dim)
        return Attention(
            pages,
            q,
            torch.from_numpy(work).to(DEVICE),
            work,
            torch.full((*q.shape[:2], shape.value_dim), torch.nan, dtype=BF16, device=DEVICE),
            DecodeSpace.empty(int(work[0]), shape.kv_heads, shape.group, shape.value_dim, DEVICE),
            scores,
        )

    def decode(self, *, layer: int = 0, twin: bool = False, config: DecodeConfig | None = None) -> torch.Tensor:
        """The decode items into `out`."""
        op: Callable[..., None] = decode_attention.decode_attention_ref if twin else decode_attention.decode_attention
        op(
            self.q,
            self.pages.pool.layer(layer),
            self.pages.table,
            self.work,
            self.out,
            self.space,
            self.scores,
            items=int(self.host[0]),
            programs=_ROUNDS * multiprocessors() * DECODE_PROGRAMS_PER_SM,
            config=config,
        )
        return self.out

    def prefill(self, *, layer: int = 0, twin: bool = False, config: PrefillConfig | None = None) -> torch.Tensor:
        """The tiles into `out`."""
        op: Callable[..., None] = (
            prefill_attention.prefill_attention_ref if twin else prefill_attention.prefill_attention
        )
        op(
            self.q,
            self.pages.pool.layer(layer),
            self.pages.table,
            self.work,
            self.out,
            self.scores,
            first_tile=HEADER + ITEM * int(self.host[2]),
            tiles=int(self.host[1]),
            programs=int(self.host[1]) * self.pages.shape.kv_heads,
            config=config,
        )
        return self.out

    def both(self, *, twin: bool = False) -> torch.Tensor:
        """Items and tiles into a fresh, poisoned output."""
        self.out.fill_(torch.nan)
        self.decode(twin=twin)
        return self.prefill(twin=twin).clone()


def step_batch(pages: Pages, tokens: int, attention: TritonAttention, bucket: Bucket | None) -> AttentionBatch:
    """The pages as a step, captured in `bucket` if there is one; its own K and V go to the spare place."""
    rows = pages.rows
    work = attention.work(rows, bucket)
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    return AttentionBatch(
        rows=none,
        num_decode=0,
        query_start=none,
        kv_len=none,
        positions=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        kv_index=torch.full((tokens,), pages.pool.spare, dtype=torch.int64, device=DEVICE),
        table=pages.table,
        max_query_len=0,
        max_kv_len=0,
        query_len_host=rows.query_len,
        kv_len_host=rows.kv_len,
        work=torch.from_numpy(work).to(DEVICE),
        work_host=None if bucket else work,
        bucket=bucket,
    )


def multiprocessors() -> int:
    """Of the device."""
    return int(torch.cuda.get_device_properties(DEVICE).multi_processor_count)
