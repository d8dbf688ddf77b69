"""Logprob kernels against their twin, and the twin against log-softmax."""

from __future__ import annotations

import math

import pytest
import torch

from inferserve.kernels.logprobs import LOWEST_LOGPROB, logprobs, logprobs_ref
from tests.kernels.compare import DTYPES, poisoned, random


def case(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Logits (a view of something wider), rows that ask, chosen tokens."""
    draw = torch.Generator().manual_seed(rows)
    logits = 4 * random(rows, vocab + 8, dtype=dtype, device=device)[:, :vocab]
    index = torch.randperm(rows, generator=draw)[: (rows + 1) // 2]
    return logits, index.to(device), torch.randint(vocab, (rows,), generator=draw).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 40), (5, 300), (2, 4096), (9, 4097), (3, 20_001), (0, 30)])
def test_logprobs(rows: int, vocab: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
    logits, index, token_ids = case(rows, vocab, dtype, device)
    outs = [poisoned(rows, dtype=torch.float32, device=device) for _ in range(2)]
    ids, values = logprobs(logits, index, token_ids, outs[0], count)
    ref_ids, ref_values = logprobs_ref(logits, index, token_ids, outs[1], count)
    assert ids.dtype == ref_ids.dtype == torch.int64
    assert ids.shape == ref_ids.shape == (len(index), count)
    torch.testing.assert_close(outs[0], outs[1], equal_nan=True, rtol=1e-5, atol=2e-5)
    assert int(outs[0].isnan().sum()) == rows - len(index)
    torch.testing.assert_close(values, ref_values, rtol=1e-5, atol=2e-5)
    # Which of equals comes first is the twin's own affair; the kernel takes the lowest index.
    asked = logits.index_select(0, index)
    assert torch.equal(asked.gather(1, ids), asked.gather(1, ref_ids))
    assert all(len(set(line)) == count for line in ids.tolist())


def test_equals_come_by_rising_index(device: torch.device) -> None:
    logits = torch.zeros(1, 9000, device=device)
    logits[0, [8999, 17, 4096]] = 2.0
    out = poisoned(1, dtype=torch.float32, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    ids, _ = logprobs(logits, first, first, out, 5)
    assert ids.tolist() == [[17, 4096, 8999, 0, 1]]


@pytest.mark.parametrize("op", [logprobs, logprobs_ref])
def test_impossible_tokens_have_a_finite_logprob(op: object, device: torch.device) -> None:
    logits = torch.full((2, 5000), -math.inf, device=device)
    logits[:, 4999] = -3.0
    out = poisoned(2, dtype=torch.float32, device=device)
    both = torch.tensor([0, 1], device=device)
    ids, values = op(logits, both, torch.tensor([4999, 2], device=device), out, 3)  # type: ignore[operator]
    assert out.tolist() == [0.0, LOWEST_LOGPROB]
    assert ids[:, 0].tolist() == [4999, 4999]
    assert values.tolist() == [[0.0, LOWEST_LOGPROB, LOWEST_LOGPROB]] * 2


def test_the_twin_is_log_softmax(device: torch.device) -> None:
    logits, index, token_ids = case(7, 333, torch.float32, torch.device("cpu"))
    out = poisoned(7, dtype=torch.float32, device=torch.device("cpu"))
    _, values = logprobs_ref(logits, index, token_ids, out, 4)
    truth = torch.log_softmax(logits.double(), -1)[index]
    torch.testing.assert_close(out[index].double(), truth.gather(1, token_ids[index][:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(values.double(), truth.topk(4).values, rtol=0, atol=1e-5)
