"""The sampling filter kernel against its twin: same token, unless the draw falls on a boundary within rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from inferserve.kernels import logit_pieces
from inferserve.kernels.sampling_filter import FilterParams, filter_sample, filter_sample_ref
from tests.kernels.compare import DTYPES, random

VOCAB = 1100


def params_of(u: torch.Tensor, *rows: tuple[float, int, float, float], vocab: int = VOCAB) -> FilterParams:
    """From (temperature, top_k, top_p, min_p) rows and their uniform numbers, for the rows of the logits in order."""
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*rows, strict=True))
    active, each = top_k < vocab, np.arange(len(rows))
    floats = np.stack((temperature, top_p, min_p, u.cpu().numpy())).astype(np.float32).view(np.int32)
    return FilterParams(
        torch.from_numpy(np.stack((*floats, top_k, each, each)).astype(np.int32)).to(u.device),
        filtered=bool((active | (top_p < 1) | (min_p > 0)).any()),
        max_top_k=int(top_k[active].max(initial=0)),
        whole=True,
    )


def drawn(op: Callable[..., None], logits: torch.Tensor, params: FilterParams) -> torch.Tensor:
    """Tokens, written over something impossible."""
    out = torch.full((logits.shape[0],), -7, dtype=torch.int64, device=logits.device)
    op(logits, params, out)
    return out


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
    (40.0, 900, 0.7, 0.0),
    (0.02, 1099, 0.999, 0.0),
]


def near_a_boundary(logits: torch.Tensor, temperature: float, tokens: tuple[int, int]) -> bool:
    """Whether the tokens are neighbours among the kept ones or a hair's breadth of mass apart, so rounding decides."""
    p = torch.softmax(logits.double() / temperature, -1)
    low, high = sorted(tokens)
    return float(p[low + 1 : high].sum()) < 1e-4


@pytest.fixture(params=[256, 8192])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles far smaller than the vocabulary, of about the size of what is kept, and larger than both."""
    monkeypatch.setattr(logit_pieces, "FILTER", logit_pieces.TileConfig(request.param, max(1, request.param // 256)))
    return int(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_the_twins_token(dtype: torch.dtype, block: int, device: torch.device) -> None:
    different = 0
    for trial in range(2):
        logits = 3 * random(len(ROWS), VOCAB + 8, dtype=dtype, device=device, seed=trial)[:, :VOCAB]
        u = torch.rand(len(ROWS), generator=torch.Generator().manual_seed(trial)).to(device)
        params = params_of(u, *ROWS)
        out, ref = drawn(filter_sample, logits, params), drawn(filter_sample_ref, logits, params)
        for row in (out != ref).nonzero().flatten().tolist():
            different += 1
            assert near_a_boundary(logits[row], ROWS[row][0], (int(out[row]), int(ref[row])))
    assert different <= 1


def test_extreme_numbers(block: int, device: torch.device) -> None:
    logits = torch.full((5, 300), -math.inf, device=device)
    logits[0, 299] = 0.0  # one possible token, at the end
    logits[1, [3, 280]] = 5.0
    logits[2] = 0.0  # all alike
    logits[3] = 1e30 * random(300, dtype=torch.float32, device=device)
    logits[4, [1, 2, 3]] = torch.tensor([2.0, 2.0, 2.0], device=device)
    rows = [(1.0, 5, 0.9, 0.0), (1.0, 300, 1.0, 0.0), (1.0, 300, 0.5, 0.0), (1.0, 300, 1.0, 0.0), (1.0, 1, 1.0, 0.0)]
    for u in (0.0, 0.5, 1 - 2.0**-24):
        params = params_of(torch.full((5,), u, device=device), *rows, vocab=300)
        out, ref = drawn(filter_sample, logits, params), drawn(filter_sample_ref, logits, params)
        assert out.tolist() == ref.tolist()
    assert out.tolist() == [299, 280, 299, int(logits[3].argmax()), 3]


@pytest.mark.parametrize("op", [filter_sample, filter_sample_ref])
def test_rows_that_make_no_sense_end_in_some_token(op: Callable[..., None], block: int, device: torch.device) -> None:
    logits = torch.zeros(3, 300, device=device)
    logits[0, 0] = math.nan
    logits[1] = -math.inf
    logits[2] = math.inf
    u = torch.full((3,), 0.5, device=device)
    params = params_of(u, (1.0, 9, 0.9, 0.1), (1.0, 5, 0.9, 0.0), (1.0, 200, 0.9, 0.1), vocab=300)
    out = drawn(op, logits, params)
    assert ((out >= 0) & (out < 300)).all()


def test_a_rows_token_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    logits = 2 * random(len(ROWS), VOCAB, dtype=torch.float32, device=device)
    u = torch.linspace(0.05, 0.95, len(ROWS), device=device)
    for op in (filter_sample, filter_sample_ref):
        together = drawn(op, logits, params_of(u, *ROWS))
        for r, row in enumerate(ROWS):
            assert drawn(op, logits[r : r + 1], params_of(u[r : r + 1], row)).tolist() == [int(together[r])]


@pytest.mark.parametrize("op", [filter_sample, filter_sample_ref])
def test_any_rows_to_any_places(op: Callable[..., None], device: torch.device) -> None:
    logits = 3 * random(len(ROWS), VOCAB, dtype=torch.float32, device=device)
    u = torch.linspace(0.05, 0.95, len(ROWS), device=device)
    params = params_of(u, *ROWS)
    expected = drawn(op, logits, params)
    some = torch.tensor([7, 2, 5], device=device)
    table = params.table[:, some].clone()
    table[6] = torch.tensor([1, 8, 0], dtype=torch.int32)
    out = torch.full((9,), -7, dtype=torch.int64, device=device)
    op(logits, dataclasses.replace(params, table=table, whole=False), out)
    assert out.tolist() == [int(expected[5]), int(expected[7]), *[-7] * 6, int(expected[2])]


@pytest.mark.parametrize("op", [filter_sample, filter_sample_ref])
def test_no_rows(op: Callable[..., None], device: torch.device) -> None:
    table = torch.empty(7, 0, dtype=torch.int32, device=device)
    params = FilterParams(table, filtered=False, max_top_k=0, whole=True)
    assert drawn(op, torch.empty(0, VOCAB, device=device), params).shape == (0,)
