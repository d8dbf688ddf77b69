"""The metrics process: takes every process's totals, answers scrapes that http workers pass on.

It holds no request and can die at any time: its successor learns all totals from the next pushes.
"""

from __future__ import annotations

import logging
import os
import time

from inferserve.errors import PeerGone
from inferserve.log import event
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.exposition import page, registry
from inferserve.metrics.names import declare
from inferserve.metrics.processes import ProcessMeter
from inferserve.metrics.totals import Totals
from inferserve.process import Child, Waiter
from inferserve.protocol.boot import ROLE_HTTP, ROLE_METRICS
from inferserve.protocol.messages import HttpMessage, MetricsMessage, MetricsPush, Scrape, ScrapeReply

log = logging.getLogger(__name__)


class Exporter:
    """Totals, the page made of them, and where to send it."""

    def __init__(self, child: Child) -> None:
        config = child.config
        table = declare(config.model.max_req_total_len, config.schedule.batch_max_tokens)
        self._totals = Totals(table)
        self._registry = registry(table, self._totals, model_name=config.model_names[0], engine="0")
        self._own = MetricsClient(table, ROLE_METRICS, 0, child.boot.incarnation, self._totals)
        self._processes = ProcessMeter(self._own, os.getppid())
        self._http = [child.outbox(f"{ROLE_HTTP}-{i}", HttpMessage) for i in range(config.http.httpserver_workers)]
        self._complained: set[str] = set()

    def handle(self, messages: list[MetricsMessage]) -> None:
        """Take the pushes among `messages`, then answer the scrapes, all with one page."""
        scrapes = []
        for message in messages:
            match message:
                case MetricsPush():
                    self._take(message)
                case Scrape():
                    scrapes.append(message)
        if scrapes:
            body = self._page(time.monotonic())
            for scrape in scrapes:
                self._answer(scrape, body)

    def _take(self, push: MetricsPush) -> None:
        try:
            self._totals.take(push)
        except ValueError as error:
            if push.role not in self._complained:
                self._complained.add(push.role)
                event(log, "push ignored", logging.WARNING, role=push.role, index=push.index, reason=str(error))

    def _page(self, now: float) -> bytes:
        self._processes.measure(now)
        self._own.flush(now, force=True)
        return page(self._registry)

    def _answer(self, scrape: Scrape, body: bytes) -> None:
        if not 0 <= scrape.worker < len(self._http):
            return
        try:
            self._http[scrape.worker].send(ScrapeReply(scrape.id, body))
        except PeerGone:
            event(log, "scrape not answered", logging.DEBUG, worker=scrape.worker)


def body(child: Child) -> None:
    """Serve until the launcher says stop."""
    waiter: Waiter[MetricsMessage] = Waiter(child, child.inbox(MetricsMessage))
    exporter = Exporter(child)
    child.ready()
    while True:
        exporter.handle(waiter.wait(None))
