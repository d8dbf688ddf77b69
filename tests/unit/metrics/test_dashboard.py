"""dashboards/grafana.json: valid, complete, and every query names series and labels that exist."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from inferserve.metrics.names import COMMON_LABELS, Kind, declare
from tests.fakes.dashboard import Query, load, queries
from tests.prometheus import needs_prometheus, promtool

SERIES = {
    series: metric
    for metric in declare(1000, 100).values()
    for series in (
        [metric.exposed + suffix for suffix in ("_bucket", "_sum", "_count")]
        if metric.kind is Kind.HISTOGRAM
        else [metric.exposed]
    )
}

WANTED = {
    *("e2e_request_latency_seconds_bucket", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting"),
    *("kv_cache_usage_perc", "request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("request_success_total", "request_queue_time_seconds_bucket", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "prefix_cache_hits_total", "num_preemptions_total"),
    *("process_cpu_seconds_total", "process_resident_memory_bytes"),
}


def test_every_panel_that_peers_ship_is_there() -> None:
    used = {name.removeprefix("inferserve_") for query in queries() for name, _ in query.series()}
    assert used >= WANTED


@pytest.mark.parametrize("query", queries(), ids=lambda q: f"{q.panel}: {q.legend}")
def test_series_and_labels_exist(query: Query) -> None:
    found = query.series()
    assert found
    assert len(found) == query.expr.count("inferserve_")
    available = set(COMMON_LABELS)
    for name, labels in found:
        metric = SERIES[name]
        own = {*COMMON_LABELS, *metric.labels, *(["le"] if name.endswith("_bucket") else [])}
        assert labels <= own
        assert "model_name" in labels
        assert ("rate(" in query.expr or "increase(" in query.expr) == (metric.kind is not Kind.GAUGE)
        available |= own
    assert query.result_labels() <= available


@needs_prometheus
def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"q:{i}", "expr": query.filled()} for i, query in enumerate(queries())]
    file = tmp_path / "rules.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stderr


def test_panels_have_their_own_id_and_place() -> None:
    panels = load()["panels"]
    assert max(Counter(p["id"] for p in panels).values()) == 1
    cells = Counter(
        (x, y)
        for p in panels
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    )
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) == 23
    assert all(a["gridPos"]["y"] <= b["gridPos"]["y"] for a, b in pairwise(panels))


def test_data_source_and_model_can_be_chosen() -> None:
    dashboard = load()
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "model_name"]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
