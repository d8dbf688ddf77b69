"""The sampling filter kernel against its twin: same token, unless the draw falls on a boundary within rounding."""

from __future__ import annotations

import math

import pytest
import torch

from inferserve.kernels.sampling_filter import FilterParams, filter_sample, filter_sample_ref
from tests.kernels.compare import DTYPES, random

VOCAB = 2500


def params_of(device: torch.device, *rows: tuple[float, int, float, float], vocab: int = VOCAB) -> FilterParams:
    """From (temperature, top_k, top_p, min_p) rows."""
    temperature, top_k, top_p, min_p = (torch.tensor(column, device=device) for column in zip(*rows, strict=True))
    active = top_k < vocab
    return FilterParams(
        temperature.float(),
        top_p.float(),
        min_p.float(),
        top_k.int(),
        filtered=bool((active | (top_p < 1) | (min_p > 0)).any()),
        max_top_k=int(top_k[active].max()) if active.any() else 0,
    )


ROWS = [
    (1.0, VOCAB, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.3, 50, 1.0, 0.0),
    (0.8, VOCAB, 0.9, 0.0),
    (2.0, VOCAB, 0.99, 0.0),
    (1.0, VOCAB, 1.0, 0.1),
    (0.9, 40, 0.6, 0.05),
    (1.5, 400, 0.95, 0.001),
    (1.0, VOCAB, 1e-6, 0.0),
]


def near_a_boundary(logits: torch.Tensor, temperature: float, tokens: tuple[int, int]) -> bool:
    """Whether the tokens are neighbours among the kept ones or a hair's breadth of mass apart, so rounding decides."""
    p = torch.softmax(logits.double() / temperature, -1)
    low, high = sorted(tokens)
    return float(p[low + 1 : high].sum()) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_the_twins_token(dtype: torch.dtype, device: torch.device) -> None:
    params = params_of(device, *ROWS)
    different = 0
    for trial in range(3):
        logits = 3 * random(len(ROWS), VOCAB + 8, dtype=dtype, device=device, seed=trial)[:, :VOCAB]
        u = torch.rand(len(ROWS), generator=torch.Generator().manual_seed(trial)).to(device)
        out, ref = filter_sample(logits, params, u), filter_sample_ref(logits, params, u)
        for row in (out != ref).nonzero().flatten().tolist():
            different += 1
            assert near_a_boundary(logits[row], ROWS[row][0], (int(out[row]), int(ref[row])))
    assert different <= 1


def test_extreme_numbers(device: torch.device) -> None:
    logits = torch.full((6, 700), -math.inf, device=device)
    logits[0, 699] = 0.0  # one possible token, at the end
    logits[1, [3, 600]] = 5.0
    logits[2] = 0.0  # all alike
    logits[3, 0] = math.nan
    logits[4] = 1e30 * random(700, dtype=torch.float32, device=device)
    logits[5, [1, 2, 3]] = torch.tensor([2.0, 2.0, 2.0], device=device)
    rows = [
        (1.0, 5, 0.9, 0.0),
        (1.0, 700, 1.0, 0.0),
        (1.0, 700, 0.5, 0.0),
        (1.0, 9, 0.9, 0.1),
        (1.0, 700, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
    ]
    params = params_of(device, *rows, vocab=700)
    for u in (0.0, 0.5, 1 - 2.0**-24):
        out = filter_sample(logits, params, torch.full((6,), u, device=device))
        ref = filter_sample_ref(logits, params, torch.full((6,), u, device=device))
        assert ((out >= 0) & (out < 700)).all()
        assert ((ref >= 0) & (ref < 700)).all()
        known = [0, 1, 2, 4, 5]
        assert out[known].tolist() == ref[known].tolist()
    assert out[known].tolist() == [699, 600, 699, int(logits[4].argmax()), 3]


def test_a_rows_token_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    logits = 2 * random(len(ROWS), VOCAB, dtype=torch.float32, device=device)
    u = torch.linspace(0.05, 0.95, len(ROWS), device=device)
    for op in (filter_sample, filter_sample_ref):
        together = op(logits, params_of(device, *ROWS), u)
        for r, row in enumerate(ROWS):
            assert op(logits[r : r + 1], params_of(device, row), u[r : r + 1]).tolist() == [int(together[r])]


def test_no_rows(device: torch.device) -> None:
    empty = torch.empty(0, device=device)
    params = FilterParams(empty, empty, empty, empty.int(), filtered=False, max_top_k=0)
    assert filter_sample(torch.empty(0, VOCAB, device=device), params, empty).shape == (0,)
