"""The real router process among a fake engine, http and metrics: what goes in and comes out on its sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from inferserve.config.schema import HttpPart, LogPart, ModelPart, ParallelPart, SchedulePart, ServerConfig
from inferserve.protocol.messages import (
    Abort,
    Admit,
    Commands,
    Dropped,
    EngineReady,
    Finish,
    FinishedRow,
    KvCounters,
    MetricsPush,
    SlotRef,
    StepReport,
    StopMatched,
    Submit,
    WorkerLost,
)
from inferserve.shm.layout import Writer
from tests.fakes.neighbours import Neighbours

POOL = 1000
CONFIG = ServerConfig(
    model=ModelPart(model_dir="m", served_model_name="m", max_req_total_len=2000, data_type="float32"),
    schedule=SchedulePart(
        running_max_req_size=4,
        max_queued_requests=12,
        batch_max_tokens=512,
        chunked_prefill_size=256,
        router_token_ratio=0.0,
    ),
    http=HttpPart(httpserver_workers=2),
    log=LogPart(log_stats_interval=0.2),
)


@pytest.fixture
def world() -> Iterator[Neighbours]:
    with Neighbours("router", CONFIG) as world:
        world.wait_ready()
        yield world


def engine_ready(world: Neighbours) -> None:
    world.send(EngineReady(kv_tokens=POOL, max_rows=4, batch_max_tokens=512))


def fill(world: Neighbours, index: int, prompt_len: int = 10, max_tokens: int = 20) -> SlotRef:
    """Take a slot as http does."""
    http = world.view(Writer.HTTP)
    http.generation[index] += 1
    http.in_use[index] = 1
    http.cancelled[index] = 0
    http.prompt_len[index] = prompt_len
    http.max_tokens[index] = max_tokens
    http.prompt_ids[index, :prompt_len] = index + 1
    return SlotRef(index, int(http.generation[index]))


def report(step: int, rows: dict[SlotRef, int], finished: tuple[FinishedRow, ...] = (), used: int = 0) -> StepReport:
    return StepReport(
        step=step,
        slots=np.array([r.index for r in rows], "<i4").tobytes(),
        generations=np.array([r.generation for r in rows], "<u4").tobytes(),
        visible=np.array(list(rows.values()), "<i4").tobytes(),
        kv=KvCounters(POOL, used, 0, POOL - used, len(rows), 0),
        finished=finished,
        decode_tokens=len(rows),
        step_seconds=0.01,
    )


def test_a_request_from_submission_to_end(world: Neighbours) -> None:
    ref = fill(world, 3)
    world.send(Submit((ref,)))
    assert world.quiet("engine-0", Commands)
    engine_ready(world)
    assert world.receive("engine-0", Commands) == Commands(1, (Admit(ref.index, ref.generation),))
    slots = world.view(Writer.HTTP)
    assert slots.admitted[3] == ref.generation and slots.router_done[3] != ref.generation
    assert 0 < time.monotonic_ns() - slots.admit_ns[3] < 60e9
    world.send(report(1, {ref: 1}, used=11))
    world.send(StopMatched((ref, ref)))
    assert world.receive("engine-0", Commands) == Commands(2, stop=(ref,))
    world.send(report(2, {}, (FinishedRow(3, ref.generation, Finish.STOP),)))
    again = fill(world, 3)
    world.send(Submit((again,)))
    assert world.receive("engine-0", Commands) == Commands(3, (Admit(3, again.generation),))
    assert slots.router_done[3] == ref.generation


def test_commands_go_to_every_rank() -> None:
    with Neighbours("router", replace(CONFIG, parallel=ParallelPart(tp=2))) as world:
        world.wait_ready()
        engine_ready(world)
        ref = fill(world, 3)
        world.send(Submit((ref,)))
        first, second = (world.receive(f"engine-{rank}", Commands) for rank in range(2))
        assert first == second == Commands(1, (Admit(ref.index, ref.generation),))


def test_siblings_are_admitted_together_and_the_rest_waits(world: Neighbours) -> None:
    engine_ready(world)
    group = tuple(fill(world, i, 100, 100) for i in range(3))
    blocked = tuple(fill(world, i) for i in (20, 21))
    world.send(Submit(group))
    world.send(Submit(blocked))
    admitted = world.receive("engine-0", Commands).admit
    assert admitted == (Admit(0, 1), Admit(1, 1, leader=0), Admit(2, 1, leader=0))
    assert world.quiet("engine-0", Commands)
    world.send(report(1, {}, (FinishedRow(1, 1, Finish.LENGTH),)))
    assert world.receive("engine-0", Commands).admit == (Admit(20, 1), Admit(21, 1, leader=20))


def test_aborts(world: Neighbours) -> None:
    engine_ready(world)
    running = fill(world, 0, 400, 500)
    waiting = fill(world, 1, 400, 500)
    behind = fill(world, 17, 400, 500)
    for ref in (running, waiting, behind):
        world.send(Submit((ref,)))
    world.receive("engine-0", Commands)
    http = world.view(Writer.HTTP)
    http.cancelled[17] = 1
    world.send(Abort((behind,)))
    assert world.receive("http-1", Dropped) == Dropped(17, 1)
    assert http.router_done[17] == 1 and http.admitted[17] == 0
    late = fill(world, 18)
    http.cancelled[18] = 1
    world.send(Abort((late,)))
    world.send(Submit((late,)))
    assert world.receive("http-1", Dropped) == Dropped(18, 1)
    for _ in range(2):
        world.send(Abort((running, SlotRef(0, 99), SlotRef(9, 1), SlotRef(500, 1))))
    assert world.receive("engine-0", Commands) == Commands(2, abort=(running,))
    assert world.quiet("engine-0", Commands)
    world.send(report(1, {}, (FinishedRow(0, 1, Finish.ABORT),)))
    assert world.receive("engine-0", Commands) == Commands(3, (Admit(1, 1),))


def test_never_fits(world: Neighbours) -> None:
    early = fill(world, 0, 600, 401)
    world.send(Submit((early,)))
    assert world.quiet("http-0", Dropped)
    engine_ready(world)
    dropped = world.receive("http-0", Dropped)
    assert dropped.code == "never_fits" and all(n in dropped.message for n in ("600", "401", "1001", "1000"))
    fits = fill(world, 1, 600, 400)
    world.send(Submit((fits,)))
    assert world.receive("engine-0", Commands).admit == (Admit(1, 1),)


def test_a_lost_http_worker(world: Neighbours) -> None:
    engine_ready(world)
    mine = [fill(world, i, 300, 150) for i in (0, 1, 2)]
    other = fill(world, 16, 300, 150)
    for ref in (*mine, other):
        world.send(Submit((ref,)))
    admitted: set[int] = set()
    while len(admitted) < 2:  # in one round of decisions or in two
        admitted |= {a.index for a in world.receive("engine-0", Commands).admit}
    world.send(WorkerLost(0, 16))
    commands = world.receive("engine-0", Commands)
    assert {r.index for r in commands.abort} == admitted == {0, 1}
    assert world.view(Writer.HTTP).router_done[2] == 1
    assert world.quiet("http-0", Dropped)
    world.send(report(1, {}, (FinishedRow(0, 1, Finish.ABORT), FinishedRow(1, 1, Finish.ABORT))))
    assert world.receive("engine-0", Commands).admit == (Admit(16, 1),)


def test_metrics_and_status_line(world: Neighbours) -> None:
    engine_ready(world)
    ref = fill(world, 0, 100, 50)
    waiting = fill(world, 1, 800, 100)
    world.send(Submit((ref,)))
    world.receive("engine-0", Commands)
    world.send(Submit((waiting,)))
    world.view(Writer.ENGINE).cached_tokens[0] = 60
    world.send(report(1, {ref: 1}, used=101))
    wanted = {"num_requests_running": 1, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.101}
    wanted |= {"prefix_cache_queries": 100, "prefix_cache_hits": 60, "batch_current_size": 1, "queue_size": 1}
    deadline = time.monotonic() + 10
    seen: dict[str, float] = {}
    while time.monotonic() < deadline and any(seen.get(k) != v for k, v in wanted.items()):
        seen = {s.name: s.values[0] for s in world.receive("metrics", MetricsPush).samples}
    assert {k: seen.get(k) for k in wanted} == wanted
    assert 150 <= seen["batch_current_max_tokens"] <= 155
    world.send(report(2, {}, (FinishedRow(0, 1, Finish.LENGTH),)))
    while seen["num_requests_waiting"]:
        seen = {s.name: s.values[0] for s in world.receive("metrics", MetricsPush).samples}
    world.send(report(3, {}, (FinishedRow(1, 1, Finish.ABORT),)))
    time.sleep(1.0)
    lines = world.log().count(" status ")
    assert lines >= 1 and "waiting=" in world.log()
    time.sleep(0.6)
    assert world.log().count(" status ") == lines


def test_it_ends_when_told(world: Neighbours) -> None:
    assert world.stop() == 0
    assert "status" not in world.log()
