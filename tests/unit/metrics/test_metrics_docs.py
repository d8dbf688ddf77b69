"""docs/metrics.md is what the table says."""

from __future__ import annotations

import re
from pathlib import Path

from inferserve.metrics.docs import TARGET, document
from inferserve.metrics.names import declare
from tests.prometheus import needs_prometheus, promtool

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / TARGET).read_text() == document(), "run python -m inferserve.metrics.docs"


def test_every_metric_is_on_it_once() -> None:
    text = document()
    for metric in declare(100, 100).values():
        assert text.count(f"| `{metric.exposed}` |") == 1


def test_every_name_in_its_text_exists() -> None:
    text = document().partition("## ")[0]
    names = {metric.exposed for metric in declare(100, 100).values()}
    found = set(re.findall(r"`(inferserve_\w+[a-z])[`{]", text))
    assert found and found <= names


@needs_prometheus
def test_its_scrape_configuration_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "prometheus.yml"
    file.write_text(document().partition("```yaml\n")[2].partition("```")[0])
    done = promtool("check", "config", str(file))
    assert done.returncode == 0, done.stderr
