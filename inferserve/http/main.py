"""The http process: builds its parts, serves on the inherited socket with Hypercorn, obeys the launcher.

Drain: new requests get 503, `Drained` goes out when the last one is answered. Stop (or a launcher that is gone): open
streams end with an error event, then the process ends within about a second. Knows no route.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop
from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.types import ASGIApp

from inferserve.errors import RequestError, RequestFailed, Unavailable
from inferserve.http.app import create_app
from inferserve.http.connections import adapt_hypercorn
from inferserve.http.dispatch import Dispatcher
from inferserve.http.live import LiveRequests
from inferserve.http.metrics_route import Scraper
from inferserve.http.prompts import PromptEncoder
from inferserve.http.request_log import RequestLog
from inferserve.http.service import Limits, LocalService
from inferserve.http.serving import Serving
from inferserve.http.slot_client import SlotClient
from inferserve.log import event
from inferserve.metrics.client import PUSH_QUEUE, MetricsClient
from inferserve.metrics.names import declare
from inferserve.metrics.requests import RequestMetrics
from inferserve.process import Child, StopRequested
from inferserve.protocol.messages import (
    Abort,
    Drain,
    Drained,
    HttpMessage,
    MetricsMessage,
    Opened,
    RouterMessage,
    ServiceReady,
)
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable
from inferserve.tokenize.chat import ChatTemplate
from inferserve.tokenize.load import load_tokenizer

log = logging.getLogger(__name__)

STOP_GRACE_S = 0.8
# A peer that takes no byte for this long is cut off by the kernel, also while our write waits for it.
WRITE_DEADLINE_MS = 30_000
KEEP_ALIVE_S = 15.0
BACKLOG = 4096


@dataclass(slots=True)
class Parts:
    """What the process consists of."""

    service: LocalService
    serving: Serving
    live: LiveRequests
    prompts: PromptEncoder
    dispatcher: Dispatcher
    metrics: MetricsClient


def build(child: Child) -> Parts:
    """All parts of this worker. Raises ConfigError for a tokenizer or template that does not load."""
    config, boot = child.config, child.boot
    tokenizer = load_tokenizer(config)
    template = tokenizer.chat_template
    chat_template = ChatTemplate(template, tokenizer.special_tokens_map) if template else None
    limits = Limits.of(config)
    per_worker = config.slots_per_worker
    view = SlotTable.attach(boot.segments, config.slots, config.model.max_req_total_len).view(Writer.HTTP)
    slots = SlotClient(view, boot.index * per_worker, per_worker, limit=per_worker)
    router = child.outbox("router", RouterMessage)
    abandoned = slots.recover()
    if abandoned:
        event(log, "aborting requests of the worker before", logging.WARNING, rows=len(abandoned))
        router.send(Abort(abandoned))
    # Pushes and questions share one channel, so that an answer knows everything that was pushed before it was asked.
    to_metrics = child.outbox("metrics", MetricsMessage, queue=PUSH_QUEUE)
    table = declare(config.model.max_req_total_len, config.schedule.batch_max_tokens)
    client = MetricsClient(table, boot.role, boot.index, boot.incarnation, to_metrics)
    request_metrics = RequestMetrics(client)
    request_log = RequestLog(not config.log.disable_log_requests)
    live = LiveRequests(slots, router, request_metrics, request_log, limits.context)
    scraper = Scraper(to_metrics, client, boot.index)
    serving = Serving(lambda: child.control.send(Drained()))
    prompts = PromptEncoder(tokenizer, chat_template, limits.context)
    service = LocalService(limits, serving, prompts, live, request_metrics, scraper)
    dispatcher = Dispatcher(child.inbox(HttpMessage), live, scraper)
    return Parts(service, serving, live, prompts, dispatcher, client)


def hypercorn_config(listen_fd: int) -> Config:
    """Hypercorn on an inherited socket: HTTP/1.1, quiet, no timeout that could cut a stream."""
    config = Config()
    config.bind = [f"fd://{listen_fd}"]
    config.alpn_protocols = ["http/1.1"]
    config.backlog = BACKLOG
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.loglevel = "WARNING"
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 100_000
    config.graceful_timeout = STOP_GRACE_S / 2
    config.read_timeout = None
    return config


class Worker:
    """One run of the process.

    Args:
        child: the border to the launcher.
        parts: from `build()`.
    """

    def __init__(self, child: Child, parts: Parts) -> None:
        self._child = child
        self._parts = parts
        self._stop = asyncio.Event()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._fault: Exception | None = None

    async def run(self, app: ASGIApp) -> None:
        """Serve until the launcher says stop."""
        loop = asyncio.get_running_loop()
        self._parts.dispatcher.attach(loop, self._guard)
        loop.add_reader(self._child.control.fileno(), self._guard(self._on_control))
        self._parts.metrics.on_change(self._plan_flush)
        self._flush_metrics()
        server = asyncio.create_task(
            serve(app, hypercorn_config(self._child.boot.listen_fd), shutdown_trigger=self._stop.wait)
        )
        self._child.ready()
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({server, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not self._stop.is_set():
            await server  # it ended by itself: raise why
        await asyncio.wait({server}, timeout=STOP_GRACE_S)
        if not server.done():
            # A client takes neither its text nor our goodbye; that its connection is cut is no news.
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            server.cancel()
            await asyncio.wait({server}, timeout=STOP_GRACE_S / 4)
        if server.done() and not server.cancelled() and server.exception() is not None:
            event(log, "the HTTP server ended badly", logging.WARNING, reason=repr(server.exception()))
        self._end()
        if self._fault is not None:
            raise self._fault

    def _guard(self, callback: Callable[[], None]) -> Callable[[], None]:
        """`callback`, whose failure ends the process with an error instead of leaving it half deaf."""

        def guarded() -> None:
            try:
                callback()
            except Exception as error:
                self._fault = error
                self._stop_serving(RequestFailed("Internal server error."))

        return guarded

    def _on_control(self) -> None:
        serving = self._parts.serving
        try:
            message = self._child.handle_control()
        except StopRequested:
            asyncio.get_running_loop().remove_reader(self._child.control.fileno())
            self._stop_serving(Unavailable("The server is shutting down.", code="shutting_down"))
            return
        match message:
            case ServiceReady():
                serving.ready = True
                self._child.control.send(Opened())
            case Drain(seconds):
                event(log, "draining", in_flight=serving.in_flight, seconds=seconds)
                serving.drain()
            case _:
                pass

    def _stop_serving(self, why: RequestError) -> None:
        self._parts.serving.stopping = True
        self._stop.set()
        self._parts.live.fail_all(why)

    def _flush_metrics(self) -> None:
        """Push totals when they are due."""
        self._parts.metrics.flush(time.monotonic())
        self._plan_flush()

    def _plan_flush(self) -> None:
        """Come back when totals are due; again whenever a change makes that earlier."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        due = self._parts.metrics.due_in(time.monotonic())
        self._flush_timer = asyncio.get_running_loop().call_later(due, self._flush_metrics)

    def _end(self) -> None:
        self._parts.metrics.on_change(lambda: None)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._parts.dispatcher.detach()
        self._parts.prompts.close()
        self._parts.metrics.close(time.monotonic())


def limit_writes(listen_fd: int, deadline_ms: int = WRITE_DEADLINE_MS) -> None:
    """Let the kernel end connections whose peer takes nothing for `deadline_ms`; accepted sockets inherit it."""
    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, deadline_ms)


def body(child: Child) -> None:
    """Process body: build, serve, end."""
    parts = build(child)
    limit_writes(child.boot.listen_fd)
    adapt_hypercorn()
    app: Any = create_app(parts.service, child.config)

    async def work() -> None:
        await Worker(child, parts).run(app)

    uvloop.run(work())
