"""Paged decode attention against its twin, and the twin against the definition."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.decode_attention import decode_attention, decode_attention_ref
from inferserve.kernels.kv_write import kv_write_ref
from inferserve.kernels.launch_config import decode_config
from inferserve.kv.pool import KvShape
from tests.fakes.paged import PagedStep, expected_attention, paged_step
from tests.kernels.compare import DTYPES, assert_matches, poisoned

RAGGED = [(1, n) for n in (1, 17, 300, 64, 2, 257)]
HEADS = [(9, 3, 64), (4, 4, 80), (8, 1, 96), (4, 2, 128), (2, 1, 256), (20, 1, 64)]


def step_of(
    lengths: list[tuple[int, int]], shape: KvShape, q_heads: int, dtype: torch.dtype, device: torch.device
) -> PagedStep:
    step = paged_step(lengths, shape, q_heads, dtype=dtype, device=device)
    kv_write_ref(step.k, step.v, step.pool.k[0], step.pool.v[0], step.batch.kv_index)
    return step


def run(op: object, step: PagedStep, **options: float) -> torch.Tensor:
    assert callable(op)
    batch = step.batch
    out = poisoned(*step.q.shape[:2], step.v.shape[2], dtype=step.q.dtype, device=step.q.device)
    pool = step.pool
    op(step.q, pool.k[0], pool.v[0], batch.table, batch.rows, batch.kv_len, out, max_kv_len=batch.max_kv_len, **options)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), HEADS)
def test_ragged_rows(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(kv_heads, head_dim), q_heads, dtype, device)
    options = {"scale": head_dim**-0.5}
    assert_matches(run(decode_attention, step, **options), run(decode_attention_ref, step, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (33, 0.0), (290, 0.0), (0, 3.0), (100, 5.0)])
def test_window_and_softcap(window: int, softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(2, 64), 6, dtype, device)
    options = {"scale": 0.5, "window": window, "softcap": softcap}
    assert_matches(run(decode_attention, step, **options), run(decode_attention_ref, step, **options), dtype)


def test_values_may_have_another_size(device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(2, 96, 64), 4, torch.float32, device)
    options = {"scale": 0.1}
    assert_matches(run(decode_attention, step, **options), run(decode_attention_ref, step, **options), torch.float32)


def test_a_rows_result_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    """Bit for bit, also when a longer neighbour makes the context be split."""
    config = decode_config(64, 4)
    split, most = config.split, config.split * config.max_splits
    rows = [(1, split - 5), (1, 2 * split + 3), (1, 3), (1, most + 7)]
    step = step_of(rows, KvShape(2, 64), 4, torch.float32, device)
    together = run(decode_attention, step, scale=0.125)
    batch = step.batch
    for r, (_, length) in enumerate(rows):
        alone = poisoned(1, 4, 64, dtype=torch.float32, device=device)
        decode_attention(
            step.q[r : r + 1],
            step.pool.k[0],
            step.pool.v[0],
            batch.table,
            batch.rows[r : r + 1],
            batch.kv_len[r : r + 1],
            alone,
            max_kv_len=length,
            scale=0.125,
        )
        assert torch.equal(alone[0], together[r])


def test_a_context_beyond_the_most_splits(device: torch.device) -> None:
    config = decode_config(32, 4)
    step = step_of([(1, config.split * config.max_splits * 2 + 100), (1, 5)], KvShape(1, 32), 2, torch.float32, device)
    options = {"scale": 0.3}
    assert_matches(run(decode_attention, step, **options), run(decode_attention_ref, step, **options), torch.float32)


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 2.0}], ids=str)
def test_the_twin_is_the_definition(options: dict[str, int], device: torch.device) -> None:
    step = step_of([(1, 3), (1, 20), (1, 1)], KvShape(2, 16), 6, torch.float32, device)
    expected = expected_attention(step, scale=0.3, **options)
    assert_matches(run(decode_attention_ref, step, scale=0.3, **options), expected, torch.float32)
