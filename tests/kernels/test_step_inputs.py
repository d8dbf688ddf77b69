"""Ids from the device and page-table entries of a step, kernel against twin."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.step_inputs import step_inputs, step_inputs_ref

ROWS, LENGTH, SPARE = 40, 37, 39


@pytest.mark.parametrize("tokens", [0, 1, 7, 256, 300])
def test_step_inputs(tokens: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def draw(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    places = torch.randperm(SPARE * LENGTH, generator=generator)[:tokens]
    owners, positions = places // LENGTH, places % LENGTH
    owners[tokens // 2 :], positions[tokens // 2 :] = SPARE, 0  # padding
    kv_index = draw(0, 2**31 - 1, tokens)
    kv_index[tokens // 2 :] = 12345
    ids = torch.where(draw(0, 2, tokens) == 0, -1, draw(0, 1000, tokens))
    inputs = [t.to(device) for t in (ids, owners, positions, kv_index, draw(0, 2**40, ROWS))]
    tables = [torch.full((ROWS, LENGTH), -7, dtype=torch.int32, device=device) for _ in range(2)]
    before = [t.clone() for t in inputs]
    out, expected = (op(*inputs, t) for op, t in zip((step_inputs, step_inputs_ref), tables, strict=True))
    assert torch.equal(out, expected) and out.dtype == torch.int64
    assert torch.equal(*tables)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    if tokens:
        assert (out >= 0).all() and (tables[0] != -7).any()
