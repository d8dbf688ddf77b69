"""`Inbox[T]` (PULL, bound on an inherited descriptor) and `Outbox[T]` (PUSH, connected): the only users of ZMQ.

Each process has one inbox. A message handed to an outbox whose peer is dead waits in the queue until the peer's
next incarnation binds the same descriptor, or is dropped with it; whoever restarts a peer resends.
"""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

import zmq

from inferserve.errors import BadMessage, PeerGone
from inferserve.protocol.codec import MAX_FRAME_BYTES, Codec

log = logging.getLogger(__name__)
T = TypeVar("T")

SEND_QUEUE = 100_000


class Inbox(Generic[T]):
    """Receive the union `T`. Not thread-safe: one reader."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], union: object, listen_fd: int, endpoint: str) -> None:
        self._codec: Codec[T] = Codec(union)
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        if listen_fd >= 0:
            self._socket.setsockopt(zmq.USE_FD, listen_fd)
        self._socket.bind(endpoint)
        self.bad_frames = 0

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a `zmq.Poller`."""
        return self._socket

    def fileno(self) -> int:
        """Edge-triggered descriptor for an event loop: after it is readable, `drain()` until it returns nothing."""
        return int(self._socket.getsockopt(zmq.FD))

    def drain(self, limit: int = 1024) -> list[T]:
        """All messages that are there now, at most `limit`, without waiting. Frames that do not decode are counted."""
        out: list[T] = []
        receive, decode = self._socket.recv, self._codec.decode
        for _ in range(limit):
            try:
                frame = receive(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                out.append(decode(frame))
            except BadMessage as error:
                self.bad_frames += 1
                log.warning("dropped a frame that does not decode: %s", error)
        return out

    def close(self) -> None:
        """Close at once."""
        self._socket.close(0)


class Outbox(Generic[T]):
    """Send the union `T` to one inbox. Never blocks."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], union: object, endpoint: str, queue: int = SEND_QUEUE
    ) -> None:
        self._codec: Codec[T] = Codec(union)
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, queue)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.connect(endpoint)
        self._endpoint = endpoint

    def send(self, message: T) -> None:
        """Queue `message`; raises PeerGone when the queue (100,000 unless told otherwise) is full."""
        self.send_frame(self._codec.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Queue an already encoded message (for a message that goes to several peers)."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again as error:
            raise PeerGone(f"{self._endpoint} takes no messages") from error

    def close(self) -> None:
        """Close, giving queued messages 200 ms."""
        self._socket.close()
