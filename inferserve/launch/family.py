"""The children that live now, and the one place to wait for any of them: their exits, their messages, our signals."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator
from dataclasses import dataclass

from inferserve.launch.child import ChildProcess, Wiring, spawn
from inferserve.launch.processes import ProcessSpec
from inferserve.launch.signals import Signals
from inferserve.protocol.messages import FromLauncher, ToLauncher


@dataclass(frozen=True)
class Exited:
    """A child ended and is collected; `how` says so for people."""

    child: ChildProcess
    how: str


@dataclass(frozen=True)
class Said:
    """A child sent a message."""

    child: ChildProcess
    message: ToLauncher


@dataclass(frozen=True)
class Signalled:
    """SIGTERM or SIGINT."""

    number: int


Happening = Exited | Said | Signalled


class Family:
    """Living children by name.

    Args:
        wiring: what each inherits.
        signals: watched together with the children.
        foreground: role whose first process keeps the terminal, '' for none.
    """

    def __init__(self, wiring: Wiring, signals: Signals, foreground: str = "") -> None:
        self._wiring = wiring
        self._signals = signals
        self._foreground = foreground
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.fileno(), selectors.EVENT_READ)
        self._living: dict[str, ChildProcess] = {}

    def __iter__(self) -> Iterator[ChildProcess]:
        return iter(tuple(self._living.values()))

    def __len__(self) -> int:
        return len(self._living)

    def start(self, spec: ProcessSpec, index: int, incarnation: int) -> ChildProcess:
        """Start one child and watch it."""
        terminal = spec.role == self._foreground and index == 0
        child = spawn(spec, index, incarnation, self._wiring, terminal=terminal)
        self._living[child.name] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.control.fileno(), selectors.EVENT_READ, child)
        return child

    def tell(self, message: FromLauncher, role: str = "") -> None:
        """Send to every living child, or to those of `role`."""
        for child in self:
            if not role or child.spec.role == role:
                child.send(message)

    def wait(self, timeout_s: float | None) -> list[Happening]:
        """What happened, after waiting at most `timeout_s` (None: for ever). A child's last words precede its exit."""
        happenings: list[Happening] = []
        ended: dict[str, ChildProcess] = {}
        for key, _ in self._selector.select(timeout_s):
            child: ChildProcess | None = key.data
            if child is None:
                happenings += [Signalled(number) for number in self._signals.received()]
            elif key.fd == child.pidfd:
                ended[child.name] = child
            else:
                happenings += self._listen(child)
        for child in ended.values():
            happenings += self._listen(child)
            happenings.append(self._bury(child))
        return happenings

    def _listen(self, child: ChildProcess) -> list[Happening]:
        messages, open_ended = child.messages()
        if not open_ended and child.control.fileno() in self._selector.get_map():
            # At EOF the descriptor would be readable for ever; the exit itself is the pidfd's to tell.
            self._selector.unregister(child.control.fileno())
        return [Said(child, message) for message in messages]

    def _bury(self, child: ChildProcess) -> Exited:
        del self._living[child.name]
        self._selector.unregister(child.pidfd)
        if child.control.fileno() in self._selector.get_map():
            self._selector.unregister(child.control.fileno())
        return Exited(child, child.reap())

    def kill(self) -> None:
        """SIGKILL to all that live; their exits still have to be waited for."""
        for child in self:
            child.kill()

    def close(self, timeout_s: float = 2.0) -> list[str]:
        """Kill and collect what is left; returns the names of those that not even that ends (stuck in a driver)."""
        self.kill()
        deadline = time.monotonic() + timeout_s
        while len(self) and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
        self._selector.close()
        return [child.name for child in self]
