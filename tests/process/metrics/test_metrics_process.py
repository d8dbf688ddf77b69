"""The real metrics process among pushers and scrapers played by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inferserve.config.schema import HttpPart, ModelPart, SchedulePart, ServerConfig
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import declare
from inferserve.protocol.boot import ROLE_HTTP, ROLE_ROUTER
from inferserve.protocol.messages import MetricsPush, Sample, Scrape, ScrapeReply
from tests.fakes.neighbours import Neighbours

CONFIG = ServerConfig(
    model=ModelPart(max_req_total_len=128, served_model_name="tiny,alias"),
    schedule=SchedulePart(running_max_req_size=4, max_queued_requests=4, batch_max_tokens=64),
    http=HttpPart(httpserver_workers=2),
)
TABLE = declare(128, 64)
LABELS = {"model_name": "tiny", "engine": "0"}


@pytest.fixture
def world() -> Iterator[Neighbours]:
    with Neighbours("metrics", CONFIG) as world:
        world.wait_ready()
        yield world


class Page:
    """One scrape."""

    def __init__(self, world: Neighbours, worker: int = 0, scrape_id: int = 1) -> None:
        world.send(Scrape(scrape_id, worker))
        self.reply = world.receive(f"http-{worker}", ScrapeReply)
        families = text_string_to_metric_families(self.reply.body.decode())
        self.samples = {
            (s.name.removeprefix("inferserve_"), tuple(v for k, v in s.labels.items() if k not in LABELS)): s.value
            for family in families
            for s in family.samples
            if LABELS.items() <= s.labels.items()
        }

    def __getitem__(self, key: str) -> float:
        return self.samples[key, ()]

    def get(self, name: str, *labels: str) -> float | None:
        return self.samples.get((name, labels))


class Lossy:
    """A channel to the process that loses, repeats and delays what it is told to."""

    def __init__(self, world: Neighbours) -> None:
        self.world = world
        self.lose = False
        self.kept: list[Any] = []

    def send(self, message: Any) -> None:
        self.kept.append(message)
        if not self.lose:
            self.world.send(message)

    def repeat(self, index: int) -> None:
        self.world.send(self.kept[index])


def test_pushes_of_several_processes_become_one_page(world: Neighbours) -> None:
    workers = [MetricsClient(TABLE, ROLE_HTTP, i, 0, Lossy(world)) for i in (0, 1)]
    router = MetricsClient(TABLE, ROLE_ROUTER, 0, 0, Lossy(world))
    for worker in workers:
        worker.add("request_success", 2, "stop")
        worker.observe("request_params_n", 1)
        worker.flush(0.0)
    router.set("num_requests_running", 3)
    router.flush(0.0)
    page = Page(world)
    assert page.get("request_success_total", "stop") == 4
    assert page["request_params_n_count"] == 2
    assert page["num_requests_running"] == 3
    assert page.get("num_requests_waiting") is None  # nobody said


def test_answers_go_to_the_worker_that_asked(world: Neighbours) -> None:
    assert Page(world, worker=1, scrape_id=77).reply.id == 77
    assert Page(world, worker=0, scrape_id=78).reply.id == 78
    assert world.quiet("http-1", ScrapeReply)


def test_counts_are_exact_with_lost_repeated_and_late_pushes(world: Neighbours) -> None:
    channel = Lossy(world)
    client = MetricsClient(TABLE, ROLE_HTTP, 0, 0, channel)
    for i in range(50):
        client.add("generation_tokens", 7)
        channel.lose = i % 3 != 0
        client.flush(0.0, force=True)
    channel.lose = False
    client.flush(0.0, force=True)
    for late in (0, 25, 49):  # older than what is known
        channel.repeat(late)
    channel.repeat(-1)
    assert Page(world)["generation_tokens_total"] == 350


def test_counts_are_exact_over_restarts_and_dead_gauges_vanish(world: Neighbours) -> None:
    channel = Lossy(world)
    for incarnation in range(8):
        client = MetricsClient(TABLE, ROLE_ROUTER, 0, incarnation, channel)
        client.add("num_preemptions", 5)
        client.set("queue_size", incarnation)
        client.observe("iteration_tokens", 3)
        client.flush(0.0)
        if incarnation % 2:
            client.add("num_preemptions", 1)
            client.close(0.0)
    channel.repeat(-1)
    page = Page(world)
    assert page["num_preemptions_total"] == 8 * 5 + 4
    assert page["iteration_tokens_count"] == 8
    assert page.get("queue_size") is None  # the newest said goodbye
    reborn = MetricsClient(TABLE, ROLE_ROUTER, 0, 8, channel)
    reborn.set("queue_size", 2)
    reborn.flush(0.0)
    assert Page(world)["queue_size"] == 2


def test_nonsense_is_ignored_and_said_once(world: Neighbours) -> None:
    for seq in range(20):
        world.send(MetricsPush(ROLE_HTTP, 0, 0, seq, (Sample("no_such", (), (1.0,)),)))
    world.send(Scrape(1, worker=99))
    good = MetricsClient(TABLE, ROLE_HTTP, 1, 0, Lossy(world))
    good.add("request_count")
    good.flush(0.0)
    assert Page(world)["request_count_total"] == 1
    assert world.log().count("push ignored") == 1


def test_processes_of_the_launcher_are_measured(world: Neighbours) -> None:
    page = Page(world)
    assert page.get("processes", "metrics") == 1
    cpu, resident = (
        page.get("process_cpu_seconds_total", "metrics"),
        page.get("process_resident_memory_bytes", "metrics"),
    )
    assert cpu is not None and 0 < cpu < 60
    assert resident is not None and 10 * 2**20 < resident < 2**30
    assert page.get("processes", "launcher") == 1  # this test stands for it


def test_a_scrape_is_answered_soon_under_a_storm_of_pushes(world: Neighbours) -> None:
    client = MetricsClient(TABLE, ROLE_HTTP, 0, 0, Lossy(world))
    for _ in range(2000):
        client.add("request_count")
        client.flush(0.0, force=True)
    begin = time.monotonic()
    assert Page(world)["request_count_total"] == 2000
    assert time.monotonic() - begin < 3.0


def test_it_is_idle_when_nothing_happens(world: Neighbours) -> None:
    Page(world)
    stat = f"/proc/{world.process.pid}/stat"

    def ticks() -> int:
        with open(stat) as source:
            return sum(map(int, source.read().rpartition(")")[2].split()[11:13]))

    before = ticks()
    time.sleep(1.0)
    assert ticks() - before <= max(1, os.sysconf("SC_CLK_TCK") // 50)


def test_it_ends_when_told(world: Neighbours) -> None:
    assert world.stop() == 0
