"""A `StepBatch` (numpy, host) as tensors on the device; one implementation for CPU, one for CUDA.

On the CPU everything is a view of the planner's and the ledger's own arrays. On CUDA a step goes over in one
asynchronous copy from pinned memory, the page table lives on the device and takes the step's changes, and ids that
only the device knows are filled in there: nothing waits for the host. Captured steps have their own way in
(`static_inputs`) and share what the device keeps of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from inferserve.attention.base import AttentionBatch
from inferserve.engine.step import Ints, StepBatch
from inferserve.kernels.dispatch import kernels_for
from inferserve.kernels.step_outputs import step_outputs_ref

_ALIGN = 16
"""Bytes: kernels are compiled for pointers that are multiples of this."""
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

    def put(self, batch: StepBatch, work: Ints | None = None) -> StepTensors:
        """Tensors of the step, and of the attention's work list for it. FROM_DEVICE ids are resolved."""
        ...

    def finish(
        self, sample_rows: torch.Tensor, token_ids: torch.Tensor, logprobs: torch.Tensor, failed: torch.Tensor
    ) -> torch.Tensor:
        """Remember what the rows int64 [S] have sampled, and pack it: int32 [3, S], see `kernels.step_outputs`."""
        ...


class CpuStaging:
    """The device is the host: views, no copies of the page table."""

    def __init__(self, max_rows: int) -> None:
        self._last_token = torch.zeros(max_rows, dtype=torch.int64)

    def put(self, batch: StepBatch, work: Ints | None = None) -> StepTensors:
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
                work=None if work is None else torch.from_numpy(work),
                work_host=work,
            ),
            logits_index=torch.from_numpy(batch.sampled_at()),
            sample_rows=torch.from_numpy(batch.rows[batch.sample].astype(np.int64)),
        )

    def finish(
        self, sample_rows: torch.Tensor, token_ids: torch.Tensor, logprobs: torch.Tensor, failed: torch.Tensor
    ) -> torch.Tensor:
        """See Staging."""
        return step_outputs_ref(token_ids, logprobs, failed, sample_rows, self._last_token)


@dataclass(frozen=True)
class DeviceRows:
    """What the device keeps of every row; the row after the last one belongs to the padding of captured steps.

    Attributes:
        table: int32 [max_rows + 1, max_len], the page table.
        last_token: int64 [max_rows + 1], newest sampled token.
    """

    table: torch.Tensor
    last_token: torch.Tensor

    @staticmethod
    def make(max_rows: int, max_len: int, device: torch.device) -> DeviceRows:
        """Zeros."""
        return DeviceRows(
            torch.zeros((max_rows + 1, max_len), dtype=torch.int32, device=device),
            torch.zeros(max_rows + 1, dtype=torch.int64, device=device),
        )

    @property
    def spare(self) -> int:
        """The padding's row."""
        return self.last_token.shape[0] - 1

    def enter_prefixes(self, batch: StepBatch) -> None:
        """Copy the table's new prefixes over, all in one upload."""
        if not batch.new_prefix:
            return
        lengths = [length for _, length in batch.new_prefix]
        pinned = pinned_empty((sum(lengths),), torch.int32, self.table.device)
        np.concatenate([batch.table[row, :length] for row, length in batch.new_prefix], out=pinned.numpy())
        parts = pinned.to(self.table.device, non_blocking=True).split(lengths)
        for (row, length), part in zip(batch.new_prefix, parts, strict=True):
            self.table[row, :length].copy_(part)


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory that `device` can copy from while the host goes on.

    torch's caching host allocator gives a pinned block out again only after the copies that read it are done.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


class CudaStaging:
    """Pinned host memory, asynchronous copies on the current stream."""

    def __init__(self, rows: DeviceRows) -> None:
        self.rows = rows
        self._device = rows.table.device
        self._kernels = kernels_for(self._device)

    def put(self, batch: StepBatch, work: Ints | None = None) -> StepTensors:
        """See Staging."""
        query_start = _query_start(batch)
        owner = np.repeat(batch.rows, batch.query_len)
        last, sampling = batch.sampled_at(), batch.rows[batch.sample]
        longs = (batch.token_ids, batch.positions, batch.kv_index, owner, last, sampling)
        ints = (batch.rows, query_start, batch.kv_len, np.empty(0, np.int32) if work is None else work)
        sent = self._send([*(a.astype(np.int64) for a in longs), *ints])
        token_ids, positions, kv_index, owners, logits_index, sample_rows, rows, start, kv_len, work_list = sent
        self.rows.enter_prefixes(batch)
        table = self.rows.table
        token_ids = self._kernels.step_inputs(token_ids, owners, positions, kv_index, self.rows.last_token, table)
        return StepTensors(
            token_ids=token_ids,
            attention=_attention_batch(
                batch,
                rows=rows,
                query_start=start,
                kv_len=kv_len,
                positions=positions,
                kv_index=kv_index,
                table=table,
                work=None if work is None else work_list,
                work_host=work,
            ),
            logits_index=logits_index,
            sample_rows=sample_rows,
        )

    def finish(
        self, sample_rows: torch.Tensor, token_ids: torch.Tensor, logprobs: torch.Tensor, failed: torch.Tensor
    ) -> torch.Tensor:
        """See Staging."""
        return self._kernels.step_outputs(token_ids, logprobs, failed, sample_rows, self.rows.last_token)

    def _send(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """One copy for all arrays; each comes back as a view of the copy, at a multiple of _ALIGN."""
        room = [-(-a.nbytes // _ALIGN) * _ALIGN for a in arrays]
        pinned = pinned_empty((sum(room),), torch.uint8, self._device)
        host = pinned.numpy()
        for a, part in zip(arrays, np.split(host, np.cumsum(room)[:-1]), strict=True):
            part[: a.nbytes] = a.view(np.uint8)
        parts = pinned.to(self._device, non_blocking=True).split(room)
        return [part[: a.nbytes].view(_TORCH[a.dtype]) for part, a in zip(parts, arrays, strict=True)]


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
    work: torch.Tensor | None,
    work_host: Ints | None,
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
        work=work,
        work_host=work_host,
    )
