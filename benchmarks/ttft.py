"""Time to the first token on an idle server, beyond the engine's own step, with the fake engine.

`python -m benchmarks.ttft` sends streamed chat requests one after another, each on a new connection and after a pause in
which the server is idle, and takes the time from sending a request to the arrival of the first event with text, less
the step's time.
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
_IDLE_S = 0.02


def _chat(number: int) -> bytes:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"Question {number}: what is the capital of France, and why is it there? " * 4},
    ]
    return request_bytes("/v1/chat/completions", {"messages": messages, "max_tokens": 3, "stream": True})


async def first_tokens(port: int, count: int) -> list[float]:
    """Milliseconds to the first event with text, for each request."""
    found = []
    for number in range(count):
        await asyncio.sleep(_IDLE_S)
        (stream,) = await run_streams(port, [_chat(number)], lambda: 0)
        for arrival, event in stream.events():
            choices = json.loads(event)["choices"] if event != "[DONE]" else []
            if choices and choices[0]["delta"].get("content"):
                found.append((arrival.at_ns - stream.sent_ns) / 1e6)
                break
        else:
            raise AssertionError(f"no text in {stream.events()}")
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", default="", help="where the tokenizer comes from; the demo model if not given")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--out", default="benchmarks/results/ttft.json")
    args = parser.parse_args()
    flags = ["--engine", "fake", "--fake-step-ms", str(args.step_ms)]
    flags += ["--model-dir", args.model_dir] if args.model_dir else []
    with Server(*flags) as server:
        start_seconds = server.start_seconds
        uvloop.run(first_tokens(server.port, 20))
        beyond = [ms - args.step_ms for ms in uvloop.run(first_tokens(server.port, args.requests))]
    quantiles = statistics.quantiles(beyond, n=100)
    result: dict[str, Any] = {
        "settings": {"requests": args.requests, "step_ms": args.step_ms},
        "server_ready_seconds": round(start_seconds, 2),
        "ttft_beyond_step_ms": {
            "p50": round(quantiles[49], 3),
            "p90": round(quantiles[89], 3),
            "p99": round(quantiles[98], 3),
            "min": round(min(beyond), 3),
            "max": round(max(beyond), 3),
        },
        "targets": {"p50": TARGET_P50_MS, "p99": TARGET_P99_MS},
    }
    print(json.dumps(result, indent=1))
    write_result(args.out, result)


if __name__ == "__main__":
    main()
