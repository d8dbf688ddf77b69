"""CPU time and memory of the service's processes by role, read from /proc: the launcher and its children.

They need not cooperate, so a role without metrics of its own is seen too. Linux only, like the rest of the service.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from inferserve.metrics.client import MetricsClient

_MODULE = re.compile(rb"-m\0inferserve\.(\w+)\0")
_ROLE_LAUNCHER = "launcher"
_MIN_INTERVAL_S = 0.5


@dataclass(frozen=True)
class ProcessUse:
    """What one process has used: CPU seconds since its start, resident bytes now."""

    pid: int
    start_ticks: int
    role: str
    cpu_seconds: float
    resident_bytes: int


def _use(folder: Path, role: str) -> ProcessUse:
    # man 5 proc: the second field of stat may hold spaces and parentheses, so count from the last ')'.
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    resident_pages = int((folder / "statm").read_text().split()[1])
    return ProcessUse(
        pid=int(folder.name),
        start_ticks=int(fields[19]),
        role=role,
        cpu_seconds=(int(fields[11]) + int(fields[12])) / ticks,
        resident_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
    )


def read(launcher: int, proc: Path = Path("/proc")) -> list[ProcessUse]:
    """The launcher with process id `launcher` and those of its children that run a module of this package."""
    pids = [pid for task in (proc / str(launcher) / "task").glob("*/children") for pid in task.read_text().split()]
    out = [_use(proc / str(launcher), _ROLE_LAUNCHER)]
    for pid in pids:
        try:
            module = _MODULE.search((proc / pid / "cmdline").read_bytes())
            if module:
                out.append(_use(proc / pid, module[1].decode()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return out


class ProcessMeter:
    """Keeps the `process*` metrics of `client` up to date.

    Args:
        client: of the metrics process.
        launcher: process id of the launcher.
    """

    def __init__(self, client: MetricsClient, launcher: int) -> None:
        self._client = client
        self._launcher = launcher
        self._seen: dict[tuple[int, int], float] = {}
        self._roles: set[str] = set()
        self._due = 0.0

    def measure(self, now: float) -> None:
        """Read /proc, unless that was done in the last half second. `now` is time.monotonic()."""
        if now < self._due:
            return
        self._due = now + _MIN_INTERVAL_S
        try:
            uses = read(self._launcher)
        except (FileNotFoundError, ProcessLookupError):
            return  # the launcher is gone, and this process with it
        resident: dict[str, int] = defaultdict(int, dict.fromkeys(self._roles, 0))
        alive: dict[str, int] = defaultdict(int, dict.fromkeys(self._roles, 0))
        seen = {}
        for use in uses:
            key = (use.pid, use.start_ticks)
            seen[key] = use.cpu_seconds
            grown = use.cpu_seconds - self._seen.get(key, 0.0)
            self._client.add("process_cpu_seconds", max(0.0, grown), use.role)
            resident[use.role] += use.resident_bytes
            alive[use.role] += 1
        for role, count in alive.items():
            self._client.set("process_resident_memory_bytes", resident[role], role)
            self._client.set("processes", count, role)
        self._seen, self._roles = seen, set(alive)
