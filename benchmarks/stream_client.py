"""A client that costs little: raw sockets, no parsing while the clock runs. Chunks are kept with their arrival time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

_TIMEOUT_S = 120.0


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """An HTTP/1.1 POST; the server closes nothing, the client does."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


@dataclass
class Arrival:
    """What one read brought: CLOCK_MONOTONIC in ns, what `observe` returned then, the bytes."""

    at_ns: int
    seen: int
    data: bytes


@dataclass
class Stream(asyncio.Protocol):
    """One request on its own connection. `done` gets its result when the body has ended or the connection is lost."""

    request: bytes
    observe: Callable[[], int]
    done: asyncio.Future[None]
    arrivals: list[Arrival] = field(default_factory=list)
    sent_ns: int = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.sent_ns = time.monotonic_ns()
        self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append(Arrival(time.monotonic_ns(), self.observe(), data))
        if data.endswith(b"0\r\n\r\n"):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.done.done():
            self.done.set_result(None)

    def events(self) -> list[tuple[Arrival, str]]:
        """(arrival of its last byte, payload) of each SSE event. Raises ValueError for another answer than 200."""
        whole = b"".join(a.data for a in self.arrivals)
        head, _, body = whole.partition(b"\r\n\r\n")
        if b" 200 " not in head[:16]:
            raise ValueError(whole[:500].decode("utf-8", "replace"))
        offset = len(head) + 4
        ends = []
        total = 0
        for arrival in self.arrivals:
            total += len(arrival.data)
            ends.append((total, arrival))
        out = []
        position = 0
        while (start := body.find(b"data: ", position)) >= 0:
            end = body.index(b"\n\n", start)
            arrival = next(a for limit, a in ends if limit >= offset + end + 2)
            out.append((arrival, body[start + 6 : end].decode()))
            position = end
        return out


def _same(stream: Stream) -> Stream:
    return stream


async def run_streams(port: int, requests: list[bytes], observe: Callable[[], int]) -> list[Stream]:
    """Send all requests at once, each on a new connection; returns when all have ended."""
    loop = asyncio.get_running_loop()
    streams = [Stream(request, observe, loop.create_future()) for request in requests]
    for stream in streams:
        await loop.create_connection(partial(_same, stream), "127.0.0.1", port)
    await asyncio.wait_for(asyncio.gather(*(stream.done for stream in streams)), _TIMEOUT_S)
    return streams
