"""Chunks cut into squares and pieces give what attention over all keys gives, whatever the prefix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferserve.attention import dense
from inferserve.attention.dense import DenseChunk, DensePrefill, cudnn_attention, pieces
from inferserve.kernels.merge_attention import merge_attention, merge_attention_ref
from inferserve.kernels.paged_kv import PagedKv
from tests.fakes.dense_attention import torch_attention

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = 0.3


@given(st.integers(0, 200_000))
def test_pieces_cut_all_but_a_little(prefix: int) -> None:
    at = 0
    for piece in pieces(prefix):
        assert piece.start == at
        assert piece.length >= 1024
        assert piece.length % (1 << max(10, piece.length.bit_length() - 3)) == 0  # few lengths
        at += piece.length
    assert 0 <= prefix - at < 1024


def pool_and_pages(context: int, dtype: torch.dtype, device: torch.device) -> tuple[PagedKv, torch.Tensor]:
    """A pool in which a row of `context` tokens lies scattered; everything else is NaN."""
    generator = torch.Generator().manual_seed(context)
    pages = torch.randperm(context + 50, generator=generator)[:context].to(torch.int32).to(device)
    k, v = (torch.full((context + 50, KV_HEADS, DIM), torch.nan, dtype=dtype, device=device) for _ in range(2))
    for pool in (k, v):
        pool[pages.long()] = torch.randn((context, KV_HEADS, DIM), generator=generator).to(device, dtype)
    return PagedKv(k, v, None, None), pages


def expected(chunk_q: torch.Tensor, kv: PagedKv, pages: torch.Tensor) -> torch.Tensor:
    context, queries = len(pages), len(chunk_q)
    k, v = (pool[pages.long()].double().repeat_interleave(HEADS // KV_HEADS, dim=1) for pool in (kv.k, kv.v))
    score = torch.einsum("shd,nhd->hsn", chunk_q.double(), k) * SCALE
    hidden = torch.ones((queries, context), dtype=torch.bool, device=score.device).triu(context - queries + 1)
    return torch.einsum("hsn,nhd->shd", score.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("prefix", [0, 1, 255, 300, 1023, 1024, 1025, 3000, 5000])
@pytest.mark.parametrize("queries", [256, 1, 300])
def test_a_chunk_behind_any_prefix(prefix: int, queries: int) -> None:
    kv, pages = pool_and_pages(prefix + queries, torch.float32, torch.device("cpu"))
    q = torch.randn((queries + 9, HEADS, DIM), generator=torch.Generator().manual_seed(queries))
    chunk = DenseChunk.of(4, queries, pages)
    out = DensePrefill(torch_attention, merge_attention_ref).attend(chunk, q, kv, SCALE)
    torch.testing.assert_close(out.double(), expected(q[4 : 4 + queries], kv, pages), rtol=1e-4, atol=1e-5)


def test_why_a_library_does_not_run_such_heads() -> None:
    def old(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("cuDNN: heads must be equal\nat line 7") if q.shape[1] != k.shape[1] else RuntimeError

    like = torch.zeros((9, KV_HEADS, DIM))
    assert dense.refusal(torch_attention, HEADS, KV_HEADS, like) == ""
    assert dense.refusal(old, HEADS, KV_HEADS, like) == "cuDNN: heads must be equal"
    assert dense.refusal(old, HEADS, HEADS, like) == "RuntimeError"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("prefix", [0, 700, 5000])
def test_cudnn(prefix: int) -> None:
    queries, device = dense.LEAST_QUERIES, torch.device("cuda")
    kv, pages = pool_and_pages(prefix + queries, torch.bfloat16, device)
    q = torch.randn((queries, HEADS, DIM), generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    assert dense.refusal(cudnn_attention, HEADS, KV_HEADS, kv.k) == ""
    chunk = DenseChunk.of(0, queries, pages)
    out = DensePrefill(cudnn_attention, merge_attention).attend(chunk, q, kv, SCALE)
    reference = expected(q, kv, pages)
    assert float((out.double() - reference).norm() / reference.norm()) < 1e-2
