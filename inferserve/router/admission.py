"""`AdmissionPolicy`: who may run, decided from a snapshot alone.

A request is admitted if the estimated future peak of KV use stays within the pool, rows and first-step tokens allow
it, and no row is paused. While less than `router_token_ratio` of the pool is in use, rows are expected to be as long
as rows lately were; above it, or with ratio 0, every row is given its full `max_tokens`. Then no row is ever paused, as
long as the engine gives each started row a token in every step and frees a row's KV within END_LAG steps. Knows no
clock, message or slot table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferserve.router.estimate import PeakEstimate
from inferserve.router.output_lengths import LengthCurve

Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

END_LAG = 2
"""Steps between a row's last token and the moment its KV is free: the engine computes one step ahead."""
PREFILL_STEPS = 32
"""How many steps' worth of first chunks may be handed to the engine before they start: it paces prompts by their number."""
PREFILL_STEPS_IN_FULL = 2
"""The same where no row may ever be paused: one that starts later than the others holds its KV longer than foreseen."""


@dataclass(frozen=True)
class Limits:
    """What the pool and the settings allow.

    Attributes:
        kv_tokens: size of the KV pool, tokens.
        max_rows: rows that may run at once.
        batch_max_tokens: tokens of one step.
        first_chunk: prompt tokens of one row in one step.
        token_ratio: pool share from which on full lengths are reserved.
        prefix_cache: whether siblings share the KV of their prompt.
    """

    kv_tokens: int
    max_rows: int
    batch_max_tokens: int
    first_chunk: int
    token_ratio: float
    prefix_cache: bool


@dataclass(frozen=True)
class Snapshot:
    """The running rows (arrays of one entry each) and what they share.

    Attributes:
        own: int64, prompt tokens that only this row holds.
        generated: int64, output tokens so far; 0 = not started.
        limit: int64, max_tokens.
        always_full: bool, the row ignores eos.
        first_tokens: int64, tokens it wants in its first step.
        shared: prompt tokens held by several rows, counted once.
        paused: rows paused for lack of KV.
        lengths: distribution of real output lengths.
    """

    own: Longs
    generated: Longs
    limit: Longs
    always_full: Bools
    first_tokens: Longs
    shared: int
    paused: int
    lengths: LengthCurve


@dataclass(frozen=True)
class Candidate:
    """The request at the head of the queue.

    Attributes:
        rows: siblings that are to run together.
        prompt_tokens: KV tokens for their prompt that no running row holds.
        sole: (position in the snapshot, tokens) of the others, where one row alone holds them so far.
        first_tokens: tokens they want to compute in their first step.
        max_tokens: output limit of each sibling.
        ignore_eos: whether each will use its limit.
    """

    rows: int
    prompt_tokens: int
    sole: tuple[tuple[int, int], ...]
    first_tokens: int
    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True)
class Admitted:
    """It runs."""


@dataclass(frozen=True)
class Held:
    """It waits, and all behind it: `reason` is paused, rows, prefill, ratio or kv."""

    reason: str


Decision = Admitted | Held


