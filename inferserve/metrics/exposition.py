"""The metrics page: `Totals` as Prometheus text (format 0.0.4), through prometheus_client's own writer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from inferserve.metrics.names import COMMON_LABELS, PREFIX, Kind, Metric
from inferserve.metrics.totals import Labels, Series, Totals


class TotalsCollector(Collector):
    """Turns `Totals` into prometheus_client families.

    Args:
        table: `names.declare(...)`.
        totals: the figures.
        common: values of `names.COMMON_LABELS`, put before each family's own labels.
    """

    def __init__(self, table: Mapping[str, Metric], totals: Totals, common: Labels) -> None:
        self._table = table
        self._totals = totals
        self._common = common

    def collect(self) -> Iterator[Family]:
        """Families in the order of the table; those without a series are left out."""
        sums = self._totals.sums()
        for name, metric in self._table.items():
            if name in sums:
                yield self._family(metric, sums[name])

    def _family(self, metric: Metric, series: Series) -> Family:
        name, labels = PREFIX + metric.name, (*COMMON_LABELS, *metric.labels)
        if metric.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(name, metric.help, labels=labels)
            bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
            for values, (total, *counts) in series.items():
                buckets = list(zip(bounds, accumulate(counts), strict=True))
                histogram.add_metric((*self._common, *values), buckets, total)
            return histogram
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(name, metric.help, labels=labels)
        for values, (value,) in series.items():
            family.add_metric((*self._common, *values), value)
        return family


def registry(table: Mapping[str, Metric], totals: Totals, *, model_name: str, engine: str) -> CollectorRegistry:
    """A registry that shows `totals`."""
    out = CollectorRegistry(auto_describe=False)
    out.register(TotalsCollector(table, totals, (model_name, engine)))
    return out


def page(source: CollectorRegistry) -> bytes:
    """The text to send with `names.CONTENT_TYPE`."""
    return generate_latest(source)
