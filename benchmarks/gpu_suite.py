"""All figures of the GPU engine through HTTP in one command, each stage with its own time limit.

    python -m benchmarks.gpu_suite --out FOLDER [--stages 8b-one,8b-64] [--limit 150]

Starts `inferserve serve --load-format dummy` once for each model, keeps it for all stages of that model, and writes for
each stage FOLDER/NAME.json and NAME.log, the servers' logs, and summary.json. A stage that fails or takes too long is
killed and reported; the rest goes on. What does not fit into --limit is skipped and named. The table comes last.
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
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import schema
from benchmarks.gpu_stages import COMMON, DEFAULT, MODELS, STAGES, Stage
from benchmarks.serving import Server

_SHAPES = Path(__file__).parent / "shapes"
_STOP_S = 3.0


class Suite:
    """Runs stages against the clock and remembers what came of them."""

    def __init__(self, out: Path, limit_s: float, flags: str, fallback: str = "") -> None:
        self._out = out
        self._fallback = fallback
        self._end = time.monotonic() + limit_s
        self._flags = flags
        self.rows: list[dict[str, Any]] = []

    @property
    def left(self) -> float:
        """Seconds of the whole limit that are left."""
        return self._end - time.monotonic()

    def run(self, stages: Iterable[Stage]) -> None:
        """Stages with the same model in a row share a server; after a server's death the next stage gets another."""
        for model, group in groupby(stages, key=lambda stage: stage.model):
            waiting = list(group)
            while waiting and not model:
                self._stage(waiting.pop(0), None)
            while waiting:
                waiting = self._serve(model, waiting)

    def _serve(self, model: str, waiting: list[Stage]) -> list[Stage]:
        """Start a server and run stages while it lives; the stages that are left.

        If it does not start, the fallback flags are added and it is tried once more: slow figures say more than none.
        """
        limit = min(MODELS[model].start_limit_s, self.left - _STOP_S)
        if limit < 1:
            self._skip(waiting, "no time left")
            return []
        flags = f"--model-dir {_SHAPES / MODELS[model].shape} {COMMON} {MODELS[model].flags} {self._flags}"
        log = self._out / f"server-{model}-{len(self.rows)}.log"
        began = time.monotonic()
        try:
            with Server(*shlex.split(flags), timeout_s=limit, log=log) as server:
                ready = round(server.start_seconds, 2)
                self._row(f"{model}-start", "ok", ready, {"ready_s": ready, "flags": flags})
                while waiting and server.alive:
                    self._stage(waiting.pop(0), server)
                if not server.alive:
                    self._row(f"{model}-server", "DIED", 0.0, {"log": _tail(log)})
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            seconds = round(time.monotonic() - began, 1)
            self._row(f"{model}-start", "FAILED", seconds, {"error": type(error).__name__, "log": _tail(log, 15)})
            if self._fallback and self._fallback not in flags:
                self._flags += f" {self._fallback}"
                return waiting
            self._skip(waiting, "no server")
            return []
        return waiting

    def _stage(self, stage: Stage, server: Server | None) -> None:
        limit = min(stage.limit_s, self.left - (_STOP_S if server else 0))
        if limit < 1:
            self._skip([stage], "no time left")
            return
        target = self._out / f"{stage.name}.json"
        command = [sys.executable, "-m", stage.module, *shlex.split(stage.args), "--out", str(target)]
        if server:
            command += ["--url", f"http://127.0.0.1:{server.port}/v1"]
        before, began = server.cpu() if server else {}, time.monotonic()
        status = self._process(command, self._out / f"{stage.name}.log", limit)
        seconds = round(time.monotonic() - began, 1)
        figures = _read(target).get("figures", {})
        facts: dict[str, Any] = {"figures": figures, "target": stage.target}
        if status != "ok":
            facts["log"] = _tail(self._out / f"{stage.name}.log")
        if server and server.alive:
            after, tokens = server.cpu(), figures.get("tokens", {}).get("output", 0)
            facts["server_cpu_us_per_token"] = {
                n: round((after[n] - before[n]) / tokens * 1e6, 2) for n in after if tokens and n in before
            }
        self._row(stage.name, status, seconds, facts)

    def _process(self, command: list[str], log: Path, limit_s: float) -> str:
        """Run it with a limit; its whole process group is gone afterwards."""
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = -1
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"KILLED after {limit_s:.0f} s"
        return "ok" if status == 0 else f"FAILED ({status})"

    def _skip(self, stages: list[Stage], why: str) -> None:
        for stage in stages:
            self._row(stage.name, f"skipped: {why}", 0.0, {})

    def _row(self, name: str, status: str, seconds: float, facts: dict[str, Any]) -> None:
        self.rows.append({"name": name, "status": status, "seconds": seconds, **facts})
        print(f"{name}: {status}, {seconds:.1f} s", flush=True)
        schema.write(
            self._out / "summary.json", schema.result("gpu_suite", {"flags": self._flags}, {"stages": self.rows})
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content


def _tail(path: Path, lines: int = 6) -> list[str]:
    try:
        return [line[:240] for line in path.read_text(errors="replace").splitlines()[-lines:]]
    except OSError:
        return []


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each row, and what failed in its own words."""
    head = f"{'stage':<18} {'s':>6} {'tok/s':>9} {'steady':>9} {'/target':>8} {'ttft50':>8} {'ttft99':>8} {'itl50':>7} {'itl99':>7}  status"
    lines = [head]
    for row in rows:
        figures = row.get("figures") or {}
        rates = figures.get("output_tok_s", {})
        total, target = rates.get("total"), row.get("target")
        cells = (
            _cell(total, 9),
            _cell(rates.get("steady"), 9),
            _cell(total / target if total and target else None, 8, 2),
            *(_cell(figures.get("ttft_ms", {}).get(q), 8) for q in ("p50", "p99")),
            *(_cell(figures.get("itl_ms", {}).get(q), 7, 2) for q in ("p50", "p99")),
        )
        lines.append(f"{row['name']:<18} {row['seconds']:>6.1f} {' '.join(cells)}  {row['status']}")
        cpu = row.get("server_cpu_us_per_token")
        if cpu:
            lines.append("    server CPU us/token: " + " ".join(f"{n} {us:g}" for n, us in cpu.items() if us >= 0.05))
        tokens = figures.get("tokens", {})
        if tokens.get("prompt_cached", 0) > 0.01 * tokens.get("prompt", 0):
            lines.append(f"    prompt tokens from the prefix cache: {tokens['prompt_cached']} of {tokens['prompt']}")
        if figures.get("lines"):
            lines += [f"    {line}" for line in figures["lines"]]
        lines += [f"    {reason[:150]} x {n}" for reason, n in list(figures.get("errors", {}).items())[:3]]
        lines += [f"    | {line}" for line in row.get("log", [])]
    return lines


def _cell(value: float | None, width: int, digits: int = 1) -> str:
    return f"{value:>{width},.{digits}f}" if value is not None else " " * (width - 1) + "-"


def main() -> None:
    """Run the stages, print the table; exit status 1 if one is not ok."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FOLDER")
    parser.add_argument("--stages", default=DEFAULT, help=f"of {', '.join(s.name for s in STAGES)}")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for everything")
    parser.add_argument("--flags", default="", help='further server flags: --flags="--a --b"')
    parser.add_argument("--fallback", default="--disable-cudagraph", help="added for a second try to start; '' = none")
    args = parser.parse_args()
    known = {stage.name: stage for stage in STAGES}
    names = args.stages.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no such stage: {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no server is left behind
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    suite = Suite(out, args.limit, args.flags, args.fallback)
    suite.run([known[name] for name in names])
    print("\n".join(table(suite.rows)[:100]), flush=True)
    raise SystemExit(any(row["status"] != "ok" for row in suite.rows))


if __name__ == "__main__":
    main()
