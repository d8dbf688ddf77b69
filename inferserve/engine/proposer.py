"""Drafts: guesses of a row's next tokens, which one step checks together. Pure: tokens in, tokens out.

A row that checks a draft of k tokens computes 1 + k tokens and keeps as many of the sampled ones as were guessed, and
one more. Its length is known only when the results are read, so it sits out the steps launched until then; one whose
newest token is unread sits out a step only for a good guess. Knows neither KV nor how the results come about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from inferserve.engine.rows import EndRules, Rows
from inferserve.engine.step import Ints

QUIET_TOKENS = 8
"""Output tokens after a draft of which nothing was right, before the next is made."""


class Proposer(Protocol):
    """What guesses. A draft model would be another one."""

    def propose(self, known: Ints, most: int, sure: bool) -> Ints:
        """At most `most` tokens that may follow `known`, int32; none where there is no guess.

        Args:
            known: int32 [n], n >= 1, prompt and output of a row.
            sure: only a guess with good prospects is wanted.
        """
        ...


@dataclass(frozen=True)
class NgramProposer:
    """What followed the last place where the row's last tokens stood before ("prompt lookup").

    Attributes:
        longest: tokens that are compared; among places with equally many equal tokens the newest counts.
    """

    longest: int = 3

    def propose(self, known: Ints, most: int, sure: bool) -> Ints:
        """See Proposer. A text that repeats itself is continued beyond its end."""
        ends = np.flatnonzero(known[:-1] == known[-1])
        equal = min(1, len(ends))
        while equal and equal < self.longest:
            longer = ends[ends >= equal]
            longer = longer[known[longer - equal] == known[-1 - equal]]
            if not len(longer):
                break
            ends, equal = longer, equal + 1
        if equal < (self.longest if sure else 1):
            return known[:0]
        start = int(ends[-1]) + 1
        return known[start + np.arange(most) % (len(known) - start)]


class Drafts(NamedTuple):
    """Rows that check a draft, oldest first, and the draft of each, int32 [k], k >= 1."""

    rows: tuple[int, ...]
    ids: tuple[Ints, ...]

    @property
    def tokens(self) -> int:
        """Draft tokens of all rows."""
        return sum(map(len, self.ids))


NO_DRAFTS = Drafts((), ())


def draft(
    rows: Rows, rules: EndRules, decode: Ints, proposer: Proposer, longest: int, room: int
) -> tuple[Ints, Drafts]:
    """Split decode rows into those that go on as usual and those with a draft; the rest waits for its results.

    Args:
        decode: int32 [D], rows that decode, oldest first.
        longest: tokens of a draft.
        room: draft tokens of all rows.
    """
    usual, drafted, ids = [], [], []
    for row in decode.tolist():
        known = rows.tokens[row, : rows.prompt_len[row] + rows.out_len[row]]
        most = min(longest, room, int(rules.limit[row] - rows.planned[row]) - 1)
        if (
            most < 1
            or not rows.drafting.plain[row]
            or rows.out_len[row] < max(rules.min_tokens[row], rows.drafting.quiet[row])
        ):
            usual.append(row)
        elif rows.planned[row] > rows.out_len[row]:
            if not len(proposer.propose(known, most, sure=True)):
                usual.append(row)
        elif len(guess := proposer.propose(known, most, sure=False)):
            drafted.append(row)
            ids.append(guess)
            room -= len(guess)
        else:
            usual.append(row)
    return np.array(usual, dtype=np.int32), Drafts(tuple(drafted), tuple(ids))
