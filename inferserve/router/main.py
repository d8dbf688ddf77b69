"""The router process: one inbox, one loop. Wakes for messages, and for figures that are due."""

from __future__ import annotations

import logging
import time

from inferserve.errors import PeerGone
from inferserve.log import event
from inferserve.metrics.client import MetricsClient
from inferserve.process import Child, Waiter
from inferserve.protocol.boot import ROLE_ENGINE, ROLE_HTTP, process_name
from inferserve.protocol.messages import Commands, Dropped, EngineMessage, HttpMessage, RouterMessage
from inferserve.router.loop import Router
from inferserve.router.observe import Observer
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable

log = logging.getLogger(__name__)

_POLL_RESOLUTION_S = 0.001


class ChannelLinks:
    """The router's outgoing messages over channels."""

    def __init__(self, child: Child) -> None:
        workers = range(child.config.http.httpserver_workers)
        ranks = range(child.config.parallel.tp)
        self._engines = [child.outbox(process_name(ROLE_ENGINE, i), EngineMessage) for i in ranks]
        self._http = [child.outbox(f"{ROLE_HTTP}-{i}", HttpMessage) for i in workers]
        self._slots_per_worker = child.config.slots_per_worker

    def command(self, commands: Commands) -> None:
        """To every rank; an engine that takes none ends the service (PeerGone)."""
        for engine in self._engines:
            engine.send(commands)

    def drop(self, dropped: Dropped) -> None:
        """To the owner of the slot. An owner that takes none is dead, and its successor starts afresh."""
        try:
            self._http[dropped.index // self._slots_per_worker].send(dropped)
        except PeerGone as gone:
            event(log, "http worker not told of a dropped request", logging.WARNING, reason=str(gone))


def body(child: Child) -> None:
    """Serve until the launcher says stop."""
    config = child.config
    inbox = child.inbox(RouterMessage)
    table = SlotTable.attach(child.boot.segments, config.slots, config.model.max_req_total_len)
    metrics = MetricsClient.for_child(child)
    observer = Observer(config, metrics, time.monotonic())
    router = Router(config, table.view(Writer.ROUTER), ChannelLinks(child), observer)
    child.ready(slots=config.slots)
    waiter = Waiter(child, inbox)
    try:
        while True:
            # The wait is in whole milliseconds; one more keeps a deadline from being met too early, again and again.
            messages = waiter.wait(router.due_in(time.monotonic()) + _POLL_RESOLUTION_S)
            now = time.monotonic()
            for message in messages:
                router.handle(message, now)
            router.conclude(now, time.monotonic_ns())
    finally:
        metrics.close(time.monotonic())
