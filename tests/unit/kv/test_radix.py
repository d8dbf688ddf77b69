"""The radix tree against a brute-force model: a dict from prefix to KV index."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inferserve.kv import radix
from inferserve.kv.radix import Node, RadixTree
from inferserve.kv.run import Ints
from inferserve.protocol import digests as digests_module
from inferserve.protocol.digests import GRANULE, granule_digests

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def ints(values: object) -> Ints:
    return np.array(values, dtype=np.int32)


class RadixMachine(RuleBasedStateMachine):
    """`model[prefix]` is the KV index of the prefix's last token; `held` are locked prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(digests_module, "GRANULE", 4)
        self.patch.setattr(radix, "GRANULE", 4)
        self.patch.setattr(radix, "SEAM", 3)
        self.tree = RadixTree()
        self.model: dict[tuple[int, ...], int] = {}
        self.held: list[tuple[tuple[int, ...], Node]] = []
        self.cached: set[bytes] = set()
        self.next_index = 0

    def teardown(self) -> None:
        self.patch.undo()

    def longest(self, tokens: list[int]) -> int:
        n = 0
        while n < len(tokens) and tuple(tokens[: n + 1]) in self.model:
            n += 1
        return n

    @rule(tokens=TOKENS)
    def insert(self, tokens: list[int]) -> None:
        indices = list(range(self.next_index, self.next_index + len(tokens)))
        self.next_index += len(tokens)
        expected = self.longest(tokens)
        inserted = self.tree.insert(ints(tokens), ints(indices))
        assert inserted.present == expected
        for n in range(expected, len(tokens)):
            self.model[tuple(tokens[: n + 1])] = indices[n]
        chain = granule_digests(ints(tokens))
        assert inserted.digests == chain[expected // 4 :]
        self.cached |= set(inserted.digests)

    @rule(tokens=TOKENS)
    def match_and_lock(self, tokens: list[int]) -> None:
        found = self.tree.match(ints(tokens))
        n = self.longest(tokens)
        assert found.indices.tolist() == [self.model[tuple(tokens[: k + 1])] for k in range(n)]
        assert found.node.end == n
        self.tree.lock(found.node)
        self.held.append((tuple(tokens[:n]), found.node))

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.held:
            self.tree.unlock(self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))[1])

    @rule(n=st.integers(1, 12))
    def evict(self, n: int) -> None:
        pinned = {p[: k + 1] for p, _ in self.held for k in range(len(p))}
        evicted = self.tree.evict(n)
        assert len(evicted.indices) == min(n, len(self.model) - len(pinned))
        gone = {p for p, index in self.model.items() if index in set(evicted.indices.tolist())}
        assert len(gone) == len(evicted.indices)
        assert not gone & pinned
        for prefix in gone:
            del self.model[prefix]
        assert all(p[:-1] in self.model for p in self.model if len(p) > 1), "a prefix lost its head"
        assert set(evicted.digests) <= self.cached
        self.cached -= set(evicted.digests)

    @invariant()
    def holds(self) -> None:
        self.tree.check()
        assert sorted(self.tree.indices().tolist()) == sorted(self.model.values())
        pinned = {p[: k + 1] for p, _ in self.held for k in range(len(p))}
        assert (self.tree.total, self.tree.pinned) == (len(self.model), len(pinned))
        assert all(node.end == len(prefix) for prefix, node in self.held)
        assert self.tree.locks() == len(self.held)
        assert self.cached == {granule_digests(ints(p))[-1] for p in self.model if len(p) % 4 == 0}


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_least_recently_used_goes_first() -> None:
    tree = RadixTree()
    for first in (1, 2, 3):
        tree.insert(ints([first, 9]), ints([10 * first, 10 * first + 1]))
    tree.match(ints([1, 9]))
    assert sorted(tree.evict(3).indices.tolist()) == [20, 21, 31]
    assert sorted(tree.evict(9).indices.tolist()) == [10, 11, 30]


def test_joining_keeps_the_age_of_the_longer_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix, "SEAM", 3)
    tree = RadixTree()
    tree.insert(ints(range(10)), ints(range(10)))
    tree.insert(ints([50, 51]), ints([50, 51]))
    short = tree.match(ints(range(2))).node
    tree.lock(short)
    tree.unlock(short)
    assert len(list(tree.nodes())) == 2, "the short head was joined again"
    assert tree.evict(1).indices.tolist() == [9], "its use does not make the long rest young"


