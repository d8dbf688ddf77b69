"""The future peak equals what playing the future step by step gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.router.estimate import PeakEstimate


@dataclass(frozen=True)
class Row:
    held: int
    left: int
    starting: bool = False


rows = st.lists(st.builds(Row, st.integers(0, 50), st.integers(0, 40), st.booleans()), max_size=12)


def played(table: list[Row], shared: int, kept: dict[int, int] | None = None) -> int:
    """The peak by playing each step; a starting row stays to the end, `kept` tokens of a row stay when it leaves."""
    worst = 0
    for step in range(max([row.left for row in table], default=0) + 2):
        used = shared
        for position, row in enumerate(table):
            if row.starting or step <= row.left:
                used += row.held + min(step, row.left)
            else:
                used += (kept or {}).get(position, 0)
        worst = max(worst, used)
    return worst


def lightllm_peak(table: list[Row]) -> int:
    """lightllm.md 6.2: sort by remaining output, longest first; max over k of (sum of first k held + k · left_k)."""
    worst = total = 0
    for count, row in enumerate(sorted(table, key=lambda r: -r.left), 1):
        total += row.held
        worst = max(worst, total + count * row.left)
    return worst


def estimate(table: list[Row], shared: int = 0) -> PeakEstimate:
    return PeakEstimate(
        np.array([r.held for r in table], np.int64),
        np.array([r.left for r in table], np.int64),
        np.array([r.starting for r in table], np.bool_),
        shared,
    )


@settings(max_examples=200, deadline=None)
@given(rows, st.integers(0, 100))
def test_peak(table: list[Row], shared: int) -> None:
    assert estimate(table, shared).peak() == played(table, shared)


@settings(max_examples=200, deadline=None)
@given(rows)
def test_equals_lightllm_where_all_rows_have_started(table: list[Row]) -> None:
    table = [replace(r, starting=False) for r in table]
    assert estimate(table).peak() == lightllm_peak(table)


@settings(max_examples=200, deadline=None)
@given(rows, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 50), st.integers(1, 4)), max_size=6))
def test_rows_that_join_one_after_the_other(table: list[Row], joining: list[tuple[int, int, int]]) -> None:
    future = estimate(table, 7)
    for tokens, left, count in joining:
        table = [*table, Row(tokens, left, True), *[Row(0, left, True)] * (count - 1)]
        assert future.peak_with(tokens, left, count) == played(table, 7)
        future.add(tokens, left, count)
        assert future.peak() == played(table, 7)


@settings(max_examples=200, deadline=None)
@given(rows.filter(bool), st.data())
def test_tokens_that_outlive_their_holder(table: list[Row], data: st.DataObject) -> None:
    holders = data.draw(st.sets(st.integers(0, len(table) - 1), min_size=1))
    kept = {h: data.draw(st.integers(0, table[h].held)) for h in holders}
    future = estimate(table)
    before = future.peak()
    assert future.keeping(tuple(kept.items())).peak() == played(table, 0, kept)
    assert future.peak() == before == played(table, 0)


def test_a_large_table() -> None:
    rng = np.random.default_rng(1)
    table = [
        Row(int(h), int(left)) for h, left in zip(rng.integers(1, 4000, 1000), rng.integers(1, 2000, 1000), strict=True)
    ]
    assert estimate(table).peak() == lightllm_peak(table)
