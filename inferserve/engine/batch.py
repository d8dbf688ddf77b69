"""From a plan to the `StepBatch` that a backend runs; the rows' KV and counts move on as if the step had been run."""

from __future__ import annotations

import numpy as np

from inferserve.engine.planner import StepPlan
from inferserve.engine.rows import DECODING, Rows
from inferserve.engine.step import FROM_DEVICE, StepBatch
from inferserve.kv.ledger import KvLedger


def build_batch(step: int, plan: StepPlan, rows: Rows, ledger: KvLedger) -> StepBatch:
    """The batch of `plan`. Raises KvExhausted, changing nothing, if the plan asks for more KV than there is."""
    num_decode = len(plan.decode)
    if len(plan.prefill):
        chosen = np.concatenate((plan.decode, plan.prefill))
        query_len = np.concatenate((np.ones(num_decode, dtype=np.int32), plan.chunks))
    else:
        chosen, query_len = plan.decode, np.ones(num_decode, dtype=np.int32)
    owner, positions, kv_index = ledger.extend(chosen, query_len)
    kv_len = ledger.length[chosen]
    token_ids = rows.tokens[owner, positions]
    unread = rows.planned[plan.decode] > rows.out_len[plan.decode]
    if unread.any():
        token_ids[:num_decode][unread] = FROM_DEVICE
    complete = np.flatnonzero(kv_len[num_decode:] == rows.fill[plan.prefill])
    sample = np.arange(num_decode + len(complete), dtype=np.int32)
    sample[num_decode:] = num_decode + complete
    sampling = chosen[sample]
    out_position = rows.planned[sampling]
    rows.planned[sampling] = out_position + 1
    rows.state[plan.prefill[complete]] = DECODING
    return StepBatch(
        step=step,
        rows=chosen,
        num_decode=num_decode,
        query_len=query_len,
        kv_len=kv_len,
        token_ids=token_ids,
        positions=positions,
        kv_index=kv_index,
        table=ledger.table,
        new_prefix=ledger.take_new_prefixes(),
        sample=sample,
        out_position=out_position,
    )
