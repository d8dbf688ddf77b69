"""docs/metrics.md is what the table says."""

from __future__ import annotations

from pathlib import Path

from inferserve.metrics.docs import TARGET, document
from inferserve.metrics.names import declare

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / TARGET).read_text() == document(), "run python -m inferserve.metrics.docs"


def test_every_metric_is_on_it_once() -> None:
    text = document()
    for metric in declare(100, 100).values():
        assert text.count(f"| `{metric.exposed}` |") == 1
