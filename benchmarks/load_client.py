"""One HTTP/1.1 connection that sends requests one after the other and keeps what comes back with the time of each read.

Nothing is parsed while the clock runs, except where a response ends: the client must not be what is measured. Works
against any server; `load_events` makes sense of the bytes afterwards.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass
class Exchange:
    """A request and the raw answer to it. Times are CLOCK_MONOTONIC, ns.

    Attributes:
        sent_ns: just before the request was written; before connecting, if that was needed.
        reads: (time, bytes) of each read.
        error: why the answer is not whole; '' if it is.
        cut: the run ended before the answer did.
    """

    sent_ns: int = 0
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    error: str = ""
    cut: bool = False


class Target:
    """Where requests go: `base` is `http://host:port/v1`; only plain HTTP is spoken."""

    def __init__(self, base: str) -> None:
        parts = urlsplit(base)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{base}: not an http:// URL")
        self.host, self.port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")

    def request(self, path: str, body: dict[str, Any]) -> bytes:
        """A POST of `body` to `base` + `path`."""
        content = json.dumps(body).encode()
        return (
            f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        ).encode() + content


class _Wire(asyncio.Protocol):
    """The socket's side: collects reads into the current exchange and ends it."""

    def __init__(self) -> None:
        self.open = True
        self._exchange = Exchange()
        self._done: asyncio.Future[None] | None = None
        self._body_left = -1
        """Bytes to go of a body with a length; -1 for a chunked one, or before the head is known."""
        self._head = b""
        self._in_head = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def begin(self, exchange: Exchange, done: asyncio.Future[None]) -> None:
        """The next bytes belong to `exchange`."""
        self._exchange, self._done = exchange, done
        self._head, self._in_head, self._body_left, self._tail = b"", True, -1, b""

    def data_received(self, data: bytes) -> None:
        self._exchange.reads.append((time.monotonic_ns(), data))
        if self._in_head:
            data = self._after_head(data)
            if self._in_head:
                return
        if self._body_left >= 0:
            self._body_left -= len(data)
            if self._body_left <= 0:
                self._end("")
        elif data.endswith(_LAST_CHUNK) or (len(data) < len(_LAST_CHUNK) and (self._tail + data).endswith(_LAST_CHUNK)):
            self._end("")
        else:
            self._tail = (self._tail + data if len(data) < len(_LAST_CHUNK) else data)[-len(_LAST_CHUNK) :]

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end(f"connection lost ({type(exc).__name__})" if exc else "connection closed before the end")

    def _after_head(self, data: bytes) -> bytes:
        """What of `data` is body; keeps the head until it is whole."""
        self._head += data
        head, end, body = self._head.partition(b"\r\n\r\n")
        if not end:
            return b""
        self._in_head = False
        self._tail = b"\r\n"  # the first chunk may be the last one
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length":
                self._body_left = int(value)
        return body

    def _end(self, error: str) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            self._exchange.error = error
            done.set_result(None)


class Connection:
    """A client's connection: opened when first needed, and again after it was lost."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._wire: _Wire | None = None

    async def send(self, request: bytes, exchange: Exchange) -> None:
        """Send and wait for the whole answer, or for what prevents it: `exchange` tells. Raises only CancelledError."""
        exchange.sent_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._converse(request, exchange)
        except TimeoutError:
            exchange.error = f"no end after {self._timeout_s:g} s"
        except OSError as error:
            exchange.error = f"cannot connect ({error.strerror or error})"
        except asyncio.CancelledError:
            exchange.cut = True
            self.close()
            raise
        if exchange.error:
            self.close()

    async def _converse(self, request: bytes, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        if self._wire is None or not self._wire.open:
            _, self._wire = await loop.create_connection(_Wire, self._target.host, self._target.port)
        done: asyncio.Future[None] = loop.create_future()
        self._wire.begin(exchange, done)
        self._wire.transport.write(request)
        await done

    def close(self) -> None:
        """Give the connection up."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.transport.abort()
