"""The table of metrics obeys Prometheus' naming rules and ours."""

from __future__ import annotations

import re

import pytest

from inferserve.metrics.names import COMMON_LABELS, Kind, Metric, declare, one_two_five

TABLE = declare(16384, 8448)


@pytest.mark.parametrize("metric", TABLE.values(), ids=lambda m: m.name)
def test_family_is_legal(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert metric.help.endswith(".")
    assert not metric.name.endswith(("_bucket", "_sum", "_total", "_created"))
    assert not metric.exposed.endswith("_count")
    assert metric.exposed.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert not {"le", "quantile", *COMMON_LABELS} & set(metric.labels)
    assert all(len(labels) == len(metric.labels) for labels in metric.known)


@pytest.mark.parametrize("metric", TABLE.values(), ids=lambda m: m.name)
def test_only_histograms_have_buckets_and_they_rise(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_latencies_start_at_a_millisecond() -> None:
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds"):
        assert TABLE[name].buckets[0] == 0.001


def test_no_series_of_one_family_is_a_family_of_its_own() -> None:
    """A histogram `x` shows `x_count`, `x_sum`, `x_bucket`: no other family may be called that."""
    exposed = {m.exposed for m in TABLE.values()}
    series = {
        f"{m.exposed}{s}" for m in TABLE.values() if m.kind is Kind.HISTOGRAM for s in ("_count", "_sum", "_bucket")
    }
    assert not exposed & series


@pytest.mark.parametrize(
    ("limit", "bounds"),
    [(1, (1,)), (2, (1, 2)), (7, (1, 2, 5, 7)), (10, (1, 2, 5, 10)), (64, (1, 2, 5, 10, 20, 50, 64))],
)
def test_one_two_five_ends_at_the_limit(limit: int, bounds: tuple[int, ...]) -> None:
    assert one_two_five(limit) == bounds


def test_lengths_reach_the_longest_request_and_the_largest_step() -> None:
    assert TABLE["request_prompt_tokens"].buckets[-1] == 16384
    assert TABLE["iteration_tokens"].buckets[-1] == 8448