def test_a_seam_is_closed_by_whichever_lock_goes_last() -> None:
    for upper_first in (True, False):
        tree = RadixTree()
        tree.insert(ints(range(10)), ints(range(10)))
        upper = tree.match(ints(range(10))).node
        tree.lock(upper)
        tree.insert(ints(range(20)), ints(range(20)))
        lower = tree.match(ints(range(20))).node
        tree.lock(lower)
        assert upper is not lower
        for node in (upper, lower) if upper_first else (lower, upper):
            tree.unlock(node)
        assert [len(node.run) for node in tree.nodes()] == [20]
        tree.check()


def test_eviction_cuts_ends_and_spares_locked_prefixes() -> None:
    tree = RadixTree()
    tree.insert(ints(range(10)), ints(range(10)))
    locked = tree.match(ints(range(4))).node
    tree.lock(locked)
    assert tree.evict(3).indices.tolist() == [7, 8, 9]
    assert sorted(tree.evict(100).indices.tolist()) == [4, 5, 6]
    tree.unlock(locked)
    assert len(tree.evict(100).indices) == 4
    assert tree.total == tree.pinned == 0


def test_growing_prompts_neither_recurse_nor_slow_down() -> None:
    """The original raised RecursionError at 995 chained prefixes (faults.md E9)."""
    length = 100_000
    tokens = np.random.default_rng(1).integers(0, 50_000, length, dtype=np.int32)
    indices = np.arange(length, dtype=np.int32)
    tree = RadixTree()
    limit = sys.getrecursionlimit()
    started = time.monotonic()
    for n in range(1, length + 1):
        found = tree.match(tokens[:n]) if n % 100 == 0 else None
        if found is not None:
            tree.lock(found.node)
        assert tree.insert(tokens[:n], indices[:n]).present == n - 1
        if found is not None:
            tree.unlock(found.node)
    seconds = time.monotonic() - started
    assert sys.getrecursionlimit() == limit
    tree.check()
    assert tree.total == length
    assert len(list(tree.nodes())) <= 2 * length // radix.SEAM + 2
    np.testing.assert_array_equal(tree.match(tokens).indices, indices)
    assert len(tree.evict(length).indices) == length
    assert seconds < 60, f"{seconds:.1f} s"


def test_a_hundred_thousand_nodes_deep() -> None:
    """A comb: a branch after each token, so that no node can be joined; look-up, locks and eviction walk all of it."""
    depth = 100_000
    tree = RadixTree()
    spine = np.zeros(depth, dtype=np.int32)
    tree.insert(spine, np.arange(depth, dtype=np.int32))
    node = tree.match(spine[:1]).node
    tree.lock(node)
    held = [node]
    for _ in range(depth - 1):
        # Cutting the rest of the spine one token at a time and holding each cut is what a walk per prefix would do.
        (rest,) = node.children.values()
        node = rest if len(rest.run) == 1 else tree._split(rest, 1)
        tree.lock(node)
        held.append(node)
    tree.check()
    assert len(tree.match(spine).indices) == depth
    assert tree.pinned == depth
    for node in reversed(held):
        tree.unlock(node)
    tree.check()
    assert tree.pinned == 0
    assert len(tree.evict(depth).indices) == depth


def test_digests_name_whole_granules_only() -> None:
    tree = RadixTree()
    tokens = np.arange(3 * GRANULE + 7, dtype=np.int32)
    chain = granule_digests(tokens)
    assert tree.insert(tokens[: GRANULE + 5], tokens[: GRANULE + 5]).digests == chain[:1]
    assert tree.insert(tokens, tokens).digests == chain[1:3]
    assert tree.evict(7).digests == []
    assert tree.evict(1).digests == chain[2:]
    assert sorted(tree.evict(10_000).digests) == sorted(chain[:2])


def test_a_short_remainder_does_not_keep_a_long_buffer_alive() -> None:
    tree = RadixTree()
    tokens = np.arange(10_000, dtype=np.int32)
    tree.insert(tokens, tokens)
    tree.lock(tree.match(tokens[:10]).node)
    tree.evict(5_000)
    tree.evict(4_990)
    (node,) = tree.nodes()
    assert node.run.tokens.tolist() == list(range(10))
    assert node.run.tokens.base is not None and node.run.tokens.base.size < 100
    assert tree.insert(tokens[:20], tokens[:20]).present == 10
    assert tree.match(tokens).indices.tolist() == list(range(20))


def test_the_eviction_queue_stays_small_without_pressure() -> None:
    """The same prompt again and again splits and joins its node; the queue must not remember each time."""
    tree = RadixTree()
    prompt = np.arange(100, dtype=np.int32)
    tree.insert(prompt, prompt)
    for _ in range(2000):
        match = tree.match(prompt[:-1])
        tree.lock(match.node)
        tree.unlock(match.node)
    tree.check()
