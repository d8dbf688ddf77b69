"""Python of one engine step, with a fake forward that costs nothing: how long the host needs around the model.

256 sequences decode; each turn of the loop plans, takes KV, builds the batch, commits, and encodes the report. The parts
are timed by wrapping the very functions the worker calls, in a second run, so that the total is free of that cost.

    python benchmarks/engine_step.py [--rows 256] [--steps 3000]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from inferserve.config.schema import EnginePart, ModelFacts, ModelPart, SchedulePart, ServerConfig
from inferserve.engine.fake import FakeBackend
from inferserve.engine.worker import Worker
from inferserve.protocol.codec import Codec
from inferserve.protocol.messages import Admit, Commands, StepReport
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable, encode_params

RESULTS = Path(__file__).parent / "results" / "engine_step.json"
LIMIT_MS = 1.0
PROMPT = 64
VOCAB = 50_000
WARM_UP = 200


def configuration(rows: int, steps: int, depth: int) -> ServerConfig:
    """An engine whose sequences run longer than the measurement."""
    return ServerConfig(
        model=ModelPart(max_req_total_len=PROMPT + steps + 2 * WARM_UP, eos_id=(0,)),
        engine=EnginePart(engine="fake", pipeline_depth=depth, fake_kv_tokens=rows * (PROMPT + steps + 2 * WARM_UP)),
        schedule=SchedulePart(
            running_max_req_size=rows, max_queued_requests=0, batch_max_tokens=8192, chunked_prefill_size=4096
        ),
        facts=ModelFacts(vocab_size=VOCAB),
    )


def running_worker(config: ServerConfig) -> Worker:
    """A worker whose rows all decode."""
    rows = config.schedule.running_max_req_size
    table, _ = SlotTable.create(config.slots, config.model.max_req_total_len)
    http = table.view(Writer.HTTP)
    generator = np.random.default_rng(0)
    for row in range(rows):
        params = encode_params(SamplingParams(max_tokens=10**6, seed=row))
        http.generation[row] = 1
        http.prompt_len[row], http.params_len[row] = PROMPT, len(params)
        http.prompt_ids[row, :PROMPT] = generator.integers(1, VOCAB, PROMPT)
        http.params[row, : len(params)] = np.frombuffer(params, dtype=np.uint8)
    backend = FakeBackend(config, rows, vocabulary=np.arange(1, VOCAB, dtype=np.int32))
    worker = Worker(config, table.view(Writer.ENGINE), backend, backend.start().kv_tokens)
    worker.apply(Commands(0, tuple(Admit(row, 1) for row in range(rows))))
    for _ in range(WARM_UP):
        report = worker.step()
    assert report is not None and report.decode_tokens == rows, "not all rows decode"
    return worker


def turn(worker: Worker, codec: Codec[StepReport]) -> None:
    """What the engine process does between two looks at its inbox."""
    report = worker.step()
    if report is not None:
        codec.encode(report)


class Stopwatch:
    """Adds up the time spent inside wrapped functions, without that of wrapped functions inside them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its own time counted under `part`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - started
                self.seconds[part] = self.seconds.get(part, 0.0) + spent - self._inner.pop()
                self._inner[-1] += spent

        return timed


def measure_total(config: ServerConfig, steps: int) -> list[float]:
    """Milliseconds of each step."""
    worker, codec = running_worker(config), Codec[StepReport](StepReport)
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        turn(worker, codec)
        times.append((time.perf_counter() - started) * 1000)
    return times


def measure_parts(config: ServerConfig, steps: int) -> dict[str, float]:
    """Microseconds a step spends in each part."""
    worker, codec, watch = running_worker(config), Codec[StepReport](StepReport), Stopwatch()
    wrapped: list[tuple[Any, str, str]] = [
        (worker, "plan", "plan"),
        (worker.ledger, "extend", "ledger"),
        (worker.ledger, "counters", "ledger"),
        (worker, "_launch", "batch"),
        (worker._backend, "launch", "fake forward"),
        (worker, "_commit", "commit"),
        (worker, "_report", "report"),
        (codec, "encode", "report encode"),
    ]
    for owner, name, part in wrapped:
        setattr(owner, name, watch.wrap(part, getattr(owner, name)))
    step = watch.wrap("rest", lambda: turn(worker, codec))
    for _ in range(steps):
        step()
    return {part: round(seconds / steps * 1e6, 1) for part, seconds in watch.seconds.items()}


def main() -> int:
    """Measure, print, write the JSON; 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    figures: dict[str, Any] = {"rows": options.rows, "steps": options.steps, "limit_ms": LIMIT_MS}
    figures["machine"] = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    for depth in (0, 1):
        config = configuration(options.rows, options.steps, depth)
        times = measure_total(config, options.steps)
        quantiles = statistics.quantiles(times, n=100)
        figures[f"pipeline_depth_{depth}"] = {
            "median_ms": round(statistics.median(times), 4),
            "p10_ms": round(quantiles[9], 4),
            "p90_ms": round(quantiles[89], 4),
            "p99_ms": round(quantiles[98], 4),
            "parts_us": measure_parts(config, options.steps),
        }
    print(json.dumps(figures, indent=2))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    worst = max(figures[f"pipeline_depth_{depth}"]["median_ms"] for depth in (0, 1))
    return int(worst > LIMIT_MS)


if __name__ == "__main__":
    raise SystemExit(main())
