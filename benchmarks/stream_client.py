"""A client that costs little: raw sockets, no parsing while the clock runs. Chunks are kept with two times.

When a chunk was read, and when its last packet reached this socket. The kernel writes the latter down as the packet
arrives, which on one machine is inside the sender's `send`: it is the time at which the server sent.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_TIMEOUT_S = 120.0
_SO_TIMESTAMPNS = 35
"""Linux: deliver a timespec of CLOCK_REALTIME with each read (socket(7))."""
_CONTROL_BYTES = socket.CMSG_SPACE(16)
_MONOTONIC_TO_REAL_NS = time.time_ns() - time.monotonic_ns()


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """An HTTP/1.1 POST; the server closes nothing, the client does."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


@dataclass
class Arrival:
    """What one read brought: when it was read and when its last packet was sent (CLOCK_MONOTONIC, ns), what `observe`
    returned at the read, the bytes."""

    at_ns: int
    sent_ns: int
    seen: int
    data: bytes


@dataclass
class Stream:
    """One request on its own connection. `done` gets its result when the body has ended or the connection is lost."""

    request: bytes
    observe: Callable[[], int]
    done: asyncio.Future[None]
    arrivals: list[Arrival] = field(default_factory=list)
    sent_ns: int = 0

    async def run(self, port: int) -> None:
        """Connect, send the request, and return; `done` tells the end. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._socket = sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        loop.add_reader(sock, self._readable)
        self.sent_ns = time.monotonic_ns()
        sock.send(self.request)

    def _readable(self) -> None:
        now = time.monotonic_ns()
        try:
            data, extra, _, _ = self._socket.recvmsg(65536, _CONTROL_BYTES)
        except ConnectionError:
            data, extra = b"", []
        if data:
            sent = _monotonic(extra[0][2]) if extra else now
            self.arrivals.append(Arrival(now, sent, self.observe(), data))
        if not data or data.endswith(b"0\r\n\r\n"):
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
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


def _monotonic(stamp: bytes) -> int:
    """A kernel's timespec of CLOCK_REALTIME as CLOCK_MONOTONIC, ns."""
    seconds, nanoseconds = struct.unpack("qq", stamp)
    return int(seconds * 10**9 + nanoseconds) - _MONOTONIC_TO_REAL_NS


async def run_streams(port: int, requests: list[bytes], observe: Callable[[], int]) -> list[Stream]:
    """Send all requests at once, each on a new connection; returns when all have ended."""
    loop = asyncio.get_running_loop()
    streams = [Stream(request, observe, loop.create_future()) for request in requests]
    for stream in streams:
        await stream.run(port)
    await asyncio.wait_for(asyncio.gather(*(stream.done for stream in streams)), _TIMEOUT_S)
    return streams
