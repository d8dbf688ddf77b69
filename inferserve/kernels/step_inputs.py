"""A step's token ids and page table brought up to date on the device, as the first launch of the step.

Ids that only the device knows (a row's newest sampled token) are filled in, and the places of the step's own tokens are
entered into the page table. Knows no requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _step_inputs_kernel(
    token_ids: tl.tensor,
    owners: tl.tensor,
    positions: tl.tensor,
    kv_index: tl.tensor,
    last_token: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    table_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    token = tl.load(token_ids + i, mask=live, other=0)
    owner = tl.load(owners + i, mask=live, other=0)
    newest = tl.load(last_token + owner, mask=live, other=0)
    tl.store(out + i, tl.where(token < 0, newest, token), mask=live)
    place = owner * table_stride + tl.load(positions + i, mask=live, other=0)
    tl.store(table + place, tl.load(kv_index + i, mask=live, other=0).to(tl.int32), mask=live)


def step_inputs(
    token_ids: torch.Tensor,
    owners: torch.Tensor,
    positions: torch.Tensor,
    kv_index: torch.Tensor,
    last_token: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Fill in ids below 0 from `last_token`, and set `table[owners, positions] = kv_index`.

    Args:
        token_ids, owners, positions, kv_index: int64 [T], contiguous; equal places in the table get equal values.
        last_token: int64 [rows], newest token of each row.
        table: int32 [rows, max_len], contiguous; written to.

    Returns: int64 [T], a new tensor.
    """
    out = torch.empty_like(token_ids)
    count = token_ids.shape[0]
    if count:
        _step_inputs_kernel[(triton.cdiv(count, _BLOCK),)](
            token_ids, owners, positions, kv_index, last_token, table, out, count, table.stride(0), BLOCK=_BLOCK
        )
    return out


def step_inputs_ref(
    token_ids: torch.Tensor,
    owners: torch.Tensor,
    positions: torch.Tensor,
    kv_index: torch.Tensor,
    last_token: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Torch twin of `step_inputs`."""
    table.index_put_((owners, positions), kv_index.to(torch.int32))
    return torch.where(token_ids < 0, last_token[owners], token_ids)
