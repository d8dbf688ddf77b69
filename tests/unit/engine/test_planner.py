"""The planner by itself: budgets, order, chunks, and when a pool is too full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.engine.planner import (
    Budget,
    has_room,
    next_to_start,
    plan_step,
    tokens_promised,
    youngest_holder,
)
from inferserve.engine.rows import DECODING, FILLING, FOLLOWING, FREE, PAUSED, QUEUED, EndRules, Rows
from inferserve.engine.step import Ints
from inferserve.protocol.sampling import SamplingParams

PLENTY = 10**6


def running(*rows: tuple[int, int, int]) -> tuple[Rows, EndRules, Ints]:
    """(state, order, tokens still to fill) for each row; KV lengths are 100."""
    table, rules = Rows(len(rows), 1000), EndRules(len(rows), 10, (0,))
    length = np.full(len(rows), 100, dtype=np.int32)
    for row, (state, order, left) in enumerate(rows):
        table.state[row], table.order[row], table.fill[row] = state, order, 100 + left
        rules.set(row, SamplingParams(max_tokens=50), 1000)
    return table, rules, length


def test_decode_rows_come_first_then_prompts_in_order_of_admission() -> None:
    rows, rules, length = running(
        (FILLING, 9, 50), (DECODING, 8, 0), (FILLING, 1, 30), (DECODING, 3, 0), (QUEUED, 2, 0)
    )
    plan = plan_step(rows, rules, length, Budget(64, 40), PLENTY)
    assert plan.decode.tolist() == [3, 1]
    assert plan.prefill.tolist() == [2, 0]
    assert plan.chunks.tolist() == [30, 32], "2 decode tokens and 30 leave 32"


def test_a_chunk_is_limited() -> None:
    rows, rules, length = running((FILLING, 1, 50), (FILLING, 2, 5))
    plan = plan_step(rows, rules, length, Budget(64, 7), PLENTY)
    assert plan.chunks.tolist() == [7, 5]


def test_a_long_prompt_leaves_half_to_those_behind_it() -> None:
    long, short = (FILLING, 1, 900), (FILLING, 2, 30)
    for waiting, chunks in (
        ([long], [64]),
        ([(FILLING, 1, 512), short], [64]),
        ([long, short], [34, 30]),
        ([long, (FILLING, 2, 300)], [32, 32]),
        ([long, (FILLING, 2, 800), short], [32, 16, 16]),
    ):
        rows, rules, length = running(*waiting)
        assert plan_step(rows, rules, length, Budget(64, 64), PLENTY).chunks.tolist() == chunks
    rows, rules, length = running(long, (QUEUED, 2, 0))
    assert has_room(rows, rules, length, Budget(64, 64)), "the one behind it must have started to share"
    rows, rules, length = running(long, (FILLING, 2, 300), (QUEUED, 2, 0))
    assert not has_room(rows, rules, length, Budget(64, 64))


def test_rows_whose_last_token_is_asked_for_are_left_out() -> None:
    rows, rules, length = running((DECODING, 1, 0), (DECODING, 2, 0))
    rows.planned[0] = 50
    assert plan_step(rows, rules, length, Budget(64, 7), PLENTY).decode.tolist() == [1]


def test_room_is_what_the_rows_with_kv_leave() -> None:
    rows, rules, length = running((DECODING, 1, 0), (FILLING, 2, 30), (QUEUED, 3, 0))
    assert has_room(rows, rules, length, Budget(32, 64)) and not has_room(rows, rules, length, Budget(31, 64))
    assert has_room(rows, rules, length, Budget(9, 7)) and not has_room(rows, rules, length, Budget(8, 7))
    assert has_room(rows, rules, length, Budget(99, 64, prompts=31))
    assert not has_room(rows, rules, length, Budget(99, 64, prompts=30))
    rows.planned[0] = 50
    assert has_room(rows, rules, length, Budget(31, 64)), "its last token is asked for"


def test_nothing_to_do_is_not_a_shortage() -> None:
    rows, rules, length = running((FREE, 0, 0), (QUEUED, 1, 0), (FOLLOWING, 2, 0))
    plan = plan_step(rows, rules, length, Budget(64, 7), 0)
    assert plan.empty and not plan.short


def test_decoding_short_of_kv_plans_nothing() -> None:
    rows, rules, length = running((DECODING, 1, 0), (DECODING, 2, 0), (FILLING, 3, 9))
    plan = plan_step(rows, rules, length, Budget(64, 7), 1)
    assert plan.short and plan.empty
    plan = plan_step(rows, rules, length, Budget(64, 7), 2)
    assert (len(plan.decode), len(plan.prefill)) == (2, 0)
    assert plan_step(rows, rules, length, Budget(64, 7), 5).chunks.tolist() == [3]


def test_prompts_alone_short_of_kv() -> None:
    rows, rules, length = running((FILLING, 1, 9))
    assert plan_step(rows, rules, length, Budget(64, 7), 0).short
    assert plan_step(rows, rules, length, Budget(64, 7, whole_prompts=True), 8).short


def test_whole_prompts() -> None:
    rows, rules, length = running((DECODING, 1, 0), (FILLING, 2, 30), (FILLING, 3, 30), (FILLING, 4, 30))
    plan = plan_step(rows, rules, length, Budget(64, 64, whole_prompts=True), PLENTY)
    assert (plan.decode.tolist(), plan.prefill.tolist(), plan.chunks.tolist()) == ([0], [1, 2], [30, 30])
    plan = plan_step(rows, rules, length, Budget(30, 30, whole_prompts=True), PLENTY)
    assert (plan.decode.tolist(), plan.prefill.tolist()) == ([], [1]), "it would never run beside a decode row"


def test_the_oldest_starts_and_the_youngest_is_paused() -> None:
    rows, _, _ = running((QUEUED, 5, 0), (PAUSED, 3, 0), (FOLLOWING, 1, 0), (DECODING, 2, 0), (FILLING, 9, 4))
    assert next_to_start(rows) == 1
    assert youngest_holder(rows) == (4, False)
    rows.state[[1, 0, 4]] = FREE
    assert next_to_start(rows) is None
    assert youngest_holder(rows) == (3, True)


def test_a_starting_row_leaves_room_for_the_others() -> None:
    rows, _, length = running((DECODING, 1, 0), (DECODING, 2, 0), (FILLING, 3, 40))
    assert tokens_promised(rows, length, resumes=False) == 42
    assert tokens_promised(rows, length, resumes=True) == 40 + 2 * 16


ROWS = st.tuples(st.sampled_from([FREE, QUEUED, PAUSED, FILLING, DECODING]), st.integers(0, 99), st.integers(1, 60))


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=9, unique_by=lambda r: r[1]),
    tokens=st.integers(1, 80),
    chunk=st.integers(1, 40),
    available=st.integers(0, 120),
)
def test_budgets_hold_and_a_plan_is_empty_only_for_a_reason(
    rows: list[tuple[int, int, int]], tokens: int, chunk: int, available: int
) -> None:
    table, rules, length = running(*rows)
    plan = plan_step(table, rules, length, Budget(tokens, chunk), available)
    used = len(plan.decode) + int(plan.chunks.sum())
    assert used <= min(tokens, available)
    assert (plan.chunks > 0).all() and (plan.chunks <= chunk).all()
    assert (plan.chunks <= table.fill[plan.prefill] - length[plan.prefill]).all()
    for part in (plan.decode, plan.prefill):
        assert (np.diff(table.order[part]) > 0).all(), "not in order of admission"
    holders = [state for state, _, _ in rows if state in (FILLING, DECODING)]
    if plan.empty:
        assert plan.short == bool(holders)
        assert not holders or available < max(1, min(holders.count(DECODING), tokens))
    else:
        assert len(plan.decode) == min(holders.count(DECODING), tokens)


@pytest.mark.parametrize(
    ("token", "position", "stops"), [(0, 0, False), (0, 2, True), (3, 2, True), (4, 2, False), (99, 2, False)]
)
def test_end_rules(token: int, position: int, stops: bool) -> None:
    rules = EndRules(2, 10, (0, 1))
    rules.set(0, SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=(3,)), 9)
    rules.set(1, SamplingParams(max_tokens=50, ignore_eos=True), 9)
    rows, ids = np.array([0, 1], dtype=np.int32), np.full(2, token, dtype=np.int32)
    assert rules.stopped(rows, ids, np.full(2, position, dtype=np.int32)).tolist() == [stops, False]
    assert rules.limit.tolist() == [5, 9]


def test_stop_ids_of_the_row_before_are_forgotten() -> None:
    rules = EndRules(1, 10, ())
    row, ids, position = np.zeros(1, dtype=np.int32), np.full(1, 3, dtype=np.int32), np.zeros(1, dtype=np.int32)
    rules.set(0, SamplingParams(stop_token_ids=(3,)), 9)
    assert rules.stopped(row, ids, position).all()
    rules.set(0, SamplingParams(), 9)
    assert not rules.stopped(row, ids, position).any()
