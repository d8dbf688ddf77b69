"""Any order of submits, aborts, stops, steps, duplicates and lost workers: each row runs at most once and ends once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferserve.protocol.messages import Abort, Finish, SlotRef, StopMatched, Submit, WorkerLost
from tests.fakes.router_world import World, report

ROWS = 8


class RouterMachine(RuleBasedStateMachine):
    """`alive` is what http waits for; `running` what the engine was told to run, with output lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(rows=ROWS)
        self.submitted: set[SlotRef] = set()
        self.waiting: set[SlotRef] = set()
        self.running: dict[SlotRef, int] = {}
        self.told: list[SlotRef] = []
        self.seen = 0
        self.dropped = 0

    def hear(self, *messages: object) -> None:
        self.world.tell(*messages)  # type: ignore[arg-type]
        for commands in self.world.commands[self.seen :]:
            for admit in commands.admit:
                ref = SlotRef(admit.index, admit.generation)
                self.waiting.remove(ref)
                self.running[ref] = 0
                assert admit.leader == -1 or admit.leader in {r.index for r in self.running}
            for ref in (*commands.abort, *commands.stop):
                assert ref in self.running and ref not in self.told
                self.told.append(ref)
        for dropped in self.world.dropped[self.dropped :]:
            self.waiting.remove(SlotRef(dropped.index, dropped.generation))
        self.seen, self.dropped = len(self.world.commands), len(self.world.dropped)

    def some(self, data: st.DataObject) -> SlotRef:
        return data.draw(st.sampled_from(sorted(self.submitted, key=lambda r: (r.index, r.generation))))

    @rule(data=st.data(), n=st.integers(1, 3), prompt=st.sampled_from([1, 10, 300, 700]), limit=st.integers(1, 900))
    def submit(self, data: st.DataObject, n: int, prompt: int, limit: int) -> None:
        busy = {r.index for r in (*self.waiting, *self.running)}
        free = [i for i in range(64) if i not in busy]
        indexes = data.draw(st.lists(st.sampled_from(free), min_size=n, max_size=n, unique=True))
        refs = tuple(self.world.slot(i, prompt, limit) for i in indexes)
        self.submitted.update(refs)
        self.waiting.update(refs)
        if data.draw(st.integers(0, 5)) == 0:
            self.world.http.cancelled[refs[0].index] = 1
        self.hear(Submit(refs))
        assert not self.world.http.cancelled[refs[0].index] or refs[0] not in self.running

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), kind=st.sampled_from([Abort, StopMatched, Submit]), shift=st.integers(-1, 1))
    def any_message_about_any_row(self, data: st.DataObject, kind: type, shift: int) -> None:
        ref = self.some(data)
        other = SlotRef(ref.index, ref.generation + shift)
        if kind is Submit and other not in self.submitted:
            return
        if kind is Abort and other in self.waiting:
            self.hear(Abort((other,)))
            assert other not in self.waiting
        else:
            self.hear(kind((other,)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), again=st.booleans())
    def step(self, data: st.DataObject, again: bool) -> None:
        ends = data.draw(st.sets(st.sampled_from(sorted(self.running, key=lambda r: r.index)), max_size=3))
        over = {r: Finish.STOP if r in self.told else Finish.LENGTH for r in (*ends, *self.told) if r in self.running}
        produced = {r: n + 1 for r, n in self.running.items() if data.draw(st.booleans())}
        self.running.update(produced)
        for ref in over:
            del self.running[ref]
        self.told = [r for r in self.told if r not in over]
        message = report(produced, over)
        self.hear(*[message] * (2 if again else 1))

    @rule(first=st.integers(0, 63), count=st.integers(0, 40))
    def lose_worker(self, first: int, count: int) -> None:
        self.waiting = {r for r in self.waiting if not first <= r.index < first + count}
        self.hear(WorkerLost(first, first + count))
        assert all(r in self.told for r in self.running if first <= r.index < first + count)

    @invariant()
    def consistent(self) -> None:
        self.world.router.check()
        assert len(self.running) <= ROWS
        assert self.world.router.idle == (not self.running and not self.waiting)
        for ref in self.submitted:
            current = self.world.http.generation[ref.index] == ref.generation
            done = self.world.http.router_done[ref.index] == ref.generation
            assert not current or done == (ref not in self.running and ref not in self.waiting)
        assert not (self.waiting and not self.running), "someone waits and nothing runs"


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
