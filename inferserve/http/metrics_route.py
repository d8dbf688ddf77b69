"""`GET /metrics`: the exposition text, asked of the metrics process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.responses import Response

from inferserve.errors import PeerGone, Unavailable
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import CONTENT_TYPE
from inferserve.protocol.messages import Scrape, ScrapeReply

DEADLINE_S = 2.0

Waiter = asyncio.Future[bytes]


class MetricsLink(Protocol):
    """What is needed of the outbox to the metrics process."""

    def send(self, message: Any) -> None:
        """Queue `message` or raise PeerGone."""


class MetricsSource(Protocol):
    """Where the page comes from; `Scraper` is one."""

    async def scrape(self) -> bytes:
        """The exposition text. Raises Unavailable."""


class Scraper:
    """Asks the metrics process and waits for its answer. One question is under way at a time, however many scrape: all
    who came before it was asked share its answer, which so holds all that was counted before they came.

    Args:
        link: outbox to the metrics process, the one over which `client` pushes: pushes arrive before the question.
        worker: index of this http worker, to which the answer goes.
    """

    def __init__(self, link: MetricsLink, client: MetricsClient, worker: int) -> None:
        self._link = link
        self._client = client
        self._worker = worker
        self._id = 0
        self._asked: set[Waiter] = set()  # they wait for the answer to question `_id`
        self._next: set[Waiter] = set()  # and these for the one after it

    async def scrape(self) -> bytes:
        """The exposition text with this worker's newest totals. Raises Unavailable after 2 s."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._next.add(waiter)
        try:
            self._ask()
            async with asyncio.timeout(DEADLINE_S):
                return await waiter
        except (TimeoutError, PeerGone) as error:
            raise Unavailable("The metrics process does not answer.", code="metrics_unavailable") from error
        finally:
            self._next.discard(waiter)
            self._asked.discard(waiter)

    def reply(self, message: ScrapeReply) -> None:
        """An answer arrived; late ones are dropped."""
        if message.id != self._id:
            return
        for waiter in self._asked:
            if not waiter.done():
                waiter.set_result(message.body)
        self._asked = set()
        # Who waits for the next answer and is not served now meets the deadline.
        with contextlib.suppress(PeerGone):
            self._ask()

    def _ask(self) -> None:
        """Put the next question unless one is open; one that nobody waits for any more is not."""
        if self._asked or not self._next:
            return
        self._client.flush(time.monotonic(), force=True)
        self._id += 1
        self._link.send(Scrape(self._id, self._worker))
        self._asked, self._next = self._next, set()


def routes(source: MetricsSource) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["operations"])

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics of the whole service."""
        return Response(await source.scrape(), headers={"content-type": CONTENT_TYPE})

    return router
