"""A follower ends up where the leader is, however late it hears of things and whatever becomes of the slots meanwhile."""

from __future__ import annotations

import random
import threading
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.engine import follower
from inferserve.engine.leader import digest
from inferserve.engine.planner import Budget
from inferserve.errors import EngineError
from inferserve.protocol.messages import Admit, Admitted, Commands, Finish, SlotRef, StepHeader
from inferserve.shm.layout import Writer
from tests.fakes.engine import EOS, engine_config
from tests.fakes.ranks import UNLUCKY, TwoRanks

SLOTS = 24


def world_of(seed: int, kv: int = 90, **settings: object) -> TwoRanks:
    config = engine_config(chunk=7, batch=20, **settings)  # type: ignore[arg-type]
    return TwoRanks(config, kv, random.Random(seed))


def admit(ref: SlotRef, leader: int = -1) -> Admit:
    return Admit(ref.index, ref.generation, leader)


def assert_equal(world: TwoRanks) -> None:
    mine, theirs = world.leading, world.following
    assert digest(mine) == digest(theirs)
    assert np.array_equal(mine.ledger.table, theirs.ledger.table)
    assert np.array_equal(mine.sequences.rows.tokens, theirs.sequences.rows.tokens)
    mine.check()
    theirs.check()


class Load:
    """Requests that come, share prompts, are cancelled, aborted and stopped at random; slots go straight to the next one."""

    def __init__(self, world: TwoRanks) -> None:
        self.world = world
        self.running: dict[int, SlotRef] = {}
        self.told: set[SlotRef] = set()
        self.leaders: set[int] = set()

    def step(self) -> None:
        world, chance = self.world, self.world.chance
        done = world.table.view(Writer.HTTP).engine_done
        self.running = {i: ref for i, ref in self.running.items() if done[i] != ref.generation}
        admits, ended = [], []
        free = [i for i in range(SLOTS) if i not in self.running]
        while free and len(self.running) < 8 and chance.random() < 0.5:
            admits.append(self._arrive(free.pop(0)))
        for ref in list(self.running.values()):
            if ref not in self.told and chance.random() < 0.08:
                self.told.add(ref)
                ended.append(ref)
        cut = chance.randint(0, len(ended))
        world.turn(*admits, abort=tuple(ended[:cut]), stop=tuple(ended[cut:]))

    def _arrive(self, index: int) -> Admit:
        chance = self.world.chance
        prompt = [chance.randint(0, 2) for _ in range(chance.randint(1, 40))]
        ref = self.world.fill(index, prompt, max_tokens=chance.randint(1, 20), seed=chance.choice([1, 2, 3, UNLUCKY]))
        if chance.random() < 0.2:
            self.world.http.cancelled[index] = 1
        leader = chance.choice([-1, *(self.leaders & self.running.keys())])
        self.running[index] = ref
        self.leaders = self.leaders - {index} | ({index} if leader < 0 else set())
        return admit(ref, leader)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.sampled_from([0, 1]),
    cache=st.booleans(),
    drafts=st.sampled_from([0, 3]),
    whole=st.booleans(),
)
def test_any_load(seed: int, depth: int, cache: bool, drafts: int, whole: bool) -> None:
    batch = {"whole_prompts": True, "max_len": 60} if whole else {}
    config = engine_config(
        **({"chunk": 7, "batch": 60 if whole else 20} | batch), depth=depth, cache=cache, drafts=drafts
    )  # type: ignore[arg-type]
    world = TwoRanks(config, 90, random.Random(seed))
    load = Load(world)
    for _ in range(60):
        load.step()
    world.finish()
    assert_equal(world)


def test_the_load_does_what_it_should() -> None:
    """Pauses, prefix hits, refused starts and cancelled admissions all happen under the load above."""
    reports, hits = [], 0
    for seed in range(10):
        world = world_of(seed, drafts=3)
        load = Load(world)
        for _ in range(60):
            load.step()
        world.finish()
        assert_equal(world)
        reports += world.reports
        hits += int(world.table.view(Writer.HTTP).cached_tokens.sum())
    ends = [row for report in reports for row in report.finished]
    assert sum(report.preempted for report in reports) > 5
    assert hits > 50
    assert {Finish.LENGTH, Finish.ABORT, Finish.STOP, Finish.ERROR} <= {Finish(row.finish) for row in ends}
    assert any("no room for penalties" in row.error for row in ends)


