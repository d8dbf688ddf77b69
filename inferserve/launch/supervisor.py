"""The supervisor: waits on all children at once and decides what their messages, deaths and our signals mean.

States go one way: starting → serving → draining → stopping. Everything is an event on a descriptor or a deadline; there
is no polling and one thread. It knows nothing of requests.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from inferserve.launch.child import ChildProcess
from inferserve.launch.family import Exited, Family, Happening, Said, Signalled
from inferserve.launch.processes import ProcessSpec
from inferserve.log import event
from inferserve.protocol.boot import ROLE_HTTP, process_name
from inferserve.protocol.messages import Drain, Drained, Fault, Opened, Ready, ServiceReady, Stop

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_FAULT = 70


@dataclass(frozen=True)
class Timing:
    """Deadlines in seconds.

    Attributes:
        drain: what running streams may take after SIGTERM; `drain_slack` more before we stop waiting for the report.
        stop: from Stop to SIGKILL.
        backoff: before the first, second, third restart of one process.
        deaths: this many of one process within `window` end the service.
        notice: how often a slow start is reported.
    """

    drain: float = 60.0
    drain_slack: float = 0.5
    stop: float = 1.5
    backoff: tuple[float, ...] = (0.1, 0.5, 2.0)
    deaths: int = 3
    window: float = 60.0
    notice: float = 15.0


class State(StrEnum):
    """Where the service is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


@dataclass(frozen=True)
class Hooks:
    """What the owner wants to know.

    Attributes:
        ready: every process is ready, and all http workers take requests; called once.
        worker_lost: an http worker died, by index; called before it is restarted.
        changed: processes or state changed.
    """

    ready: Callable[[], None]
    worker_lost: Callable[[int], None]
    changed: Callable[[State, Family], None]


class Timers:
    """Callbacks at times of the monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Run `call` once, `seconds` from now."""
        heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._order), call))

    def timeout(self) -> float | None:
        """Seconds until the next one, None when there is none."""
        return max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None

    def fire(self) -> None:
        """Run those that are due."""
        while self._heap and self._heap[0][0] <= time.monotonic():
            heapq.heappop(self._heap)[2]()


