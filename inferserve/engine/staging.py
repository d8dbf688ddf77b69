"""A `StepBatch` (numpy, host) as tensors on the device; one implementation for CPU, one for CUDA.

On the CPU everything is a view of the planner's and the ledger's own arrays. On CUDA a step goes over in one
asynchronous copy from pinned memory, the page table lives on the device and takes the step's changes, and ids that
only the device knows are filled in there: nothing waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from inferserve.attention.base import AttentionBatch
from inferserve.engine.step import StepBatch

_TORCH = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


@dataclass(frozen=True)
class StepTensors:
    """A step on the device.

    Attributes:
        token_ids: int64 [T].
        attention: rows, lengths, page table.
        logits_index: int64 [S], see `StepBatch.sampled_at`.
        sample_rows: int64 [S], the row of each.
    """

    token_ids: torch.Tensor
    attention: AttentionBatch
    logits_index: torch.Tensor
    sample_rows: torch.Tensor


class Staging(Protocol):
    """Brings steps to the device and remembers each row's newest token there."""

    def put(self, batch: StepBatch) -> StepTensors:
        """Tensors of the step. FROM_DEVICE ids are resolved."""
        ...

    def remember(self, sample_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """The rows int64 [S] have sampled token_ids int64 [S]."""
        ...


class CpuStaging:
    """The device is the host: views, no copies of the page table."""

    def __init__(self, max_rows: int) -> None:
        self._last_token = torch.zeros(max_rows, dtype=torch.int64)

    def put(self, batch: StepBatch) -> StepTensors:
        """See Staging."""
        query_start = _query_start(batch)
        token_ids = batch.token_ids.astype(np.int64)
        pending = np.flatnonzero(token_ids < 0)
        if len(pending):
            owners = np.repeat(batch.rows, batch.query_len)[pending]
            token_ids[pending] = self._last_token.numpy()[owners]
        return StepTensors(
            token_ids=torch.from_numpy(token_ids),
            attention=_attention_batch(
                batch,
                rows=torch.from_numpy(batch.rows),
                query_start=torch.from_numpy(query_start),
                kv_len=torch.from_numpy(batch.kv_len),
                positions=torch.from_numpy(batch.positions.astype(np.int64)),
                kv_index=torch.from_numpy(batch.kv_index.astype(np.int64)),
                table=torch.from_numpy(batch.table),
            ),
            logits_index=torch.from_numpy(batch.sampled_at()),
            sample_rows=torch.from_numpy(batch.rows[batch.sample].astype(np.int64)),
        )

    def remember(self, sample_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """See Staging."""
        self._last_token[sample_rows] = token_ids


class CudaStaging:
    """Pinned host memory, asynchronous copies on the current stream.

    Pinned blocks come from torch's caching host allocator, which gives one out again only after the copies that read
    it are done, so a step never overwrites what an earlier one is still sending.
    """

    def __init__(self, max_rows: int, max_len: int, device: torch.device) -> None:
        self._device = device
        self._table = torch.zeros((max_rows, max_len), dtype=torch.int32, device=device)
        self._last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def put(self, batch: StepBatch) -> StepTensors:
        """See Staging."""
        query_start = _query_start(batch)
        owner = np.repeat(batch.rows, batch.query_len)
        last, sampling = batch.sampled_at(), batch.rows[batch.sample]
        longs = (batch.token_ids, batch.positions, batch.kv_index, owner, last, sampling)
        token_ids, positions, kv_index, owners, logits_index, sample_rows, rows, start, kv_len = self._send(
            [*(a.astype(np.int64) for a in longs), batch.rows, query_start, batch.kv_len]
        )
        self._update_table(batch, owners, positions, kv_index)
        if batch.token_ids.min(initial=0) < 0:
            token_ids = torch.where(token_ids < 0, self._last_token[owners], token_ids)
        return StepTensors(
            token_ids=token_ids,
            attention=_attention_batch(
                batch,
                rows=rows,
                query_start=start,
                kv_len=kv_len,
                positions=positions,
                kv_index=kv_index,
                table=self._table,
            ),
            logits_index=logits_index,
            sample_rows=sample_rows,
        )

    def remember(self, sample_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """See Staging."""
        self._last_token.index_copy_(0, sample_rows, token_ids)

    def _send(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """One copy for all arrays, int64 ones before int32 ones; each comes back as a view of the copy."""
        pinned = torch.empty(sum(a.nbytes for a in arrays), dtype=torch.uint8, pin_memory=True)
        np.concatenate([a.view(np.uint8) for a in arrays], out=pinned.numpy())
        parts = pinned.to(self._device, non_blocking=True).split([a.nbytes for a in arrays])
        return [part.view(_TORCH[a.dtype]) for part, a in zip(parts, arrays, strict=True)]

    def _update_table(
        self, batch: StepBatch, owners: torch.Tensor, positions: torch.Tensor, kv_index: torch.Tensor
    ) -> None:
        for row, length in batch.new_prefix:
            pinned = torch.empty(length, dtype=torch.int32, pin_memory=True)
            pinned.numpy()[:] = batch.table[row, :length]
            self._table[row, :length].copy_(pinned, non_blocking=True)
        self._table.index_put_((owners, positions), kv_index.int())


def _query_start(batch: StepBatch) -> np.ndarray:
    start = np.zeros(len(batch.rows) + 1, dtype=np.int32)
    np.cumsum(batch.query_len, out=start[1:])
    return start


def _attention_batch(
    batch: StepBatch,
    *,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    kv_len: torch.Tensor,
    positions: torch.Tensor,
    kv_index: torch.Tensor,
    table: torch.Tensor,
) -> AttentionBatch:
    return AttentionBatch(
        rows=rows,
        num_decode=batch.num_decode,
        query_start=query_start,
        kv_len=kv_len,
        positions=positions,
        kv_index=kv_index,
        table=table,
        max_query_len=int(batch.query_len.max(initial=0)),
        max_kv_len=int(batch.kv_len.max(initial=0)),
        query_len_host=batch.query_len,
        kv_len_host=batch.kv_len,
    )
