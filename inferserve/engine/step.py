"""What planner, ledger and backend say to each other about one step. Arrays are numpy on the host; no torch here.

A *row* is an index in [0, running_max_req_size): the engine's own number for a running sequence, given at admission
and free again at its end. Rows of a step are ordered: decode rows (one query token each) first, then rows that check a
draft (their newest token and the drafted ones after it), then prefill chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inferserve.protocol.sampling import SamplingParams

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

FROM_DEVICE = -1
"""In `StepBatch.token_ids`: the id is the row's newest sampled token, which only the device may know yet."""


@dataclass(frozen=True)
class StepBatch:
    """One forward pass over R rows and T tokens.

    Attributes:
        step: number of the step.
        rows: int32 [R], row indexes; the first `num_decode` have one query token each.
        num_decode: how many of them are decode rows.
        query_len: int32 [R], query tokens of each row in this step; sums to T.
        kv_len: int32 [R], tokens of the row in KV after this step (cached + computed + this step's).
        token_ids: int32 [T], FROM_DEVICE where the newest sampled token of the row is meant.
        positions: int32 [T], absolute positions.
        kv_index: int32 [T], where in the pool each token's K and V go.
        table: int32 [max_rows, max_len], page table: pool index of each position of each row (host copy, owned by the
            ledger; valid for positions < kv_len). A device copy follows it by `new_prefix` and `kv_index`.
        new_prefix: (row, length) of rows whose first `length` table entries were set since the last step (prefix hits
            and resumes); entries for this step's own tokens are `kv_index` at `positions`.
        sample: int32 [S], rising, indexes into `rows` of those that sample a token in this step (decode rows and final
            chunks). Results come in this order. A row named m times samples at each of its last m tokens, in order.
        out_position: int32 [S], output position of the token being sampled (0 = first output token).
    """

    step: int
    rows: Ints
    num_decode: int
    query_len: Ints
    kv_len: Ints
    token_ids: Ints
    positions: Ints
    kv_index: Ints
    table: Ints
    new_prefix: tuple[tuple[int, int], ...]
    sample: Ints
    out_position: Ints

    def sampled_at(self) -> Longs:
        """int64 [S]: index into the T tokens of the one whose logits each result is chosen from."""
        last = np.cumsum(self.query_len, dtype=np.int64)[self.sample] - 1
        after = np.searchsorted(self.sample, self.sample, side="right") - 1 - np.arange(len(self.sample))
        at: Longs = last - after
        return at


@dataclass(frozen=True)
class TopAlternatives:
    """Alternatives of one sampled token: likeliest first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class StepResult:
    """Results of a step, in the order of `StepBatch.sample`.

    Attributes:
        token_ids: int32 [S].
        logprobs: float32 [S], of the chosen tokens under softmax of the raw logits (before bias, penalties,
            temperature); NaN for rows that did not ask.
        failed: bool [S], True where the row's logits were not finite; its token is meaningless.
        tops: index into S → alternatives, for rows that asked for them.
    """

    token_ids: Ints
    logprobs: Floats
    failed: NDArray[np.bool_]
    tops: dict[int, TopAlternatives]


class PendingStep(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return its results."""
        ...


@dataclass(frozen=True)
class BackendFacts:
    """Known only after loading: size of the KV pool in tokens, and a word for the log."""

    kv_tokens: int
    about: dict[str, str | int | float]


class EngineBackend(Protocol):
    """What runs steps: torch on a device, or the fake. Calls come from one thread, in order."""

    def start(self) -> BackendFacts:
        """Load, size the pool, warm up. Raises ConfigError for what a user can fix."""
        ...

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """A sequence takes `row`. `prompt` and `output` (non-empty after a resume) are int32 ids; copy what is kept."""
        ...

    def close_row(self, row: int) -> None:
        """The sequence left `row`; effects on the device are ordered after steps already launched."""
        ...

    def launch(self, batch: StepBatch) -> PendingStep:
        """Start a step. On CUDA this returns before it is done; on CPU when it is done."""
        ...
