"""The inputs of captured steps: device buffers at fixed addresses, filled by one asynchronous copy a step.

All buckets lay their sections out on the same buffer, since one step runs after another. The copy of step k + 1 is
queued behind everything that reads step k's sections (its graph, the gathering of sampled rows, the sampler), on one
stream, so it may be asked for while step k runs. Host buffers take turns, and one is written again only after its last
copy is done. Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from inferserve.attention.base import AttentionBatch, Bucket
from inferserve.engine.staging import DeviceRows, pinned_empty
from inferserve.engine.step import Ints, StepBatch

_ALIGN = 128
"""Bytes between starts of sections: kernels see the same alignment whatever the bucket."""
_TURNS = 2
"""Host buffers: one being sent, one being written."""

Array = TypeVar("Array")


class Sections(NamedTuple, Generic[Array]):
    """A step's inputs, NumPy arrays on the host and tensors on the device.

    Attributes:
        token_ids, positions, kv_index, owners: int64 [tokens]; an owner is the row that a token belongs to.
        picked: int64 [tokens], those whose logits are wanted; the first S entries are valid.
        sampling: int64 [tokens], the rows of those.
        work: int32 [work], the attention's work list.
    """

    token_ids: Array
    positions: Array
    kv_index: Array
    owners: Array
    picked: Array
    sampling: Array
    work: Array


def _cut(bucket: Bucket, work: int, cut: Callable[[int, int, bool], Array]) -> Sections[Array]:
    """Sections made by `cut(start byte, entries, whether int64)`."""
    parts, start = [], 0
    for count, long in (*[(bucket.tokens, True)] * 6, (work, False)):
        parts.append(cut(start, count, long))
        start += _padded(count * (8 if long else 4))
    return Sections(*parts)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def size(bucket: Bucket, work: int) -> int:
    """Bytes of all sections."""
    return 6 * _padded(8 * bucket.tokens) + _padded(4 * work)


class Upload:
    """The buffer on the device, and the host's that take turns.

    Args:
        nbytes: of the largest bucket.
        device: on the CPU the same copies are made, and none needs waiting for.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.target = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.sources = [pinned_empty((nbytes,), torch.uint8, device) for _ in range(_TURNS)]
        self._cuda = device.type == "cuda"
        self._sent: list[torch.cuda.Event | None] = [None] * _TURNS
        self._turn = 0

    def take_turn(self) -> int:
        """Number of the source to write next. Waits for its last copy, which is long done: a step came between."""
        self._turn = (self._turn + 1) % _TURNS
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        return self._turn

    def send(self, turn: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue the copy from the beginning of source number `turn` to that of the target, views of both."""
        target.copy_(source, non_blocking=True)
        if self._cuda:
            sent = self._sent[turn] = self._sent[turn] or torch.cuda.Event()
            sent.record()


class StaticInputs:
    """The inputs of one bucket.

    Args:
        bucket: its size.
        work: int32s of its work list.
        upload: shared by all buckets.
        rows: page table and newest tokens.
        spare: pool token that padding writes to.
    """

    def __init__(self, bucket: Bucket, work: int, upload: Upload, rows: DeviceRows, spare: int) -> None:
        self.bucket = bucket
        self.device = _cut(bucket, work, _tensors(upload.target))
        self._hosts = [_cut(bucket, work, _arrays(source)) for source in upload.sources]
        used = slice(0, size(bucket, work))
        self._sources, self._target = [source[used] for source in upload.sources], upload.target[used]
        self._upload = upload
        self._spare = rows.spare, spare

    def fill(self, batch: StepBatch, work: Ints) -> None:
        """Queue the copy of a step that fits the bucket.

        Args:
            work: int32 [work], of this bucket.
        """
        turn = self._upload.take_turn()
        host, tokens, samples = self._hosts[turn], len(batch.token_ids), len(batch.sample)
        spare_row, spare_token = self._spare
        for section, values, padding in (
            (host.token_ids, batch.token_ids, 0),
            (host.positions, batch.positions, 0),
            (host.kv_index, batch.kv_index, spare_token),
            (host.owners, _owners(batch), spare_row),
        ):
            section[:tokens] = values
            section[tokens:] = padding
        host.picked[:samples] = batch.sample if batch.num_decode == len(batch.rows) else batch.sampled_at()
        host.sampling[:samples] = batch.rows[batch.sample]
        host.work[:] = work
        self._upload.send(turn, self._sources[turn], self._target)

    def attention_batch(self, table: torch.Tensor) -> AttentionBatch:
        """What layers see of the bucket, whatever step fills it."""
        device = self.device
        nothing, nowhere = torch.empty(0, dtype=torch.int32, device=table.device), np.empty(0, np.int32)
        return AttentionBatch(
            rows=nothing,
            num_decode=0,
            query_start=nothing,
            kv_len=nothing,
            positions=device.positions,
            kv_index=device.kv_index,
            table=table,
            max_query_len=0,
            max_kv_len=0,
            query_len_host=nowhere,
            kv_len_host=nowhere,
            work=device.work,
            bucket=self.bucket,
        )


def _owners(batch: StepBatch) -> Ints:
    if batch.num_decode == len(batch.rows):
        return batch.rows
    owners: Ints = np.repeat(batch.rows, batch.query_len)
    return owners


def _tensors(buffer: torch.Tensor) -> Callable[[int, int, bool], torch.Tensor]:
    def cut(start: int, count: int, long: bool) -> torch.Tensor:
        dtype = torch.int64 if long else torch.int32
        return buffer[start : start + count * dtype.itemsize].view(dtype)

    return cut


def _arrays(buffer: torch.Tensor) -> Callable[[int, int, bool], np.ndarray]:
    flat = buffer.numpy()

    def cut(start: int, count: int, long: bool) -> np.ndarray:
        dtype = np.dtype(np.int64 if long else np.int32)
        part: np.ndarray = flat[start : start + count * dtype.itemsize].view(dtype)
        return part

    return cut
