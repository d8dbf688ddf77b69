"""`Totals`: what all processes pushed, summed so that no lost, late, repeated or reordered push changes a figure.

Each push holds everything one incarnation counted, so the newest one (by seq) of each incarnation is kept and the sum
over incarnations is the truth. Gauges count only while their incarnation is the newest of its process and has not said
goodbye. Pure: no I/O, no clock. Knows nothing of Prometheus.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from inferserve.metrics.names import Kind, Metric
from inferserve.protocol.messages import MetricsPush, Sample

Labels = tuple[str, ...]
Series = dict[Labels, list[float]]

# A dead incarnation's last push can arrive after the first one of its successor; of no more than a few at once.
_KEPT_INCARNATIONS = 4


def _accumulate(series: Series, labels: Labels, values: tuple[float, ...] | list[float]) -> None:
    cells = series.get(labels)
    if cells is None:
        series[labels] = list(values)
    else:
        for i, value in enumerate(values):
            cells[i] += value


class _Process:
    """One (role, index): its newest incarnations apart, the older ones folded together."""

    def __init__(self) -> None:
        self.pushes: dict[int, MetricsPush] = {}
        self._folded: dict[str, Series] = {}
        self._folded_upto = -1

    def take(self, push: MetricsPush, table: Mapping[str, Metric]) -> None:
        known = self.pushes.get(push.incarnation)
        if push.incarnation <= self._folded_upto or (known is not None and known.seq >= push.seq):
            return
        self.pushes[push.incarnation] = push
        if len(self.pushes) > _KEPT_INCARNATIONS:
            self._folded_upto = min(self.pushes)
            for sample in self.pushes.pop(self._folded_upto).samples:
                if table[sample.name].kind is not Kind.GAUGE:
                    _accumulate(self._folded.setdefault(sample.name, {}), sample.labels, sample.values)

    def samples(self, table: Mapping[str, Metric]) -> Iterator[tuple[str, Labels, tuple[float, ...] | list[float]]]:
        for name, series in self._folded.items():
            for labels, cells in series.items():
                yield name, labels, cells
        newest = max(self.pushes, default=-1)
        for incarnation, push in self.pushes.items():
            alive = incarnation == newest and not push.last
            for sample in push.samples:
                if alive or table[sample.name].kind is not Kind.GAUGE:
                    yield sample.name, sample.labels, sample.values


class Totals:
    """The figures of the whole service.

    Args:
        table: `names.declare(...)`.
    """

    def __init__(self, table: Mapping[str, Metric]) -> None:
        self._table = table
        self._processes: dict[tuple[str, int], _Process] = {}

    def take(self, push: MetricsPush) -> None:
        """Keep `push` if it is news. ValueError, changing nothing, for a sample that is not as declared."""
        for sample in push.samples:
            self._check(push.role, sample)
        self._processes.setdefault((push.role, push.index), _Process()).take(push, self._table)

    def send(self, push: MetricsPush) -> None:
        """`take` by the name that a `MetricsClient` in the same process calls."""
        self.take(push)

    def sums(self) -> dict[str, Series]:
        """Family name → labels → (value,) or (sum, count of each bucket …), summed over processes and incarnations."""
        out: dict[str, Series] = {}
        for process in self._processes.values():
            for name, labels, values in process.samples(self._table):
                _accumulate(out.setdefault(name, {}), labels, values)
        return out

    def _check(self, role: str, sample: Sample) -> None:
        metric = self._table.get(sample.name)
        if metric is None or metric.role != role:
            raise ValueError(f"metric {sample.name} is not declared for role {role}")
        width = len(metric.buckets) + 2 if metric.kind is Kind.HISTOGRAM else 1
        if len(sample.labels) != len(metric.labels) or len(sample.values) != width:
            raise ValueError(f"metric {sample.name} has the wrong shape")
        if not all(math.isfinite(value) for value in sample.values):
            raise ValueError(f"metric {sample.name} is not finite")
