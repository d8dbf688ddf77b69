"""The queue against a plain list; and that leaving it costs the same wherever one waits."""

from __future__ import annotations

import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferserve.protocol.messages import SlotRef
from inferserve.router.queue import Group, WaitingQueue


class QueueAgainstList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.model: list[list[SlotRef]] = []
        self.next_slot = 0

    @rule(n=st.integers(1, 4))
    def put(self, n: int) -> None:
        refs = [SlotRef(self.next_slot + i, 7) for i in range(n)]
        self.next_slot += n
        self.queue.put(Group({r.index: r for r in refs}, 10, 10, False))
        self.model.append(refs)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.model))
        ref = data.draw(st.sampled_from(group))
        assert not self.queue.remove(SlotRef(ref.index, 6))
        assert self.queue.remove(ref)
        assert not self.queue.remove(ref)
        group.remove(ref)
        self.model = [g for g in self.model if g]

    @precondition(lambda self: self.model)
    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        head = self.queue.head()
        assert head is not None
        assert self.queue.take(head, count) == self.model[0][:count]
        self.model[0] = self.model[0][count:]
        self.model = [g for g in self.model if g]

    @invariant()
    def same(self) -> None:
        self.queue.check()
        assert [list(g.members.values()) for g in self.queue] == self.model
        assert len(self.queue) == sum(map(len, self.model))
        head = self.queue.head()
        assert (list(head.members.values()) if head else None) == (self.model[0] if self.model else None)
        low, high = 3, 9
        assert sorted(r.index for r in self.queue.members(low, high)) == sorted(
            r.index for g in self.model for r in g if low <= r.index < high
        )


TestQueueAgainstList = QueueAgainstList.TestCase
TestQueueAgainstList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_long_queue_drains_in_linear_time() -> None:
    def drain(n: int) -> float:
        queue = WaitingQueue()
        for i in range(n):
            queue.put(Group({i: SlotRef(i, 1)}, 1, 1, False))
        begin = time.perf_counter()
        while head := queue.head():
            queue.take(head, 1)
        return time.perf_counter() - begin

    drain(1000)
    assert drain(40_000) < 40 * max(drain(4_000), 0.002)
