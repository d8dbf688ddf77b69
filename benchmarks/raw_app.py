"""The yardstick of `benchmarks.chain`: an ASGI app on Hypercorn with uvloop that sends one ready-made event a token.

Its arguments are FD STEP_MS: it listens on the inherited socket FD; `POST /TOKENS` streams TOKENS events, one
every STEP_MS, all streams woken by one timer as a step of an engine would.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop
from hypercorn.asyncio import serve
from hypercorn.config import Config

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1700000000,'
    b'"model":"SmolLM2-135M-Instruct","choices":[{"index":0,"text":" hello","logprobs":null,"finish_reason":null}]}\n\n'
)

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Ticker:
    """Wakes everybody who waits once a period."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def run(self, period_s: float) -> None:
        """Tick for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += period_s
            await asyncio.sleep(due - loop.time())
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def tick(self) -> asyncio.Future[None]:
        """Done at the next tick."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future


class App:
    """The ASGI callable."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker = ticker

    async def __call__(self, scope: dict[str, Any], _: Callable[[], Awaitable[Any]], send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _step in range(int(scope["path"].strip("/"))):
            await self._ticker.tick()
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def main(fd: int, step_ms: float) -> None:
    """Serve until killed."""
    config = Config()
    config.bind = [f"fd://{fd}"]
    config.loglevel = "warning"
    ticker = Ticker()
    ticking = asyncio.create_task(ticker.run(step_ms / 1000))
    await serve(App(ticker), config)  # type: ignore[arg-type]
    ticking.cancel()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2])))
