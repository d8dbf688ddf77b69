"""The cost model: what it predicts after a fit, and the least squares under it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.engine.cost_model import CostModel, StepCost, chunk_pairs, fit, nnls, padded

GEMM_MS = {64: 4.27, 128: 4.66, 256: 7.12, 512: 11.8, 1024: 21.0, 4096: 80.0}
"""Matrix products of one step of an 8B model on an H200, by tokens."""


def h200(step: StepCost) -> float:
    gemm = float(np.interp(padded(step.tokens), list(GEMM_MS), list(GEMM_MS.values())))
    return gemm + step.kv * 131e3 / 4.26e9 + step.pairs * 524e3 / 400e9 + 0.3 + 0.001 * step.sampled


def some_steps() -> list[StepCost]:
    decode = [StepCost(rows, rows * length, 0, rows) for rows in (1, 16, 64, 128, 256) for length in (128, 2048)]
    chunks = [
        StepCost(tokens, 0, chunk_pairs(before, tokens), 1)
        for tokens in (64, 128, 256, 512, 1024, 4096)
        for before in (0, 8192)
    ]
    mixed = [StepCost(64 + n, 64 * 1024, chunk_pairs(0, n), 64) for n in (64, 192, 448, 960)]
    return [*decode, *chunks, *mixed]


def test_it_predicts_what_it_was_fitted_to_and_what_lies_between() -> None:
    model = fit(some_steps(), [h200(s) for s in some_steps()])
    for step in (*some_steps(), StepCost(320, 64 * 1152, chunk_pairs(512, 256), 64), StepCost(200, 200 * 700, 0, 200)):
        assert model.milliseconds(step) == pytest.approx(h200(step), rel=0.12)


def test_noise_does_not_turn_a_weight_negative() -> None:
    random = np.random.default_rng(0)
    times = [h200(s) * float(random.uniform(0.7, 1.3)) for s in some_steps()]
    model = fit(some_steps(), times)
    assert min(model.weights) >= 0
    step = StepCost(64, 64 * 1024, 0, 64)
    assert model.milliseconds(step._replace(tokens=4096)) >= model.milliseconds(step)
    assert model.milliseconds(step) == pytest.approx(h200(step), rel=0.3)


def test_equal_times_give_a_constant() -> None:
    model = fit(some_steps(), [10.0] * len(some_steps()))
    assert model.milliseconds(StepCost(8192, 10**6, 1e7, 256)) == pytest.approx(10.0, rel=0.01)


def test_sizes_and_pairs() -> None:
    assert [padded(n) for n in (1, 64, 65, 385, 8192, 8193)] == [64, 64, 128, 512, 8192, 8256]
    assert chunk_pairs(0, 4) == 1 + 2 + 3 + 4
    assert chunk_pairs(10, 2) == 11 + 12


def test_a_model_is_a_sum() -> None:
    model = CostModel((1.0, 0.5, 0.0, 0.0, 0.0, 0.25, 0.125, 2.0))
    assert model.milliseconds(StepCost(3, 8, 16, 4)) == 1 + 32 + 2 + 2 + 8


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 6), st.integers(1, 6))
def test_least_squares_satisfy_the_optimality_conditions(seed: int, m: int, n: int, rank: int) -> None:
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(m, min(rank, n))) @ random.normal(size=(min(rank, n), n))
    target = random.normal(size=m)
    x = nnls(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-6).all(), "a larger value would be better"
    assert np.abs(gradient[x > 1e-9]).max(initial=0.0) <= 1e-6, "another value would be better"