class AdmissionPolicy:
    """The rules for one set of limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def refusal(self, prompt_len: int, max_tokens: int) -> str:
        """Why one sequence can never run, with the numbers; '' if it can."""
        need, pool = prompt_len + max_tokens, self.limits.kv_tokens
        if need <= pool:
            return ""
        return (
            f"prompt of {prompt_len} tokens + max_tokens {max_tokens} = {need} tokens"
            f" can never fit: the KV pool holds {pool} tokens"
        )

    def together(self, rows: int, prompt_len: int, max_tokens: int) -> int:
        """How many of `rows` siblings can run at once on an empty engine; at least 1 if none is refused."""
        further = (self.limits.kv_tokens - prompt_len - max_tokens) // (self._further(prompt_len) + max_tokens)
        return max(1, min(rows, self.limits.max_rows, 1 + further))

    def prompt_tokens(self, rows: int, prompt_len: int, shared: int) -> int:
        """KV tokens for the prompt of `rows` siblings, of which running rows hold `shared`."""
        return prompt_len - shared + (rows - 1) * self._further(prompt_len)

    def first_tokens(self, rows: int, prefill: int) -> int:
        """Tokens that `rows` siblings with `prefill` uncached prompt tokens want in their first step."""
        return min(prefill, self.limits.first_chunk) + (rows - 1) * min(self._further(prefill), self.limits.first_chunk)

    def _further(self, prompt_len: int) -> int:
        """Prompt tokens of a further sibling: it computes the last one for its own first output."""
        return 1 if self.limits.prefix_cache else prompt_len

    def open(self, snapshot: Snapshot) -> AdmissionRound:
        """Begin a round of decisions on `snapshot`."""
        return AdmissionRound(self.limits, snapshot)


class AdmissionRound:
    """Decisions that build on each other: what is admitted counts for the next candidate.

    A round is all in expected or all in full lengths; the one in which use rises above the ratio ends there.
    """

    def __init__(self, limits: Limits, snapshot: Snapshot) -> None:
        self._limits = limits
        self._snapshot = snapshot
        self._rows = len(snapshot.own)
        starting = snapshot.generated == 0
        self._starting = bool(starting.any())
        self._first_tokens = int(np.where(starting, snapshot.first_tokens, 1).sum())
        self._used = int(snapshot.own.sum() + snapshot.generated.sum()) + snapshot.shared
        self._in_full = self._above_ratio()
        self._estimate: PeakEstimate | None = None

    def peak(self) -> int:
        """Estimated future peak, KV tokens, of all that runs now."""
        return self._future().peak()

    def consider(self, candidate: Candidate) -> Decision:
        """Admit the candidate or hold it; assumes that `refusal` and `together` had nothing against it."""
        if self._rows:
            if self._snapshot.paused:
                return Held("paused")
            if self._rows + candidate.rows > self._limits.max_rows:
                return Held("rows")
            if not self._starts_soon(candidate):
                return Held("prefill")
        future = self._future().keeping(candidate.sole)
        left = self._length(candidate)
        if self._rows:
            if self._above_ratio() and not self._in_full:
                return Held("ratio")
            if future.peak_with(candidate.prompt_tokens, left, candidate.rows) > self._limits.kv_tokens:
                return Held("kv")
        self._estimate = future
        future.add(candidate.prompt_tokens, left, candidate.rows)
        self._rows += candidate.rows
        self._used += candidate.prompt_tokens
        self._first_tokens += candidate.first_tokens
        self._starting = True
        return Admitted()

    def _above_ratio(self) -> bool:
        return self._used >= self._limits.token_ratio * self._limits.kv_tokens

    def _starts_soon(self, candidate: Candidate) -> bool:
        """Whether its first chunk comes up soon enough; if nothing else is starting, it does."""
        tokens = self._first_tokens + candidate.first_tokens
        steps = PREFILL_STEPS_IN_FULL if self._in_full else PREFILL_STEPS
        return not self._starting or tokens <= steps * self._limits.batch_max_tokens

    def _length(self, candidate: Candidate) -> int:
        """Output tokens to reserve for each of its rows."""
        if self._in_full or candidate.ignore_eos:
            return candidate.max_tokens
        limit = np.array([candidate.max_tokens])
        return int(self._snapshot.lengths.expected(limit * 0, limit)[0])

    def _future(self) -> PeakEstimate:
        """The rows of the snapshot and those admitted since; made when first asked for."""
        if self._estimate is None:
            rows = self._snapshot
            starting = rows.generated == 0
            total = rows.limit
            if not self._in_full:
                total = np.where(rows.always_full, rows.limit, rows.lengths.expected(rows.generated, rows.limit))
            left = total - rows.generated + np.where(starting, 0, END_LAG)
            self._estimate = PeakEstimate(rows.own + rows.generated, left, starting, rows.shared)
        return self._estimate
