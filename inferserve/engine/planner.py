"""What the next step computes: pure functions of the rows, their KV lengths and two budgets.

Decode rows come first, then prompt chunks in order of admission, mixed in one step. Knows no ledger, slots or device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from inferserve.engine.rows import DECODING, FILLING, PAUSED, QUEUED, EndRules, Rows
from inferserve.engine.step import Ints

_NONE: Ints = np.zeros(0, dtype=np.int32)
_NONE.flags.writeable = False

RESUME_STEPS = 16
"""A paused row resumes only when the others can decode this many steps more beside it, so that it does not bounce."""


@dataclass(frozen=True)
class Budget:
    """What one step may compute.

    Attributes:
        tokens: query tokens of the step.
        chunk: query tokens of one sequence.
        whole_prompts: a prompt is computed in one step or not yet.
    """

    tokens: int
    chunk: int
    whole_prompts: bool = False


class StepPlan(NamedTuple):
    """Rows of the next step.

    Attributes:
        decode: int32 [D], rows that compute their newest token.
        prefill: int32 [P], rows that compute a chunk of `chunks` tokens.
        chunks: int32 [P].
        short: the KV pool is too full for this; something must be paused first, and the plan is empty.
    """

    decode: Ints = _NONE
    prefill: Ints = _NONE
    chunks: Ints = _NONE
    short: bool = False

    @property
    def empty(self) -> bool:
        """True when there is nothing to launch."""
        return not (len(self.decode) or len(self.prefill))


SHORT = StepPlan(short=True)


def in_order(rows: Rows, chosen: Ints) -> Ints:
    """`chosen` rows, oldest admission first."""
    return chosen[np.argsort(rows.order[chosen], kind="stable")]


def of_state(rows: Rows, state: int) -> Ints:
    """Rows in `state`, int32 [n], oldest first."""
    return in_order(rows, np.flatnonzero(rows.state == state).astype(np.int32))


def plan_step(rows: Rows, rules: EndRules, length: Ints, budget: Budget, available: int) -> StepPlan:
    """The next step.

    Args:
        rows, rules: the running set. Rows whose last token is already asked for are left out.
        length: int32 [max_rows], KV tokens of each row before the step.
        budget: limits of the step.
        available: KV tokens that can be given out.
    """
    decoding = np.flatnonzero((rows.state == DECODING) & (rows.planned < rules.limit)).astype(np.int32)
    decode = in_order(rows, decoding)[: budget.tokens]
    if len(decode) > available:
        return SHORT
    filling = of_state(rows, FILLING)
    if not len(filling):
        return StepPlan(decode)
    wanted = (rows.fill[filling] - length[filling]).tolist()
    if budget.whole_prompts:
        return _plan_whole(decode, filling, wanted, budget, available)
    left = min(budget.tokens, available) - len(decode)
    chunks = []
    for want in wanted:
        if left <= 0:
            break
        chunks.append(min(want, budget.chunk, left))
        left -= chunks[-1]
    if not chunks and not len(decode):
        return SHORT
    return StepPlan(decode, filling[: len(chunks)], np.array(chunks, dtype=np.int32))


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


def tokens_wanted(rows: Rows, rules: EndRules, length: Ints, budget: Budget) -> int:
    """Query tokens that the rows which hold KV would put into the next step."""
    decoding = int(np.count_nonzero((rows.state == DECODING) & (rows.planned < rules.limit)))
    filling = np.flatnonzero(rows.state == FILLING)
    return decoding + int(np.minimum(rows.fill[filling] - length[filling], budget.chunk).sum())


def tokens_promised(rows: Rows, length: Ints, resumes: bool) -> int:
    """KV tokens that a row about to start must leave to the others: what they still fill, and some steps of decoding."""
    filling = np.flatnonzero(rows.state == FILLING)
    decoding = int(np.count_nonzero(rows.state == DECODING))
    return int((rows.fill[filling] - length[filling]).sum()) + decoding * (RESUME_STEPS if resumes else 1)


def youngest_holder(rows: Rows) -> tuple[int, bool]:
    """The row to pause under KV pressure: the youngest that holds KV; and whether it is the only one."""
    holders = np.flatnonzero(rows.state >= FILLING)
    return int(holders[rows.order[holders].argmax()]), len(holders) == 1
