"""Full load for minutes: does anything drift? Memory of every process, slots and pages in use, tokens counted.

    python -m benchmarks.soak [--flags "--model-dir … --load-format dummy"] [--minutes 8] [--clients 256]

Starts the server, warms it up, then keeps it busy with random lengths. Every few seconds the resident memory of each
process is read; the second half's mean may not exceed the first half's by more than --drift. Afterwards nothing may run,
wait or hold KV, and the tokens that clients counted equal those that the server says it delivered. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import os
import shlex
import threading
import time
import urllib.request
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import schema
from benchmarks.serve_load import collect, first_model, parser, plan_of, run
from benchmarks.serving import Server

_PAGE = os.sysconf("SC_PAGE_SIZE")
_EVERY_S = 2.0
_IDLE = ("inferserve_num_requests_running", "inferserve_num_requests_waiting", "inferserve_kv_cache_usage_perc")
_GENERATED = "inferserve_generation_tokens_total"
_SETTLE_S = 10.0


def resident(pid: int) -> int:
    """Bytes (proc(5): second field of statm)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def metrics(url: str) -> dict[str, float]:
    """Sums of all series by family."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            name = series.split("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


class Watch(threading.Thread):
    """Reads the memory of each process until told to stop."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.over = threading.Event()
        self.bytes: dict[str, list[int]] = {}

    def run(self) -> None:
        while not self.over.wait(_EVERY_S):
            for name, pid in self._server.pids.items():
                self.bytes.setdefault(name, []).append(resident(pid))

    def drift(self) -> dict[str, dict[str, float]]:
        """Mean of the first and second half, MB, and their ratio; the first tenth is left out: caches fill."""
        found = {}
        for name, series in self.bytes.items():
            series = series[len(series) // 10 :]
            half = len(series) // 2
            first, second = fmean(series[:half] or [1]), fmean(series[half:] or [1])
            found[name] = {"first_mb": first / 1e6, "second_mb": second / 1e6, "ratio": second / first}
        return {n: {k: round(v, 4) for k, v in row.items()} for n, row in found.items()}


def settled(url: str) -> dict[str, float]:
    """Idle gauges once they are all 0, or as they are after some seconds."""
    end = time.monotonic() + _SETTLE_S
    while True:
        gauges = {name: value for name, value in metrics(url).items() if name in _IDLE}
        if not any(gauges.values()) or time.monotonic() > end:
            return gauges
        time.sleep(0.2)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Figures, with `problems`."""
    with Server(*shlex.split(args.flags), timeout_s=180) as server:
        url = f"http://127.0.0.1:{server.port}"
        lengths = ["--input-len", str(args.longest), "--output-len", str(args.longest), "--workload", "random"]
        load = parser().parse_args([*lengths, "--clients", str(args.clients), "--requests", str(args.clients)])
        plan = plan_of(load, first_model(url + "/v1"))
        run(plan, url + "/v1", timeout_s=300)
        before = metrics(url)[_GENERATED]
        watch = Watch(server)
        watch.start()
        rounds: list[dict[str, Any]] = []
        end = time.monotonic() + args.minutes * 60
        while time.monotonic() < end:
            load.seed = -1
            rounds.append(collect(plan_of(load, plan.model), url + "/v1", timeout_s=300).figures())
        watch.over.set()
        watch.join()
        idle, delivered = settled(url), metrics(url)[_GENERATED] - before
    counted = sum(one["tokens"]["by_usage"] for one in rounds)
    problems = [f"{sum(one['requests']['failed'] for one in rounds)} requests failed"]
    problems = problems if any(one["errors"] for one in rounds) else []
    drift = watch.drift()
    problems += [f"memory of {n} grew {row['ratio']:.3f} x" for n, row in drift.items() if row["ratio"] > args.drift]
    problems += [f"{name} is {value} when idle" for name, value in idle.items() if value]
    if counted != delivered:
        problems.append(f"clients counted {counted} tokens, the server delivered {delivered:.0f}")
    rates = [one["output_tok_s"]["total"] for one in rounds]
    tokens = {"counted": counted, "delivered": delivered}
    return {"problems": problems, "memory": drift, "idle": idle, "tokens": tokens, "output_tok_s_by_round": rates}


def main() -> None:
    """Measure, print, write; exit status 1 if something drifted."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = Path(__file__).parent / "shapes" / "llama-3.1-8b"
    flags.add_argument("--flags", default=f"--model-dir {shape} --load-format dummy --max-req-total-len 8192")
    flags.add_argument("--minutes", type=float, default=8.0)
    flags.add_argument("--clients", type=int, default=256)
    flags.add_argument("--longest", type=int, default=1024, help="tokens of prompt and of output, from a tenth of it")
    flags.add_argument("--drift", type=float, default=1.03, help="memory of the second half over the first")
    flags.add_argument("--out", default="", metavar="FILE")
    args = flags.parse_args()
    figures = measure(args)
    print(figures, flush=True)
    if args.out:
        schema.write(args.out, schema.result("soak", {n: v for n, v in vars(args).items() if n != "out"}, figures))
    raise SystemExit(bool(figures["problems"]))


if __name__ == "__main__":
    main()
