"""`inferserve env`: what a bug report needs to say of this machine. Prints no secrets and imports no torch."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from inferserve import __version__
from inferserve.config import env
from inferserve.config.machine import available_memory, cpu_count, cuda_problem

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "numpy",
    "msgspec",
    "pyzmq",
    "fastapi",
    "pydantic",
    "starlette",
    "hypercorn",
    "uvloop",
    "jinja2",
    "prometheus-client",
)


def describe() -> str:
    """A few dozen lines of `key: value`."""
    facts = {
        "inferserve": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.platform()} ({_pretty_name()})",
        "cpu": f"{_cpu_model()}, {cpu_count()} usable",
        "memory": f"{_total_memory() / 2**30:.1f} GiB, {available_memory() / 2**30:.1f} GiB available",
        "disk of the cache": f"{_free_disk() / 2**30:.1f} GiB free at {env.cache_dir()}",
        "gpu": _gpus(),
        **{f"package {name}": _version(name) for name in _PACKAGES},
        **{f"env {name}": value for name, value in env.report().items()},
    }
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _pretty_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "?")
    except OSError:
        return "unknown distribution"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _total_memory() -> int:
    return int(Path("/proc/meminfo").read_text().split()[1]) * 1024


def _free_disk() -> int:
    existing = next(p for p in (env.cache_dir(), *env.cache_dir().parents) if p.exists())
    return shutil.disk_usage(existing).free


def _gpus() -> str:
    problem = cuda_problem()
    if problem:
        return f"none ({problem})"
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"present, nvidia-smi failed ({error})"
    return "; ".join(done.stdout.splitlines())
