"""A step's results into slots and rows: ids and logprobs first, the visible length last, then what ended.

All rows at once in numpy; Python per row only for those that end, finish their prompt or asked for alternatives. Rows
that were paused or ended after the step was launched have another epoch, and their results are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferserve.engine.sequences import Sequences
from inferserve.engine.step import Ints, Longs, PendingStep, StepBatch, StepResult
from inferserve.protocol.messages import Finish, TopLogprobs

NOT_FINITE = "the model computed values that are not finite"


@dataclass(frozen=True)
class LaunchedStep:
    """A step in flight: its batch, the backend's handle, epochs int64 [S] of the rows it samples, launch time in ns."""

    batch: StepBatch
    pending: PendingStep
    epochs: Longs
    launched_ns: int


@dataclass(frozen=True)
class Committed:
    """Rows that got a token: parallel int32 [n] slots and visible lengths, uint32 [n] generations; and alternatives."""

    slots: Ints
    generations: np.ndarray
    visible: Ints
    tops: tuple[TopLogprobs, ...]


def commit(step: LaunchedStep, result: StepResult, sequences: Sequences, now_ns: int) -> Committed:
    """Write the results of `step`, end the rows that are done, share the prompts that are computed."""
    rows, batch = sequences.rows, step.batch
    sampled = batch.rows[batch.sample]
    live = rows.epoch[sampled] == step.epochs
    good = live & ~result.failed
    which = np.flatnonzero(good)
    row, position, ids = sampled[which], batch.out_position[which], result.token_ids[which]
    rows.tokens[row, rows.prompt_len[row] + position] = ids
    rows.out_len[row] = position + 1
    rows.good[row] = batch.kv_len[batch.sample[which]]
    written = _write_slots(sequences, row, position, ids, result.logprobs[which], now_ns)
    committed = Committed(*written, _alternatives(batch, result, sequences, good))
    stopped = sequences.rules.stopped(row, ids, position)
    done = stopped | (position + 1 >= sequences.rules.limit[row])
    first_chunk = int(np.searchsorted(which, batch.num_decode))
    for i in range(first_chunk, len(which)):
        if not done[i]:
            sequences.publish(int(row[i]))
    for i in np.flatnonzero(done).tolist():
        finish, token = (Finish.STOP, int(ids[i])) if stopped[i] else (Finish.LENGTH, -1)
        sequences.end(int(row[i]), finish, token)
    for i in np.flatnonzero(live & result.failed).tolist():
        sequences.end(int(sampled[i]), Finish.ERROR, error=NOT_FINITE)
    return committed


def _write_slots(
    sequences: Sequences, row: Ints, position: Ints, ids: Ints, logprobs: np.ndarray, now_ns: int
) -> tuple[Ints, np.ndarray, Ints]:
    """Publish in the order that readers rely on. Returns slots, generations and visible lengths."""
    slots, index = sequences.slots, sequences.rows.slot[row]
    slots.output_ids[index, position] = ids
    slots.logprobs[index, position] = logprobs
    first = position == 0
    if first.any():
        slots.first_token_ns[index[first]] = now_ns
    slots.last_token_ns[index] = now_ns
    visible = position + 1
    slots.visible[index] = visible
    return index, sequences.rows.generation[row].astype(np.uint32), visible


def _alternatives(
    batch: StepBatch, result: StepResult, sequences: Sequences, good: np.ndarray
) -> tuple[TopLogprobs, ...]:
    rows = sequences.rows
    found = []
    for i, top in result.tops.items():
        if good[i]:
            row = int(batch.rows[batch.sample[i]])
            place = int(rows.slot[row]), int(rows.generation[row]), int(batch.out_position[i])
            found.append(TopLogprobs(*place, top.token_ids, top.logprobs))
    return tuple(found)
