"""From a plan to the `StepBatch` that a backend runs; the rows' KV and counts move on as if the step had been run."""

from __future__ import annotations

import numpy as np

from inferserve.engine.planner import StepPlan
from inferserve.engine.proposer import Drafts
from inferserve.engine.rows import DECODING, Rows
from inferserve.engine.step import FROM_DEVICE, Ints, StepBatch
from inferserve.kv.ledger import KvLedger


def build_batch(step: int, plan: StepPlan, rows: Rows, ledger: KvLedger) -> StepBatch:
    """The batch of `plan`. Raises KvExhausted, changing nothing, if the plan asks for more KV than there is."""
    num_decode = len(plan.decode)
    chosen, query_len = _members(plan)
    owner, positions, kv_index = ledger.extend(chosen, query_len)
    kv_len = ledger.length[chosen]
    _write_drafts(plan.drafts, rows)
    token_ids = rows.tokens[owner, positions]
    unread = rows.planned[plan.decode] > rows.out_len[plan.decode]
    if unread.any():
        token_ids[:num_decode][unread] = FROM_DEVICE
    chunks_from = num_decode + len(plan.drafts.rows)
    complete = np.flatnonzero(kv_len[chunks_from:] == rows.fill[plan.prefill]).astype(np.int32)
    sample, out_position = _samples(query_len[:chunks_from], complete + np.int32(chunks_from), chosen, rows)
    rows.planned[chosen[sample]] = out_position + 1
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


def _members(plan: StepPlan) -> tuple[Ints, Ints]:
    """Rows of the step and their query tokens."""
    if not len(plan.prefill) and not plan.drafts.rows:
        return plan.decode, np.ones(len(plan.decode), dtype=np.int32)
    checks = [1 + len(ids) for ids in plan.drafts.ids]
    rows = np.concatenate((plan.decode, plan.drafts.rows, plan.prefill)).astype(np.int32)
    ones = np.ones(len(plan.decode), dtype=np.int32)
    return rows, np.concatenate((ones, checks, plan.chunks)).astype(np.int32)


def _write_drafts(drafts: Drafts, rows: Rows) -> None:
    for row, ids in zip(drafts.rows, drafts.ids, strict=True):
        start = int(rows.prompt_len[row] + rows.out_len[row])
        rows.tokens[row, start : start + len(ids)] = ids
        rows.drafting.pending[row] = len(ids)


def _samples(decoding: Ints, complete: Ints, chosen: Ints, rows: Rows) -> tuple[Ints, Ints]:
    """`StepBatch.sample` and `out_position`: every token of the `decoding` rows, the last one of the `complete` chunks."""
    count = len(decoding)
    if int(decoding.sum()) == count:
        sample = np.concatenate((np.arange(count, dtype=np.int32), complete)).astype(np.int32)
        return sample, rows.planned[chosen[sample]]
    decode = np.repeat(np.arange(count, dtype=np.int32), decoding)
    nth = np.arange(len(decode), dtype=np.int32) - np.repeat(np.cumsum(decoding) - decoding, decoding)
    sample = np.concatenate((decode, complete)).astype(np.int32)
    out_position = rows.planned[chosen[sample]]
    out_position[: len(decode)] += nth.astype(np.int32)
    return sample, out_position