def test_a_slot_that_ended_before_the_follower_heard_of_it_may_be_anybody_s() -> None:
    world = world_of(1)
    world.chance.random = lambda: 1.0  # type: ignore[method-assign]  # the follower hears nothing
    first = world.fill(0, [1, 2, 3], max_tokens=5, seed=1)
    world.turn(admit(first), abort=(first,))
    second = world.fill(0, [7, 8, 9, 10], max_tokens=5, seed=2)
    world.turn(admit(second))
    while world.hear():
        pass
    assert_equal(world)
    world.finish()
    assert_equal(world)
    assert [int(t) for t in world.following.sequences.slots.prompt(0)] == [7, 8, 9, 10]


def test_a_difference_is_found_and_named() -> None:
    world = world_of(2)
    ref = world.fill(0, [1, 2, 3], max_tokens=15, seed=1)
    world.turn(admit(ref))
    while world.hear():
        pass
    world.following.ledger.open(5, np.array([1, 2, 3], dtype=np.int32))
    with pytest.raises(EngineError, match="ranks have parted before turn"):
        world.finish()


def test_a_lost_header_is_found() -> None:
    world = world_of(3)
    world.chance.random = lambda: 1.0  # type: ignore[method-assign]
    world.turn(admit(world.fill(0, [1, 2, 3], max_tokens=15, seed=1)))
    world.turn()
    world.link.queue.pop()
    world.turn()
    with pytest.raises(EngineError, match="turn 3 of the leading rank came after 1"):
        while world.hear():
            pass


def test_a_header_waits_for_the_commands_it_names() -> None:
    world = world_of(4)
    world.chance.random = lambda: 1.0  # type: ignore[method-assign]
    world.turn(admit(world.fill(0, [1, 2, 3], max_tokens=3, seed=1)))
    world.follower.hear(world.link.queue.popleft())
    assert world.follower.waits_for is None
    world.follower.hear(world.link.queue.popleft())
    assert world.follower.waits_for == 0
    assert not world.following.busy
    world.follower.hear(world.from_router.popleft())
    assert world.follower.waits_for is None
    assert world.following.busy
    world.finish()
    assert_equal(world)


def test_a_gap_in_the_router_s_commands_is_a_fault() -> None:
    world = world_of(5)
    world.follower.hear(Commands(3))
    world.follower.hear(Commands(5))
    with pytest.raises(EngineError, match="commands 5 came after 3"):
        world.follower.hear(StepHeader(turn=1, commands_upto=5))


def test_headers_survive_the_wire() -> None:
    world = world_of(6)
    world.chance.random = lambda: 1.0  # type: ignore[method-assign]
    world.turn(admit(world.fill(0, [1, 2, 3, EOS], max_tokens=3, seed=1)))
    admitted, header = world.link.queue
    assert isinstance(header, StepHeader) and isinstance(admitted, Admitted)
    assert np.frombuffer(admitted.prompt, dtype=np.int32).tolist() == [1, 2, 3, EOS]
    assert (admitted.index, admitted.generation, header.turn, header.commands_upto) == (0, 1, 1, 0)


def test_a_budget_holds_nothing_that_followers_are_not_told() -> None:
    """Whatever else changes from step to step by the leader's clock has to travel in the `StepHeader`."""
    told, fixed = {"prompts", "drafts"}, {"tokens", "chunk", "whole_prompts"}
    assert {field.name for field in fields(Budget)} == told | fixed


def test_commands_that_never_come_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader would sit in a collective for as long as the follower waits."""
    monkeypatch.setattr(follower, "COMMANDS_WITHIN_S", 0.05)
    told = [[StepHeader(turn=1, commands_upto=4)]]
    waited: list[float | None] = []

    class Silent:
        def wait(self, timeout_s: float | None) -> list[StepHeader]:
            waited.append(timeout_s)
            if told:
                return told.pop()
            threading.Event().wait(timeout_s)
            return []

    with pytest.raises(EngineError, match="commands 4 of the router did not come"):
        follower.follow(world_of(7).follower, Silent())  # type: ignore[arg-type]
    assert waited[:2] == [None, 0.05]
