"""Steps of the engine alone, no HTTP: milliseconds, host time, and how long the GPU stands idle between steps.

    python -m benchmarks.step_time [--shapes llama-3.1-8b,qwen3-0.6b] [--quant-type T] [--llm-kv-type T] [--out FILE.json]

Random weights of real shapes; rows decode at a context of 1024 tokens, one step ahead, greedy; "mixed" is 64 of them
beside 256 prompt tokens. Each time stands beside its floor: bytes of weights and of KV read, over the copy rate measured in the
same run. What does not fit into --limit seconds is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from benchmarks import gpu_trace, schema
from inferserve import log
from inferserve.config.dummy_model import weight_count
from inferserve.config.resolve import resolve
from inferserve.config.schema import EnginePart, ModelPart, SchedulePart, ServerConfig
from inferserve.engine.step import FROM_DEVICE, PendingStep, StepBatch
from inferserve.engine.torch_backend import TorchBackend
from inferserve.kv.ledger import KvLedger
from inferserve.kv.pool import KvPool
from inferserve.models.registry import read_model_config

SHAPES = Path(__file__).parent / "shapes"
ROWS = 256
CONTEXT = 1024
CHUNK = 256
LENGTH = 2048
BATCHES = (1, 8, 64, 256)
PROFILED = (1, 64, 256)
WARM_UP = 6

Json = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """A started backend, and sizes for floors."""

    backend: TorchBackend
    kv_tokens: int
    weight_bytes: int
    kv_bytes: int


class Course:
    """Decode steps of `rows` rows, each with one chunk of a new prompt beside them if `chunk`."""

    def __init__(self, kv_tokens: int, rows: int, chunk: int) -> None:
        self._ledger = KvLedger(kv_tokens, ROWS, LENGTH, prefix_cache=False)
        self._rows = np.arange(rows, dtype=np.int32)
        self._chunk = chunk
        self._ledger.extend(self._rows, np.full(rows, CONTEXT, np.int32))
        self._new = tuple((row, CONTEXT) for row in range(rows))
        self._steps = 0

    def step(self) -> StepBatch:
        """The next one. The chunk is the beginning of a prompt each time, in a row that nobody else has."""
        rows, counts = self._rows, np.ones(len(self._rows), np.int32)
        ids = np.full(len(rows), FROM_DEVICE, np.int32)
        if self._chunk:
            filler = ROWS - 1
            if self._steps:
                self._ledger.truncate(filler, 0)
            rows, counts = np.append(rows, np.int32(filler)), np.append(counts, np.int32(self._chunk))
            ids = np.append(ids, np.arange(self._chunk, dtype=np.int32))
        _, positions, kv_index = self._ledger.extend(rows, counts)
        new, self._new, self._steps = self._new, (), self._steps + 1
        sample = np.arange(len(rows), dtype=np.int32)
        return StepBatch(
            step=self._steps,
            rows=rows,
            num_decode=len(self._rows),
            query_len=counts,
            kv_len=self._ledger.length[rows],
            token_ids=ids,
            positions=positions,
            kv_index=kv_index,
            table=self._ledger.table,
            new_prefix=new,
            sample=sample,
            out_position=np.full(len(rows), self._steps, np.int32),
        )


class Pipeline:
    """Launches one step ahead; keeps the host's time of each launch in milliseconds."""

    def __init__(self, backend: TorchBackend, course: Course) -> None:
        self._backend, self._course = backend, course
        self._pending: deque[PendingStep] = deque()
        self.launch_ms: list[float] = []

    def run(self, steps: int) -> None:
        """Launch and read `steps` steps."""
        for _ in range(steps):
            batch = self._course.step()
            started = time.perf_counter()
            self._pending.append(self._backend.launch(batch))
            self.launch_ms.append((time.perf_counter() - started) * 1000)
            if len(self._pending) > 1:
                self._read()
        while self._pending:
            self._read()

    def _read(self) -> None:
        if self._pending.popleft().result().failed.any():
            raise RuntimeError("logits are not finite")


def start(shape: str, device: str, quant_type: str = "none", kv_type: str = "auto") -> tuple[Engine, float]:
    """The engine with the KV that the measurements need, filled with random numbers; seconds to start."""
    tokens = ROWS * (CONTEXT + CHUNK)
    asked = ServerConfig(
        model=ModelPart(
            model_dir=str(SHAPES / shape), load_format="dummy", max_req_total_len=LENGTH, quant_type=quant_type
        ),
        engine=EnginePart(device=device, max_total_token_num=tokens, llm_kv_type=kv_type),
        schedule=SchedulePart(running_max_req_size=ROWS, batch_max_tokens=LENGTH, chunked_prefill_size=LENGTH),
    )
    config = resolve(asked)
    begin = time.monotonic()
    backend = TorchBackend(config, ROWS)
    facts = backend.start()
    seconds = time.monotonic() - begin
    model, pool = read_model_config(Path(config.facts.folder)), backend._ready().attention.pool  # type: ignore[attr-defined]
    with torch.inference_mode():
        for tensor in (*pool.k, *pool.v):
            if tensor.dtype == pool.dtype:
                tensor.normal_()
            else:
                tensor.view(torch.uint8).random_(0, 120)  # 0 to 240 in e4m3
        for scale in (*pool.k_scale, *pool.v_scale):
            if scale is not None:
                scale.fill_(0.01)
    head = model.vocab_size * model.hidden_size
    layers = weight_count(model) - (1 if model.tie_word_embeddings else 2) * head
    quantised = 0 if quant_type == "none" else layers * (model.num_layers - 1) // model.num_layers
    weights = (head + layers - quantised) * pool.dtype.itemsize + quantised
    return Engine(backend, facts.kv_tokens, weights, KvPool.bytes_per_token(pool.shapes, pool.k[0].dtype)), seconds


