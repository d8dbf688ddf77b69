"""A StepBatch as tensors on the CPU: views of the engine's arrays, device ids filled in, logits rows picked."""

from __future__ import annotations

import numpy as np
import torch

from inferserve.engine.staging import CpuStaging
from inferserve.engine.step import FROM_DEVICE, StepBatch


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def batch(table: np.ndarray) -> StepBatch:
    """Rows 2 and 0 decode, row 1 computes three prompt tokens of more, row 3 its last two."""
    return StepBatch(
        step=4,
        rows=ints(2, 0, 1, 3),
        num_decode=2,
        query_len=ints(1, 1, 3, 2),
        kv_len=ints(5, 9, 3, 6),
        token_ids=ints(FROM_DEVICE, 31, 11, 12, 13, 14, 15),
        positions=ints(4, 8, 0, 1, 2, 4, 5),
        kv_index=ints(40, 41, 42, 43, 44, 45, 46),
        table=table,
        new_prefix=(),
        sample=ints(0, 1, 3),
        out_position=ints(1, 2, 0),
    )


def test_cpu_staging() -> None:
    table = np.zeros((4, 16), np.int32)
    staging = CpuStaging(4)
    sampled = torch.tensor([70, 72]), torch.tensor([-1.5, torch.nan]), torch.tensor([False, True])
    packed = staging.finish(torch.tensor([0, 2]), *sampled)
    assert packed[0].tolist() == [70, 72] and packed[2].tolist() == [0, 1]
    step = staging.put(batch(table))
    assert step.token_ids.tolist() == [72, 31, 11, 12, 13, 14, 15]
    assert step.logits_index.tolist() == [0, 1, 6]
    assert step.sample_rows.tolist() == [2, 0, 3]
    attention = step.attention
    assert attention.query_start.tolist() == [0, 1, 2, 5, 7]
    assert (attention.num_decode, attention.max_query_len, attention.max_kv_len) == (2, 3, 9)
    assert attention.query_len_host.tolist() == [1, 1, 3, 2]
    assert attention.kv_len_host.tolist() == [5, 9, 3, 6]
    assert (attention.positions.dtype, attention.kv_index.dtype) == (torch.int64, torch.int64)


def test_the_page_table_is_shared() -> None:
    table = np.zeros((4, 16), np.int32)
    step = CpuStaging(4).put(batch(table))
    table[1, 3] = 99
    assert step.attention.table[1, 3] == 99


def test_the_batch_is_not_changed() -> None:
    table = np.zeros((4, 16), np.int32)
    mine = batch(table)
    CpuStaging(4).put(mine)
    assert mine.token_ids[0] == FROM_DEVICE
