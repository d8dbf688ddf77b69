"""The environment: every variable that inferserve reads, and nothing else reads `os.environ`.

Settings are flags, never variables; what stands here is where files live and how the machine is set up.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

CACHE = "INFERSERVE_CACHE"
DEMO_WHEEL = "INFERSERVE_DEMO_WHEEL"
RUN_DIR = "INFERSERVE_RUN_DIR"
_LOOPBACK = "lo"
_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL", "AUTH")


def cache_dir() -> Path:
    """Where converted tokenizers and the demo model are kept: INFERSERVE_CACHE, or ~/.cache/inferserve."""
    chosen = os.environ.get(CACHE)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "inferserve"


def demo_wheel() -> Path | None:
    """An already downloaded wheel of the demo model (INFERSERVE_DEMO_WHEEL), None when not set."""
    chosen = os.environ.get(DEMO_WHEEL)
    return Path(chosen).expanduser() if chosen else None


def run_base() -> Path:
    """Parent of the private directories of boots: INFERSERVE_RUN_DIR, XDG_RUNTIME_DIR/inferserve, or one in /tmp."""
    chosen = os.environ.get(RUN_DIR)
    if chosen:
        return Path(chosen).expanduser()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "inferserve"
    return Path(tempfile.gettempdir()) / f"inferserve-{os.getuid()}"


def cuda_hidden() -> bool:
    """True when CUDA_VISIBLE_DEVICES hides every GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.strip() in ("", "-1", "NoDevFiles")


def cuda_devices() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names; None when it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]


def child_environment(*, one_thread: bool) -> dict[str, str]:
    """The environment of a child process; ours stays here, since children are told everything in their boot record.

    Args:
        one_thread: keep numerical libraries from starting one thread a core, for processes that do no linear algebra.

    Sockets of gloo and NCCL, which engine ranks exchange tensors through, are pinned to loopback: nothing protects them.

    Where there are threads, they sleep at barriers instead of spinning, unless the user has chosen. A thread that spins
    takes the core from the thread it waits for whenever another process wants one: on 2 cores with others competing,
    SmolLM2 decoded 5 times slower with libgomp's default.
    """
    child = {name: value for name, value in os.environ.items() if not name.startswith("INFERSERVE_")}
    if one_thread:
        child.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    else:
        child.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        child.update(GLOO_SOCKET_IFNAME=_LOOPBACK, NCCL_SOCKET_IFNAME=f"={_LOOPBACK}")
    return child


def environment_with_path(folder: Path) -> dict[str, str]:
    """Ours, for a program whose modules are below `folder`."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{before}" if before else str(folder)}


def report() -> dict[str, str]:
    """Variables that matter in a bug report; values of anything that may be a secret are left out."""
    prefixes = ("INFERSERVE_", "CUDA_", "HF_", "TORCH_", "TRITON_", "OMP_", "MKL_", "NCCL_", "OPENBLAS_")
    chosen = {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)}
    return {k: "(hidden)" if any(w in k for w in _SECRET_WORDS) else v for k, v in chosen.items()}
