"""Many scrapers, one question at a time, and no answer older than its asker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inferserve.errors import PeerGone, Unavailable
from inferserve.http import metrics_route
from inferserve.http.metrics_route import Scraper
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import declare
from inferserve.protocol.messages import Scrape, ScrapeReply


class Link:
    """Keeps the questions."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.broken = False

    def send(self, message: Any) -> None:
        if self.broken:
            raise PeerGone("metrics")
        if isinstance(message, Scrape):
            self.asked.append(message.id)


def make() -> tuple[Scraper, Link]:
    link = Link()
    return Scraper(link, MetricsClient(declare(32, 32), "http", 0, 1, None), 0), link


async def start(scraper: Scraper, count: int) -> list[asyncio.Task[bytes]]:
    tasks = [asyncio.create_task(scraper.scrape()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


def test_a_crowd_shares_answers() -> None:
    async def crowd() -> None:
        scraper, link = make()
        first, *others = await start(scraper, 300)
        assert link.asked == [1]
        scraper.reply(ScrapeReply(1, b"old"))
        assert await first == b"old"
        assert link.asked == [1, 2]
        late = await start(scraper, 5)
        scraper.reply(ScrapeReply(1, b"again"))
        scraper.reply(ScrapeReply(2, b"new"))
        assert set(await asyncio.gather(*others)) == {b"new"}
        scraper.reply(ScrapeReply(3, b"newest"))
        assert set(await asyncio.gather(*late)) == {b"newest"}
        await start(scraper, 1)
        assert link.asked == [1, 2, 3, 4]

    asyncio.run(crowd())


def test_a_question_that_is_not_answered_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_route, "DEADLINE_S", 0.02)

    async def silence() -> None:
        scraper, link = make()
        results = await asyncio.gather(*await start(scraper, 3), return_exceptions=True)
        assert all(isinstance(r, Unavailable) for r in results)
        (again,) = await start(scraper, 1)
        scraper.reply(ScrapeReply(link.asked[-1], b"x"))
        assert await again == b"x"
        link.broken = True
        with pytest.raises(Unavailable):
            await scraper.scrape()

    asyncio.run(silence())
