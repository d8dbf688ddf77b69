"""A child process that obeys a script: `python -m tests.fakes.child --boot-fd N`, for tests of the launcher.

FAKE_CHILDREN in the environment is JSON: process name to settings of `Script`. What the child sees of the launcher is
written line by line to `<name>.log` in the folder FAKE_CHILDREN_LOG.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from inferserve.errors import ConfigError
from inferserve.process import Child, Waiter, run
from inferserve.protocol.boot import ROLE_HTTP, ROLE_ROUTER
from inferserve.protocol.messages import Drain, Drained, Opened, RouterMessage, ServiceReady, WorkerLost


@dataclass(frozen=True)
class Script:
    """How one child behaves; `die_after` counts from ServiceReady."""

    ready_after: float = 0.0
    fault: str = ""
    config_fault: str = ""
    exit_at_start: int = -1
    die_after: float = -1.0
    drain_takes: float = 0.0
    ignores_stop: bool = False
    grandchild: bool = False


def _script(child: Child) -> Script:
    scripts = json.loads(os.environ.get("FAKE_CHILDREN", "{}"))
    return Script(**scripts.get(child.boot.name, {}))


def _note(child: Child, line: str) -> None:
    with (Path(os.environ["FAKE_CHILDREN_LOG"]) / f"{child.boot.name}.log").open("a") as log:
        log.write(line + "\n")


def _start(child: Child, script: Script) -> None:
    """Everything up to Ready."""
    if script.grandchild:
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        _note(child, f"grandchild {grandchild.pid}")
    if script.exit_at_start >= 0:
        os._exit(script.exit_at_start)
    if script.fault:
        raise RuntimeError(script.fault)
    if script.config_fault:
        raise ConfigError(script.config_fault)
    time.sleep(script.ready_after)
    child.ready()


def body(child: Child) -> None:
    """Obey the script until the launcher says Stop."""
    script = _script(child)
    _note(child, f"start {child.boot.incarnation} {os.getpid()}")
    inbox = child.inbox(RouterMessage)
    waiter = Waiter(child, inbox)
    _start(child, script)
    served_at, drained_at, told = math.inf, -1.0, False
    handle = child.handle_control

    def handle_and_note() -> object:
        nonlocal served_at, drained_at
        message = handle()
        _note(child, type(message).__name__)
        if isinstance(message, ServiceReady):
            served_at = time.monotonic()
            if child.boot.role == ROLE_HTTP:
                child.control.send(Opened())
        if isinstance(message, Drain):
            drained_at = time.monotonic() + script.drain_takes
        return message

    child.handle_control = handle_and_note  # type: ignore[method-assign,assignment]
    while True:
        if 0 <= script.die_after < time.monotonic() - served_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if 0 <= drained_at <= time.monotonic() and not told:
            told = True
            child.control.send(Drained())
        try:
            for message in waiter.wait(0.02):
                if isinstance(message, WorkerLost) and child.boot.role == ROLE_ROUTER:
                    _note(child, f"lost {message.first} {message.last}")
        except Exception:
            _note(child, "stop")
            while script.ignores_stop:
                time.sleep(1)
            raise


if __name__ == "__main__":
    sys.exit(run(body))
