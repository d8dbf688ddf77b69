"""The one form of every result file: where, what, how, and the figures with their ratios to floors or targets.

schema      1
benchmark   name of the program
commit      of the repository; "+" behind it when tracked files were changed
machine     CPU, GPUs with driver, Python
versions    of the libraries that matter, where installed
command     as typed
settings    what was asked for
figures     what was measured; units are in the names
ratios      figure ÷ what it is held against, by name
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from inferserve.config.machine import cuda_problem

SCHEMA = 1
COMMIT = "BENCH_COMMIT"
"""Environment variable: the commit, for copies of the tree that have no git history."""
_ROOT = Path(__file__).parents[1]
_LIBRARIES = (
    *("hypercorn", "uvloop", "fastapi", "starlette", "msgspec", "pyzmq", "tokenizers", "numpy"),
    *("torch", "triton", "transformers", "flashinfer-python", "flash-attn-3", "nvidia-nccl-cu13"),
)
_TIMEOUT_S = 10

Json = dict[str, Any]


def result(benchmark: str, settings: Json, figures: Json, ratios: Json | None = None) -> Json:
    """A whole result."""
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": {name: found for name in _LIBRARIES if (found := _version(name))},
        "command": " ".join([Path(sys.argv[0]).stem, *sys.argv[1:]]),
        "settings": settings,
        "figures": figures,
        "ratios": ratios or {},
    }


def write(path: str | Path, content: Json) -> None:
    """As JSON; folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1) + "\n")


def require_gpu() -> None:
    """For programs that measure nothing without one: ends them with one line and status 2."""
    if problem := cuda_problem():
        print(f"error: {Path(sys.argv[0]).stem} needs a GPU: {problem}", file=sys.stderr)
        raise SystemExit(2)


def machine() -> Json:
    """Where a figure was measured."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpus(),
        "python": platform.python_version(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """See the module; "unknown" where nobody can tell."""
    named = os.environ.get(COMMIT)
    if named:
        return named
    head = _output("git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    return (head or "unknown") + ("+" if head and changed else "")


@functools.cache
def gpus() -> list[str]:
    """Name, memory and driver of each GPU, as nvidia-smi tells."""
    told = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return told.splitlines() if told else []


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """Of a program that may be missing or fail: then ''."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
