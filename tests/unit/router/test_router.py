"""`Router` message by message, on a real slot table, without sockets."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from inferserve.protocol.digests import GRANULE, granule_digests
from inferserve.protocol.messages import (
    Abort,
    Admit,
    Commands,
    Dropped,
    EngineReady,
    Finish,
    SlotRef,
    StopMatched,
    Submit,
    WorkerLost,
)
from tests.fakes.router_world import POOL, World, report


def admitted(commands: Commands | None) -> list[int]:
    return [a.index for a in commands.admit] if commands else []


def test_a_submit_on_an_idle_server_is_admitted_in_the_same_wake_up() -> None:
    world = World()
    ref = world.slot(5)
    assert world.tell(Submit((ref,))) == Commands(1, (Admit(5, 1),))
    assert world.http.admitted[5] == 1 and world.http.admit_ns[5] > 0


def test_first_come_first_served_behind_a_blocked_head() -> None:
    world = World()
    refs = [world.slot(0, 100, 1500), world.slot(1, 100, 1500), world.slot(2)]
    assert admitted(world.tell(*[Submit((r,)) for r in refs])) == [0]
    assert world.tell(report({refs[0]: 1})) is None
    assert world.tell(Abort((refs[1],))) == Commands(2, (Admit(2, 1),))
    assert world.dropped == [Dropped(1, 1)]


def test_an_aborted_request_leaves_at_once_from_behind_a_blocked_head() -> None:
    world = World()
    refs = [world.slot(0, 100, 1500), world.slot(1, 100, 1500), world.slot(2)]
    world.tell(*[Submit((r,)) for r in refs])
    assert world.tell(Abort((refs[2],))) is None
    assert world.dropped == [Dropped(2, 1)]
    assert world.http.router_done[2] == 1 and world.http.admitted[2] == 0
    assert world.gauges()["num_requests_waiting"] == 1


def test_siblings_and_one_of_them_aborted_while_waiting() -> None:
    world = World(ready=False)
    group = tuple(world.slot(i) for i in range(3))
    assert world.tell(Submit(group), Abort((group[0],))) is None
    assert world.dropped == [Dropped(0, 1)]
    assert world.tell(EngineReady(POOL, 8, 4096)) == Commands(1, (Admit(1, 1), Admit(2, 1, leader=1)))


def test_a_group_is_not_split_unless_it_could_never_run_whole() -> None:
    world = World(rows=4)
    first, group = (world.slot(0), world.slot(1)), tuple(world.slot(i) for i in range(2, 5))
    assert admitted(world.tell(Submit(first), Submit(group))) == [0, 1]
    assert admitted(world.tell(report(finished={first[0]: Finish.STOP}))) == [2, 3, 4]
    big = tuple(world.slot(i) for i in range(10, 16))
    assert world.tell(Submit(big)) is None
    ends = dict.fromkeys((first[1], *group), Finish.STOP)
    assert world.tell(report(finished=ends)) == Commands(3, (Admit(10, 1), *(Admit(i, 1, 10) for i in (11, 12, 13))))
    assert world.tell(report(finished={big[0]: Finish.STOP})) is None
    ends = dict.fromkeys(big[1:3], Finish.STOP)
    assert world.tell(report(finished=ends)) == Commands(4, (Admit(14, 1), Admit(15, 1, leader=14)))


def test_siblings_of_a_long_prompt_fit_because_it_is_counted_once() -> None:
    for cache, together in [(True, 4), (False, 2)]:
        world = World(cache=cache)
        assert len(admitted(world.tell(Submit(tuple(world.slot(i, 900, 50) for i in range(4)))))) == together


def test_sharers_of_a_cached_prefix_count_it_once() -> None:
    prefix = np.arange(4 * GRANULE, dtype=np.int32)
    digests = tuple(granule_digests(prefix))
    prompts = [np.append(prefix, np.full(50, 5000 + i)).astype(np.int32) for i in range(6)]
    for known, runs in [((), [0]), (digests, [0, 1, 2, 3, 4, 5]), (digests[:2], [0, 1])]:
        world = World()
        world.tell(report(cached=known))
        assert admitted(world.tell(*[Submit((world.slot(i, p, 100),)) for i, p in enumerate(prompts)])) == runs
    # The first one computes the prefix; from its first token on the others can share it.
    world = World()
    refs = [world.slot(i, p, 100) for i, p in enumerate(prompts)]
    assert admitted(world.tell(*[Submit((r,)) for r in refs])) == [0]
    assert admitted(world.tell(report({refs[0]: 1}, cached=digests))) == [1, 2, 3, 4, 5]


def test_a_prefix_that_is_gone_from_the_tree_is_not_counted_on() -> None:
    prefix = np.arange(4 * GRANULE, dtype=np.int32)
    digests = tuple(granule_digests(prefix))
    world = World()
    world.tell(report(cached=digests))
    world.tell(report(evicted=digests[1:]))
    prompts = [np.append(prefix, np.full(50, 5000 + i)).astype(np.int32) for i in range(2)]
    assert admitted(world.tell(*[Submit((world.slot(i, p, 100),)) for i, p in enumerate(prompts)])) == [0]


def test_never_fits_names_the_numbers_before_and_after_the_engine_is_ready() -> None:
    world = World(ready=False)
    early, late = world.slot(0, 1500, 501), (world.slot(1, 1500, 501), world.slot(2, 1500, 501))
    world.tell(Submit((early,)))
    assert not world.dropped
    world.tell(EngineReady(POOL, 8, 4096))
    world.tell(Submit(late))
    assert [d.index for d in world.dropped] == [0, 1, 2]
    for dropped in world.dropped:
        assert dropped.code == "never_fits"
        assert all(n in dropped.message for n in ("1500", "501", "2001", "2000"))
    assert world.router.idle and world.http.router_done[:3].tolist() == [1, 1, 1]
    assert admitted(world.tell(Submit((world.slot(3, 1500, 500),)))) == [3]


def test_nobody_is_admitted_while_a_row_is_paused() -> None:
    world = World()
    first, second = world.slot(0), world.slot(1)
    world.tell(Submit((first,)))
    world.tell(report({first: 1}, paused=1))
    assert world.tell(Submit((second,))) is None
    assert world.gauges()["batch_pause_size"] == 1
    assert admitted(world.tell(report(paused=0))) == [1]


def test_running_rows_are_told_once_to_end() -> None:
    world = World()
    one, two = world.slot(0), world.slot(1)
    world.tell(Submit((one,)), Submit((two,)))
    assert world.tell(StopMatched((one, two)), StopMatched((one,)), Abort((one,))) == Commands(2, stop=(one, two))
    assert world.tell(Abort((one,)), StopMatched((SlotRef(0, 9), SlotRef(5, 1)))) is None
    world.tell(report(finished={one: Finish.STOP}))
    assert world.tell(Abort((one,)), StopMatched((one,))) is None
    assert world.http.router_done[0] == 1


def test_what_is_stale_unknown_or_said_twice_changes_nothing() -> None:
    world = World()
    ref = world.slot(0)
    assert world.tell(Submit((SlotRef(0, 0), SlotRef(0, 2), SlotRef(99, 1), SlotRef(-1, 1)))) is None
    assert admitted(world.tell(Submit((ref, ref)), Submit((ref,)))) == [0]
    assert world.tell(Submit((ref,)), Abort((SlotRef(0, 2), SlotRef(999, 1)))) is None
    world.tell(report({SlotRef(0, 7): 5, SlotRef(3, 1): 2}, {SlotRef(0, 7): Finish.STOP, SlotRef(4, 1): Finish.STOP}))
    assert not world.router.idle and world.gauges()["prefix_cache_queries"] == 0
    world.tell(report({ref: 1}, {ref: Finish.LENGTH}))
    world.tell(report({}, {ref: Finish.LENGTH}))
    assert world.router.idle
    assert world.tell(Submit((ref,))) is None
    assert not world.dropped


def test_a_cancelled_member_never_runs() -> None:
    world = World()
    group = tuple(world.slot(i) for i in range(2))
    world.http.cancelled[0] = 1
    assert world.tell(Abort((group[0],)), Submit(group)) == Commands(1, (Admit(1, 1),))
    assert world.dropped == [Dropped(0, 1)]


def test_a_new_tenant_replaces_one_that_waited() -> None:
    world = World(ready=False)
    world.tell(Submit((world.slot(0),)))
    again = world.slot(0)
    world.tell(Submit((again,)))
    assert world.tell(EngineReady(POOL, 8, 4096)) == Commands(1, (Admit(0, 2),))
    third = world.slot(0)
    world.tell(Submit((third,)))
    assert world.dropped[-1].code == "internal_error" and world.http.router_done[0] == 3


def test_a_lost_worker_frees_its_range() -> None:
    world = World(rows=2)
    refs = [world.slot(i) for i in (0, 30, 1, 31)]
    assert admitted(world.tell(*[Submit((r,)) for r in refs])) == [0, 30]
    assert world.tell(WorkerLost(0, 26)) == Commands(2, abort=(refs[0],))
    assert world.http.router_done[1] == 1 and not world.dropped
    assert admitted(world.tell(report(finished={refs[0]: Finish.ABORT}))) == [31]


def test_rows_that_ended_by_themselves_teach_the_expected_length() -> None:
    world = World(ratio=1.0)
    for _ in range(20):
        ref = world.slot(0, 10, 1000)
        assert admitted(world.tell(Submit((ref,)))) == [0]
        world.tell(report({ref: 20}))
        world.tell(report(finished={ref: Finish.STOP}))
    assert len(admitted(world.tell(*[Submit((world.slot(i, 10, 1000),)) for i in range(6)]))) == 6


def test_metrics() -> None:
    world = World()
    one, two = world.slot(0, 100, 1000), world.slot(1, 50, 1945)
    world.tell(Submit((one,)), Submit((two,)))
    world.engine.cached_tokens[0] = 64
    world.now = 1.0
    world.tell(report({one: 1}))
    seen = world.gauges()
    for name in ("num_requests_running", "num_running_reqs", "batch_current_size"):
        assert seen[name] == 1
    assert seen["num_requests_waiting"] == seen["queue_size"] == 1
    assert seen["kv_cache_usage_perc"] == 0.25
    assert seen["prefix_cache_queries"] == 100 and seen["prefix_cache_hits"] == 64
    assert 1100 <= seen["batch_current_max_tokens"] <= 1102


def test_one_status_line_an_interval_while_busy(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    ref = world.slot(0)
    with caplog.at_level(logging.INFO, logger="inferserve"):
        world.now = 100.0
        world.tell(Submit((ref,)))
        for visible in range(1, 81):
            world.now += 0.125
            world.tell(report({ref: visible}))
        assert world.router.due_in(world.now) <= 5.0
        lines = [r for r in caplog.records if r.getMessage() == "status"]
        assert len(lines) == 2
        fields: dict[str, object] = lines[-1].fields  # type: ignore[attr-defined]
        assert fields["generation_tok_s"] == "8.0" and fields["prompt_tok_s"] == "24.0"
        assert fields["running"] == 1 and fields["kv_usage"] == "25.0%"
        assert world.gauges()["gen_throughput"] == 8.0
        world.tell(report(finished={ref: Finish.LENGTH}))
        for _ in range(10):
            world.now += 5.0
            world.tell()
        assert len([r for r in caplog.records if r.getMessage() == "status"]) <= 3
        assert world.gauges()["gen_throughput"] == 0


def test_an_aborted_slot_that_was_never_submitted_is_forgotten() -> None:
    """A worker died between taking the slot and sending Submit; its successor aborts what it finds."""
    world = World()
    ref = world.slot(0)
    world.http.cancelled[0] = 1
    world.tell(Abort((ref,)))
    assert world.http.router_done[0] == ref.generation
    assert world.tell(Submit((ref,))) is None
    assert world.router.idle and len(world.dropped) == 1


def test_rows_that_the_engine_has_not_begun_still_wait() -> None:
    world = World()
    refs = [world.slot(i) for i in (3, 4, 5)]
    world.tell(*[Submit((ref,)) for ref in refs])
    world.tell(report({refs[0]: 1}, queued=2))
    seen = world.gauges()
    assert (seen["num_requests_running"], seen["num_requests_waiting"]) == (1, 2)
