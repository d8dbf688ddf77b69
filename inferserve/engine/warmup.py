"""Made-up steps that touch what real ones touch: they compile kernels, fill allocators and show the peak of memory."""

from __future__ import annotations

import numpy as np

from inferserve.engine.step import FROM_DEVICE, Ints, StepBatch

TOKEN = 1


def prefill(table: Ints, tokens: int) -> StepBatch:
    """Row 0 computes `tokens` prompt tokens and samples one. Uses pool places [0, tokens)."""
    positions = np.arange(tokens, dtype=np.int32)
    table[0, :tokens] = positions
    return StepBatch(
        step=0,
        rows=_ints(0),
        num_decode=0,
        query_len=_ints(tokens),
        kv_len=_ints(tokens),
        token_ids=np.full(tokens, TOKEN, np.int32),
        positions=positions,
        kv_index=positions.copy(),
        table=table,
        new_prefix=(),
        sample=_ints(0),
        out_position=_ints(0),
    )


def decode(table: Ints, rows: int, length: int) -> StepBatch:
    """Rows [0, rows) compute their `length`-th token, all over the same places, and sample. `rows + length` places."""
    index = np.arange(rows, dtype=np.int32)
    own = length - 1 + index
    table[:rows, : length - 1] = np.arange(length - 1, dtype=np.int32)
    table[:rows, length - 1] = own
    return StepBatch(
        step=1,
        rows=index,
        num_decode=rows,
        query_len=np.ones(rows, np.int32),
        kv_len=np.full(rows, length, np.int32),
        token_ids=np.full(rows, FROM_DEVICE, np.int32),
        positions=np.full(rows, length - 1, np.int32),
        kv_index=own,
        table=table,
        new_prefix=tuple((row, length - 1) for row in range(rows)),
        sample=index.copy(),
        out_position=np.ones(rows, np.int32),
    )


def _ints(value: int) -> Ints:
    return np.array([value], np.int32)
