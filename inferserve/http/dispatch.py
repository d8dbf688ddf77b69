"""`Dispatcher`: reads this worker's inbox when the event loop says so and wakes the requests that messages name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import assert_never

from inferserve.http.live import LiveRequests
from inferserve.http.metrics_route import Scraper
from inferserve.protocol.messages import Dropped, HttpMessage, ScrapeReply, TextReady
from inferserve.transport.channel import Inbox

_BATCH = 256

Guard = Callable[[Callable[[], None]], Callable[[], None]]


class Dispatcher:
    """Inbox to requests."""

    def __init__(self, inbox: Inbox[HttpMessage], live: LiveRequests, scraper: Scraper) -> None:
        self._inbox = inbox
        self._live = live
        self._scraper = scraper
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop, guard: Guard) -> None:
        """Start reading. The descriptor is edge-triggered, so what came before is read at once.

        Args:
            guard: makes a callback whose failure ends the process; lost messages would leave requests hanging.
        """
        self._loop = loop
        self._drain_guarded = guard(self.drain)
        loop.add_reader(self._inbox.fileno(), self._drain_guarded)
        loop.call_soon(self._drain_guarded)

    def detach(self) -> None:
        """Stop reading."""
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.fileno())

    def drain(self) -> None:
        """Handle what is there. After a full batch the loop gets a turn before the rest."""
        messages = self._inbox.drain(_BATCH)
        now_ns = time.monotonic_ns()
        for message in messages:
            self.handle(message, now_ns)
        if len(messages) == _BATCH and self._loop is not None:
            self._loop.call_soon(self._drain_guarded)

    def handle(self, message: HttpMessage, now_ns: int) -> None:
        """Act on one message that arrived at `now_ns`."""
        match message:
            case TextReady():
                self._live.deliver(message.items, now_ns)
            case Dropped():
                self._live.dropped(message)
            case ScrapeReply():
                self._scraper.reply(message)
            case _:
                assert_never(message)
