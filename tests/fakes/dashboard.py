"""The queries of dashboards/grafana.json, with Grafana's variables filled in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "dashboards" / "grafana.json"

_SELECTOR = re.compile(r"(inferserve_\w+)\{([^}]*)\}")
_GROUPING = re.compile(r"\bby \(([^)]*)\)")


@dataclass(frozen=True)
class Query:
    """One target of one panel."""

    panel: str
    expr: str
    legend: str

    def series(self) -> list[tuple[str, set[str]]]:
        """Series names with the labels their selectors name."""
        return [
            (name, {m.split("=")[0].strip(" !~") for m in labels.split(",") if m})
            for name, labels in _SELECTOR.findall(self.expr)
        ]

    def result_labels(self) -> set[str]:
        """Labels of the result that grouping or the legend name."""
        grouped = {label.strip() for group in _GROUPING.findall(self.expr) for label in group.split(",")}
        return grouped | set(re.findall(r"\{\{(\w+)\}\}", self.legend))

    def filled(self, interval: str = "1m") -> str:
        """PromQL for all models."""
        return self.expr.replace("$__rate_interval", interval).replace("$model_name", ".+")


def load() -> dict[str, Any]:
    """The dashboard."""
    return json.loads(FILE.read_text())


def queries() -> list[Query]:
    """All of them."""
    return [
        Query(panel["title"], target["expr"], target["legendFormat"])
        for panel in load()["panels"]
        for target in panel.get("targets", ())
    ]
