"""Paged prefill attention against its twin, and the twin against the definition."""

from __future__ import annotations

import pytest
import torch

from inferserve.attention.base import HostRows
from inferserve.attention.work import WorkLists, WorkShape
from inferserve.kernels.kv_write import kv_write_ref
from inferserve.kernels.launch_config import prefill_config
from inferserve.kernels.paged_kv import HEADER, ITEM, Scores
from inferserve.kernels.prefill_attention import prefill_attention, prefill_attention_ref
from inferserve.kv.pool import KvShape
from tests.fakes.paged import PagedStep, expected_attention, paged_step
from tests.kernels.compare import DTYPES, assert_matches, poisoned

RAGGED = [(40, 40), (2, 90), (33, 150), (1, 1), (70, 71)]
HEADS = [(9, 3, 64), (4, 4, 80), (8, 1, 96), (4, 2, 128), (2, 1, 256)]


def step_of(
    rows: list[tuple[int, int]],
    shape: KvShape,
    q_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    stored: torch.dtype | None = None,
) -> PagedStep:
    step = paged_step(rows, shape, q_heads, dtype=dtype, device=device, stored=stored)
    kv = step.pool.layer(0)
    kv_write_ref(step.k, step.v, kv.k, kv.v, step.batch.kv_index, kv.k_scale, kv.v_scale)
    return step


def run(op: object, step: PagedStep, scores: Scores, *, decode: int = 0, programs: int = 1000) -> torch.Tensor:
    """The step's rows but for the first `decode`, all as chunks."""
    assert callable(op)
    shape, host = step.pool.shapes[0], step.host_rows
    dims = max(shape.head_dim, shape.value_dim)
    config = prefill_config(dims, step.pool.k[0].element_size(), step.q.element_size())
    lists = WorkLists(WorkShape(shape.kv_heads, shape.group, config.block_m, 16, deterministic=True))
    work = lists.make(HostRows(host.rows, decode, host.query_len, host.kv_len), None)
    out = poisoned(*step.q.shape[:2], step.v.shape[2], dtype=step.q.dtype, device=step.q.device)
    op(
        step.q,
        step.pool.layer(0),
        step.batch.table,
        torch.from_numpy(work).to(step.q.device),
        out,
        scores,
        first_tile=HEADER + ITEM * int(work[2]),
        tiles=int(work[1]),
        programs=programs,
    )
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), HEADS)
def test_ragged_chunks(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(kv_heads, head_dim), q_heads, dtype, device)
    scores = Scores(head_dim**-0.5)
    assert_matches(run(prefill_attention, step, scores), run(prefill_attention_ref, step, scores), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (9, 0.0), (60, 0.0), (0, 3.0), (20, 5.0)])
def test_window_and_softcap(window: int, softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(2, 64), 6, dtype, device)
    scores = Scores(0.5, window, softcap)
    assert_matches(run(prefill_attention, step, scores), run(prefill_attention_ref, step, scores), dtype)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 60])
def test_pools_of_8_bits(window: int, dtype: torch.dtype, stored: torch.dtype, device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(2, 64), 6, dtype, device, stored)
    scores = Scores(0.125, window)
    assert_matches(run(prefill_attention, step, scores), run(prefill_attention_ref, step, scores), dtype)


def test_only_the_given_rows_are_written(device: torch.device) -> None:
    """Decode rows come first in a step; their part of `out` belongs to another kernel."""
    step = step_of([(1, 9), (1, 30), (5, 12)], KvShape(2, 32, 48), 4, torch.float32, device)
    outs = []
    for op in (prefill_attention, prefill_attention_ref):
        out = run(op, step, Scores(0.2), decode=2)
        assert out[:2].isnan().all()
        outs.append(out[2:])
    assert_matches(outs[0], outs[1], torch.float32)


def test_few_programs_share_many_tiles(device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(2, 32), 4, torch.float32, device)
    assert torch.equal(run(prefill_attention, step, Scores(0.2), programs=3), run(prefill_attention, step, Scores(0.2)))


@pytest.mark.parametrize("window", [0, 25])
def test_a_query_s_result_does_not_depend_on_its_chunk(window: int, device: torch.device) -> None:
    """Bit for bit: a prompt at once, its end as a chunk, and that among others."""
    whole = step_of([(90, 90)], KvShape(2, 32), 4, torch.float32, device)
    full = run(prefill_attention, whole, Scores(0.2, window))
    batch = whole.batch
    table_row, host = int(batch.rows[0]), whole.host_rows
    lists = WorkLists(WorkShape(2, 2, prefill_config(32, 4, 4).block_m, 16, deterministic=True))
    for first in (1, 37, 64, 89):
        rows = HostRows(host.rows, 0, host.query_len - first, host.kv_len)
        work = lists.make(rows, None)
        out = poisoned(90 - first, 4, 32, dtype=torch.float32, device=device)
        prefill_attention(
            whole.q[first:],
            whole.pool.layer(0),
            batch.table,
            torch.from_numpy(work).to(device),
            out,
            Scores(0.2, window),
            first_tile=HEADER,
            tiles=int(work[1]),
            programs=100,
        )
        assert table_row == rows.rows[0]
        assert torch.equal(out, full[first:])


@pytest.mark.parametrize("scores", [Scores(0.3), Scores(0.3, window=7), Scores(0.3, softcap=2.0)], ids=str)
def test_the_twin_is_the_definition(scores: Scores, device: torch.device) -> None:
    step = step_of([(3, 3), (5, 20), (1, 4)], KvShape(2, 16), 6, torch.float32, device)
    expected = expected_attention(step, scale=0.3, window=scores.window, softcap=scores.softcap)
    assert_matches(run(prefill_attention_ref, step, scores), expected, torch.float32)
