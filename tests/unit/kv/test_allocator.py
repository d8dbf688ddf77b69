"""The token allocator against a set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inferserve.errors import KvExhausted
from inferserve.kv.allocator import TokenAllocator

TOTAL = 40


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = TokenAllocator(TOTAL)
        self.held: list[int] = []

    @rule(n=st.integers(0, TOTAL + 3))
    def alloc(self, n: int) -> None:
        if n > TOTAL - len(self.held):
            with pytest.raises(KvExhausted):
                self.allocator.alloc(n)
            return
        got = self.allocator.alloc(n).tolist()
        assert len(got) == n
        self.held += got

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if not self.held:
            return
        gone = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.allocator.free(np.array(gone, dtype=np.int32))
        self.held = [h for h in self.held if h not in gone]

    @invariant()
    def holds(self) -> None:
        self.allocator.check()
        assert self.allocator.free_count == TOTAL - len(self.held)
        assert sorted([*self.held, *self.allocator.free_indices().tolist()]) == list(range(TOTAL))


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_freeing_more_than_the_pool_is_our_bug() -> None:
    allocator = TokenAllocator(4)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(np.zeros(1, dtype=np.int32))


def test_check_sees_a_double_free() -> None:
    allocator = TokenAllocator(4)
    first, _ = allocator.alloc(2).tolist()
    allocator.free(np.array([first, first], dtype=np.int32))
    with pytest.raises(AssertionError, match="free twice"):
        allocator.check()


def test_what_was_given_out_is_not_a_view_of_the_stack() -> None:
    allocator = TokenAllocator(4)
    got = allocator.alloc(2)
    allocator.free(got[1:])
    before = got.copy()
    allocator.alloc(1)
    allocator.free(np.array([3], dtype=np.int32)[:0])
    np.testing.assert_array_equal(got, before)