def copy_rate() -> float:
    """Bytes read and written a second by a large copy on the device."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
    times = []
    for _ in range(8):
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * source.nbytes / statistics.median(times) * 1000


def measure(engine: Engine, rows: int, chunk: int, steps: int) -> Json:
    """Milliseconds of a step, and of the host in its launch."""
    pipeline = Pipeline(engine.backend, Course(engine.kv_tokens, rows, chunk))
    pipeline.run(WARM_UP)
    pipeline.launch_ms.clear()
    gc.collect()
    begin = time.perf_counter()
    pipeline.run(steps)
    ms = (time.perf_counter() - begin) / steps * 1000
    return {"ms": round(ms, 3), "launch_ms": round(statistics.median(pipeline.launch_ms), 3)}


def measure_all(engine: Engine, rate: float, options: argparse.Namespace, end: float) -> Json:
    """Every batch size, with graphs and without, beside its floor, and traces of some, until the clock says `end`."""
    graphs, plain = engine.backend, engine.backend._ready()
    figures: Json = {}
    steps = options.steps
    for rows, chunk in (*((rows, 0) for rows in options.batches), (64, CHUNK)):
        name = f"mixed_{rows}_{chunk}" if chunk else f"decode_{rows}"
        if time.monotonic() > end:
            print(f"{name}: no time left", flush=True)
            break
        floor = (engine.weight_bytes + rows * CONTEXT * engine.kv_bytes) / rate * 1000
        graphs._runner = plain
        figures[name] = {"floor_ms": round(floor, 3), "graph": measure(engine, rows, chunk, steps)}
        if chunk or rows in PROFILED:
            pipeline = Pipeline(graphs, Course(engine.kv_tokens, rows, chunk))
            pipeline.run(WARM_UP)
            figures[name]["trace"] = attempt(lambda p=pipeline: gpu_trace.summary(lambda: p.run(12)))
        graphs._runner = replace(plain, graphs=None)
        figures[name]["eager"] = measure(engine, rows, chunk, max(6, steps // 4))
        graphs._runner = plain
        shown = {key: value for key, value in figures[name].items() if key != "trace"}
        print(name, json.dumps(shown), flush=True)
    return figures


def attempt(run: Any) -> Json:
    """What it returns, or why not: a trace is worth having, but not worth losing the times for."""
    try:
        result: Json = run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return result


def measure_shape(shape: str, rate: float, options: argparse.Namespace, end: float) -> Json:
    """Start, measure, let go of the memory."""
    if time.monotonic() > end:
        return {"error": "no time left"}
    engine, seconds = start(shape, "cuda", options.quant_type, options.llm_kv_type)
    try:
        return {"start_seconds": round(seconds, 2), **measure_all(engine, rate, options, end)}
    finally:
        engine.backend._runner = None
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def main() -> int:
    """Measure, print, write; 1 if a shape failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-3.1-8b,qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--quant-type", default="none", help="weights, as `inferserve serve` takes it")
    parser.add_argument("--llm-kv-type", default="auto", help="K and V, as `inferserve serve` takes it")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which no other case is begun")
    parser.add_argument("--out", default="benchmarks/results/step_time.json")
    options = parser.parse_args()
    schema.require_gpu()
    log.setup("step_time")
    end = time.monotonic() + options.limit
    rate = copy_rate()
    figures: Json = {"copy_tb_per_s": round(rate / 1e12, 3)}
    for shape in options.shapes.split(","):
        figures[shape] = attempt(lambda shape=shape: measure_shape(shape, rate, options, end))
        schema.write(options.out, result(options, figures))
    print(json.dumps(figures, indent=1))
    return int(any("error" in figures[shape] for shape in options.shapes.split(",")))


def result(options: argparse.Namespace, figures: Json) -> Json:
    """In the common form; ratios are times over floors."""
    settings = {name: getattr(options, name) for name in ("steps", "batches", "quant_type", "llm_kv_type")}
    settings["context"] = CONTEXT
    ratios = {
        f"{shape} {name}": round(case["graph"]["ms"] / case["floor_ms"], 3)
        for shape, cases in figures.items()
        if isinstance(cases, dict)
        for name, case in cases.items()
        if isinstance(case, dict) and "floor_ms" in case
    }
    return schema.result("step_time", settings, figures, ratios)


if __name__ == "__main__":
    raise SystemExit(main())
