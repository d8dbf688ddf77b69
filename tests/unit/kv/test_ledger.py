"""The ledger as an engine uses it, over a pretended pool that remembers which prefix each KV index was computed for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferserve.errors import KvExhausted
from inferserve.kv.ledger import KvLedger
from inferserve.kv.run import Ints
from inferserve.protocol.digests import GRANULE, granule_digests

TOTAL, ROWS, MAX_LEN = 48, 5, 24


def ints(values: object) -> Ints:
    return np.array(values, dtype=np.int32)


class LedgerMachine(RuleBasedStateMachine):
    """Two ledgers get the same calls. `tokens[row]` are the row's tokens, of which `length` have KV."""

    def __init__(self, prefix_cache: bool = True) -> None:
        super().__init__()
        self.ledger = KvLedger(TOTAL, ROWS, MAX_LEN, prefix_cache)
        self.twin = KvLedger(TOTAL, ROWS, MAX_LEN, prefix_cache)
        self.tokens: dict[int, list[int]] = {}
        self.bad: set[int] = set()
        self.content: list[tuple[int, ...] | None] = [None] * TOTAL
        self.device = np.full((ROWS, MAX_LEN), -1, dtype=np.int32)

    def both(self, call: str, *args: object) -> object:
        mine = getattr(self.ledger, call)(*args)
        getattr(self.twin, call)(*args)
        assert self.ledger.digest() == self.twin.digest()
        return mine

    def computed(self, row: int) -> int:
        return int(self.ledger.length[row])

    @precondition(lambda self: len(self.tokens) < ROWS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def open(self, tokens: list[int]) -> None:
        row = next(r for r in range(ROWS) if r not in self.tokens)
        prefix = self.both("open", row, ints(tokens))
        assert isinstance(prefix, int) and prefix <= len(tokens) - 1
        self.tokens[row] = tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """A step: chunks and single tokens of several rows at once. A row past its tokens gets an invented one."""
        rows = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, min_size=1))
        counts = []
        for row in rows:
            left = len(self.tokens[row]) - self.computed(row)
            if left == 0 and len(self.tokens[row]) < MAX_LEN:
                self.tokens[row].append(data.draw(st.integers(0, 1)))
            counts.append(data.draw(st.integers(0, len(self.tokens[row]) - self.computed(row))))
        if sum(counts) > self.ledger.available:
            before = self.ledger.digest()
            with pytest.raises(KvExhausted):
                self.ledger.extend(ints(rows), ints(counts))
            assert self.ledger.digest() == before
            return
        got = self.both("extend", ints(rows), ints(counts))
        assert isinstance(got, tuple)
        self.apply_prefixes()
        for row, position, index in zip(*(part.tolist() for part in got), strict=True):
            poison = (-1,) if row in self.bad else ()
            self.content[index] = (*self.tokens[row][: position + 1], *poison)
            self.device[row, position] = index

    def apply_prefixes(self) -> None:
        """What a backend does with `new_prefix`."""
        news = self.both("take_new_prefixes")
        assert isinstance(news, tuple)
        for row, length in news:
            self.device[row, :length] = self.ledger.table[row, :length]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        if row not in self.bad:
            self.both("publish", row, ints(self.tokens[row][: self.computed(row)]))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        length = data.draw(st.integers(int(self.ledger.shared[row]), self.computed(row)))
        self.both("truncate", row, length)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def go_bad(self, data: st.DataObject) -> None:
        """From here on this row computes NaN."""
        self.bad.add(data.draw(st.sampled_from(sorted(self.tokens))))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        good = 0 if row in self.bad else data.draw(st.integers(0, self.computed(row)))
        self.both("close", row, ints(self.tokens.pop(row)[:good]))
        self.bad.discard(row)

    @invariant()
    def holds(self) -> None:
        self.ledger.check()
        self.apply_prefixes()
        counters = self.ledger.counters(len(self.tokens), 0)
        assert counters.used + counters.cached + counters.free == counters.total == TOTAL
        assert counters.cached + counters.free == self.ledger.available
        for row, tokens in self.tokens.items():
            places = self.ledger.table[row, : self.computed(row)].tolist()
            assert self.device[row, : self.computed(row)].tolist() == places
            if row not in self.bad:
                assert [self.content[p] for p in places] == [tuple(tokens[: k + 1]) for k in range(len(places))]
        if not self.tokens:
            assert counters.used == 0


class UncachedLedgerMachine(LedgerMachine):
    def __init__(self) -> None:
        super().__init__(prefix_cache=False)

    @invariant()
    def caches_nothing(self) -> None:
        assert self.ledger.counters(0, 0).cached == 0
        assert self.ledger.take_digests() == ((), ())


SETTINGS = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
TestLedger.settings = SETTINGS
TestUncachedLedger = UncachedLedgerMachine.TestCase
TestUncachedLedger.settings = settings(SETTINGS, max_examples=40)


def run_row(ledger: KvLedger, row: int, tokens: Ints) -> int:
    """Open a row, compute all its tokens; returns how many were cached."""
    cached = ledger.open(row, tokens)
    ledger.extend(ints([row]), ints([len(tokens) - cached]))
    return cached


def test_a_prompt_always_leaves_its_last_token_to_compute() -> None:
    ledger = KvLedger(64, 2, 32)
    tokens = ints(range(10))
    assert run_row(ledger, 0, tokens) == 0
    ledger.close(0, tokens)
    assert run_row(ledger, 0, tokens) == 9
    assert run_row(ledger, 1, ints(range(12))) == 10


def test_a_published_prompt_is_stored_once() -> None:
    ledger = KvLedger(64, 3, 32)
    tokens = ints(range(10))
    for row in range(3):
        run_row(ledger, row, tokens)
        if row == 0:
            ledger.publish(0, tokens)
    assert ledger.counters(3, 0).used == 12, "ten shared tokens and the last prompt token of two more rows"
    ledger.publish(1, tokens)
    ledger.publish(2, tokens)
    assert ledger.counters(3, 0).used == 10
    np.testing.assert_array_equal(ledger.table[0, :10], ledger.table[2, :10])


def test_a_failed_row_leaves_nothing_in_the_cache() -> None:
    ledger = KvLedger(64, 1, 32)
    tokens = ints(range(10))
    run_row(ledger, 0, tokens)
    ledger.close(0, tokens[:0])
    assert ledger.counters(0, 0).cached == 0
    assert ledger.open(0, tokens) == 0


def test_digest_news_are_net() -> None:
    ledger = KvLedger(2 * GRANULE, 1, 2 * GRANULE)
    first = np.arange(GRANULE, dtype=np.int32)
    run_row(ledger, 0, first)
    ledger.close(0, first)
    assert ledger.take_digests() == (tuple(granule_digests(first)), ())
    second = np.full(2 * GRANULE, 7, dtype=np.int32)
    run_row(ledger, 0, second)
    ledger.close(0, second)
    third = first + 1
    run_row(ledger, 0, third)
    came, went = ledger.take_digests()
    assert set(went) == set(granule_digests(first))
    assert set(came) == set(granule_digests(second)[:1])


def test_different_histories_show_in_the_digest() -> None:
    one, other = KvLedger(64, 2, 32), KvLedger(64, 2, 32)
    run_row(one, 0, ints([1, 2, 3]))
    run_row(other, 0, ints([1, 2]))
    assert one.digest() != other.digest()
