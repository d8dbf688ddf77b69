"""A step's results into slots and rows: ids and logprobs first, the visible length last, then what ended.

All rows at once in numpy; Python per row only for those that end, finish their prompt, asked for alternatives or had a
draft. Rows that were paused or ended after the step was launched have another epoch, and their results are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferserve.engine.sequences import Sequences
from inferserve.engine.step import Ints, Longs, PendingStep, StepBatch, StepResult
from inferserve.protocol.messages import Finish, TopLogprobs

NOT_FINITE = "the model computed values that are not finite"


@dataclass(frozen=True)
class LaunchedStep:
    """A step in flight.

    Attributes:
        batch: what was launched.
        chunks_from: its rows from this one on are prompt chunks.
        pending: the backend's handle.
        epochs: int64 [S], of the rows it samples.
        launched_ns: when.
    """

    batch: StepBatch
    chunks_from: int
    pending: PendingStep
    epochs: Longs
    launched_ns: int

    @property
    def prompt_tokens(self) -> int:
        """Its prompt tokens."""
        return int(self.batch.query_len[self.chunks_from :].sum())


@dataclass(frozen=True)
class Committed:
    """What a step led to.

    Attributes:
        slots, visible: int32 [n], slots that got tokens and their visible lengths; generations: uint32 [n].
        tops: alternatives.
        drafted: draft tokens checked. accepted: how many drafts were right at their first, second, … token.
    """

    slots: Ints
    generations: np.ndarray
    visible: Ints
    tops: tuple[TopLogprobs, ...]
    drafted: int = 0
    accepted: tuple[int, ...] = ()


def commit(step: LaunchedStep, result: StepResult, sequences: Sequences, now_ns: int) -> Committed:
    """Write the results of `step`, end the rows that are done, share the prompts that are computed."""
    rows, batch = sequences.rows, step.batch
    sampled = batch.rows[batch.sample]
    stopped = sequences.rules.stopped(sampled, result.token_ids, batch.out_position)
    live = rows.epoch[sampled] == step.epochs
    drafts = step.chunks_from > batch.num_decode
    if drafts:
        live &= follows(batch, result.token_ids, stopped | result.failed)
    good = live & ~result.failed
    which = np.flatnonzero(good)
    row, position, ids = sampled[which], batch.out_position[which], result.token_ids[which]
    place, visible = rows.prompt_len[row] + position, position + 1
    rows.tokens[row, place] = ids
    rows.out_len[row] = visible
    rows.good[row] = place
    slot = rows.slot[row]
    _write_slots(sequences, slot, position, ids, result.logprobs[which], now_ns)
    newest = np.append(row[1:] != row[:-1], True)[: len(row)] if drafts else slice(None)
    generations = rows.generation[row[newest]].astype(np.uint32)
    tops = _alternatives(batch, result, sequences, good)
    committed = Committed(slot[newest], generations, visible[newest], tops)
    if drafts:
        committed = replace(committed, **_settle_drafts(step, sequences, which))
    stopped = stopped[which]
    done = stopped | (visible >= sequences.rules.limit[row])
    first_chunk = int(np.searchsorted(batch.sample[which], step.chunks_from))
    for i in range(first_chunk, len(which)):
        if not done[i]:
            sequences.publish(int(row[i]))
    for i in np.flatnonzero(done).tolist():
        finish, token = (Finish.STOP, int(ids[i])) if stopped[i] else (Finish.LENGTH, -1)
        sequences.end(int(row[i]), finish, token)
    for i in np.flatnonzero(live & result.failed).tolist():
        sequences.end(int(sampled[i]), Finish.ERROR, error=NOT_FINITE)
    return committed


def follows(batch: StepBatch, token_ids: Ints, ends: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """bool [S]: results of a row up to and with the first that differs from its draft, or at which the row ends.

    Args:
        token_ids: int32 [S], sampled.
        ends: bool [S], the row ends with this one.
    """
    sample, given = batch.sample, batch.token_ids[batch.sampled_at()]
    wrong = np.zeros(len(sample), dtype=np.bool_)
    wrong[1:] = (sample[1:] == sample[:-1]) & ((given[1:] != token_ids[:-1]) | ends[:-1])
    before = np.cumsum(wrong)
    kept: NDArray[np.bool_] = before == before[np.searchsorted(sample, sample)]
    return kept


def _settle_drafts(step: LaunchedStep, sequences: Sequences, which: NDArray[np.intp]) -> dict[str, Any]:
    """Give back the KV of wrong guesses; the counts for `Committed`. `which` are the results that count."""
    rows, batch = sequences.rows, step.batch
    nth = np.arange(len(batch.sample)) - np.searchsorted(batch.sample, batch.sample)
    accepted = np.bincount(nth[which][nth[which] > 0] - 1)
    members = np.arange(batch.num_decode, step.chunks_from)
    live = rows.epoch[batch.rows[members]] == step.epochs[np.searchsorted(batch.sample, members)]
    for member in members[live].tolist():
        sequences.settle(int(batch.rows[member]))
    checked = batch.query_len[members] - 1
    return {"drafted": int(checked.sum()), "accepted": tuple(accepted.tolist())}


def _write_slots(
    sequences: Sequences, index: Ints, position: Ints, ids: Ints, logprobs: np.ndarray, now_ns: int
) -> None:
    """Publish to the slots `index` in the order that readers rely on."""
    slots = sequences.slots
    slots.output_ids[index, position] = ids
    slots.logprobs[index, position] = logprobs
    first = position == 0
    if first.any():
        slots.first_token_ns[index[first]] = now_ns
    slots.last_token_ns[index] = now_ns
    slots.visible[index] = position + 1


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
