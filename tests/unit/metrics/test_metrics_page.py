"""The page parses, its histograms are cumulative, promtool finds nothing to say about it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inferserve.metrics.client import MetricsClient
from inferserve.metrics.exposition import page, registry
from inferserve.metrics.names import CONTENT_TYPE, Kind, declare
from inferserve.metrics.totals import Totals
from inferserve.protocol.boot import ROLE_HTTP, ROLE_METRICS, ROLE_ROUTER
from tests.prometheus import needs_prometheus, promtool

TABLE = declare(1000, 100)
MODEL = 'odd "name"\\ of\na model'


@pytest.fixture
def text() -> str:
    """A page on which every declared family has a series."""
    totals = Totals(TABLE)
    for role in (ROLE_HTTP, ROLE_ROUTER, ROLE_METRICS):
        client = MetricsClient(TABLE, role, 0, 0, totals)
        for name, metric in TABLE.items():
            labels = ["x"] * len(metric.labels)
            if metric.role == role and metric.kind is Kind.HISTOGRAM and not labels:
                for value in (0.5, 1.0, 1e9):
                    client.observe(name, value)
            elif metric.role == role and metric.kind is Kind.GAUGE:
                client.set(name, 2.5, *labels)
            elif metric.role == role and metric.kind is Kind.COUNTER:
                client.add(name, 3, *labels)
        client.flush(0.0)
    return page(registry(TABLE, totals, model_name=MODEL, engine="0")).decode()


def test_every_declared_family_is_shown_with_its_kind_and_labels(text: str) -> None:
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert len(families) == len(TABLE)
    for name, metric in TABLE.items():
        family = families["inferserve_" + name]
        assert family.type == metric.kind
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"model_name", "engine", *metric.labels}
            assert (sample.labels["model_name"], sample.labels["engine"]) == (MODEL, "0")


def test_buckets_are_cumulative_and_end_at_the_count(text: str) -> None:
    family = next(f for f in text_string_to_metric_families(text) if f.name == "inferserve_request_params_n")
    values = {s.labels.get("le", s.name.rpartition("_")[2]): s.value for s in family.samples}
    assert values == {"1.0": 2, "2.0": 2, "5.0": 2, "10.0": 2, "20.0": 2, "+Inf": 3, "count": 3, "sum": 1e9 + 1.5}


def test_a_family_that_nobody_pushed_is_left_out() -> None:
    assert page(registry(TABLE, Totals(TABLE), model_name="m", engine="0")) == b""


def test_no_created_series(text: str) -> None:
    assert "_created" not in text


def test_content_type_is_that_of_the_text() -> None:
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"


@needs_prometheus
def test_promtool_is_content(text: str) -> None:
    done = promtool("check", "metrics", text=text)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_process_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, inferserve.metrics.main; print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
