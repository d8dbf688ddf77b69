"""From spawning the server to ready, with and without compiled kernels, and what each phase of it took.

    python -m benchmarks.startup [--flags "--model-dir FOLDER"] [--out FILE]

Starts `inferserve serve` twice or more with an empty Triton cache in a temporary folder: the first start compiles, the
others find the cache. The default is the 8B shape with random weights; for a checkpoint the first start also brings the
files into the page cache, so `cold` is measured after its files were read once. `phases` are the server's own log.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import schema
from benchmarks.serving import Server

_SHAPE = Path(__file__).parent / "shapes" / "llama-3.1-8b"
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
_PHASE = re.compile(r"(?P<what>[^=]*?) +(\w+=\S* +)*?seconds=(?P<seconds>[\d.]+)")


def phases(log: str) -> dict[str, float]:
    """What log lines say of their seconds: "engine-0 weights loaded" → 1.3."""
    found: dict[str, float] = {}
    for line in log.splitlines():
        words = line.split(maxsplit=3)
        matched = _PHASE.match(words[3]) if len(words) == 4 else None
        if matched:
            found[f"{words[2]} {matched['what']}"] = float(matched["seconds"])
    return found


def read_once(folder: Path) -> int:
    """Read a checkpoint's files, so that they are in the page cache; bytes."""
    total = 0
    for path in [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.gguf"))] if folder.is_dir() else []:
        with path.open("rb", buffering=0) as file:
            while block := file.read(1 << 24):
                total += len(block)
    return total


def start(flags: list[str], limit_s: float) -> dict[str, Any]:
    """One start and its phases."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with Server(*flags, timeout_s=limit_s, log=log) as server:
            seconds = server.start_seconds
        return {"ready_s": round(seconds, 2), "phases": phases(log.read_text())}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = f"--model-dir {_SHAPE} --load-format dummy --max-req-total-len 8192"
    parser.add_argument("--flags", default=default, help="of `inferserve serve`")
    parser.add_argument("--warm", type=int, default=1, help="starts with the kernel cache filled")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds that one start may take")
    parser.add_argument("--out", default="", metavar="FILE")
    args = parser.parse_args()
    flags = shlex.split(args.flags)
    if "--model-dir" in flags:
        read_once(Path(flags[flags.index("--model-dir") + 1]))
    with tempfile.TemporaryDirectory(prefix="kernel-cache-") as cache:
        os.environ.update({name: f"{cache}/{name}" for name in _CACHES})
        cold = start(flags, args.limit)
        warm = [start(flags, args.limit) for _ in range(args.warm)]
    figures: dict[str, Any] = {"cold_ready_s": cold["ready_s"], "warm_ready_s": [w["ready_s"] for w in warm]}
    figures |= {"cold_phases_s": cold["phases"], "warm_phases_s": warm[-1]["phases"] if warm else {}}
    figures["lines"] = [f"cold {cold['ready_s']} s, warm {figures['warm_ready_s']} s"]
    print("\n".join(figures["lines"]), figures["cold_phases_s"], figures["warm_phases_s"], sep="\n", flush=True)
    if args.out:
        schema.write(args.out, schema.result("startup", {"flags": args.flags}, figures))


if __name__ == "__main__":
    main()