class Supervisor:
    """Runs one service from its first process to its last."""

    def __init__(self, family: Family, hooks: Hooks, timing: Timing) -> None:
        self._family = family
        self._hooks = hooks
        self._timing = timing
        self._timers = Timers()
        self._deaths: dict[str, list[float]] = {}
        self._state = State.STARTING
        self._announced = False
        self._killed = False
        self._exit_code = EXIT_OK
        self._last_words = ""

    def run(self, table: Sequence[tuple[ProcessSpec, int]]) -> int:
        """Start `table` (rows with how many of each), supervise, return the exit status."""
        try:
            for spec, count in table:
                for index in range(count):
                    self._start(spec, index, 1)
            event(log, "processes started", count=len(self._family))
            self._timers.after(self._timing.notice, self._notice)
            while self._state is not State.STOPPING or (len(self._family) and not self._killed):
                for happening in self._family.wait(self._timers.timeout()):
                    self._handle(happening)
                self._timers.fire()
        finally:
            stuck = self._family.close()
        if stuck:
            log.error("not even SIGKILL ends %s", ", ".join(stuck))
        if self._last_words:
            log.error(self._last_words)
        else:
            event(log, "stopped")
        return self._exit_code

    def _handle(self, happening: Happening) -> None:
        match happening:
            case Said(child, Ready()):
                self._ready(child)
            case Said(child, Fault() as fault):
                self._fault(child, fault)
            case Said(child, Opened()):
                child.opened = True
                self._announce()
            case Said(child, Drained()):
                child.drained = True
                self._check_drained()
            case Exited(child, how):
                self._exited(child, how)
            case Signalled(number):
                self._signalled(number)

    # ------------------------------------------------------------------------------------------------ start

    def _start(self, spec: ProcessSpec, index: int, incarnation: int) -> None:
        try:
            self._family.start(spec, index, incarnation)
        except OSError as error:  # no descriptors, processes or memory left
            self._stop(EXIT_FAULT, f"{process_name(spec.role, index)} cannot be started: {error}")
        self._hooks.changed(self._state, self._family)

    def _ready(self, child: ChildProcess) -> None:
        child.ready = True
        if self._state is State.SERVING:
            child.send(ServiceReady())
        elif self._state is State.STARTING and all(c.ready for c in self._family):
            self._enter(State.SERVING)
            self._family.tell(ServiceReady())

    def _announce(self) -> None:
        """Say that the service serves, once nobody who hears it can be refused for being early."""
        workers = [child for child in self._family if child.spec.role == ROLE_HTTP]
        if self._state is State.SERVING and not self._announced and all(child.opened for child in workers):
            self._announced = True
            self._hooks.ready()

    def _notice(self) -> None:
        if self._state is State.STARTING:
            waiting = ",".join(c.name for c in self._family if not c.ready)
            event(log, "still starting", waiting_for=waiting)
            self._timers.after(self._timing.notice, self._notice)

    # ---------------------------------------------------------------------------------------------- failures

    def _fault(self, child: ChildProcess, fault: Fault) -> None:
        child.fault = fault
        if self._state is State.STARTING or not child.spec.restart:
            self._stop(EXIT_CONFIG if fault.config else EXIT_FAULT, f"{child.name}: {fault.reason}")

    def _exited(self, child: ChildProcess, how: str) -> None:
        self._hooks.changed(self._state, self._family)
        if self._state is State.STOPPING:
            return
        why = f"{child.name} died: {child.fault.reason if child.fault else how}"
        if self._state is State.STARTING or not child.spec.restart:
            self._stop(EXIT_FAULT, f"{why}; the service ends")
            return
        event(log, why, logging.ERROR, incarnation=child.boot.incarnation)
        if child.spec.role == ROLE_HTTP:
            self._hooks.worker_lost(child.boot.index)
        if self._state is State.DRAINING:
            self._check_drained()
        else:
            self._restart_later(child)

    def _restart_later(self, child: ChildProcess) -> None:
        now = time.monotonic()
        deaths = [t for t in self._deaths.get(child.name, []) if now - t < self._timing.window]
        deaths.append(now)
        self._deaths[child.name] = deaths
        if len(deaths) >= self._timing.deaths:
            why = f"{child.name} died {len(deaths)} times within {self._timing.window:g} s"
            self._stop(EXIT_FAULT, f"{why}; the service ends")
            return
        wait = self._timing.backoff[min(len(deaths), len(self._timing.backoff)) - 1]
        self._timers.after(wait, partial(self._restart, child))

    def _restart(self, dead: ChildProcess) -> None:
        if self._state is State.SERVING:
            self._start(dead.spec, dead.boot.index, dead.boot.incarnation + 1)

    # ------------------------------------------------------------------------------------------ drain and stop

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._state is State.STOPPING:
            self._kill()
        elif number == signal.SIGTERM and self._state is State.SERVING:
            event(log, "draining", signal=name, seconds=self._timing.drain)
            self._enter(State.DRAINING)
            self._family.tell(Drain(self._timing.drain), ROLE_HTTP)
            self._timers.after(self._timing.drain + self._timing.drain_slack, self._drain_over)
            self._check_drained()
        else:
            event(log, "stopping", signal=name, was=str(self._state))
            self._stop(EXIT_OK)

    def _check_drained(self) -> None:
        if self._state is State.DRAINING and all(
            c.drained for c in self._family if c.spec.role == ROLE_HTTP and c.ready
        ):
            event(log, "drained")
            self._stop(EXIT_OK)

    def _drain_over(self) -> None:
        if self._state is State.DRAINING:
            event(log, "drain deadline passed; stopping", logging.WARNING)
            self._stop(EXIT_OK)

    def _stop(self, exit_code: int, last_words: str = "") -> None:
        """Tell everybody to end; the first reason counts, and `run` logs it last. Stragglers are killed after a while."""
        if self._state is State.STOPPING:
            return
        self._exit_code, self._last_words = exit_code, last_words
        self._enter(State.STOPPING)
        self._family.tell(Stop())
        self._timers.after(self._timing.stop, self._kill)

    def _kill(self) -> None:
        """Patience is over: `run` ends, and collects what it can."""
        self._killed = True

    def _enter(self, state: State) -> None:
        self._state = state
        self._hooks.changed(state, self._family)
