"""`MetricsClient`: counts inside the process that observes, and pushes cumulative totals to the metrics process.

A call is a dictionary look-up and an addition: no I/O, no lock, no thread (one event loop or one loop a process calls
it). A push holds all totals of this incarnation, so a lost one costs nothing: the next brings the same totals or newer.
Totals are repeated every few seconds even if idle, which is how a restarted metrics process learns them. Knows nothing
of Prometheus.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from inferserve.errors import PeerGone
from inferserve.log import event
from inferserve.metrics.names import Kind, Metric, declare
from inferserve.protocol.boot import Boot
from inferserve.protocol.messages import MetricsMessage, MetricsPush, Sample

log = logging.getLogger(__name__)

PUSH_INTERVAL_S = 0.25
REPEAT_INTERVAL_S = 5.0
# A dead metrics process must not make its clients hoard pushes. Scrapes share the queue, so it holds a burst of them.
PUSH_QUEUE = 256
_COMPLAIN_INTERVAL_S = 10.0


class PushOutbox(Protocol):
    """What the client needs of `transport.Outbox`."""

    def send(self, message: Any) -> None:
        """Queue `message` or raise PeerGone."""


class ChildLike(Protocol):
    """What `for_child` needs of `process.Child`."""

    boot: Boot
    config: Any

    def outbox(self, name: str, union: object, queue: int = ...) -> Any:
        """A channel to the process called `name`."""


class MetricsClient:
    """The totals of one process incarnation.

    Args:
        table: `names.declare(...)`; only metrics of `role` may be used.
        role, index, incarnation: who pushes.
        outbox: takes `MetricsPush`; None keeps totals without sending (tests).
    """

    def __init__(
        self, table: Mapping[str, Metric], role: str, index: int, incarnation: int, outbox: PushOutbox | None
    ) -> None:
        self._metrics = {name: metric for name, metric in table.items() if metric.role == role}
        self._who = (role, index, incarnation)
        self._outbox = outbox
        self._scalars: dict[Kind, dict[str, dict[tuple[str, ...], list[float]]]] = {Kind.COUNTER: {}, Kind.GAUGE: {}}
        self._counters = self._scalars[Kind.COUNTER]
        self._gauges = self._scalars[Kind.GAUGE]
        # name → labels → (bounds, [sum, count of each bucket …, count beyond the last bound])
        self._histograms: dict[str, dict[tuple[str, ...], tuple[tuple[float, ...], list[float]]]] = {}
        self._changed = True
        self._wake: Callable[[], None] = _nothing
        self._pushes = _Pushes()
        for metric in self._metrics.values():
            for labels in metric.known:
                self._open(metric.kind, metric.name, labels)

    @classmethod
    def for_child(cls, child: ChildLike) -> MetricsClient:
        """The client of the process `child`."""
        boot, config = child.boot, child.config
        table = declare(config.model.max_req_total_len, config.schedule.batch_max_tokens)
        outbox = child.outbox("metrics", MetricsMessage, queue=PUSH_QUEUE)
        return cls(table, boot.role, boot.index, boot.incarnation, outbox)

    def add(self, name: str, value: float = 1.0, *labels: str) -> None:
        """Raise counter `name` by `value` >= 0. ValueError: unknown here, no counter, or a bad value."""
        try:
            cell = self._counters[name][labels]
        except KeyError:
            self._open(Kind.COUNTER, name, labels)
            cell = self._counters[name][labels]
        if not 0 <= value < math.inf:
            raise ValueError(f"counter {name} cannot grow by {value}")
        cell[0] += value
        if not self._changed:
            self._note_change()

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set gauge `name`. ValueError: unknown here or no gauge."""
        try:
            cell = self._gauges[name][labels]
        except KeyError:
            self._open(Kind.GAUGE, name, labels)
            cell = self._gauges[name][labels]
        if cell[0] != value:
            cell[0] = value
            if not self._changed:
                self._note_change()

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put `value` into histogram `name`. ValueError: unknown here, no histogram, or not finite."""
        try:
            bounds, values = self._histograms[name][labels]
        except KeyError:
            self._open(Kind.HISTOGRAM, name, labels)
            bounds, values = self._histograms[name][labels]
        if not -math.inf < value < math.inf:
            raise ValueError(f"histogram {name} cannot take {value}")
        values[0] += value
        values[bisect_left(bounds, value) + 1] += 1
        if not self._changed:
            self._note_change()

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` at the first change after a push, when `due_in` gets shorter: for owners that sleep till then."""
        self._wake = wake

    def due_in(self, now: float) -> float:
        """Seconds from `now` (time.monotonic()) until `flush` has something to send, if nothing changes before."""
        return max(0.0, self._pushes.due(self._changed) - now)

    def flush(self, now: float, force: bool = False) -> None:
        """Push all totals if they changed and the last push is 0.25 s old, or if it is 5 s old.

        Args:
            now: time.monotonic().
            force: push whatever changed when.
        """
        if force or now >= self._pushes.due(self._changed):
            self._push(now, last=False)

    def close(self, now: float) -> None:
        """Push the totals of the end; the exporter forgets this incarnation's gauges."""
        self._push(now, last=True)

    def samples(self) -> tuple[Sample, ...]:
        """All series with their totals."""
        scalars = [
            Sample(name, labels, (cell[0],))
            for families in self._scalars.values()
            for name, series in families.items()
            for labels, cell in series.items()
        ]
        histograms = [
            Sample(name, labels, tuple(values))
            for name, series in self._histograms.items()
            for labels, (_, values) in series.items()
        ]
        return (*scalars, *histograms)

    def _note_change(self) -> None:
        self._changed = True
        self._wake()

    def _push(self, now: float, last: bool) -> None:
        self._pushes.last_push = now
        if self._outbox is None:
            return
        self._pushes.seq += 1
        try:
            self._outbox.send(MetricsPush(*self._who, self._pushes.seq, self.samples(), last))
        except PeerGone as gone:
            if self._pushes.may_complain(now):
                event(log, "metrics not pushed", logging.WARNING, reason=str(gone))
        else:
            self._changed = False

    def _open(self, kind: Kind, name: str, labels: tuple[str, ...]) -> None:
        metric = self._metrics.get(name)
        if metric is None:
            raise ValueError(f"metric {name} is not declared for role {self._who[0]}")
        if metric.kind is not kind:
            raise ValueError(f"metric {name} is a {metric.kind}, not a {kind}")
        if len(labels) != len(metric.labels):
            raise ValueError(f"metric {name} takes labels {metric.labels}, got {labels}")
        if kind is Kind.HISTOGRAM:
            cells = (metric.buckets, [0.0] * (len(metric.buckets) + 2))
            self._histograms.setdefault(name, {})[labels] = cells
        else:
            self._scalars[kind].setdefault(name, {})[labels] = [0.0]


def _nothing() -> None:
    """Nobody waits for changes."""


class _Pushes:
    """How many there were, when the client pushed last and when it complained last."""

    def __init__(self) -> None:
        self.seq = 0
        self.last_push = -math.inf
        self._last_complaint = -math.inf

    def due(self, changed: bool) -> float:
        return self.last_push + (PUSH_INTERVAL_S if changed else REPEAT_INTERVAL_S)

    def may_complain(self, now: float) -> bool:
        if now - self._last_complaint < _COMPLAIN_INTERVAL_S:
            return False
        self._last_complaint = now
        return True
