"""Signals as events, from the first line of main.

While the launcher works in a straight line (resolving, converting a model), a signal raises `Interrupted` there; once
the supervisor loops, signals are bytes on a descriptor that it waits on with everything else.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType, TracebackType

_WATCHED = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """SIGTERM and SIGINT wait while the block runs; a process started in it has them blocked until it lets them in."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interrupted(BaseException):
    """SIGTERM or SIGINT arrived before anything was started."""


class Signals:
    """Handlers for the life of a `with` block. SIGHUP is ignored: a lost terminal does not end a service."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._raising = True

    def __enter__(self) -> Signals:
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _WATCHED:
            signal.signal(number, self._handle)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number in _WATCHED:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._raising:
            self._raising = False
            raise Interrupted(signal.Signals(number).name)

    def collect(self) -> None:
        """From now on signals only wake `fileno()`."""
        self._raising = False

    def fileno(self) -> int:
        """Readable when `received()` has something."""
        return self._reader.fileno()

    def received(self) -> list[int]:
        """Numbers of the watched signals that arrived, in order."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = self._reader.recv(256)
        return [number for number in data if number in _WATCHED]
