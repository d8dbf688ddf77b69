"""What the HTTP benchmarks share: `inferserve serve` as a process tree, CPU time of processes, facts of the machine."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from inferserve.config.env import RUN_DIR

_TICK = os.sysconf("SC_CLK_TCK")
_LIBRARIES = ("hypercorn", "uvloop", "fastapi", "starlette", "msgspec", "pyzmq", "tokenizers", "numpy")


def cpu_seconds(pid: int) -> float:
    """User + system time of a process so far (proc(5): fields 14 and 15 of /proc/PID/stat), without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def machine() -> dict[str, Any]:
    """Where a figure was measured."""
    model = [x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return {
        "cpu": model[0] if model else platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "realtime_priority": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "versions": {name: version(name) for name in _LIBRARIES},
    }


def write_result(path: str, result: dict[str, Any]) -> None:
    """Write machine, command and figures as JSON."""
    whole = {"machine": machine(), "command": " ".join([Path(sys.argv[0]).stem, *sys.argv[1:]]), **result}
    Path(path).write_text(json.dumps(whole, indent=1) + "\n")


class Server:
    """`inferserve serve` on a free port, as a context manager. Everything it logs goes to `log_path`."""

    def __init__(self, *flags: str, timeout_s: float = 60.0, log: Path | None = None) -> None:
        self._flags = flags
        self._timeout_s = timeout_s
        self._log = log

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory(prefix="inferserve-bench-")
        self.log_path = self._log or Path(self._folder.name) / "log"
        command = [sys.executable, "-m", "inferserve", "serve", "--port", "0", *self._flags]
        environment = {**os.environ, RUN_DIR: str(Path(self._folder.name) / "run")}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        began = time.monotonic()
        while self._state() != "serving":
            if self._process.poll() is not None or time.monotonic() - began > self._timeout_s:
                self._process.kill()  # its children die with it
                raise RuntimeError(f"the server did not start:\n{self.log_path.read_text()}")
            time.sleep(0.02)
        self.start_seconds = time.monotonic() - began
        return self

    def _status(self) -> dict[str, Any]:
        for path in Path(self._folder.name).glob("run/boot-*/status.json"):
            status: dict[str, Any] = json.loads(path.read_text())
            return status
        return {}

    def _state(self) -> str:
        return str(self._status().get("state", ""))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if value is not None:
            print(self.log_path.read_text()[-4000:], file=sys.stderr)
        self._folder.cleanup()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(str(self._status()["url"]).rpartition(":")[2])

    @property
    def pids(self) -> dict[str, int]:
        """Process name (`launcher`, `http-0`, `router`, …) to pid."""
        status = self._status()
        return {"launcher": status["launcher"], **{n: p["pid"] for n, p in status["processes"].items()}}

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each process so far; {} if the server has ended."""
        try:
            return {name: cpu_seconds(pid) for name, pid in self.pids.items()}
        except (KeyError, OSError):
            return {}

    def slots_memfd(self) -> str:
        """Path to the slot table's memory, to read the engine's own time stamps."""
        folder = Path(f"/proc/{self._process.pid}/fd")
        for entry in folder.iterdir():
            if "memfd:inferserve-slots" in str(entry.readlink()):
                return str(entry)
        raise RuntimeError("the launcher holds no slot table")
