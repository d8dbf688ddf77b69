"""A pool that is too small: eviction, pauses, resumption with the same output, and what cannot fit at all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferserve.protocol.messages import Finish, SlotRef
from tests.fakes.engine import EOS, VOCAB, Rig, expected

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def prompt_of(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 900, n).tolist()


@DEPTHS
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kv", [40, 64, 100])
def test_paused_rows_resume_with_the_same_output(depth: int, cache: bool, kv: int) -> None:
    """Six rows of at most 38 tokens each over a pool for one to three of them."""
    rig = Rig(kv=kv, depth=depth, cache=cache, chunk=7, batch=20)
    refs = []
    for i in range(6):
        prompt = prompt_of(6 + 2 * i, seed=i)
        refs.append((rig.submit(prompt, max_tokens=20, seed=i), prompt))
    rig.run()
    for i, (ref, prompt) in enumerate(refs):
        assert rig.finish(ref) is Finish.LENGTH
        assert rig.output(ref) == expected(prompt, 20, seed=i)
    pauses = sum(r.preempted for r in rig.reports)
    assert pauses > 0
    assert pauses == sum(int(rig.slots.preemptions[ref.index]) for ref, _ in refs)
    assert pauses <= 6 * 3, "rows bounce"
    assert max(r.kv.paused for r in rig.reports) > 0
    assert rig.used() == 0


@DEPTHS
def test_the_youngest_is_paused_and_the_oldest_resumes_first(depth: int) -> None:
    rig = Rig(kv=60, depth=depth)
    refs = [rig.submit(prompt_of(10, seed=i), max_tokens=30, seed=i) for i in range(4)]
    rig.run()
    assert rig.slots.preemptions[refs[0].index] == 0
    ends = list(rig.finished)
    assert ends == refs, "older rows end first"


@DEPTHS
def test_the_cache_goes_before_anything_is_paused(depth: int) -> None:
    rig = Rig(kv=64, depth=depth)
    rig.submit(prompt_of(40, seed=1), max_tokens=10)
    rig.run()
    assert rig.reports[-1].kv.cached > 40
    ref = rig.submit(prompt_of(50, seed=2), max_tokens=10)
    rig.run()
    assert rig.output(ref) == expected(prompt_of(50, seed=2), 10)
    assert not any(r.preempted for r in rig.reports)


@DEPTHS
def test_what_cannot_fit_alone_ends_with_an_error(depth: int) -> None:
    rig = Rig(kv=32, depth=depth)
    too_long = rig.submit(prompt_of(33, seed=1), max_tokens=4)
    grows = rig.submit(prompt_of(20, seed=2), max_tokens=40, seed=2)
    fits = rig.submit(prompt_of(20, seed=3), max_tokens=12, seed=3)
    rig.run()
    assert rig.finish(too_long) is Finish.ERROR
    assert rig.finish(grows) is Finish.ERROR
    assert "32 tokens" in rig.finished[grows].error
    assert rig.output(grows) == expected(prompt_of(20, seed=2), 13, seed=2), "32 tokens of KV give 13 tokens"
    assert rig.output(fits) == expected(prompt_of(20, seed=3), 12, seed=3)


@DEPTHS
def test_a_pool_that_fits_exactly_suffices(depth: int) -> None:
    """The speculative token of a row that ends early must not cost another row its place."""
    rig = Rig(kv=29, depth=depth)
    rig.backend.forced = {(1, 9): EOS}
    ref = rig.submit(prompt_of(20, seed=1), max_tokens=40, seed=1)
    rig.run()
    assert rig.finish(ref) is Finish.STOP
    assert len(rig.output(ref)) == 10


@DEPTHS
def test_what_was_not_seen_to_be_finite_is_not_cached_by_a_pause(depth: int) -> None:
    """A row paused in the middle of its prompt has sampled nothing yet, so its KV may be NaN."""
    rig = Rig(kv=38, depth=depth, chunk=4)
    rig.submit(prompt_of(10, seed=1), max_tokens=25, seed=1)
    for _ in range(4):
        rig.step()
    late = rig.submit(prompt_of(23, seed=2), max_tokens=2, seed=2)
    while not rig.slots.preemptions[late.index]:
        rig.step()
    assert rig.worker.ledger.counters(0, 0).cached == 0
    rig.run()
    assert rig.output(late) == expected(prompt_of(23, seed=2), 2, seed=2)


@DEPTHS
def test_a_row_starts_only_where_the_others_can_go_on(depth: int) -> None:
    rig = Rig(kv=30, depth=depth)
    rig.submit(prompt_of(10, seed=1), max_tokens=15, seed=1)
    rig.step()
    rig.step()
    available = rig.worker.ledger.available
    late = rig.submit(prompt_of(available, seed=2), max_tokens=2, seed=2)
    rig.run()
    assert rig.output(late) == expected(prompt_of(available, seed=2), 2, seed=2)
    assert not any(r.preempted for r in rig.reports)


@DEPTHS
def test_a_paused_row_can_be_aborted(depth: int) -> None:
    rig = Rig(kv=40, depth=depth)
    refs = [rig.submit(prompt_of(10, seed=i), max_tokens=25, seed=i) for i in range(3)]
    while not any(rig.slots.preemptions[r.index] for r in refs):
        rig.step()
    paused = next(r for r in refs if rig.slots.preemptions[r.index])
    rig.command(abort=[paused])
    rig.run()
    assert rig.finish(paused) is Finish.ABORT
    for i, ref in enumerate(refs):
        if ref != paused:
            assert rig.output(ref) == expected(prompt_of(10, seed=i), 25, seed=i)


class WorkerMachine(RuleBasedStateMachine):
    """Anything a router may do, in any order, over a pool of 70 tokens. What is visible is always right."""

    depth = 0
    cache = True
    drafts = 0
    alphabet = VOCAB - 1
    params: tuple[tuple[str, object], ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(
            kv=70,
            rows=5,
            max_len=40,
            chunk=7,
            batch=12,
            depth=self.depth,
            cache=self.cache,
            drafts=self.drafts,
            alphabet=self.alphabet,
        )
        self.live: dict[SlotRef, tuple[list[int], int, int]] = {}
        self.aborted: set[SlotRef] = set()
        self.stopped: set[SlotRef] = set()
        self.failing: set[SlotRef] = set()
        self.seed = 0

    def room(self) -> int:
        return 5 - self.rig.worker.sequences.count

    @precondition(lambda self: self.room() > 0)
    @rule(data=st.data(), length=st.integers(1, 30), alphabet=st.sampled_from([1, 2, 50]), count=st.integers(1, 12))
    def admit(self, data: st.DataObject, length: int, alphabet: int, count: int) -> None:
        prompt = data.draw(st.lists(st.integers(0, alphabet), min_size=length, max_size=length))
        n = data.draw(st.integers(1, self.room()))
        refs = []
        for _ in range(n):
            self.seed += 1
            ref = self.rig.fill(prompt, max_tokens=count, seed=self.seed, **dict(self.params))
            if data.draw(st.integers(0, 7)) == 0:
                self.rig.backend.failing.add((self.seed, data.draw(st.integers(0, count - 1))))
                self.failing.add(ref)
            self.live[ref] = (prompt, min(count, 40 - length), self.seed)
            refs.append(ref)
        self.rig.command(admit=refs[:1])
        if refs[1:]:
            self.rig.command(admit=refs[1:], leader=refs[0])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(list(self.live)))
        self.aborted.add(ref)
        self.rig.command(abort=[ref])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(list(self.live)))
        self.stopped.add(ref)
        self.rig.command(stop=[ref])

    @precondition(lambda self: self.rig.worker.busy)
    @rule(times=st.integers(1, 6))
    def steps(self, times: int) -> None:
        for _ in range(times):
            if self.rig.worker.busy:
                self.rig.step()

    @invariant()
    def visible_tokens_are_right(self) -> None:
        for ref, (prompt, count, seed) in list(self.live.items()):
            if self.rig.http.generation[ref.index] != ref.generation:
                assert ref in self.rig.finished
                del self.live[ref]
                continue
            output = self.rig.output(ref)
            assert output == expected(prompt, len(output), seed, self.alphabet)
            if ref in self.rig.finished:
                finish = self.rig.finish(ref)
                assert finish is not Finish.LENGTH or len(output) == count
                assert finish is not Finish.ABORT or ref in self.aborted
                assert finish is not Finish.STOP or ref in self.stopped
                assert finish is not Finish.ERROR or ref in self.failing
                del self.live[ref]

    def teardown(self) -> None:
        self.rig.run()
        self.visible_tokens_are_right()
        assert not self.live
        assert self.rig.used() == 0
        assert len(self.rig.worker.sequences._free) == 5


class PipelinedMachine(WorkerMachine):
    depth = 1


class UncachedMachine(WorkerMachine):
    depth = 1
    cache = False


SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestWorker = WorkerMachine.TestCase
TestWorker.settings = SETTINGS
TestPipelined = PipelinedMachine.TestCase
TestPipelined.settings = SETTINGS
TestUncached = UncachedMachine.TestCase
TestUncached.settings = settings(SETTINGS, max_examples=30)
