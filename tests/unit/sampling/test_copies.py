"""What a step of sampling sends to the device: copies and launches are its cost on the host, whatever the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inferserve.protocol.sampling import SamplingParams
from inferserve.sampling import penalties, sampler, token_edits
from inferserve.sampling.sampler import Sampler
from inferserve.sampling.upload import upload

ROWS, VOCAB = 40, 300


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy to the device."""
    sizes: list[int] = []

    def counted(array: np.ndarray, device: torch.device) -> torch.Tensor:
        sizes.append(array.nbytes)
        return upload(array, device)

    for module in (sampler, penalties, token_edits):
        monkeypatch.setattr(module, "upload", counted)
    return sizes


@pytest.mark.parametrize(
    ("params", "copies"),
    [
        ({"temperature": 0.0}, 0),
        ({"top_p": 0.9, "top_k": 20, "min_p": 0.1}, 1),
        ({"temperature": 0.0, "logprobs": 5}, 1),
        ({"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1}, 2),
        ({"top_p": 0.9, "repetition_penalty": 1.2}, 3),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}, "min_tokens": 16}, 1),
    ],
    ids=str,
)
def test_copies_of_a_step(params: dict[str, Any], copies: int, sent: list[int]) -> None:
    chooser, none = Sampler(ROWS, 100, VOCAB, torch.device("cpu"), (1,)), np.empty(0, np.int32)
    rows = np.arange(ROWS, dtype=np.int32)
    for row in range(ROWS):
        chooser.open_row(row, SamplingParams(seed=row, **params), np.arange(5, dtype=np.int32), none)
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    chooser.sample(logits, rows, rows * 0)
    sent.clear()
    chooser.sample(logits, rows, rows * 0 + 1)
    assert len(sent) == copies
    assert sum(sent) <= 80 * ROWS


def test_a_row_of_another_kind_adds_its_own_copies_alone(sent: list[int]) -> None:
    chooser, none = Sampler(ROWS, 100, VOCAB, torch.device("cpu"), ()), np.empty(0, np.int32)
    for row in range(ROWS):
        chooser.open_row(row, SamplingParams(temperature=float(row == 7), seed=1), none, none)
    rows = np.arange(ROWS, dtype=np.int32)
    chooser.sample(torch.zeros(ROWS, VOCAB), rows, rows)
    assert sent == [7 * 4]
