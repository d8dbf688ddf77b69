"""What one request adds: each family once, in seconds, and the sums agree with its usage."""

from __future__ import annotations

import pytest

from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import Kind, declare
from inferserve.metrics.requests import RequestMeter, RequestMetrics
from inferserve.protocol.boot import ROLE_HTTP

TABLE = declare(1000, 100)
MS = 1_000_000
START = 5_000 * MS


class Counted:
    """An http worker's request metrics, readable."""

    def __init__(self) -> None:
        self.client = MetricsClient(TABLE, ROLE_HTTP, 0, 0, None)
        self.requests = RequestMetrics(self.client)

    def begin(self, n: int = 1) -> RequestMeter:
        return self.requests.begin(START, START + MS, prompt_tokens=10, n=n, max_tokens=50)

    def _values(self, name: str, *labels: str) -> tuple[float, ...]:
        return next(s.values for s in self.client.samples() if (s.name, s.labels) == (name, labels))

    def value(self, name: str, *labels: str) -> float:
        return self._values(name, *labels)[0]

    def count(self, name: str) -> float:
        return sum(self._values(name)[1:])

    def outcomes(self) -> dict[str, float]:
        return {
            f"{s.name} {s.labels[0]}": s.values[0]
            for s in self.client.samples()
            if s.name in ("request_success", "request_failure") and s.values[0]
        }


def complete(counted: Counted) -> None:
    meter = counted.begin(n=2)
    meter.first_token(START + 20 * MS, cached_tokens=4)
    meter.tokens(0, 1, START + 20 * MS)
    meter.tokens(1, 1, START + 21 * MS)
    meter.tokens(0, 2, START + 30 * MS)
    meter.tokens(1, 0, START + 30 * MS)
    meter.tokens(1, 1, START + 31 * MS)
    meter.finish(
        "stop",
        START + 40 * MS,
        start_ns=START + 5 * MS,
        first_token_ns=START + 18 * MS,
        last_token_ns=START + 28 * MS,
        preemptions=2,
    )


def test_a_finished_request_moves_every_family_of_its_role_once() -> None:
    counted = Counted()
    complete(counted)
    for name, metric in TABLE.items():
        if metric.role == ROLE_HTTP and metric.kind is Kind.HISTOGRAM:
            assert counted.count(name) == (2 if name == "inter_token_latency_seconds" else 1), name
    counted.requests.refused("overloaded")
    for name, metric in TABLE.items():
        if metric.role == ROLE_HTTP and metric.kind is Kind.COUNTER:
            assert sum(s.values[0] for s in counted.client.samples() if s.name == name) > 0, name


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("time_to_first_token_seconds", 0.020),
        ("request_first_token_duration", 0.020),
        ("inter_token_latency_seconds", 0.020),
        ("request_time_per_output_token_seconds", 0.010 / 2),
        ("request_mean_time_per_token_duration", 0.010 / 2),
        ("e2e_request_latency_seconds", 0.040),
        ("request_duration", 0.040),
        ("request_inference_duration", 0.040),
        ("request_validation_duration", 0.001),
        ("request_queue_time_seconds", 0.005),
        ("request_queue_duration", 0.005),
        ("request_prefill_time_seconds", 0.013),
        ("request_decode_time_seconds", 0.010),
        ("request_inference_time_seconds", 0.023),
        ("request_prompt_tokens", 10),
        ("request_input_length", 10),
        ("request_generation_tokens", 5),
        ("request_generated_tokens", 5),
        ("request_max_num_generation_tokens", 3),
        ("request_prefill_kv_computed_tokens", 6),
        ("request_params_n", 2),
        ("request_params_max_tokens", 50),
        ("request_max_new_tokens", 50),
        ("request_num_preemptions", 2),
        ("cache_length", 4),
        ("cache_ratio", 0.4),
        ("prompt_tokens", 10),
        ("prompt_tokens_cached", 4),
        ("generation_tokens", 5),
        ("request_count", 1),
    ],
)
def test_values(name: str, total: float) -> None:
    counted = Counted()
    complete(counted)
    assert counted.value(name) == pytest.approx(total)


def test_prompt_tokens_by_source_add_up_to_prompt_tokens() -> None:
    counted = Counted()
    complete(counted)
    assert counted.value("prompt_tokens_by_source", "local_cache_hit") == 4
    assert counted.value("prompt_tokens_by_source", "local_compute") == 6


def test_the_end_counts_once() -> None:
    counted = Counted()
    meter = counted.begin()
    meter.finish("abort", START + MS)
    meter.finish("stop", START + 2 * MS)
    meter.refused("overloaded")
    assert counted.outcomes() == {"request_success abort": 1}


def test_abort_while_it_waits() -> None:
    counted = Counted()
    counted.begin().finish("abort", START + 3 * MS)
    assert counted.count("e2e_request_latency_seconds") == 1
    assert counted.count("request_inference_duration") == 0
    for name in ("request_queue_time_seconds", "time_to_first_token_seconds", "request_prefill_time_seconds"):
        assert counted.count(name) == 0
    assert counted.value("prompt_tokens") == 0


def test_abort_before_the_first_token_ignores_what_an_older_request_left_in_the_slot() -> None:
    counted = Counted()
    counted.begin().finish("abort", START + 3 * MS, start_ns=START + MS, first_token_ns=7, last_token_ns=9)
    assert counted.count("request_queue_time_seconds") == 1
    assert counted.count("request_prefill_time_seconds") == 0


def test_an_error_is_an_outcome_and_a_failure() -> None:
    counted = Counted()
    counted.begin().finish("error", START + MS)
    assert counted.outcomes() == {"request_success error": 1, "request_failure error": 1}


def test_refusals() -> None:
    counted = Counted()
    counted.requests.refused("invalid")
    counted.begin().refused("overloaded")
    assert counted.outcomes() == {"request_failure invalid": 1, "request_failure overloaded": 1}
    assert counted.value("request_count") == 2


def test_one_token_has_no_time_per_token() -> None:
    counted = Counted()
    meter = counted.begin()
    meter.first_token(START + MS, 0)
    meter.tokens(0, 1, START + MS)
    meter.finish("length", START + MS, start_ns=START, first_token_ns=START + MS, last_token_ns=START + MS)
    assert counted.count("request_time_per_output_token_seconds") == 0
    assert counted.count("inter_token_latency_seconds") == 0
    assert counted.count("request_decode_time_seconds") == 1


def test_clocks_of_processes_that_disagree_a_little_give_zero_not_less() -> None:
    counted = Counted()
    meter = counted.begin()
    meter.first_token(START - 5, 0)
    assert counted.value("time_to_first_token_seconds") == 0
