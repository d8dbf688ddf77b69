"""CPU and memory by role, from a made-up /proc and from the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferserve.metrics import processes
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import declare
from inferserve.metrics.processes import ProcessMeter, ProcessUse, read
from inferserve.protocol.boot import ROLE_METRICS

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def make_process(proc: Path, pid: int, command: str, cpu_seconds: float = 0, pages: int = 0) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    fields = ["S", "1", *["0"] * 9, str(int(cpu_seconds * TICKS)), "0", *["0"] * 6, str(pid * 10), "0"]
    (folder / "stat").write_text(f"{pid} (a (b) c) " + " ".join(fields))
    (folder / "statm").write_text(f"999 {pages} 0 0 0 0 0")
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())


def test_read_finds_the_launcher_and_its_children(tmp_path: Path) -> None:
    make_process(tmp_path, 10, "python -m inferserve serve", 1.5, 3)
    make_process(tmp_path, 11, "python -m inferserve.router --boot-fd 3", 2, 4)
    make_process(tmp_path, 12, "python -m inferserve.http --boot-fd 4", 3, 5)
    make_process(tmp_path, 13, "bash -c inferserve.router", 9, 9)
    for task, children in ((10, "11 13 99 "), (20, "12 ")):
        (tmp_path / "10" / "task" / str(task)).mkdir(parents=True)
        (tmp_path / "10" / "task" / str(task) / "children").write_text(children)
    assert sorted(read(10, tmp_path), key=lambda u: u.pid) == [
        ProcessUse(10, 100, "launcher", 1.5, 3 * PAGE),
        ProcessUse(11, 110, "router", 2.0, 4 * PAGE),
        ProcessUse(12, 120, "http", 3.0, 5 * PAGE),
    ]


def test_read_sees_this_process() -> None:
    (use, *_) = read(os.getpid())
    assert use.cpu_seconds > 0
    assert use.resident_bytes > 10 * 2**20


def test_cpu_never_falls_when_a_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    client = MetricsClient(declare(100, 100), ROLE_METRICS, 0, 0, None)
    meter = ProcessMeter(client, 1)

    def measure(now: float, *uses: ProcessUse) -> dict[str, float]:
        monkeypatch.setattr(processes, "read", lambda launcher: list(uses))
        meter.measure(now)
        return {s.name: s.values[0] for s in client.samples() if s.labels == ("http",)}

    first, second = ProcessUse(5, 1, "http", 10.0, 100), ProcessUse(6, 2, "http", 1.0, 50)
    assert measure(1.0, first)["process_cpu_seconds"] == 10
    both = measure(2.0, ProcessUse(5, 1, "http", 12.0, 100), second)
    assert both == {"process_cpu_seconds": 13, "process_resident_memory_bytes": 150, "processes": 2}
    assert measure(2.1)["processes"] == 2  # too soon to look again
    assert measure(3.0, second) == {"process_cpu_seconds": 13, "process_resident_memory_bytes": 50, "processes": 1}
    assert measure(4.0) == {"process_cpu_seconds": 13, "process_resident_memory_bytes": 0, "processes": 0}
