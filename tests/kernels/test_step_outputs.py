"""Results packed for the host, kernel against twin."""

from __future__ import annotations

import pytest
import torch

from inferserve.kernels.step_outputs import step_outputs, step_outputs_ref

ROWS = 400


@pytest.mark.parametrize("count", [0, 1, 5, 256, 300])
def test_step_outputs(count: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, 200_000, (count,), generator=generator).to(device)
    logprobs = torch.randn(count, generator=generator).to(device)
    logprobs[::3] = torch.nan
    failed = (torch.rand(count, generator=generator) < 0.3).to(device)
    rows = torch.randperm(ROWS, generator=generator)[:count].to(device)
    kept = [torch.full((ROWS,), -5, dtype=torch.int64, device=device) for _ in range(2)]
    out, expected = (
        op(ids, logprobs, failed, rows, last) for op, last in zip((step_outputs, step_outputs_ref), kept, strict=True)
    )
    assert torch.equal(out, expected) and out.shape == (3, count) and out.dtype == torch.int32
    assert torch.equal(*kept) and torch.equal(kept[0][rows], ids)
    assert int((kept[0] == -5).sum()) == ROWS - count
    torch.testing.assert_close(out[1].view(torch.float32), logprobs, rtol=0, atol=0, equal_nan=True)
