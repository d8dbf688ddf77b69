"""What this machine offers, found without torch: GPUs, cores, memory that may still be taken.

Containers are limited by control groups, so memory is the least of what the kernel and every enclosing group leave.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import subprocess
import sys
import time
from pathlib import Path

from inferserve.config import env

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_QUERY_TIMEOUT_S = 1.5


def interpreter() -> list[str]:
    """How to start another Python that finds the same packages, up to `-m`.

    An installed package gets `-P`: a `json.py` in the user's folder must not become ours. A source tree that is used
    from its own folder needs that folder.
    """
    here = str(Path.cwd())
    return [sys.executable] if here in sys.path or "" in sys.path else [sys.executable, "-P"]


def process_age() -> float:
    """Seconds since the kernel started this process: with the interpreter's own start and all imports."""
    ticks = int((_PROC / "self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def cuda_problem() -> str:
    """Why CUDA cannot be used, in a few words; '' when nothing speaks against it."""
    if env.cuda_hidden():
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    driver = _PROC / "driver/nvidia/gpus"
    if not (driver.is_dir() and any(driver.iterdir())) and not any(Path("/dev").glob("nvidia[0-9]*")):
        return "no NVIDIA GPU found"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    return f"torch {version} is built for CPU only" if version.endswith("+cpu") else ""


def gpu_count() -> int:
    """How many GPUs this process may use: those that exist, or those of them that CUDA_VISIBLE_DEVICES names."""
    existing = sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))
    existing = existing or sum(1 for _ in (_PROC / "driver/nvidia/gpus").glob("*"))
    named = env.cuda_devices()
    return existing if named is None else min(existing, len(named))


def gpu_memory() -> tuple[int, int] | None:
    """(free, total) bytes of the first visible GPU as nvidia-smi tells; None when it cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
        free, total = (int(part) for part in done.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return free * 2**20, total * 2**20


def cpu_count() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its control group rounded up."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return allowed


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping or being killed."""
    return min(_kernel_available(), _cgroup_available())


def _kernel_available() -> int:
    for line in (_PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available() -> int:
    """Room below the tightest memory.max on the way to the root (cgroup v2, then v1); huge when there is none."""
    room = 1 << 62
    for folder, limit_file, used_file in _memory_groups():
        try:
            limit = int((folder / limit_file).read_text())
            used = int((folder / used_file).read_text())
            reclaimable = _stat(folder / "memory.stat", "inactive_file")
        except (OSError, ValueError):
            continue
        room = min(room, max(0, limit - used + reclaimable))
    return room


def _memory_groups() -> list[tuple[Path, str, str]]:
    groups: list[tuple[Path, str, str]] = []
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, names = _CGROUP, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = _CGROUP / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        groups += [(parent, *names) for parent in (folder, *folder.parents) if parent.is_relative_to(base)]
    return groups


def _stat(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
