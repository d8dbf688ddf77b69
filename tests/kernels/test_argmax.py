"""Argmax kernel against its twin, whatever the cut of the rows, and what it says of rows that make no sense."""

from __future__ import annotations

import math

import pytest
import torch

from inferserve.kernels.argmax import argmax, argmax_ref
from inferserve.kernels.logit_pieces import PIECES, cut
from tests.kernels.compare import DTYPES, random


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 9000), (3, 4096), (5, 4097), (2, 20_001), (40, 300), (0, 7)])
def test_argmax(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = random(rows, vocab + 8, dtype=dtype, device=device)[:, :vocab]
    for out, ref in zip(argmax(logits), argmax_ref(logits), strict=True):
        assert out.dtype == ref.dtype
        assert torch.equal(out, ref)


@pytest.mark.parametrize("op", [argmax, argmax_ref])
def test_the_first_of_equals(op: object, device: torch.device) -> None:
    logits = torch.zeros(4, 9000, device=device)
    logits[1, [8999, 4500, 70]] = 1.0
    logits[2, 8191:8193] = 2.0
    logits[3, :] = -math.inf
    logits[3, [4095, 8999]] = -5.0
    assert op(logits)[0].tolist() == [0, 70, 8191, 4095]  # type: ignore[operator]


@pytest.mark.parametrize("op", [argmax, argmax_ref])
def test_rows_that_make_no_sense(op: object, device: torch.device) -> None:
    logits = random(6, 9000, dtype=torch.float32, device=device)
    logits[1, 8000] = math.nan
    logits[2, 5] = math.inf
    logits[3] = -math.inf
    logits[4, :8999] = -math.inf
    logits[5] = math.nan
    token_ids, failed = op(logits)  # type: ignore[operator]
    assert failed.tolist() == [False, True, True, True, False, True]
    assert int(token_ids[4]) == 8999
    assert ((token_ids >= 0) & (token_ids < 9000)).all()


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 256, 1000])
@pytest.mark.parametrize("vocab", [1, 4096, 4097, 49152, 151936])
def test_pieces_cover_a_row_once(rows: int, vocab: int) -> None:
    pieces, piece = cut(rows, vocab, 4096)
    assert 1 <= pieces <= PIECES
    assert (pieces - 1) * piece < vocab <= pieces * piece
