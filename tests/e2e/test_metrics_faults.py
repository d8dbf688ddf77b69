"""F-08: without the metrics process nothing changes for clients, and nothing that was counted is lost."""

from __future__ import annotations

import asyncio
import time

import httpx

from tests.e2e.requests import COMPLETIONS, chunks
from tests.e2e.server import RunningServer

BODY = {"prompt": "Count me,", "max_tokens": 20, "ignore_eos": True}


def test_an_exporter_that_hangs_costs_the_page_and_nothing_else() -> None:
    with RunningServer("--engine", "fake", "--fake-step-ms", "2", "--disable-log-requests") as server:
        reference = chunks(server, COMPLETIONS, {**BODY, "seed": 1})
        exporter = server.children()["metrics"]
        exporter.suspend()
        try:
            lines = len(server.lines)
            begin = time.monotonic()
            answers = [httpx.get(server.url + "/metrics", timeout=10) for _ in range(2)]
            assert time.monotonic() - begin < 2 * 3.0
            for answer in answers:
                assert answer.status_code == 503
                assert answer.json()["error"]["message"]
                assert "retry-after" in answer.headers
            for _ in range(5):
                begin = time.monotonic()
                again = chunks(server, COMPLETIONS, {**BODY, "seed": 1})
                assert [c["choices"] for c in again] == [c["choices"] for c in reference]
                assert time.monotonic() - begin < 1.0
            told = [line for line in server.lines[lines:] if "metric" in line.lower()]
            assert len(told) <= 4, told
        finally:
            exporter.resume()
        deadline = time.monotonic() + 5
        while httpx.get(server.url + "/metrics", timeout=10).status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.metric("request_count_total") == 6
        assert server.metric("generation_tokens_total") == 6 * 20
        server.wait_until_idle(2)


def test_a_burst_of_scrapes_is_answered() -> None:
    async def scrape_together(url: str, count: int) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client:
            return await asyncio.gather(*[client.get("/metrics") for _ in range(count)])

    with RunningServer("--engine", "fake", "--disable-log-requests") as server:
        chunks(server, COMPLETIONS, BODY)
        answers = asyncio.run(scrape_together(server.url, 50))
        assert {answer.status_code for answer in answers} == {200}
        assert all("inferserve_generation_tokens_total{" in answer.text for answer in answers)
