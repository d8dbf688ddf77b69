"""CPU of the whole chain for each streamed token, with the fake engine, against a raw ASGI app.

`python -m benchmarks.chain` starts the real server (one http worker, fake engine) and the raw app, and lets the same
client read 64 streams from one and the other in turn, at the same pace. User + system time of every server process is
read from /proc around each run. Also checked: one event for each token, and how long after the engine's commit (its
`last_token_ns` in the slot table) the server sent the event, and the client read it. How long after the first event of a
tick the raw app sent the others says what this machine does to a process that has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from benchmarks.serving import Server, cpu_seconds, write_result
from benchmarks.stream_client import Stream, request_bytes, run_streams
from inferserve.shm.layout import Writer
from inferserve.shm.segment import Segment
from inferserve.shm.slots import SlotTable

TARGET_RATIO = 3.0
TARGET_DELAY_MS = 5.0


class RawApp:
    """`benchmarks.raw_app` in its own process, as a context manager."""

    def __init__(self, step_ms: float) -> None:
        self._step_ms = step_ms

    def __enter__(self) -> RawApp:
        with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
            self.port = listener.getsockname()[1]
            fd = listener.fileno()
            command = [sys.executable, "-m", "benchmarks.raw_app", str(fd), str(self._step_ms)]
            self._process = subprocess.Popen(command, pass_fds=[fd])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far."""
        return {"raw": cpu_seconds(self._process.pid)}


def commit_clock(server: Server) -> Callable[[], int]:
    """A function that reads the engine's newest commit, CLOCK_MONOTONIC in ns, from the slot table."""
    fd = os.open(server.slots_memfd(), os.O_RDWR)
    segment = Segment(fd, os.fstat(fd).st_size)
    _, _, slots, max_len = np.frombuffer(segment.mmap, np.int64, 4).tolist()
    stamps = SlotTable(segment, slots, max_len).view(Writer.DETOKENIZE).last_token_ns
    return lambda: int(stamps.max())


def completion(tokens: int, prompt: str) -> bytes:
    """A streamed /v1/completions request of exactly `tokens` tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return request_bytes("/v1/completions", body)


@dataclass(frozen=True)
class Delays:
    """Milliseconds from the commit of each token to its event's way out of the server, and to the client's read."""

    sent: list[float]
    read: list[float]


def check_events(streams: list[Stream], tokens: int) -> Delays:
    """One event for each token of each stream, and when. Raises AssertionError."""
    delays = Delays([], [])
    commits = sorted({a.seen for stream in streams for a in stream.arrivals})
    for stream in streams:
        events = stream.events()
        if events[-1][1] != "[DONE]":
            raise AssertionError(f"last event is {events[-1][1]!r}")
        texts = [(arrival, json.loads(event)["choices"]) for arrival, event in events[:-1]]
        with_text = [arrival for arrival, choices in texts if choices and choices[0]["text"]]
        if len(with_text) != tokens:
            raise AssertionError(f"{len(with_text)} events with text for {tokens} tokens")
        for arrival in with_text:
            commit = commits[max(0, bisect(commits, arrival.sent_ns) - 1)]
            delays.sent.append((arrival.sent_ns - commit) / 1e6)
            delays.read.append((arrival.at_ns - commit) / 1e6)
    return delays


def raw_delays(streams: list[Stream], tick_ms: float) -> list[float]:
    """Milliseconds from the first event of a tick to each event of it, as the raw app sent them."""
    sent = sorted(a.sent_ns for stream in streams for a, _ in stream.events())
    delays, first = [], sent[0]
    for before, at in zip([sent[0], *sent], sent, strict=False):
        first = at if at - before > tick_ms / 2 * 1e6 else first
        delays.append((at - first) / 1e6)
    return delays


def run_once(
    target: Server | RawApp, port: int, requests: list[bytes], observe: Callable[[], int], tokens: int
) -> tuple[dict[str, float], list[Stream], float]:
    """CPU microseconds a token of each process, the streams, and the wall seconds."""
    before = target.cpu()
    began = time.monotonic()
    streams = uvloop.run(run_streams(port, requests, observe))
    seconds = time.monotonic() - began
    after = target.cpu()
    count = tokens * len(requests)
    return {name: (after[name] - before[name]) / count * 1e6 for name in after}, streams, seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Interleaved runs of both; the result to be written."""
    flags = ["--engine", "fake", "--httpserver-workers", "1", "--fake-step-ms", str(args.step_ms)]
    flags += ["--model-dir", args.model_dir] if args.model_dir else []
    chain: list[dict[str, float]] = []
    raw: list[float] = []
    delays, spread = Delays([], []), list[float]()
    pace: list[float] = []
    with Server(*flags) as server, RawApp(args.step_ms) as app:
        observe = commit_clock(server)
        for run in range(args.runs + 1):
            requests = [completion(args.tokens, f"stream {n} of run {run}") for n in range(args.streams)]
            shares, streams, seconds = run_once(server, server.port, requests, observe, args.tokens)
            late = check_events(streams, args.tokens)
            plain = [request_bytes(f"/{args.tokens}", {}) for _ in range(args.streams)]
            yardstick, raw_streams, _ = run_once(app, app.port, plain, lambda: 0, args.tokens)
            if any(len(s.events()) != args.tokens for s in raw_streams):
                raise AssertionError("the raw app lost events")
            if run:  # the first run warms both up
                chain.append(shares)
                raw.append(yardstick["raw"])
                delays.sent.extend(late.sent)
                delays.read.extend(late.read)
                spread += raw_delays(raw_streams, args.step_ms)
                pace.append(seconds / args.tokens * 1e3)
    result = summary(chain, raw, delays, pace, args)
    result["raw_event_after_first_of_tick_ms"] = _quantiles(spread)
    return result


def summary(
    chain: list[dict[str, float]], raw: list[float], delays: Delays, pace: list[float], args: argparse.Namespace
) -> dict[str, Any]:
    """Medians, ratios and spreads."""
    totals = [sum(shares.values()) for shares in chain]
    ratios = [total / yardstick for total, yardstick in zip(totals, raw, strict=True)]
    return {
        "settings": {k: getattr(args, k) for k in ("streams", "tokens", "step_ms", "runs")},
        "us_per_token": {
            "chain": _spread(totals),
            "raw": _spread(raw),
            "share": {name: round(statistics.median(s[name] for s in chain), 1) for name in chain[0]},
        },
        "ratio_to_raw": _spread(ratios),
        "event_delay_ms": {"sent": _quantiles(delays.sent), "read_by_client": _quantiles(delays.read)},
        "ms_per_token_and_stream": _spread(pace),
        "one_event_per_token": True,
        "targets": {"ratio_to_raw": TARGET_RATIO, "event_delay_ms": TARGET_DELAY_MS},
    }


def _quantiles(delays: list[float]) -> dict[str, float]:
    parts = statistics.quantiles(delays, n=1000)
    figures = {"p50": parts[499], "p99": parts[989], "p999": parts[998], "max": max(delays)}
    within = sum(d <= TARGET_DELAY_MS for d in delays) / len(delays)
    return {name: round(ms, 3) for name, ms in figures.items()} | {"share_within_5_ms": round(within, 6)}


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", default="", help="where the tokenizer comes from; the demo model if not given")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", default="benchmarks/results/chain.json")
    args = parser.parse_args()
    result = measure(args)
    print(json.dumps(result, indent=1))
    write_result(args.out, result)


if __name__ == "__main__":
    main()
