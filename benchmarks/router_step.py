"""Microseconds of the router's work per wake-up, with 256 rows running and 1000 waiting.

    python -m benchmarks.router_step [--out benchmarks/results/router_step.json]

Measured are the calls that the process makes between two waits, decoding of the frame included; the socket is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.router_sim import settings
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import declare
from inferserve.protocol.boot import ROLE_ROUTER
from inferserve.protocol.codec import Codec
from inferserve.protocol.messages import (
    Commands,
    Dropped,
    EngineReady,
    Finish,
    FinishedRow,
    KvCounters,
    RouterMessage,
    SlotRef,
    StepReport,
    Submit,
)
from inferserve.router.estimate import PeakEstimate
from inferserve.router.loop import Router
from inferserve.router.observe import Observer
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable

ROWS = 256
WAITING = 1000
POOL = 400_000


class Bench:
    """A router with ROWS running and WAITING in the queue; also its `Links`, which keep what was admitted."""

    def __init__(self, ratio: float) -> None:
        config = settings(ratio, rows=ROWS)
        table, self.segment = SlotTable.create(config.slots, config.model.max_req_total_len)
        self.http = table.view(Writer.HTTP)
        metrics = MetricsClient(declare(8192, 2048), ROLE_ROUTER, 0, 0, None)
        self.router = Router(config, table.view(Writer.ROUTER), self, Observer(config, metrics, 0.0))
        self.codec: Codec[RouterMessage] = Codec(RouterMessage)
        self.running: dict[SlotRef, int] = {}
        self.free = list(range(config.slots))
        self.rng = np.random.default_rng(0)
        self.hear(EngineReady(POOL, ROWS, 2048))

    def command(self, commands: Commands) -> None:
        """Links."""
        self.running.update({SlotRef(a.index, a.generation): 0 for a in commands.admit})

    def drop(self, dropped: Dropped) -> None:
        """Links; nothing is dropped here."""
        raise AssertionError(dropped)

    def hear(self, message: RouterMessage) -> float:
        """One wake-up; returns its seconds."""
        frame = self.codec.encode(message)
        begin = time.perf_counter()
        now = time.monotonic()
        self.router.handle(self.codec.decode(frame), now)
        self.router.conclude(now, time.monotonic_ns())
        return time.perf_counter() - begin

    def submit(self) -> float:
        """A new request of 400 to 1200 tokens; seconds of its wake-up."""
        index = self.free.pop()
        prompt = self.rng.integers(0, 100_000, int(self.rng.integers(400, 1200)))
        self.http.generation[index] += 1
        self.http.prompt_len[index] = len(prompt)
        self.http.prompt_ids[index, : len(prompt)] = prompt
        self.http.max_tokens[index] = int(self.rng.integers(100, 1000))
        return self.hear(Submit((SlotRef(index, int(self.http.generation[index])),)))

    def step(self, ends: int = 0) -> float:
        """Every running row has one more token and the `ends` oldest end; seconds of the wake-up."""
        for ref in self.running:
            self.running[ref] += 1
        refs = list(self.running)
        over = refs[:ends]
        report = StepReport(
            step=1,
            slots=np.array([r.index for r in refs], "<i4").tobytes(),
            generations=np.array([r.generation for r in refs], "<u4").tobytes(),
            visible=np.array(list(self.running.values()), "<i4").tobytes(),
            kv=KvCounters(POOL, POOL // 2, 0, POOL - POOL // 2, len(refs), 0),
            finished=tuple(FinishedRow(r.index, r.generation, Finish.STOP) for r in over),
            decode_tokens=len(refs),
            step_seconds=0.01,
        )
        for ref in over:
            del self.running[ref]
            self.free.insert(0, ref.index)
        return self.hear(report)


def microseconds(what: Callable[[], float], times: int) -> dict[str, float]:
    """Median and 99th percentile of `times` calls."""
    taken = sorted(1e6 * what() for _ in range(times))
    return {"p50": round(statistics.median(taken), 1), "p99": round(taken[int(0.99 * times)], 1)}


def estimate_microseconds(rows: int) -> dict[str, float]:
    """Per candidate: the question, and an admission, in a table of `rows` started rows."""
    rng = np.random.default_rng(0)
    held, left = rng.integers(1, 4000, rows), rng.integers(1, 2000, rows)

    def build() -> float:
        begin = time.perf_counter()
        PeakEstimate(held, left, np.zeros(rows, np.bool_)).peak()
        return time.perf_counter() - begin

    estimate = PeakEstimate(held, left, np.zeros(rows, np.bool_))
    estimate.peak_with(100, 100)

    def ask() -> float:
        begin = time.perf_counter()
        estimate.peak_with(100, 1000)
        return time.perf_counter() - begin

    def admit() -> float:
        begin = time.perf_counter()
        estimate.add(100, 1000)
        estimate.peak_with(100, 1000)
        return time.perf_counter() - begin

    parts = {"build": build, "ask": ask, "admit_and_ask": admit}
    return {name: microseconds(part, 500)["p50"] for name, part in parts.items()}


def measure(ratio: float) -> dict[str, object]:
    """All figures for one `--router-token-ratio`."""
    bench = Bench(ratio)
    idle = Bench(ratio)
    first = microseconds(lambda: _alone(idle), 200)
    for _ in range(ROWS + WAITING):
        bench.submit()
        if len(bench.running) < ROWS:
            bench.step()
    assert len(bench.running) > ROWS // 2
    queued = bench.submit()
    return {
        "router_token_ratio": ratio,
        "rows": len(bench.running),
        "submit_on_idle_us": first,
        "submit_behind_a_full_engine_us": round(1e6 * queued, 1),
        "report_nothing_finished_us": microseconds(bench.step, 1000),
        "report_one_finished_us": microseconds(lambda: bench.step(ends=1), 300),
    }


def _alone(bench: Bench) -> float:
    for _ in range(len(bench.running)):
        bench.step(ends=1)
    return bench.submit()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {
        "loop": [measure(ratio) for ratio in (0.0, 0.85)],
        "estimate": {str(rows): estimate_microseconds(rows) for rows in (256, 1024, 4096)},
    }
    print(json.dumps(result, indent=1), file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
