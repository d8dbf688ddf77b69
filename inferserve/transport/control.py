"""The control socket between launcher and child: SOCK_SEQPACKET, one msgpack message a packet, EOF = peer is gone."""

from __future__ import annotations

import contextlib
import socket

from inferserve.errors import PeerGone
from inferserve.protocol.codec import Codec
from inferserve.protocol.messages import FromLauncher, ToLauncher

_PACKET_BYTES = 64 * 1024


class ChildControl:
    """The child's end."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._out: Codec[ToLauncher] = Codec(ToLauncher)
        self._in: Codec[FromLauncher] = Codec(FromLauncher)

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    def gone(self) -> bool:
        """True when the launcher has closed its end; does not block and takes nothing."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, message: ToLauncher) -> None:
        """Tell the launcher; silent when it is gone (the next `receive` says so)."""
        with contextlib.suppress(OSError):
            self._socket.send(self._out.encode(message))

    def receive(self) -> FromLauncher:
        """The next message; blocks. Raises PeerGone at EOF: the child must end."""
        try:
            packet = self._socket.recv(_PACKET_BYTES)
        except OSError as error:
            raise PeerGone("launcher") from error
        if not packet:
            raise PeerGone("launcher")
        return self._in.decode(packet)


class ParentControl:
    """The launcher's end; non-blocking, for an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setblocking(False)
        self._out: Codec[FromLauncher] = Codec(FromLauncher)
        self._in: Codec[ToLauncher] = Codec(ToLauncher)

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    def send(self, message: FromLauncher) -> None:
        """Tell the child; silent when it is gone (its exit is noticed elsewhere)."""
        with contextlib.suppress(OSError):
            self._socket.send(self._out.encode(message))

    def receive(self) -> ToLauncher | None:
        """The next message, None when there is none now. Raises PeerGone at EOF."""
        try:
            packet = self._socket.recv(_PACKET_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerGone("child") from error
        if not packet:
            raise PeerGone("child")
        return self._in.decode(packet)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
