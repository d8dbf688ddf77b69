"""`Pace`: how much a step may compute so that rows which decode do not wait long. The leader's clock, in two integers.

What it decides leaves it as token counts in a `Budget`, which followers can be told; times, and what is learnt from
them, stay here. Without a cost model every step may be as large as the fixed budget.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np

from inferserve.engine.cost_model import SIZES, TILE, CostModel, StepCost, chunk_pairs
from inferserve.engine.planner import Budget, cut, in_order
from inferserve.engine.rows import DECODING, FILLING, QUEUED, Rows
from inferserve.engine.step import Ints, StepBatch

LEAST_PROMPT = TILE // 2
"""Prompt tokens that every step may compute, however long it gets: prompts must not starve."""

SHARE = 5.0
"""See `Target`; with prompts of 1024 and answers of 256 tokens a steady load takes 4 (benchmarks/planner_sim.py)."""

DRAFT_RATIO = 1.25
"""How much longer a step may get by drafts that it checks: what is thrown away should have cost little."""

_LEARNING = 0.02
_BOUND = 2.0


@dataclass(frozen=True)
class Target:
    """How long a step with prompts beside decode rows should take.

    Attributes:
        ms: milliseconds; 0 = what the others say.
        ratio: this many times the step without prompts; but always long enough for
        share: so many prompt tokens for each sequence that decodes or waits for its prompt. Where prompts are so many
            times longer than answers, fewer would not keep up, and rows that could decode would wait ever longer.
    """

    ms: float = 0.0
    ratio: float = 0.0
    share: float = SHARE


class Pace:
    """Budgets of coming steps.

    Args:
        fixed: limits that hold whatever time a step takes; `fixed.drafts` is the longest draft of a row.
        model: None for no limits but these.
        target: used with a model.
    """

    def __init__(self, fixed: Budget, model: CostModel | None = None, target: Target | None = None) -> None:
        self._fixed = fixed
        self._model = model
        self._target = target or Target()
        self._factor = 1.0
        self._sizes = [*(size for size in SIZES if size < fixed.tokens), fixed.tokens]

    @property
    def factor(self) -> float:
        """Measured ÷ predicted time of the steps so far, slowly changing, within [1/2, 2]."""
        return self._factor

    def budget(self, rows: Rows, length: Ints) -> Budget:
        """Limits of the next step.

        Args:
            rows: the running set.
            length: int32 [max_rows], KV tokens of each row.
        """
        decoding = np.flatnonzero(rows.state == DECODING)
        if self._model is None or not len(decoding):
            return self._fixed
        decode = StepCost(len(decoding), int(length[decoding].sum()) + len(decoding), 0.0, len(decoding))
        drafts = self._drafts(decode) if self._fixed.drafts else 0
        filling = in_order(rows, (rows.state >= QUEUED) & (rows.state <= FILLING))
        if not len(filling):
            return replace(self._fixed, drafts=drafts)
        return replace(self._fixed, drafts=drafts, prompts=self._prompts(decode, rows, filling, length[filling]))

    @property
    def learns(self) -> bool:
        """Whether `observe` has any effect."""
        return self._model is not None

    def observe(self, step: StepCost, milliseconds: float) -> None:
        """A step took this long."""
        # A fit to few times may find a step for nothing.
        if self._model is not None and (predicted := self._model.milliseconds(step)) > 0:
            ratio = milliseconds / predicted
            self._factor += _LEARNING * (min(max(ratio, 1 / _BOUND), _BOUND) - self._factor)

    def _time(self, step: StepCost) -> float:
        assert self._model is not None
        return self._factor * self._model.milliseconds(step)

    def _limit(self, decode: StepCost, sequences: int) -> float:
        """Milliseconds of a step in which `decode` is the decode rows' part."""
        target = self._target
        shared = decode._replace(tokens=decode.tokens + int(target.share * sequences))
        return target.ms or max(target.ratio * self._time(decode), self._time(shared))

    def _drafts(self, decode: StepCost) -> int:
        """Draft tokens of each row that cost little beside the step without."""
        limit, rows = DRAFT_RATIO * self._time(decode), decode.tokens
        for drafts in range(self._fixed.drafts, 0, -1):
            tokens = rows * (1 + drafts)
            if self._time(decode._replace(tokens=tokens, sampled=tokens)) <= limit:
                return drafts
        return 0

    def _prompts(self, decode: StepCost, rows: Rows, filling: Ints, before: Ints) -> int:
        """Prompt tokens that keep the step within the target; with the decode rows they fill one of the sizes."""
        wanted = np.where(
            rows.state[filling] == FILLING,
            rows.fill[filling] - before,
            rows.prompt_len[filling] + rows.out_len[filling],
        )
        target = self._limit(decode, decode.tokens + len(filling))
        parts = before.tolist(), wanted.tolist()
        sizes, most = (
            self._sizes,
            min(self._fixed.tokens, decode.tokens + int(np.minimum(wanted, self._fixed.chunk).sum())),
        )
        low = min(bisect_left(sizes, decode.tokens + LEAST_PROMPT), len(sizes) - 1)
        high = max(low, bisect_left(sizes, most))
        while low < high:
            middle = (low + high + 1) // 2
            if self._time(self._with_prompts(decode, *parts, sizes[middle] - decode.tokens)) <= target:
                low = middle
            else:
                high = middle - 1
        return max(0, sizes[low] - decode.tokens)

    def _with_prompts(self, decode: StepCost, before: list[int], wanted: list[int], tokens: int) -> StepCost:
        """The step with `tokens` prompt tokens, shared out as the planner does."""
        chunks = cut(wanted, self._fixed.chunk, tokens)
        pairs = sum(map(chunk_pairs, before, chunks))
        return decode._replace(tokens=decode.tokens + tokens, pairs=pairs)


def cost_of(batch: StepBatch, chunks_from: int) -> StepCost:
    """What the cost of `batch` depends on; its rows from `chunks_from` on are prompt chunks."""
    pairs = 0.0
    if chunks_from < len(batch.rows):
        queries, context = batch.query_len[chunks_from:].astype(np.float64), batch.kv_len[chunks_from:]
        pairs = float((queries * (context - (queries - 1) / 2)).sum())
    return StepCost(len(batch.token_ids), int(batch.kv_len[:chunks_from].sum()), pairs, len(batch.sample))
