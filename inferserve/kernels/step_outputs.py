"""A step's results packed for the host, and each row's newest token kept on the device, as the last launch of the step.

Knows no requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def _step_outputs_kernel(
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    failed: tl.tensor,
    rows: tl.tensor,
    last_token: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    token = tl.load(token_ids + i, mask=live, other=0)
    tl.store(last_token + tl.load(rows + i, mask=live, other=0), token, mask=live)
    tl.store(out + i, token.to(tl.int32), mask=live)
    bits = tl.load(logprobs + i, mask=live, other=0.0).to(tl.int32, bitcast=True)
    tl.store(out + count + i, bits, mask=live)
    tl.store(out + 2 * count + i, tl.load(failed + i, mask=live, other=0).to(tl.int32), mask=live)


def step_outputs(
    token_ids: torch.Tensor, logprobs: torch.Tensor, failed: torch.Tensor, rows: torch.Tensor, last_token: torch.Tensor
) -> torch.Tensor:
    """Set `last_token[rows] = token_ids`, and pack the results.

    Args:
        token_ids: int64 [S]. logprobs: float32 [S]. failed: bool [S]. All contiguous.
        rows: int64 [S]; of a row that comes more than once, any of its tokens is kept.
        last_token: int64 [max_rows], written to.

    Returns: int32 [3, S]: ids, bits of the logprobs, failures.
    """
    count = token_ids.shape[0]
    out = torch.empty((3, count), dtype=torch.int32, device=token_ids.device)
    if count:
        _step_outputs_kernel[(triton.cdiv(count, _BLOCK),)](
            token_ids, logprobs, failed.view(torch.uint8), rows, last_token, out, count, BLOCK=_BLOCK
        )
    return out


def step_outputs_ref(
    token_ids: torch.Tensor, logprobs: torch.Tensor, failed: torch.Tensor, rows: torch.Tensor, last_token: torch.Tensor
) -> torch.Tensor:
    """Torch twin of `step_outputs`."""
    last_token.index_copy_(0, rows, token_ids)
    return torch.stack((token_ids.int(), logprobs.view(torch.int32), failed.int()))
