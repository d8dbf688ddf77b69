"""What the next step computes: pure functions of the rows, their KV lengths and budgets.

Decode rows come first, then those that check a draft, then prompt chunks in order of admission, mixed in one step.
Knows no ledger, slots, device or clock: how much time a step should take has become token counts in its `Budget`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferserve.engine.cost_model import padded
from inferserve.engine.proposer import NO_DRAFTS, Drafts, Proposer, draft
from inferserve.engine.rows import DECODING, FILLING, PAUSED, QUEUED, EndRules, Rows
from inferserve.engine.step import Ints

_NONE: Ints = np.zeros(0, dtype=np.int32)
_NONE.flags.writeable = False

RESUME_STEPS = 16
"""A paused row resumes only when the others can decode this many steps more beside it, so that it does not bounce."""

LONG_PROMPT = 8
"""A prompt that would fill more steps than this shares them with the prompts behind it."""


@dataclass(frozen=True)
class Budget:
    """What one step may compute.

    Attributes:
        tokens: query tokens of the step.
        chunk: query tokens of one sequence.
        whole_prompts: a prompt is computed in one step or not yet.
        prompts: prompt tokens of a step in which rows decode; None = as many as `tokens` leaves. With drafts it may be
            some more, up to the size that the step is padded to.
        drafts: draft tokens that a row may check.
    """

    tokens: int
    chunk: int
    whole_prompts: bool = False
    prompts: int | None = None
    drafts: int = 0


class StepPlan(NamedTuple):
    """Rows of the next step.

    Attributes:
        decode: int32 [D], rows that compute their newest token.
        drafts: rows that compute their newest token and a draft of those after it.
        prefill: int32 [P], rows that compute a chunk of `chunks` tokens.
        chunks: int32 [P].
        short: the KV pool is too full for this; something must be paused first, and the plan is empty.
    """

    decode: Ints = _NONE
    prefill: Ints = _NONE
    chunks: Ints = _NONE
    drafts: Drafts = NO_DRAFTS
    short: bool = False

    @property
    def empty(self) -> bool:
        """True when there is nothing to launch."""
        return not (len(self.decode) or len(self.prefill) or self.drafts.rows)


SHORT = StepPlan(short=True)


def in_order(rows: Rows, chosen: NDArray[np.bool_]) -> Ints:
    """Rows whose flag in `chosen`, bool [max_rows], is set; int32 [n], oldest admission first."""
    found = np.flatnonzero(chosen).astype(np.int32)
    return found[np.argsort(rows.order[found], kind="stable")]


def of_state(rows: Rows, state: int) -> Ints:
    """Rows in `state`, int32 [n], oldest first."""
    return in_order(rows, rows.state == state)


def _decoding(rows: Rows, rules: EndRules) -> NDArray[np.bool_]:
    """Rows that decode and have not been asked for their last token."""
    return (rows.state == DECODING) & (rows.planned < rules.limit)


def plan_step(
    rows: Rows, rules: EndRules, length: Ints, budget: Budget, available: int, proposer: Proposer | None = None
) -> StepPlan:
    """The next step.

    Args:
        rows, rules: the running set. Rows whose last token is already asked for, and those whose length depends on a
            draft in flight, are left out.
        length: int32 [max_rows], KV tokens of each row before the step.
        budget: limits of the step.
        available: KV tokens that can be given out.
        proposer: makes drafts, if the budget allows any.
    """
    decode = in_order(rows, _decoding(rows, rules) & (rows.drafting.pending == 0))[: budget.tokens]
    if len(decode) > available:
        return SHORT
    filling = of_state(rows, FILLING)
    left = min(budget.tokens, available) - len(decode)
    drafts = NO_DRAFTS
    if proposer is not None and budget.drafts and not (budget.whole_prompts and len(filling)):
        decode, drafts = draft(rows, rules, decode, proposer, budget.drafts, left // 2 if len(filling) else left)
        left -= drafts.tokens
    if not len(filling):
        return StepPlan(decode, drafts=drafts)
    wanted = (rows.fill[filling] - length[filling]).tolist()
    if budget.whole_prompts:
        return _plan_whole(decode, filling, wanted, budget, available)
    if budget.prompts is not None:
        beside = len(decode) + len(drafts.rows) + drafts.tokens
        left = min(left, padded(beside + budget.prompts) - beside if drafts.rows else budget.prompts)
    chunks = cut(wanted, budget.chunk, left)
    if not chunks and not len(decode) and not drafts.rows:
        return SHORT
    return StepPlan(decode, filling[: len(chunks)], np.array(chunks, dtype=np.int32), drafts)


def cut(wanted: list[int], longest: int, left: int) -> list[int]:
    """Chunks of the first rows, at most `longest` of one and `left` of all. A long prompt leaves half to those behind it."""
    chunks: list[int] = []
    long = LONG_PROMPT * left
    for want in wanted:
        if left <= 0:
            break
        most = -(-left // 2) if want > long else left
        chunks.append(min(want, longest, most))
        left -= chunks[-1]
    if chunks and left > 0:
        chunks[0] += min(left, wanted[0] - chunks[0], longest - chunks[0])
    return chunks


def _plan_whole(decode: Ints, filling: Ints, wanted: list[int], budget: Budget, available: int) -> StepPlan:
    """Prompts that are not cut. One that does not fit beside the decode rows gets a step of its own."""
    left = min(budget.tokens, available) - len(decode)
    if wanted[0] > left and wanted[0] <= available:
        return StepPlan(prefill=filling[:1], chunks=np.array(wanted[:1], dtype=np.int32))
    fits = int(np.searchsorted(np.cumsum(wanted), left, side="right"))
    if not fits and not len(decode):
        return SHORT
    return StepPlan(decode, filling[:fits], np.array(wanted[:fits], dtype=np.int32))


def next_to_start(rows: Rows) -> int | None:
    """The oldest row that has no KV and waits for nothing but room."""
    waiting = np.flatnonzero((rows.state == QUEUED) | (rows.state == PAUSED))
    return int(waiting[rows.order[waiting].argmin()]) if len(waiting) else None


def has_room(rows: Rows, rules: EndRules, length: Ints, budget: Budget) -> bool:
    """Whether the next step could compute more than the rows that hold KV would put into it."""
    room = budget.tokens - int(np.count_nonzero(_decoding(rows, rules)))
    if budget.prompts is not None:
        room = min(room, budget.prompts)
    filling = np.flatnonzero(rows.state == FILLING)
    wanted = rows.fill[filling] - length[filling]
    return int(np.where(wanted > LONG_PROMPT * room, room // 2, np.minimum(wanted, budget.chunk)).sum()) < room


def tokens_promised(rows: Rows, length: Ints, resumes: bool) -> int:
    """KV tokens that a row about to start must leave to the others: what they still fill, and some steps of decoding."""
    filling = np.flatnonzero(rows.state == FILLING)
    decoding = int(np.count_nonzero(rows.state == DECODING))
    return int((rows.fill[filling] - length[filling]).sum()) + decoding * (RESUME_STEPS if resumes else 1)


def youngest_holder(rows: Rows) -> tuple[int, bool]:
    """The row to pause under KV pressure: the youngest that holds KV; and whether it is the only one."""
    holders = np.flatnonzero(rows.state >= FILLING)
    return int(holders[rows.order[holders].argmax()]), len(holders) == 1
