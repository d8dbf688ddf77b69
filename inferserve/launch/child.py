"""One child process as its parent sees it: started with its boot record, watched by pidfd, spoken to by control socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field

import msgspec

from inferserve.config import env
from inferserve.config.machine import interpreter
from inferserve.errors import BadMessage, PeerGone
from inferserve.launch.processes import ProcessSpec
from inferserve.launch.signals import held
from inferserve.protocol.boot import Boot
from inferserve.protocol.messages import Fault, FromLauncher, ToLauncher
from inferserve.transport.control import ParentControl


@dataclass(frozen=True)
class Wiring:
    """What children inherit: the encoded config, and descriptors by name.

    Attributes:
        config: `config.schema.encode()`.
        run_dir: this boot's directory.
        listen_fd: the API socket.
        inboxes: process name to listening unix socket.
        endpoints: process name to ZMQ address.
        segments: segment name to memfd.
    """

    config: bytes
    run_dir: str
    listen_fd: int = -1
    inboxes: dict[str, int] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)
    segments: dict[str, int] = field(default_factory=dict)


class ChildProcess:
    """A running child. `fault` is what it said before it ended."""

    def __init__(
        self, spec: ProcessSpec, boot: Boot, popen: subprocess.Popen[bytes], control: ParentControl, *, own_group: bool
    ) -> None:
        self.spec = spec
        self.boot = boot
        self.popen = popen
        self.control = control
        self.pidfd = os.pidfd_open(popen.pid)
        self.ready = False
        self.opened = False
        self.drained = False
        self.fault: Fault | None = None
        self._own_group = own_group

    @property
    def name(self) -> str:
        """As in logs and endpoints."""
        return self.boot.name

    def send(self, message: FromLauncher) -> None:
        """Tell the child; silent when it is gone."""
        self.control.send(message)

    def messages(self) -> tuple[list[ToLauncher], bool]:
        """What it said since the last call, and whether it may say more (False at EOF).

        A frame that does not decode is a fault of the child.
        """
        out: list[ToLauncher] = []
        try:
            while (message := self.control.receive()) is not None:
                out.append(message)
        except PeerGone:
            return out, False
        except BadMessage as error:
            out.append(Fault(f"sent nonsense to the launcher: {error}"))
        return out, True

    def kill(self) -> None:
        """SIGKILL to it and, where it leads its own group, to whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._own_group:
                os.killpg(self.popen.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> str:
        """Collect a child that has ended (or kill it first); returns how it ended, for people."""
        self.kill()  # a zombie keeps its group id from being reused, so this reaches only its own descendants
        status = self.popen.wait()
        os.close(self.pidfd)
        self.control.close()
        if status >= 0:
            return f"exit status {status}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
        return f"killed by signal {-status}"


def spawn(spec: ProcessSpec, index: int, incarnation: int, wiring: Wiring, *, terminal: bool = False) -> ChildProcess:
    """Start one child. Call it from the main thread: PDEATHSIG follows the thread that forked.

    Args:
        spec: its row in the process table.
        index: which one of that role.
        incarnation: 1 for the first, rising with each restart.
        wiring: descriptors; the child gets those that its row names.
        terminal: leave it in the launcher's session with standard input, for a debugger.
    """
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    boot = Boot(
        role=spec.role,
        index=index,
        incarnation=incarnation,
        config=wiring.config,
        control_fd=child_end.fileno(),
        listen_fd=wiring.listen_fd if spec.listens else -1,
        segments={name: wiring.segments[name] for name in spec.segments},
        endpoints=wiring.endpoints,
        run_dir=wiring.run_dir,
    )
    boot = msgspec.structs.replace(boot, inbox_fd=wiring.inboxes.get(boot.name, -1))
    boot_fd = os.memfd_create("inferserve-boot", os.MFD_CLOEXEC)
    try:
        os.write(boot_fd, msgspec.msgpack.encode(boot))
        fds = (boot_fd, boot.control_fd, boot.inbox_fd, boot.listen_fd, *boot.segments.values())
        with held():  # Ctrl-C in a terminal and a stop by the init system reach children too
            # A group each, so that Ctrl-C goes to the launcher alone, but one session: Linux shares the processor out
            # between sessions (autogroup), and events came up to 1 ms later when each process was one of its own.
            popen = subprocess.Popen(
                [*interpreter(), "-m", spec.module, "--boot-fd", str(boot_fd)],
                pass_fds=[fd for fd in fds if fd >= 0],
                stdin=None if terminal else subprocess.DEVNULL,
                process_group=None if terminal else 0,
                env=env.child_environment(one_thread=not spec.threads),
            )
    except OSError:
        parent_end.close()
        raise
    finally:
        os.close(boot_fd)
        child_end.close()
    return ChildProcess(spec, boot, popen, ParentControl(parent_end), own_group=not terminal)
