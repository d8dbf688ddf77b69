"""Shared prompt tokens are counted once, whoever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferserve.protocol.digests import GRANULE
from inferserve.router.prefix_hints import PrefixHints
from inferserve.router.sharing import Overlap, SharedSpans, Span, granule_spans

LEN = 2 * GRANULE + 100


def prompt(*starts: int) -> np.ndarray:
    """Granules by number, and a rest of 100 tokens."""
    return np.concatenate([np.full(GRANULE, s) for s in starts] + [np.arange(100)]).astype(np.int32)


def shared(slots: int = 8) -> tuple[SharedSpans, np.ndarray]:
    own = np.zeros(slots, np.int64)
    return SharedSpans(own), own


def test_two_rows_on_a_cached_prefix_count_it_once() -> None:
    spans, own = shared()
    chain = granule_spans(prompt(1, 2))
    spans.join(0, LEN, chain, 0)
    assert (own[0], spans.tokens) == (LEN, 0)
    assert spans.overlap(chain, 2) == Overlap(2 * GRANULE, ((0, 2 * GRANULE),))
    assert spans.overlap(chain, 1) == Overlap(GRANULE, ((0, GRANULE),))
    assert spans.overlap(granule_spans(prompt(9, 2)), 2) == Overlap()
    spans.join(1, LEN, chain, 2)
    assert (own[0], own[1], spans.tokens) == (100, 100, 2 * GRANULE)
    assert spans.overlap(chain, 2) == Overlap(2 * GRANULE, ())
    spans.leave(0)
    assert (own[1], spans.tokens) == (LEN, 0)


def test_a_row_that_finds_nothing_in_the_tree_counts_all_of_its_own() -> None:
    spans, own = shared()
    chain = granule_spans(prompt(1, 2))
    spans.join(0, LEN, chain, 0)
    spans.join(1, LEN, chain, 0)
    assert (own[0], own[1], spans.tokens) == (LEN, LEN, 0)
    spans.settle(0, LEN, lambda _: 2)
    spans.settle(1, LEN, lambda _: 2)
    assert (own[0], own[1], spans.tokens) == (100, 100, 2 * GRANULE)
    spans.check()


def test_siblings_count_their_prompt_once() -> None:
    spans, own = shared()
    chain = granule_spans(prompt(1, 2))
    spans.join(7, LEN, chain, 0)
    spans.join_siblings([0, 1, 2], LEN, chain, 0, ticket=5)
    assert own[:3].tolist() == [1, 1, 1] and spans.tokens == LEN - 1 and own[7] == LEN
    spans.leave(0)
    assert own[1:3].tolist() == [1, 1] and spans.tokens == LEN - 1
    spans.leave(2)
    assert own[1] == LEN and spans.tokens == 0
    spans.join_siblings([0, 2], LEN, chain, 0, ticket=6)
    assert own[:3].tolist() == [1, LEN, 1] and spans.tokens == LEN - 1
    spans.check()


@pytest.mark.parametrize("length", [1, 2, GRANULE, GRANULE + 1])
def test_siblings_of_short_prompts(length: int) -> None:
    spans, own = shared()
    chain = granule_spans(np.zeros(length, np.int32))
    spans.join_siblings([0, 1], length, chain, 0, ticket=1)
    assert own[0] + own[1] + spans.tokens == length + 1


def test_hints() -> None:
    hints = PrefixHints()
    chain = granule_spans(prompt(1, 2, 3))
    assert [s.tokens for s in chain] == [GRANULE] * 3 and hints.hits(chain) == 0
    hints.update([s.key for s in chain], [])
    assert hints.hits(chain) == 3 and len(hints) == 3
    hints.update([], [chain[1].key, b"unknown"])
    assert hints.hits(chain) == 1
    assert granule_spans(np.zeros(GRANULE, np.int32)) == ()


class SharedAgainstSets(RuleBasedStateMachine):
    """Total = each distinct span held once + what only single rows hold."""

    def __init__(self) -> None:
        super().__init__()
        self.spans, self.own = shared(16)
        self.rows: dict[int, int] = {}
        self.ticket = 0

    def chain(self, branch: int, depth: int) -> tuple[Span, ...]:
        return tuple(Span(f"{min(branch, level)}-{level}".encode(), 10) for level in range(depth))

    @rule(branch=st.integers(0, 2), depth=st.integers(0, 4), hits=st.integers(0, 4), n=st.integers(1, 3))
    def join(self, branch: int, depth: int, hits: int, n: int) -> None:
        free = [s for s in range(16) if s not in self.rows][:n]
        if len(free) < n:
            return
        chain, length = self.chain(branch, depth), GRANULE * depth + 5
        before = int(self.own[list(self.rows)].sum()) + self.spans.tokens
        overlap = self.spans.overlap(chain, hits)
        self.ticket += 1
        if n > 1:
            self.spans.join_siblings(free, length, chain, hits, self.ticket)
        else:
            self.spans.join(free[0], length, chain, hits)
        self.rows |= dict.fromkeys(free, length)
        after = int(self.own[list(self.rows)].sum()) + self.spans.tokens
        if n == 1:
            assert after - before == length - overlap.tokens

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        del self.rows[slot]
        self.spans.leave(slot)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), found=st.integers(0, 4))
    def settle(self, data: st.DataObject, found: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.spans.settle(slot, self.rows[slot], lambda spans: min(found, len(spans)))

    @invariant()
    def consistent(self) -> None:
        self.spans.check()
        assert (self.own[list(self.rows)] >= 1).all()
        if not self.rows:
            assert self.spans.tokens == 0


TestSharedAgainstSets = SharedAgainstSets.TestCase
TestSharedAgainstSets.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
