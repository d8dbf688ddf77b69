"""Paged decode attention against its twin, and the twin against the definition."""

from __future__ import annotations

import pytest
import torch

from inferserve.attention.base import HostRows
from inferserve.attention.work import WorkLists, WorkShape
from inferserve.kernels.decode_attention import DecodeSpace, decode_attention, decode_attention_ref
from inferserve.kernels.kv_write import kv_write_ref
from inferserve.kernels.paged_kv import Scores
from inferserve.kv.pool import KvShape
from tests.fakes.paged import PagedStep, expected_attention, paged_step
from tests.kernels.compare import DTYPES, TOLERANCE, assert_matches, poisoned

RAGGED = [(1, n) for n in (1, 17, 300, 64, 2, 757)]
HEADS = [(9, 3, 64), (4, 4, 80), (8, 1, 96), (4, 2, 128), (2, 1, 256), (20, 1, 64)]
STORED = [torch.float8_e4m3fn, torch.int8]


def step_of(
    lengths: list[tuple[int, int]],
    shape: KvShape,
    q_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    stored: torch.dtype | None = None,
) -> PagedStep:
    step = paged_step(lengths, shape, q_heads, dtype=dtype, device=device, stored=stored)
    kv = step.pool.layer(0)
    kv_write_ref(step.k, step.v, kv.k, kv.v, step.batch.kv_index, kv.k_scale, kv.v_scale)
    return step


def run(
    op: object, step: PagedStep, scores: Scores, *, rows: slice = slice(None), slots: int = 16, programs: int = 1000,
    deterministic: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The step's rows through a list made for a device of `slots` programs."""
    assert callable(op)
    shape, host = step.pool.shapes[0], step.host_rows
    lists = WorkLists(WorkShape(shape.kv_heads, shape.group, 64, slots, deterministic))
    chosen = HostRows(host.rows[rows], len(host.rows[rows]), host.query_len[rows], host.kv_len[rows])
    work = lists.make(chosen, None)
    q = step.q[rows]
    out = poisoned(*q.shape[:2], step.v.shape[2], dtype=q.dtype, device=q.device)
    space = DecodeSpace.empty(int(work[0]), shape.kv_heads, shape.group, step.v.shape[2], q.device)
    space.part.fill_(torch.nan)
    space.lse.fill_(torch.nan)
    op(
        q,
        step.pool.layer(0),
        step.batch.table,
        torch.from_numpy(work).to(q.device),
        out,
        space,
        scores,
        items=int(work[0]),
        programs=programs,
    )
    assert not space.arrived.any(), "the next launch would join too early"
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), HEADS)
def test_ragged_rows(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(kv_heads, head_dim), q_heads, dtype, device)
    scores = Scores(head_dim**-0.5)
    assert_matches(run(decode_attention, step, scores), run(decode_attention_ref, step, scores), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (33, 0.0), (290, 0.0), (0, 3.0), (100, 5.0)])
def test_window_and_softcap(window: int, softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(2, 64), 6, dtype, device)
    scores = Scores(0.5, window, softcap)
    assert_matches(run(decode_attention, step, scores), run(decode_attention_ref, step, scores), dtype)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 290])
def test_pools_of_8_bits(window: int, dtype: torch.dtype, stored: torch.dtype, device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(2, 64), 6, dtype, device, stored)
    scores = Scores(0.125, window)
    out, ref = run(decode_attention, step, scores), run(decode_attention_ref, step, scores)
    assert_matches(out, ref, torch.float16 if dtype == torch.bfloat16 else dtype)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_pools_of_8_bits_come_near_the_whole_numbers(stored: torch.dtype, device: torch.device) -> None:
    outs = []
    for dtype in (stored, None):
        step = step_of(RAGGED, KvShape(2, 64), 6, torch.float32, device, dtype)
        outs.append(run(decode_attention_ref, step, Scores(0.125)))
    error = float((outs[0] - outs[1]).norm() / outs[1].norm())
    assert TOLERANCE[torch.float32] < error < (0.04 if stored == torch.float8_e4m3fn else 0.015)


def test_values_may_have_another_size(device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(2, 96, 64), 4, torch.float32, device)
    scores = Scores(0.1)
    assert_matches(run(decode_attention, step, scores), run(decode_attention_ref, step, scores), torch.float32)


def test_few_programs_share_many_items(device: torch.device) -> None:
    step = step_of(RAGGED, KvShape(2, 64), 6, torch.float32, device)
    few = run(decode_attention, step, Scores(0.125), programs=3)
    assert torch.equal(few, run(decode_attention, step, Scores(0.125)))


def test_a_rows_result_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    """Bit for bit, when deterministic."""
    step = step_of([(1, 250), (1, 515), (1, 3), (1, 4103), (1, 515)], KvShape(2, 64), 4, torch.float32, device)
    together = run(decode_attention, step, Scores(0.125), deterministic=True)
    for r in range(5):
        alone = run(decode_attention, step, Scores(0.125), rows=slice(r, r + 1), deterministic=True)
        assert torch.equal(alone[0], together[r])


@pytest.mark.parametrize("scores", [Scores(0.3), Scores(0.3, window=7), Scores(0.3, softcap=2.0)], ids=str)
def test_the_twin_is_the_definition(scores: Scores, device: torch.device) -> None:
    step = step_of([(1, 3), (1, 20), (1, 1)], KvShape(2, 16), 6, torch.float32, device)
    expected = expected_attention(step, scale=0.3, window=scores.window, softcap=scores.softcap)
    assert_matches(run(decode_attention_ref, step, scores), expected, torch.float32)
