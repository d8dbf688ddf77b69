"""Sums stay exact when pushes are lost, late, repeated, reordered and processes restart."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import declare
from inferserve.metrics.totals import Totals
from inferserve.protocol.boot import ROLE_HTTP, ROLE_ROUTER
from inferserve.protocol.messages import MetricsPush, Sample

TABLE = declare(1000, 100)


def push(incarnation: int, seq: int, value: float, *, index: int = 0, last: bool = False) -> MetricsPush:
    return MetricsPush(ROLE_HTTP, index, incarnation, seq, (Sample("request_count", (), (value,)),), last)


def gauge(incarnation: int, seq: int, value: float, last: bool = False) -> MetricsPush:
    return MetricsPush(ROLE_ROUTER, 0, incarnation, seq, (Sample("queue_size", (), (value,)),), last)


def counted(totals: Totals) -> float:
    return totals.sums().get("request_count", {}).get((), [0.0])[0]


def test_the_newest_push_of_an_incarnation_counts() -> None:
    totals = Totals(TABLE)
    for message in (push(0, 1, 5), push(0, 3, 9), push(0, 2, 7), push(0, 3, 9)):
        totals.take(message)
    assert counted(totals) == 9


def test_incarnations_and_workers_add_up() -> None:
    totals = Totals(TABLE)
    for message in (push(0, 4, 10), push(1, 1, 2), push(0, 1, 3, index=1), push(1, 2, 4)):
        totals.take(message)
    assert counted(totals) == 10 + 4 + 3


def test_the_last_push_of_the_dead_may_come_after_its_successor() -> None:
    totals = Totals(TABLE)
    for message in (push(0, 1, 10), push(1, 1, 1), push(0, 2, 12, last=True)):
        totals.take(message)
    assert counted(totals) == 13


def test_many_restarts_fold_and_memory_stays() -> None:
    totals = Totals(TABLE)
    for incarnation in range(1000):
        totals.take(push(incarnation, 1, 1))
        totals.take(push(incarnation, 2, 2, last=True))
    assert counted(totals) == 2000
    assert len(totals._processes[ROLE_HTTP, 0].pushes) <= 4
    totals.take(push(3, 9, 50))  # long dead and already folded
    assert counted(totals) == 2000


def test_gauges_are_those_of_the_newest_incarnation() -> None:
    totals = Totals(TABLE)
    totals.take(gauge(0, 1, 7))
    assert totals.sums()["queue_size"] == {(): [7]}
    totals.take(gauge(1, 1, 2))
    totals.take(gauge(0, 2, 9))
    assert totals.sums()["queue_size"] == {(): [2]}
    totals.take(gauge(1, 2, 3, last=True))
    assert "queue_size" not in totals.sums()


@pytest.mark.parametrize(
    "sample",
    [
        Sample("nonsense", (), (1,)),
        Sample("queue_size", (), (1,)),  # the router's, pushed by http
        Sample("request_count", ("x",), (1,)),
        Sample("request_count", (), (1, 2)),
        Sample("request_params_n", (), (1, 2)),
        Sample("request_count", (), (float("nan"),)),
        Sample("request_count", (), (float("inf"),)),
    ],
)
def test_what_is_not_as_declared_is_refused_whole(sample: Sample) -> None:
    totals = Totals(TABLE)
    with pytest.raises(ValueError, match=sample.name):
        totals.take(MetricsPush(ROLE_HTTP, 0, 0, 1, (Sample("request_count", (), (1,)), sample)))
    assert totals.sums() == {}


@dataclass
class Worker:
    """A worker that restarts; what it counted is the truth, what arrives is up to the network."""

    index: int
    incarnation: int = 0
    truth: float = 0.0
    pushes: list[MetricsPush] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = MetricsClient(TABLE, ROLE_HTTP, self.index, self.incarnation, self)

    def send(self, message: MetricsPush) -> None:
        self.pushes.append(message)

    def restart(self) -> None:
        self.client.close(0.0)
        self.incarnation += 1
        self.client = MetricsClient(TABLE, ROLE_HTTP, self.index, self.incarnation, self)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["add", "add", "push", "restart"])), max_size=60),
    st.randoms(use_true_random=False),
)
def test_nothing_is_lost_as_long_as_the_last_push_of_each_incarnation_arrives(
    steps: list[tuple[int, str]], chance: random.Random
) -> None:
    workers = [Worker(0), Worker(1)]
    for which, step in steps:
        worker = workers[which]
        if step == "add":
            worker.client.add("request_count", 3)
            worker.client.observe("request_params_n", 2)
            worker.truth += 3
        elif step == "push":
            worker.client.flush(0.0, force=True)
        elif worker.incarnation < 3:
            worker.restart()
    for worker in workers:
        worker.client.flush(0.0, force=True)
    sent = [p for w in workers for p in w.pushes]
    newest = {(p.index, p.incarnation): p for p in sent}
    arriving = [p for p in sent if newest[p.index, p.incarnation] is p or chance.random() < 0.5]
    arriving += [p for p in arriving if chance.random() < 0.3]
    chance.shuffle(arriving)
    totals = Totals(TABLE)
    for message in arriving:
        totals.take(message)
    truth = sum(w.truth for w in workers)
    sums = totals.sums()
    assert sums["request_count"][()] == [truth]
    observed = sums["request_params_n"][()]
    assert observed == [truth / 3 * 2, 0, truth / 3, 0, 0, 0, 0]
