"""The client: what it accepts, what and when it pushes, what a call costs."""

from __future__ import annotations

import logging
import math
import timeit
from typing import Any

import pytest

from inferserve.errors import PeerGone
from inferserve.metrics.client import PUSH_INTERVAL_S, REPEAT_INTERVAL_S, MetricsClient
from inferserve.metrics.names import declare
from inferserve.protocol.boot import ROLE_HTTP, ROLE_ROUTER
from inferserve.protocol.codec import Codec
from inferserve.protocol.messages import MetricsMessage, MetricsPush

TABLE = declare(1000, 100)


class Sent:
    """An outbox that keeps what it is given, or refuses it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.gone = False

    def send(self, message: Any) -> None:
        if self.gone:
            raise PeerGone("metrics takes no messages")
        self.messages.append(message)


def make(role: str = ROLE_HTTP) -> tuple[MetricsClient, Sent]:
    sent = Sent()
    return MetricsClient(TABLE, role, 3, 7, sent), sent


def values(client: MetricsClient, name: str, *labels: str) -> tuple[float, ...]:
    return next(s.values for s in client.samples() if (s.name, s.labels) == (name, labels))


def test_counts_add_up() -> None:
    client, _ = make()
    client.add("generation_tokens")
    client.add("generation_tokens", 4)
    client.add("request_success", 1, "stop")
    assert values(client, "generation_tokens") == (5,)
    assert values(client, "request_success", "stop") == (1,)
    assert values(client, "request_success", "abort") == (0,)


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    client, _ = make()
    for value in (0.5, 1, 1.5, 20, 21, 1000):
        client.observe("request_params_n", value)
    # bounds 1 2 5 10 20 +Inf
    assert values(client, "request_params_n") == (1044, 2, 1, 0, 0, 1, 2)


def test_a_gauge_holds_the_last_value() -> None:
    client, _ = make(ROLE_ROUTER)
    client.set("queue_size", 5)
    client.set("queue_size", 2)
    assert values(client, "queue_size") == (2,)


def test_all_known_series_exist_from_the_start() -> None:
    client, _ = make()
    have = {(s.name, s.labels) for s in client.samples()}
    assert have == {(m.name, labels) for m in TABLE.values() if m.role == ROLE_HTTP for labels in m.known}


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("add", ("no_such_metric", 1)),
        ("add", ("num_preemptions", 1)),  # the router's
        ("add", ("request_params_n", 1)),  # a histogram
        ("set", ("generation_tokens", 1)),
        ("observe", ("generation_tokens", 1)),
        ("add", ("request_success", 1)),  # a label is missing
        ("add", ("generation_tokens", 1, "stop")),
        ("add", ("generation_tokens", -1)),
        ("add", ("generation_tokens", math.nan)),
        ("add", ("generation_tokens", math.inf)),
        ("observe", ("request_params_n", math.nan)),
        ("observe", ("request_params_n", math.inf)),
    ],
)
def test_mistakes_raise_and_change_nothing(method: str, args: tuple[Any, ...]) -> None:
    client, _ = make()
    before = client.samples()
    with pytest.raises(ValueError, match=args[0]):
        getattr(client, method)(*args)
    assert client.samples() == before


def test_pushes_hold_all_totals_and_who_counted() -> None:
    client, sent = make()
    client.add("request_count")
    client.flush(10.0)
    (push,) = sent.messages
    assert (push.role, push.index, push.incarnation, push.seq, push.last) == (ROLE_HTTP, 3, 7, 1, False)
    assert push.samples == client.samples()
    assert Codec[MetricsPush](MetricsMessage).decode(Codec[MetricsPush](MetricsMessage).encode(push)) == push


def test_pushes_are_spaced_and_only_changes_are_pushed_soon() -> None:
    client, sent = make()
    client.flush(10.0)
    client.add("request_count")
    client.flush(10.0 + PUSH_INTERVAL_S / 2)
    assert len(sent.messages) == 1
    assert client.due_in(10.0 + PUSH_INTERVAL_S / 2) == pytest.approx(PUSH_INTERVAL_S / 2)
    client.flush(10.0 + PUSH_INTERVAL_S)
    assert len(sent.messages) == 2
    client.flush(11.0)  # nothing changed
    assert len(sent.messages) == 2
    assert client.due_in(11.0) == pytest.approx(REPEAT_INTERVAL_S - 1.0 + PUSH_INTERVAL_S)
    client.flush(11.0, force=True)
    assert [m.seq for m in sent.messages] == [1, 2, 3]


def test_totals_are_repeated_when_idle_for_a_restarted_exporter() -> None:
    client, sent = make()
    client.flush(10.0)
    client.flush(10.0 + REPEAT_INTERVAL_S)
    assert len(sent.messages) == 2
    assert sent.messages[0].samples == sent.messages[1].samples


def test_setting_a_gauge_to_what_it_is_is_no_change() -> None:
    client, sent = make(ROLE_ROUTER)
    client.set("queue_size", 1)
    client.flush(10.0)
    client.set("queue_size", 1)
    client.flush(11.0)
    assert len(sent.messages) == 1


def test_the_first_change_after_a_push_wakes_the_owner() -> None:
    client, _ = make()
    due: list[float] = []
    client.on_change(lambda: due.append(client.due_in(12.0)))
    client.flush(10.0)
    client.flush(11.9, force=True)
    assert client.due_in(12.0) == pytest.approx(REPEAT_INTERVAL_S - 0.1)
    client.add("request_count")
    client.observe("request_params_n", 1)
    client.add("request_count")
    assert due == [pytest.approx(PUSH_INTERVAL_S - 0.1)]
    client.flush(13.0)
    client.observe("request_params_n", 1)
    assert len(due) == 2


def test_close_sends_the_last_totals() -> None:
    client, sent = make()
    client.flush(10.0)
    client.add("request_count")
    client.close(10.01)
    assert sent.messages[-1].last
    assert sent.messages[-1].samples == client.samples()


def test_a_dead_exporter_costs_a_log_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    client, sent = make()
    sent.gone = True
    with caplog.at_level(logging.WARNING):
        for tick in range(40):  # 10 s
            client.add("request_count")
            client.flush(100.0 + tick * PUSH_INTERVAL_S)
        client.close(109.99)
    assert len(caplog.records) == 1
    sent.gone = False
    client.flush(120.0)
    assert [s.values for s in sent.messages[-1].samples if s.name == "request_count"] == [(40,)]


@pytest.mark.parametrize(
    ("call", "limit_us"),
    [
        ('http.add("generation_tokens", 1)', 1.0),
        ('http.add("request_success", 1.0, "stop")', 1.0),
        ('router.set("queue_size", 3)', 1.0),
        ('http.observe("inter_token_latency_seconds", 0.02)', 2.0),
        ('router.observe("batch_inference_duration", 0.02, "decode")', 2.0),
    ],
)
def test_a_call_is_cheap(call: str, limit_us: float) -> None:
    http, router = make()[0], make(ROLE_ROUTER)[0]
    times = timeit.repeat(call, globals={"http": http, "router": router}, number=2000, repeat=40)
    assert min(times) / 2000 * 1e6 <= limit_us
