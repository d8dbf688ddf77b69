"""Paged prefill attention against its twin, and the twin against the definition."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.kv_write import kv_write_ref
from inferserve.kernels.prefill_attention import prefill_attention, prefill_attention_ref
from inferserve.kv.pool import KvShape
from tests.fakes.paged import PagedStep, expected_attention, paged_step
from tests.kernels.compare import DTYPES, assert_matches, poisoned

RAGGED = [(40, 40), (2, 90), (33, 150), (1, 1), (70, 71)]
HEADS = [(9, 3, 64), (4, 4, 80), (8, 1, 96), (4, 2, 128), (2, 1, 256)]


def step_of(
    rows: list[tuple[int, int]], shape: KvShape, q_heads: int, dtype: torch.dtype, device: torch.device
) -> PagedStep:
    step = paged_step(rows, shape, q_heads, dtype=dtype, device=device)
    kv_write_ref(step.k, step.v, step.pool.k[0], step.pool.v[0], step.batch.kv_index)
    return step


def run(op: object, step: PagedStep, **options: float) -> torch.Tensor:
    assert callable(op)
    batch, pool = step.batch, step.pool
    out = poisoned(*step.q.shape[:2], step.v.shape[2], dtype=step.q.dtype, device=step.q.device)
    op(
        step.q,
        pool.k[0],
        pool.v[0],
        batch.table,
        batch.rows,
        batch.query_start,
        batch.kv_len,
        out,
        max_query_len=batch.max_query_len,
        **options,
    )
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), HEADS)
def test_ragged_chunks(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(kv_heads, head_dim), q_heads, dtype, device)
    options = {"scale": head_dim**-0.5}
    assert_matches(run(prefill_attention, step, **options), run(prefill_attention_ref, step, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (9, 0.0), (60, 0.0), (0, 3.0), (20, 5.0)])
def test_window_and_softcap(window: int, softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(2, 64), 6, dtype, device)
    options = {"scale": 0.5, "window": window, "softcap": softcap}
    assert_matches(run(prefill_attention, step, **options), run(prefill_attention_ref, step, **options), dtype)


def test_only_the_given_rows_are_written(device: torch.device) -> None:
    """Decode rows come first in a step; their part of `out` belongs to another kernel."""
    step = step_of([(1, 9), (1, 30), (5, 12)], KvShape(2, 32, 48), 4, torch.float32, device)
    batch = step.batch
    outs = []
    for op in (prefill_attention, prefill_attention_ref):
        out = poisoned(7, 4, 48, dtype=torch.float32, device=device)
        op(
            step.q,
            step.pool.k[0],
            step.pool.v[0],
            batch.table,
            batch.rows[2:],
            batch.query_start[2:],
            batch.kv_len[2:],
            out,
            max_query_len=batch.max_query_len,
            scale=0.2,
        )
        assert out[:2].isnan().all()
        outs.append(out[2:])
    assert_matches(outs[0], outs[1], torch.float32)


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 2.0}], ids=str)
def test_the_twin_is_the_definition(options: dict[str, int], device: torch.device) -> None:
    step = step_of([(3, 3), (5, 20), (1, 4)], KvShape(2, 16), 6, torch.float32, device)
    expected = expected_attention(step, scale=0.3, **options)
    assert_matches(run(prefill_attention_ref, step, scale=0.3, **options), expected, torch.float32)
