"""What Hypercorn's connections do differently here, where it has no setting for it. Knows no request.

HTTP/1.1 only; a client that leaves is noticed even if it has sent bytes behind its request; and the chunks of a stream
take a short way to their connection.
"""

from __future__ import annotations

import asyncio
import select
from typing import Any

import h11
from hypercorn.events import Closed
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream


def adapt_hypercorn() -> None:
    """Change how this process serves connections. To be called before the first one."""

    async def no_other_protocol(_: H11Protocol, __: object) -> None:
        """Hypercorn takes HTTP/2 in clear text, by preface or upgrade. Streams of one connection would escape the limits
        that are per connection, and clients without TLS do not ask for it."""

    async def initiate(protocol: H11Protocol) -> None:
        protocol.can_read = PausedReading(protocol)

    H11Protocol._check_protocol = no_other_protocol
    H11Protocol.initiate = initiate


class ChunkWriter:
    """Writes chunks of a response whose head has been sent, past Hypercorn's layers, which frame them in the same way (RFC
    9112, 7.1) at a third of what a token costs this process. The last chunk goes through them, and so ends the response.
    """

    __slots__ = ("_writer",)

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    @classmethod
    def behind(cls, send: Any) -> ChunkWriter | None:
        """The one of the connection that an ASGI `send` belongs to; None if it is not Hypercorn's for HTTP/1.1."""
        stream = getattr(send, "__self__", None)
        protocol = getattr(stream.send, "__self__", None) if isinstance(stream, HTTPStream) else None
        return cls(protocol.send.__self__.writer) if isinstance(protocol, H11Protocol) else None

    async def write(self, body: bytes) -> None:
        """Send one chunk, `body` not empty; waits while the client reads too slowly. Raises OSError when it has left."""
        try:
            self._writer.write(b"%x\r\n%b\r\n" % (len(body), body))
            await self._writer.drain()
        except RuntimeError as error:  # uvloop's word for a transport that is closed
            raise ConnectionResetError(str(error)) from error


class PausedReading:
    """Hypercorn's event for which a connection waits, without reading, while bytes of a next request lie behind the one
    that runs. Its end would not be seen before those bytes are read, so here the kernel is asked for it meanwhile.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._event = asyncio.Event()

    async def clear(self) -> None:
        """Reading is paused."""
        self._event.clear()

    async def set(self) -> None:
        """Reading may go on."""
        self._event.set()

    async def wait(self) -> None:
        """Return when reading may go on, or the client has left: then the stream is closed and the rest is not parsed."""
        descriptor = self._protocol.send.__self__.writer.get_extra_info("socket").fileno()
        if descriptor < 0 or await self._hung_up(descriptor):
            self._protocol.connection = _Left()
            await self._protocol.handle(Closed())

    async def _hung_up(self, descriptor: int) -> bool:
        loop = asyncio.get_running_loop()
        with select.epoll() as hangups:
            hangups.register(descriptor, select.EPOLLRDHUP)
            loop.add_reader(hangups.fileno(), self._event.set)
            try:
                await self._event.wait()
            finally:
                loop.remove_reader(hangups.fileno())
            return bool(hangups.poll(0))


class _Left:
    """In place of h11's connection when the client has left: nothing can be read or written any more."""

    they_are_waiting_for_100_continue = False
    our_state = None
    their_state = h11.ERROR
    trailing_data = (b"", True)

    def receive_data(self, data: bytes) -> None:
        """Nobody waits for an answer to it."""

    def next_event(self) -> type[h11.NEED_DATA]:
        """Nothing."""
        return h11.NEED_DATA

    def send(self, _: object) -> bytes:
        """Refused, as h11 does."""
        raise h11.LocalProtocolError("the client has left")
