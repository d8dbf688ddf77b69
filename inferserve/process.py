"""What every child process does at its border: read `Boot`, answer to the launcher alone, end typed.

A process package has a `__main__.py` of two lines that calls `run(body)`; `body(child)` builds its parts, calls
`child.ready()` and loops. Signals are the launcher's business: children ignore SIGINT and SIGTERM, end on `Stop`, on
EOF of the control socket, or by PDEATHSIG when the launcher is killed.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq

from inferserve.config import schema
from inferserve.config.machine import process_age
from inferserve.errors import ConfigError, PeerGone
from inferserve.log import event, setup
from inferserve.protocol.boot import Boot
from inferserve.protocol.messages import Fault, FromLauncher, Ready, ServiceReady, Stop
from inferserve.transport.channel import SEND_QUEUE, Inbox, Outbox
from inferserve.transport.control import ChildControl

log = logging.getLogger(__name__)
T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
EXIT_CONFIG = 2
EXIT_FAULT = 70


class StopRequested(Exception):
    """The launcher said `Stop` or is gone."""


class Child:
    """A child process: its boot record, config, control socket and ZMQ context."""

    def __init__(self, boot: Boot) -> None:
        self.boot = boot
        self.config = schema.decode(boot.config)
        self.control = ChildControl(boot.control_fd)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.service_ready = False
        self._outboxes: dict[str, Outbox] = {}

    def inbox(self, union: object) -> Inbox:
        """This process's inbox, decoding `union`."""
        return Inbox(self.context, union, self.boot.inbox_fd, self.boot.endpoints[self.boot.name])

    def outbox(self, name: str, union: object, queue: int = SEND_QUEUE) -> Outbox:
        """The channel to the process called `name` (`router`, `engine-0`, `http-1`, …), holding `queue` unsent messages.

        One for each name, however often it is asked for: what this process sends to a peer arrives in order.
        """
        if name not in self._outboxes:
            self._outboxes[name] = Outbox(self.context, union, self.boot.endpoints[name], queue)
        return self._outboxes[name]

    def ready(self, **facts: str | int | float) -> None:
        """Tell the launcher that this process serves. Freezes start-up objects out of the garbage collector."""
        gc.collect()
        gc.freeze()
        seconds = round(process_age(), 3)
        event(log, "ready", seconds=seconds, **facts)
        self.control.send(Ready({"seconds": seconds, **facts}))

    def handle_control(self) -> FromLauncher | None:
        """Read one control message. Raises StopRequested on `Stop` or EOF; returns what the caller must act on."""
        try:
            message = self.control.receive()
        except PeerGone as gone:
            raise StopRequested from gone
        if isinstance(message, Stop):
            raise StopRequested
        if isinstance(message, ServiceReady):
            self.service_ready = True
        return message

    def await_stop(self, seconds: float) -> None:
        """Give the launcher `seconds` to say Stop; StopRequested if it does."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.control.fileno()], [], [], left)[0]:
                self.handle_control()


class Waiter(Generic[T]):
    """Wait on the inbox and the control socket together, for processes with a plain loop."""

    def __init__(self, child: Child, inbox: Inbox[T]) -> None:
        self._child = child
        self._inbox = inbox
        self._poller = zmq.Poller()
        self._poller.register(inbox.socket, zmq.POLLIN)
        self._poller.register(child.control.fileno(), zmq.POLLIN)

    def wait(self, timeout_s: float | None) -> list[T]:
        """Messages that are there, after waiting at most `timeout_s` (None: for ever). Raises StopRequested."""
        ready = self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000)))
        if not ready:
            return []
        for source, _ in ready:
            if source is not self._inbox.socket:
                self._child.handle_control()
        return self._inbox.drain()


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def read_boot(argv: list[str]) -> Boot:
    """The Boot record from `--boot-fd N`."""
    fd = int(argv[argv.index("--boot-fd") + 1])
    with os.fdopen(fd, "rb") as source:
        source.seek(0)
        return msgspec.msgpack.decode(source.read(), type=Boot)


def run(body: Callable[[Child], None]) -> int:
    """Process main: returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The launcher started us with both blocked: neither may end a process that is still importing.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    _die_with_parent()
    child = Child(read_boot(sys.argv))
    if child.control.gone():
        return 0  # the launcher died before this process asked to die with it
    setup(child.boot.name, child.config.log.log_level, child.config.log.log_format)
    try:
        body(child)
    except StopRequested:
        return 0
    except ConfigError as error:
        child.control.send(Fault(str(error), config=True, exit_code=EXIT_CONFIG))
        return EXIT_CONFIG
    except Exception as error:
        log.exception("%s cannot go on", child.boot.name)
        child.control.send(Fault(f"{type(error).__name__}: {error}"))
        return EXIT_FAULT
    return 0
