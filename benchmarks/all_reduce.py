"""Sums over GPUs, by size: NCCL and symmetric memory, inside CUDA graphs as the engine runs them, checked for the right sum.

    python -m benchmarks.all_reduce --ranks 2 [--device cuda] [--seconds 60] [--out FILE.json]

Figures are microseconds of one sum of so many kB, `wrong` lists sums that were not right (exit code 1). With --ranks 1 it
tells whether NCCL and symmetric memory can be captured at all, on a machine with one GPU; with --device cpu it tries the
program itself, over gloo and without graphs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from benchmarks import schema
from inferserve.config.env import child_environment
from inferserve.engine.recorder import CudaRecorder, EagerRecorder, Recorder
from inferserve.parallel.all_reduce import AllReduce, Collective, Symmetric, reachable
from inferserve.parallel.process_group import joined
from inferserve.parallel.ranks import Ranks

KILOBYTES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 2600, 4096)
IN_A_ROW = 64
"""Sums of one graph: as many as a model of 32 layers has."""
_REPLAYS = {"cuda": 20, "cpu": 1}


def measured(way: AllReduce, ranks: Ranks, device: torch.device, kilobytes: int) -> tuple[float, bool]:
    """Microseconds of one sum of bfloat16 [n, 4096 or less], and whether it is right."""
    torch.manual_seed(kilobytes + 1000 * ranks.rank)
    x = torch.randn(kilobytes * 1024 // 2, dtype=torch.bfloat16, device=device)
    wanted = torch.stack(ranks.gather(x)).float().sum(0)
    right = bool(torch.allclose(way.sum(x.clone()).float(), wanted, rtol=0.02, atol=0.05))
    static = torch.zeros_like(x)

    def run() -> torch.Tensor:
        total = static
        for _ in range(IN_A_ROW):
            total = way.sum(total)
        return total

    recorder: Recorder = CudaRecorder(device) if device.type == "cuda" else EagerRecorder()
    replay = recorder.record(run)
    ranks.least(0)
    began = time.perf_counter()
    for _ in range(_REPLAYS[device.type]):
        replay()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / _REPLAYS[device.type] / IN_A_ROW * 1e6, right


def rank_main(rank: int, size: int, kind: str, folder: Path) -> None:
    """Measure as one of `size` ranks; the first one prints the figures."""
    with torch.inference_mode(), joined(rank, size, kind, folder, "nccl") as ranks:
        device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
        group = dist.group.WORLD
        plain = Collective(group)
        ways: dict[str, AllReduce] = {"nccl" if kind == "cuda" else "gloo": plain}
        figures: dict[str, dict[str, float]] = {}
        wrong = []
        if kind == "cuda" and ranks.least(reachable(rank, size)):
            try:
                ways["symmetric"] = Symmetric.between(group, device, plain)
            except RuntimeError as error:
                wrong.append(f"symmetric: {str(error).partition(chr(10))[0]}")
        for name, way in ways.items():
            for kilobytes in KILOBYTES:
                microseconds, right = measured(way, ranks, device, kilobytes)
                figures.setdefault(f"{name}_us", {})[str(kilobytes)] = round(microseconds, 2)
                wrong += [] if ranks.least(right) else [f"{name} {kilobytes} kB"]
        if not rank:
            print(json.dumps({"figures": figures, "wrong": wrong}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which everything is ended")
    parser.add_argument("--out", default="")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        rank_main(options.rank, options.ranks, options.device, options.folder)
        return 0
    if options.device == "cuda":
        schema.require_gpu()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.all_reduce", *sys.argv[1:], "--folder", folder, "--rank"]
        env = child_environment(one_thread=False)
        ranks = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, env=env) for i in range(options.ranks)]
        try:
            said = json.loads(ranks[0].communicate(timeout=options.seconds)[0])
        finally:
            for each in ranks:
                each.kill()
                each.wait()
    settings = {"ranks": options.ranks, "device": options.device, "in_a_row": IN_A_ROW, "dtype": "bfloat16"}
    ratios = {}
    if "symmetric_us" in said["figures"]:
        pairs = zip(said["figures"]["nccl_us"].items(), said["figures"]["symmetric_us"].values(), strict=True)
        ratios = {f"nccl_over_symmetric_{size}_kb": round(slow / fast, 2) for (size, slow), fast in pairs}
    content = schema.result("all_reduce", settings, {**said["figures"], "wrong": said["wrong"]}, ratios)
    print(json.dumps(content, indent=1))
    if options.out:
        schema.write(options.out, content)
    return 1 if said["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
