"""The running distribution of output lengths: cautious when it knows little, right when it knows much."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.router.output_lengths import MIN_ROWS, QUANTILE, OutputLengths


def expected(lengths: OutputLengths, generated: int, limit: int) -> int:
    return int(lengths.curve().expected(np.array([generated]), np.array([limit]))[0])


def test_nothing_known_means_the_limit() -> None:
    lengths = OutputLengths(4096)
    assert expected(lengths, 0, 1000) == 1000
    for _ in range(MIN_ROWS - 2):
        lengths.observe(10, ended=True)
    assert expected(lengths, 0, 1000) == 1000
    for _ in range(3):
        lengths.observe(10, ended=True)
    assert expected(lengths, 0, 1000) == 10
    assert expected(lengths, 0, 5) == 5


def test_a_row_that_outlives_what_is_known_gets_its_limit() -> None:
    lengths = OutputLengths(4096)
    for _ in range(200):
        lengths.observe(100, ended=True)
    assert 100 <= expected(lengths, 50, 4000) <= 110
    assert expected(lengths, 200, 4000) == 4000


def test_the_quantile_of_a_known_distribution() -> None:
    rng = np.random.default_rng(0)
    lengths = OutputLengths(16384)
    drawn = np.ceil(rng.exponential(300, 4000)).astype(int)
    for length in drawn:
        lengths.observe(int(length), ended=True)
    assert expected(lengths, 0, 16384) == pytest.approx(np.quantile(drawn[-1000:], QUANTILE), rel=0.2)
    beyond = drawn[drawn > 300]
    assert expected(lengths, 300, 16384) == pytest.approx(np.quantile(beyond, QUANTILE), rel=0.25)


def test_rows_cut_by_their_limit_do_not_make_others_look_short() -> None:
    rng = np.random.default_rng(0)
    lengths = OutputLengths(16384)
    for length in np.ceil(rng.exponential(300, 4000)).astype(int):
        cut = rng.random() < 0.5
        lengths.observe(min(int(length), 50) if cut else int(length), ended=not cut or length <= 50)
    assert expected(lengths, 0, 16384) == pytest.approx(-300 * np.log(1 - QUANTILE), rel=0.25)


def test_old_rows_are_forgotten() -> None:
    lengths = OutputLengths(4096)
    for _ in range(5000):
        lengths.observe(2000, ended=True)
    for _ in range(5000):
        lengths.observe(20, ended=True)
    assert expected(lengths, 0, 4096) <= 22


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=80),
    st.lists(st.tuples(st.integers(0, 4999), st.integers(1, 5000)), min_size=1, max_size=20),
)
def test_always_beyond_now_and_within_the_limit(seen: list[tuple[int, bool]], rows: list[tuple[int, int]]) -> None:
    lengths = OutputLengths(5000)
    for length, ended in seen:
        lengths.observe(length, ended)
    generated = np.array([min(g, limit - 1) for g, limit in rows])
    limit = np.array([limit for _, limit in rows])
    total = lengths.curve().expected(generated, limit)
    assert (total > generated).all() and (total <= limit).all()
