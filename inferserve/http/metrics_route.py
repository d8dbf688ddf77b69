"""`GET /metrics`: the exposition text, asked of the metrics process."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.responses import Response

from inferserve.errors import PeerGone, Unavailable
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import CONTENT_TYPE
from inferserve.protocol.messages import Scrape, ScrapeReply

DEADLINE_S = 2.0


class MetricsLink(Protocol):
    """What is needed of the outbox to the metrics process."""

    def send(self, message: Any) -> None:
        """Queue `message` or raise PeerGone."""


class MetricsSource(Protocol):
    """Where the page comes from; `Scraper` is one."""

    async def scrape(self) -> bytes:
        """The exposition text. Raises Unavailable."""


class Scraper:
    """Asks the metrics process and waits for its answer.

    Args:
        link: outbox to the metrics process, the one over which `client` pushes: pushes arrive before the question.
        worker: index of this http worker, to which the answer goes.
    """

    def __init__(self, link: MetricsLink, client: MetricsClient, worker: int) -> None:
        self._link = link
        self._client = client
        self._worker = worker
        self._last_id = 0
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    async def scrape(self) -> bytes:
        """The exposition text with this worker's newest totals. Raises Unavailable after 2 s."""
        self._last_id += 1
        scrape_id = self._last_id
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[scrape_id] = answer
        try:
            self._client.flush(time.monotonic(), force=True)
            self._link.send(Scrape(scrape_id, self._worker))
            async with asyncio.timeout(DEADLINE_S):
                return await answer
        except (TimeoutError, PeerGone) as error:
            raise Unavailable("The metrics process does not answer.", code="metrics_unavailable") from error
        finally:
            del self._waiting[scrape_id]

    def reply(self, message: ScrapeReply) -> None:
        """An answer arrived; late ones are dropped."""
        answer = self._waiting.get(message.id)
        if answer is not None and not answer.done():
            answer.set_result(message.body)


def routes(source: MetricsSource) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["operations"])

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics of the whole service."""
        return Response(await source.scrape(), headers={"content-type": CONTENT_TYPE})

    return router
