"""`Neighbours`: start ONE real process of any role, and play every process around it by hand.

The process is started as the launcher starts it (`python -m inferserve.<role> --boot-fd N`, boot record in a memfd,
inherited listening sockets and segments, control socket pair). The test holds the other end of every link:

    with Neighbours("router", config) as world:
        world.wait_ready()
        world.send(EngineReady(kv_tokens=1000, max_rows=8, batch_max_tokens=64))
        commands = world.receive("engine-0", Commands)
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

from inferserve.config import schema
from inferserve.config.schema import ServerConfig
from inferserve.errors import PeerGone
from inferserve.protocol import messages
from inferserve.protocol.boot import ROLE_ENGINE, ROLE_HTTP, ROLE_ROUTER, Boot
from inferserve.protocol.messages import Fault, FromLauncher, Ready, Stop, ToLauncher
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SEGMENT, SlotTable, SlotView
from inferserve.transport.channel import Inbox, Outbox
from inferserve.transport.control import ParentControl

M = TypeVar("M")

UNIONS: dict[str, Any] = {
    "router": messages.RouterMessage,
    "engine": messages.EngineMessage,
    "detokenize": messages.DetokMessage,
    "http": messages.HttpMessage,
    "metrics": messages.MetricsMessage,
}


class Neighbours:
    """One real process called `name` (`router`, `http-0`, `engine-0`, `detokenize`, `metrics`) among hand-driven peers.

    Args:
        name: the real process; its role is the part before `-`.
        config: what it is told. `config.model.max_req_total_len` must be set (the slot table needs it).
        listen: the API listening socket for an http process.
        incarnation: as in `Boot`.
    """

    def __init__(
        self, name: str, config: ServerConfig, listen: socket.socket | None = None, incarnation: int = 0
    ) -> None:
        self.name = name
        self.config = config
        self._listen = listen
        self._incarnation = incarnation
        self._pending: dict[str, list[Any]] = {}

    def __enter__(self) -> Neighbours:
        self.run_dir = tempfile.mkdtemp(prefix="inferserve-test-")
        self._log_file = Path(self.run_dir) / "log"
        names = [ROLE_ROUTER, "detokenize", "metrics"]
        names += [f"engine-{i}" for i in range(self.config.parallel.tp)]
        names += [f"http-{i}" for i in range(self.config.http.httpserver_workers)]
        sockets = {n: _listening(self.run_dir, n) for n in names}
        self.endpoints = {n: f"ipc://{self.run_dir}/{n}" for n in names}
        self.table, segment = SlotTable.create(self.config.slots, self.config.model.max_req_total_len)
        parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ParentControl(parent)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.process = self._start(child, sockets[self.name], {SEGMENT: segment.fd})
        child.close()
        sockets.pop(self.name).close()
        self._inboxes: dict[str, Inbox[Any]] = {
            n: Inbox(self.context, UNIONS[_role(n)], s.detach(), self.endpoints[n]) for n, s in sockets.items()
        }
        self._outbox: Outbox[Any] = Outbox(self.context, UNIONS[_role(self.name)], self.endpoints[self.name])
        return self

    def _start(self, control: socket.socket, inbox: socket.socket, segments: dict[str, int]) -> subprocess.Popen[bytes]:
        listen_fd = self._listen.fileno() if self._listen else -1
        boot = Boot(
            role=_role(self.name),
            index=int(self.name.partition("-")[2] or 0),
            incarnation=self._incarnation,
            config=schema.encode(self.config),
            control_fd=control.fileno(),
            inbox_fd=inbox.fileno(),
            listen_fd=listen_fd,
            segments=segments,
            endpoints=self.endpoints,
            run_dir=self.run_dir,
        )
        fd = os.memfd_create("boot", 0)
        os.write(fd, msgspec.msgpack.encode(boot))
        inherited = [fd, boot.control_fd, boot.inbox_fd, *segments.values(), *([listen_fd] if self._listen else [])]
        command = [sys.executable, "-m", f"inferserve.{boot.role}", "--boot-fd", str(fd)]
        with self._log_file.open("wb") as log:
            process = subprocess.Popen(command, pass_fds=inherited, stderr=log)
        os.close(fd)
        return process

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if value is not None:
            print(self.log(), file=sys.stderr)
        for inbox in self._inboxes.values():
            inbox.close()
        self._outbox.close()
        self.context.destroy(linger=0)
        self.control.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    # ------------------------------------------------------------------------------------------ links to the process

    def send(self, message: object) -> None:
        """Put `message` into the process's inbox."""
        self._outbox.send(message)

    def receive(self, at: str, kind: type[M], timeout_s: float = 10.0) -> M:
        """The next message of type `kind` in the inbox of neighbour `at`, skipping others. AssertionError if none."""
        found = self.receive_all(at, kind, 1, timeout_s)
        return found[0]

    def receive_all(self, at: str, kind: type[M], count: int, timeout_s: float = 10.0) -> list[M]:
        """The next `count` messages of type `kind` at `at`."""
        deadline = time.monotonic() + timeout_s
        found: list[M] = []
        queue = self._pending.setdefault(at, [])
        while len(found) < count:
            while queue and len(found) < count:
                message = queue.pop(0)
                if isinstance(message, kind):
                    found.append(message)
            if len(found) < count:
                left = deadline - time.monotonic()
                inbox = self._inboxes[at]
                assert left > 0 and inbox.socket.poll(int(left * 1000) + 1), (
                    f"{at} got {len(found)} of {count} {kind.__name__} within {timeout_s} s"
                )
                queue += inbox.drain()
        return found

    def quiet(self, at: str, kind: type[object], seconds: float = 0.2) -> bool:
        """True if no message of type `kind` reaches `at` within `seconds`."""
        try:
            self.receive(at, kind, seconds)
        except AssertionError:
            return True
        return False

    def view(self, writer: Writer) -> SlotView:
        """The slot table as a neighbour sees it."""
        return self.table.view(writer)

    # ---------------------------------------------------------------------------------------------------- as launcher

    def tell(self, message: FromLauncher) -> None:
        """Say `message` on the control socket."""
        self.control.send(message)

    def wait_control(self, timeout_s: float = 20.0) -> ToLauncher:
        """The next message on the control socket."""
        poller = zmq.Poller()
        poller.register(self.control.fileno(), zmq.POLLIN)
        assert poller.poll(int(timeout_s * 1000)), f"{self.name} said nothing within {timeout_s} s"
        try:
            message = self.control.receive()
        except PeerGone as gone:
            raise AssertionError(f"{self.name} is gone: {self.log()}") from gone
        assert message is not None
        return message

    def wait_ready(self, timeout_s: float = 20.0) -> Ready:
        """Wait for `Ready`."""
        message = self.wait_control(timeout_s)
        assert not isinstance(message, Fault), message.reason
        assert isinstance(message, Ready)
        return message

    def log(self) -> str:
        """What the process logged so far."""
        return self._log_file.read_text()

    def stop(self, timeout_s: float = 10.0) -> int:
        """Ask the process to end if it has not; its exit status (-9 if it had to be killed)."""
        self.tell(Stop())
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def _role(name: str) -> str:
    role = name.partition("-")[0]
    return role if role in (ROLE_HTTP, ROLE_ENGINE) else name


def _listening(run_dir: str, name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(Path(run_dir) / name))
    sock.listen(128)
    sock.setblocking(False)
    return sock
