"""Time to the first token on an idle server, beyond the engine's own step, with the fake engine.

`python -m benchmarks.ttft` sends streamed chat requests, one at a time and each on a new connection, and takes the time
from sending a request to the arrival of the first event with text, less the step's time (0 unless --step-ms says
otherwise). Two series: requests back to back, and each after a pause. After a pause the processors have gone to sleep
and their caches are cold; the difference between the series is what the machine asks for that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from typing import Any

import uvloop

from benchmarks.serving import Server, write_result
from benchmarks.stream_client import request_bytes, run_streams

TARGET_P50_MS = 3.0
TARGET_P99_MS = 10.0
_PAUSES_MS = {"back_to_back": 0, "after_20_ms_pause": 20}


def _chat(number: int) -> bytes:
    messages = [{"role": "user", "content": f"Hello, who are you? Question {number}."}]
    return request_bytes("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "stream": True})


async def first_tokens(port: int, count: int, pause_s: float) -> list[float]:
    """Milliseconds to the first event with text, for each request."""
    found = []
    for number in range(count):
        if pause_s:
            await asyncio.sleep(pause_s)
        (stream,) = await run_streams(port, [_chat(number)], lambda: 0)
        for arrival, event in stream.events():
            choices = json.loads(event)["choices"] if event != "[DONE]" else []
            if choices and choices[0]["delta"].get("content"):
                found.append((arrival.at_ns - stream.sent_ns) / 1e6)
                break
        else:
            raise AssertionError(f"no text in {stream.events()}")
    return found


def _quantiles(values: list[float]) -> dict[str, float]:
    parts = statistics.quantiles(values, n=100)
    figures = {"p50": parts[49], "p90": parts[89], "p99": parts[98], "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", default="", help="where the tokenizer comes from; the demo model if not given")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--out", default="benchmarks/results/ttft.json")
    args = parser.parse_args()
    flags = ["--engine", "fake", "--fake-step-ms", str(args.step_ms)]
    flags += ["--model-dir", args.model_dir] if args.model_dir else []
    beyond: dict[str, list[float]] = {name: [] for name in _PAUSES_MS}
    with Server(*flags) as server:
        start_seconds = server.start_seconds
        uvloop.run(first_tokens(server.port, 50, 0))
        for _ in range(4):  # interleaved, so that a busy moment of the machine meets both
            for name, pause_ms in _PAUSES_MS.items():
                series = uvloop.run(first_tokens(server.port, args.requests // 4, pause_ms / 1000))
                beyond[name] += [ms - args.step_ms for ms in series]
    result: dict[str, Any] = {
        "settings": {"requests": args.requests, "step_ms": args.step_ms},
        "server_ready_seconds": round(start_seconds, 2),
        "ttft_beyond_step_ms": {name: _quantiles(values) for name, values in beyond.items()},
        "targets": {"p50": TARGET_P50_MS, "p99": TARGET_P99_MS},
    }
    print(json.dumps(result, indent=1))
    write_result(args.out, result)


if __name__ == "__main__":
    main()
