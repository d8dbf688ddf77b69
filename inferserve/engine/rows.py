"""`Rows`: the running sequences of one engine, one numpy column a fact, so that a step over all of them is a few
array operations. Knows neither KV nor the slot table; times and texts are other people's business.

A row without KV is following (until its leader's prompt is cached), queued or paused. Then it is filling (its prompt,
and after a pause its output too, is being computed), then decoding. `epoch` tells apart the lives of a row, so that
results of a step that was launched for an earlier one are dropped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferserve.engine.step import Ints, Longs
from inferserve.protocol.sampling import SamplingParams

FREE, FOLLOWING, QUEUED, PAUSED, FILLING, DECODING = range(6)


class EndRules:
    """When each row ends; columns of `max_rows`.

    Attributes:
        limit: int32, output tokens at which it ends with LENGTH.
        min_tokens: int32, output tokens before which no stop token ends it.
        ignore_eos: bool.
        stop_ids: row to its own stop token ids, for those rows that have any.
        eos: bool [vocab], the model's eos ids.
    """

    def __init__(self, max_rows: int, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.limit: Ints = np.zeros(max_rows, dtype=np.int32)
        self.min_tokens: Ints = np.zeros(max_rows, dtype=np.int32)
        self.ignore_eos: NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        self.stop_ids: dict[int, frozenset[int]] = {}
        self.eos: NDArray[np.bool_] = np.zeros(max(vocab_size, *eos_ids, 0) + 1, dtype=np.bool_)
        self.eos[list(eos_ids)] = True

    def set(self, row: int, params: SamplingParams, limit: int) -> None:
        """Rules of a new sequence in `row`, which may put out at most `limit` tokens for other reasons."""
        self.limit[row] = min(params.max_tokens, limit)
        self.min_tokens[row] = params.min_tokens
        self.ignore_eos[row] = params.ignore_eos
        self.stop_ids.pop(row, None)
        if params.stop_token_ids:
            self.stop_ids[row] = frozenset(params.stop_token_ids)

    def stopped(self, rows: Ints, ids: Ints, positions: Ints) -> NDArray[np.bool_]:
        """bool [n]: `ids[i]`, output token number `positions[i]` of `rows[i]`, ends it. All int32 [n]."""
        known = np.clip(ids, 0, len(self.eos) - 1)
        stopped = self.eos[known] & ~self.ignore_eos[rows]
        for row, own in self.stop_ids.items():
            for at in np.flatnonzero(rows == row):
                stopped[at] |= int(ids[at]) in own
        return stopped & (positions >= self.min_tokens[rows])


class Drafting:
    """Which rows may have their next tokens guessed (see `proposer`); columns of `max_rows`.

    Attributes:
        plain: bool, the likeliest token is taken and nothing else is asked for, so that drafts can be checked.
        pending: int32, draft tokens that the step in flight checks; until its results are read the row's length is
            unknown.
        quiet: int32, output tokens before which no draft is made, since the last one was wrong.
    """

    def __init__(self, max_rows: int) -> None:
        self.plain: NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        self.pending: Ints = np.zeros(max_rows, dtype=np.int32)
        self.quiet: Ints = np.zeros(max_rows, dtype=np.int32)


class Rows:
    """Columns of `max_rows`, int32 unless said otherwise.

    Attributes:
        state: int8, FREE … DECODING; from FILLING on the row holds KV.
        slot: slot index, -1 when free.
        generation: int64, the slot's generation.
        order: int64, rises with each admission: older rows have smaller numbers.
        epoch: int64, rises whenever the row pauses or ends.
        prompt_len: prompt tokens.
        out_len: output tokens committed.
        planned: output tokens committed or asked for by launched steps.
        fill: tokens to compute before the row decodes: prompt, and output so far after a pause.
        good: leading tokens whose KV is known to be good, since finite logits came out of it.
        drafting: what drafts depend on.
        tokens: int32 [max_rows, max_len], prompt and committed output, behind them the draft in flight.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.state: NDArray[np.int8] = np.zeros(max_rows, dtype=np.int8)
        self.slot: Ints = np.full(max_rows, -1, dtype=np.int32)
        self.generation: Longs = np.zeros(max_rows, dtype=np.int64)
        self.order: Longs = np.zeros(max_rows, dtype=np.int64)
        self.epoch: Longs = np.zeros(max_rows, dtype=np.int64)
        self.prompt_len: Ints = np.zeros(max_rows, dtype=np.int32)
        self.out_len: Ints = np.zeros(max_rows, dtype=np.int32)
        self.planned: Ints = np.zeros(max_rows, dtype=np.int32)
        self.fill: Ints = np.zeros(max_rows, dtype=np.int32)
        self.good: Ints = np.zeros(max_rows, dtype=np.int32)
        self.drafting = Drafting(max_rows)
        self.tokens: Ints = np.zeros((max_rows, max_len), dtype=np.int32)
