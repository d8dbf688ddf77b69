"""Penalty kernels against their twins, and the twins against one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferserve.kernels.penalties import PenaltyParams, append_tokens, append_tokens_ref, penalise, penalise_ref
from tests.kernels.compare import random

VOCAB, WIDTH, PLACES = 500, 512, 3000
STRENGTHS = [(1.3, 0.0, 0.0), (1.0, 0.7, 0.3), (0.8, -0.4, 0.9), (1.0, 0.0, -0.5), (1.2, 1.0, 0.0), (1.0, 0.5, 0.0)]
LENGTHS = [(0, 0), (7, 7), (0, 1500), (300, 2500), (1, 2), (400, 1025)]


def histories(rows: int, device: torch.device) -> torch.Tensor:
    """Twice as many lines as rows; the prompt's part of a line is distinct tokens, as it must be."""
    draw = torch.Generator().manual_seed(7)
    history = torch.randint(VOCAB + 1, (2 * rows, PLACES), generator=draw)
    for line, (prompt, _) in enumerate(LENGTHS[:rows]):
        history[2 * line, :prompt] = torch.randperm(VOCAB + 1, generator=draw)[:prompt]
    return history.to(device)


def params_of(device: torch.device) -> PenaltyParams:
    order, line = np.array([4, 0, 5, 2, 1, 3]), 2 * np.arange(len(LENGTHS))
    prompt, total = np.array(LENGTHS).T
    strengths = np.array(STRENGTHS, np.float32).T.copy().view(np.int32)
    table = np.stack((order, order + 1, line, prompt, total, *strengths)).astype(np.int32)
    return PenaltyParams(torch.from_numpy(table).to(device), int(total.max()))


def test_penalise(device: torch.device) -> None:
    history, params = histories(len(LENGTHS), device), params_of(device)
    works = [4 * random(8, WIDTH, dtype=torch.float32, device=device) for _ in range(2)]
    for op, work in zip((penalise, penalise_ref), works, strict=True):
        op(work, params, history)
    torch.testing.assert_close(works[0][:, :VOCAB], works[1][:, :VOCAB], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(works[0][6:], 4 * random(8, WIDTH, dtype=torch.float32, device=device)[6:])


@pytest.mark.parametrize("op", [penalise, penalise_ref])
def test_one_token_at_a_time(op: object, device: torch.device) -> None:
    history, params = histories(len(LENGTHS), device), params_of(device)
    work = 4 * random(8, WIDTH, dtype=torch.float32, device=device)
    expected = work.double().cpu()
    lines = zip(params.table[0].tolist(), LENGTHS, STRENGTHS, strict=True)
    for line, (where, (prompt, total), (repetition, presence, frequency)) in enumerate(lines):
        row, said = expected[where], history[2 * line, :total].tolist()
        for token in set(said):
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token in set(said[prompt:]):
            row[token] -= presence + frequency * said[prompt:].count(token)
    op(work, params, history)  # type: ignore[operator]
    torch.testing.assert_close(work[:, :VOCAB].double().cpu(), expected[:, :VOCAB], rtol=1e-5, atol=1e-4)


def test_minus_infinity_stays(device: torch.device) -> None:
    history, params = histories(len(LENGTHS), device), params_of(device)
    for op in (penalise, penalise_ref):
        work = torch.full((6, WIDTH), -torch.inf, device=device)
        op(work, params, history)
        assert (work[:, :VOCAB] == -torch.inf).all()


@pytest.mark.parametrize("op", [append_tokens, append_tokens_ref])
def test_append(op: object, device: torch.device) -> None:
    history, params = histories(len(LENGTHS), device), params_of(device)
    token_ids = torch.arange(100, 107, device=device)
    expected = history.clone()
    for line, (sampled, (_, total)) in enumerate(zip(params.table[1].tolist(), LENGTHS, strict=True)):
        expected[2 * line, total] = 100 + sampled
    op(history, params, token_ids)  # type: ignore[operator]
    assert torch.equal(history, expected)


def test_nobody(device: torch.device) -> None:
    params = PenaltyParams(torch.empty(8, 0, dtype=torch.int32, device=device), 0)
    work, history = torch.ones(2, WIDTH, device=device), histories(1, device)
    for op in (penalise, penalise_ref):
        op(work, params, history)
    for append in (append_tokens, append_tokens_ref):
        append(history, params, torch.empty(0, dtype=torch.int64, device=device))
    assert (work == 1).all()
    assert torch.equal(history, histories(1, device))
