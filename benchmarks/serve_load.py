"""Load on any server that speaks the OpenAI API: rates, time to first token, inter-token times, failures, counts.

    python -m benchmarks.serve_load --url http://127.0.0.1:8000/v1 --clients 64 --input-len 1024 --output-len 256
    python -m benchmarks.serve_load --serve "--engine fake --fake-step-ms 10" --clients 256 --duration 10

Workloads: `fixed` and `random` lengths and `shared-prefix` prompts from clients that each wait for their answer
(closed loop), `multi-turn` conversations whose prompts hold the answers so far, `bursty` arrivals (open loop, gamma
distributed). Requests are streamed /v1/completions with ignore_eos, so output lengths are known: the server's own
count is compared. When --duration is over, what is under way is cut and counts only up to there; with --requests alone
everything is answered. A request that fails is counted and its reason shown; exit status 1 if one did.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks import load_report, schema
from benchmarks.load_events import Outcome
from benchmarks.load_plan import WORKLOADS, Plan
from benchmarks.load_worker import Orders, Results
from benchmarks.serving import Server

_CLIENTS_PER_PROCESS = 64
_START_AFTER_S = 0.2
_GRACE_S = 60.0


def parser(about: str | None = __doc__) -> argparse.ArgumentParser:
    """Flags that say what is sent, and to whom."""
    built = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = built.add_argument
    add("--url", default="", help="base URL with /v1")
    add("--serve", default="", metavar="FLAGS", help="start `inferserve serve FLAGS` for the time of the run instead")
    add("--model", default="", help="name of the model; the first of /v1/models if not given")
    add("--workload", choices=WORKLOADS, default="fixed")
    add("--clients", type=int, default=64, help="requests at any one time (not for bursty)")
    add("--requests", type=int, default=0, help="requests in all")
    add("--duration", type=float, default=0.0, metavar="S", help="seconds of load; with --requests: at most")
    add("--warmup", type=int, default=0, help="requests before the clock runs")
    add("--input-len", type=int, default=1024)
    add("--output-len", type=int, default=256)
    add("--spread", type=float, default=None, help="smallest length / largest; 1 if not random or bursty, else 0.1")
    add("--prefix-len", type=int, default=0, help="tokens at the start that all prompts share")
    add("--turns", type=int, default=8, help="multi-turn: of a conversation")
    add("--only-new", action="store_true", help="multi-turn: prompts hold the turn's new tokens alone, to compare")
    add("--rate", type=float, default=8.0, help="bursty: requests a second")
    add("--burstiness", type=float, default=1.0, help="bursty: shape of the gamma gaps; 1 = Poisson, less = bursts")
    add("--text", action="store_true", help="prompts are text, not token ids (multi-turn: always)")
    add("--ids", type=int, nargs=2, default=(1000, 30000), metavar=("FIRST", "LAST"), help="range of token ids")
    add("--no-stream", action="store_true", help="whole answers")
    add("--extra", default="{}", help="JSON object: further fields of each request")
    add(
        "--seed",
        type=int,
        default=-1,
        help="of prompts and lengths; a new one if not given, so that no cache knows them",
    )
    add("--timeout", type=float, default=120.0, help="seconds that a request may take")
    add("--client-processes", type=int, default=0, help=f"one for each {_CLIENTS_PER_PROCESS} clients if not given")
    add("--out", default="", metavar="FILE", help="where the JSON goes")
    return built


def plan_of(args: argparse.Namespace, model: str) -> Plan:
    """What the flags ask for."""
    varied, each = args.workload in ("random", "bursty"), args.turns if args.workload == "multi-turn" else 4
    return Plan(
        workload=args.workload,
        model=model,
        clients=1 if args.workload == "bursty" else args.clients,
        requests=args.requests or (0 if args.duration else args.clients * each),
        duration_s=args.duration,
        input_len=args.input_len,
        output_len=args.output_len,
        spread=args.spread if args.spread is not None else (0.1 if varied else 1.0),
        prefix_len=args.prefix_len,
        turns=args.turns,
        only_new=args.only_new,
        rate=args.rate,
        burstiness=args.burstiness,
        text=args.text or args.workload == "multi-turn",
        stream=not args.no_stream,
        ids=tuple(args.ids),
        seed=args.seed if args.seed >= 0 else time.time_ns() % 2**31,
        extra=json.loads(args.extra),
    )


def first_model(base: str) -> str:
    """The first name that /v1/models lists."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would be asked for local names
    try:
        with direct.open(base + "/models", timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except OSError as error:
        raise SystemExit(f"--url {base}: {getattr(error, 'reason', error)}") from error


class Processes:
    """Client processes that are ready to begin. A context manager: at its end none of them is left."""

    def __init__(self, orders: list[Orders]) -> None:
        self._orders = orders
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Processes:
        command = [sys.executable, "-m", "benchmarks.load_worker"]
        for orders in self._orders:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._running.append(process)
            data = msgspec.msgpack.encode(orders)
            assert process.stdin is not None
            process.stdin.write(b"%d\n%b" % (len(data), data))
            process.stdin.flush()
        for process in self._running:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("a client process did not start")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()

    def run(self) -> tuple[int, list[Results]]:
        """The moment at which all began, ns, and what each brought. Raises RuntimeError if one broke."""
        start_ns = time.monotonic_ns() + int(_START_AFTER_S * 1e9)
        for process in self._running:
            assert process.stdin is not None
            process.stdin.write(b"%d\n" % start_ns)
            process.stdin.flush()
        results = []
        for process in self._running:
            assert process.stdout is not None
            size, data = process.stdout.readline(), process.stdout.read()
            if process.wait(_GRACE_S) or int(size or -1) != len(data):
                raise RuntimeError(
                    f"a client process ended with status {process.returncode}, {len(data)} bytes of {size!r}"
                )
            results.append(msgspec.msgpack.decode(data, type=Results))
        return start_ns, results


def orders_of(plan: Plan, base: str, timeout_s: float, processes: int) -> list[Orders]:
    """Clients and requests dealt out to `processes` processes."""
    count = min(processes or -(-plan.clients // _CLIENTS_PER_PROCESS), plan.clients)
    shares = [list(range(i, plan.clients, count)) for i in range(count)]
    requests = [plan.requests * (i + 1) // count - plan.requests * i // count for i in range(count)]
    pairs = [(s, r) for s, r in zip(shares, requests, strict=True) if r or not plan.requests]
    return [Orders(plan, base, "/completions", share, share_of, timeout_s) for share, share_of in pairs]


@dataclass(frozen=True)
class Run:
    """What came of a load. Times are CLOCK_MONOTONIC, ns; see `Results` for `idle_ns` and `cpu_s`."""

    outcomes: list[Outcome]
    begin_ns: int
    idle_ns: int
    processes: int
    busiest_cpu_s: float

    def figures(self) -> dict[str, Any]:
        """See `load_report`; and what the client itself cost."""
        found = load_report.report(self.outcomes, self.begin_ns, self.idle_ns)
        share = round(self.busiest_cpu_s / max(found["wall_s"], 1e-9), 3)
        return {**found, "client": {"processes": self.processes, "busiest_cpu_share": share}}


def collect(plan: Plan, base: str, *, timeout_s: float = 120.0, processes: int = 0) -> Run:
    """Put the load on the server and wait for its end."""
    with Processes(orders_of(plan, base, timeout_s, processes)) as started:
        begin_ns, results = started.run()
    return Run(
        [seen for one in results for seen in one.outcomes],
        begin_ns,
        min(one.idle_ns for one in results),
        len(results),
        max(one.cpu_s for one in results),
    )


def run(plan: Plan, base: str, *, timeout_s: float = 120.0, processes: int = 0) -> dict[str, Any]:
    """Figures of a load."""
    return collect(plan, base, timeout_s=timeout_s, processes=processes).figures()


def warm_up(plan: Plan, base: str, requests: int) -> None:
    """Requests of the same kind, not counted. Raises RuntimeError if one fails."""
    warm = msgspec.structs.replace(plan, requests=requests, duration_s=0.0, seed=plan.seed + 1)
    errors = run(warm, base)["errors"]
    if errors:
        raise RuntimeError(f"warm-up failed: {errors}")


def summary(figures: dict[str, Any]) -> str:
    """Two or three lines for a terminal."""
    rates, requests, tokens = figures["output_tok_s"], figures["requests"], figures["tokens"]
    steady = f" steady {rates['steady']:,.0f} over {rates['steady_window_s']} s" if "steady" in rates else ""
    lines = [
        f"output tok/s {rates['total']:,.1f}{steady}; {requests['complete']} of {requests['sent']} requests complete"
    ]
    parts = []
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        if figures[name]:
            shown = " ".join(f"{figures[name][q]:g}" for q in ("p50", "p90", "p99"))
            parts.append(f"{name} p50/p90/p99 {shown}")
    lines.append("; ".join(parts))
    counts = f"tokens by usage {tokens['by_usage']} of {tokens['asked']} asked, {tokens['per_event']} an event"
    lines.append(f"{counts}; prompt tokens {tokens['prompt']}, of them cached {tokens['prompt_cached']}")
    lines += [f"FAILED {count} x {reason}" for reason, count in figures["errors"].items()]
    return "\n".join(lines)


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Start what is to be started, warm up, run; the result of benchmark `name`."""
    serving: AbstractContextManager[Server | None] = Server(*shlex.split(args.serve)) if args.serve else nullcontext()
    with serving as server:
        base = f"http://127.0.0.1:{server.port}/v1" if server else args.url.rstrip("/")
        plan = plan_of(args, args.model or first_model(base))
        if args.warmup:
            warm_up(plan, base, args.warmup)
        before = server.cpu() if server else {}
        figures = run(plan, base, timeout_s=args.timeout, processes=args.client_processes)
        after = server.cpu() if server else {}
    tokens = max(1, figures["tokens"]["output"])
    if server:
        spent = {n: round((after[n] - before[n]) / tokens * 1e6, 2) for n in after if n in before}
        figures["server_cpu_us_per_token"] = {**spent, "sum": round(sum(spent.values()), 2)}
    return schema.result(name, {**msgspec.to_builtins(plan), "serve": args.serve}, figures)


def main(name: str = "serve_load", about: str | None = __doc__) -> None:
    """Measure, print, write; exit status 1 if a request failed."""
    args = parser(about).parse_args()
    if bool(args.url) == bool(args.serve):
        raise SystemExit("either --url or --serve")
    content = measure(args, name)
    figures = content["figures"]
    print(json.dumps(figures, indent=1) if os.isatty(1) and not args.out else summary(figures), flush=True)
    if args.out:
        schema.write(args.out, content)
    raise SystemExit(bool(figures["requests"]["failed"]) or not figures["tokens"]["output"])


if __name__ == "__main__":
    main()
