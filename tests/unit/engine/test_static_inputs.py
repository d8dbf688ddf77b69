"""Static inputs: where sections lie, what padding holds, and that a host buffer is not written while it is sent."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from inferserve.attention.base import Bucket
from inferserve.engine.staging import DeviceRows
from inferserve.engine.static_inputs import StaticInputs, Upload, size
from inferserve.engine.step import FROM_DEVICE, StepBatch

CPU = torch.device("cpu")
ROWS, SPARE = 9, 777


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def mixed() -> StepBatch:
    """Rows 2 and 0 decode, row 5 computes three tokens and samples nothing, row 3 samples at its last two."""
    return StepBatch(
        step=1,
        rows=ints(2, 0, 5, 3),
        num_decode=2,
        query_len=ints(1, 1, 3, 2),
        kv_len=ints(5, 9, 3, 6),
        token_ids=ints(FROM_DEVICE, 31, 11, 12, 13, 14, 15),
        positions=ints(4, 8, 0, 1, 2, 4, 5),
        kv_index=ints(40, 41, 42, 43, 44, 45, 46),
        table=np.zeros((ROWS, 16), np.int32),
        new_prefix=(),
        sample=ints(0, 1, 3, 3),
        out_position=ints(1, 2, 0, 1),
    )


def decode(count: int) -> StepBatch:
    numbers = np.arange(count, dtype=np.int32)
    fields = dict.fromkeys(("kv_len", "token_ids", "positions", "kv_index", "sample", "out_position"), numbers)
    return StepBatch(
        step=2,
        rows=numbers[::-1].copy(),
        num_decode=count,
        query_len=np.ones(count, np.int32),
        table=np.zeros((ROWS, 16), np.int32),
        new_prefix=(),
        **fields,
    )


def test_a_mixed_step_and_its_padding() -> None:
    bucket = Bucket(10, 9, 9)
    inputs = StaticInputs(bucket, 5, Upload(size(bucket, 5), CPU), DeviceRows.make(ROWS, 16, CPU), SPARE)
    inputs.fill(mixed(), ints(1, 2, 3, 4, 5))
    device = inputs.device
    assert device.token_ids.tolist() == [FROM_DEVICE, 31, 11, 12, 13, 14, 15, 0, 0, 0]
    assert device.positions.tolist() == [4, 8, 0, 1, 2, 4, 5, 0, 0, 0]
    assert device.kv_index.tolist() == [40, 41, 42, 43, 44, 45, 46, SPARE, SPARE, SPARE]
    assert device.owners.tolist() == [2, 0, 5, 5, 5, 3, 3, ROWS, ROWS, ROWS]
    assert device.picked[:4].tolist() == [0, 1, 5, 6]
    assert device.sampling[:4].tolist() == [2, 0, 3, 3]
    assert device.work.tolist() == [1, 2, 3, 4, 5]


def test_what_an_earlier_step_left_is_padding_again() -> None:
    small, large = Bucket(4, 4, 0), Bucket(10, 9, 9)
    upload, rows = Upload(size(large, 7), CPU), DeviceRows.make(ROWS, 16, CPU)
    first, second = StaticInputs(large, 7, upload, rows, SPARE), StaticInputs(small, 3, upload, rows, SPARE)
    for _ in range(3):
        first.fill(mixed(), np.full(7, -1, np.int32))
        second.fill(decode(3), ints(7, 8, 9))
        device = second.device
        assert device.token_ids.tolist() == [0, 1, 2, 0]
        assert device.kv_index.tolist() == [0, 1, 2, SPARE]
        assert device.owners.tolist() == [2, 1, 0, ROWS]
        assert device.picked[:3].tolist() == [0, 1, 2] and device.sampling[:3].tolist() == [2, 1, 0]
        assert device.work.tolist() == [7, 8, 9]


@pytest.mark.parametrize("bucket", [Bucket(1, 1, 0), Bucket(17, 3, 3), Bucket(64, 9, 9)])
def test_sections_are_apart_and_aligned(bucket: Bucket) -> None:
    upload = Upload(size(bucket, 11), CPU)
    sections = StaticInputs(bucket, 11, upload, DeviceRows.make(ROWS, 16, CPU), SPARE).device
    spans = sorted((s.data_ptr() - upload.target.data_ptr(), s.numel() * s.element_size()) for s in sections)
    assert all(start % 128 == 0 for start, _ in spans)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    assert sum(spans[-1]) <= upload.target.numel()


class Sent:
    """An event of a copy."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_a_source_waits_for_its_own_copy_and_no_other() -> None:
    upload = Upload(64, CPU)
    assert [upload.take_turn() for _ in range(4)] == [1, 0, 1, 0]
    events = [Sent(), Sent()]
    upload._sent = list(events)
    assert upload.take_turn() == 1
    assert [event.waited for event in events] == [0, 1]
    assert upload.sources[0].data_ptr() != upload.sources[1].data_ptr()


def test_attention_sees_only_what_stays() -> None:
    bucket = Bucket(4, 4, 0)
    rows = DeviceRows.make(ROWS, 16, CPU)
    inputs = StaticInputs(bucket, 3, Upload(size(bucket, 3), CPU), rows, SPARE)
    batch = inputs.attention_batch(rows.table)
    assert batch.bucket == bucket and batch.work_host is None and batch.work is inputs.device.work
    assert not len(batch.rows) and not len(batch.kv_len_host) and batch.max_kv_len == batch.num_decode == 0
    assert rows.spare == ROWS and batch.table.shape[0] == ROWS + 1
