"""The real router over the real engine core, without a model: how full the KV pool gets, and what that costs in pauses.

    python -m benchmarks.router_sim [--requests 2000] [--out benchmarks/results/router_sim.json]

Time is counted in engine steps. A synthetic trace (chat-like prompts with shared system prompts, outputs far shorter
than `max_tokens`) arrives faster than it can be served; each setting of `--router-token-ratio` replays the same trace.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inferserve.config.schema import EnginePart, ModelFacts, ModelPart, SchedulePart, ServerConfig
from inferserve.engine.step import BackendFacts, StepBatch, StepResult
from inferserve.engine.worker import Worker
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import declare
from inferserve.protocol.boot import ROLE_ROUTER
from inferserve.protocol.messages import (
    Abort,
    Commands,
    Dropped,
    EngineReady,
    SlotRef,
    StepReport,
    Submit,
)
from inferserve.protocol.sampling import SamplingParams
from inferserve.router.loop import Router
from inferserve.router.observe import Observer
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable, encode_params

Ints = NDArray[np.int32]

EOS = 0


@dataclass(frozen=True)
class Request:
    """One request of a trace: `lengths` has the true output length of each sibling; `abort_at` is a step or -1."""

    arrival: int
    prompt: Ints
    max_tokens: int
    lengths: tuple[int, ...]
    ignore_eos: bool = False
    abort_at: int = -1


@dataclass(frozen=True)
class Computed:
    """A pretended step that is over at once."""

    outcome: StepResult

    def result(self) -> StepResult:
        """What it sampled."""
        return self.outcome


class ScriptedBackend:
    """No model: a row samples EOS when its text is as long as its seed says."""

    def __init__(self, kv_tokens: int, max_rows: int) -> None:
        self._kv_tokens = kv_tokens
        self._length = np.zeros(max_rows, np.int64)

    def start(self) -> BackendFacts:
        """The pool that was asked for."""
        return BackendFacts(self._kv_tokens, {})

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:  # noqa: ARG002
        """Remember where the row's text ends."""
        self._length[row] = params.seed

    def close_row(self, row: int) -> None:
        """Nothing is kept."""

    def launch(self, batch: StepBatch) -> Computed:
        """Sample."""
        rows = batch.rows[batch.sample]
        ends = batch.out_position + 1 >= self._length[rows]
        tokens = np.where(ends, EOS, batch.out_position % 1000 + 1000 * (rows + 1)).astype(np.int32)
        return Computed(StepResult(tokens, np.zeros(len(rows), np.float32), np.zeros(len(rows), np.bool_), {}))


@dataclass
class Outcome:
    """What one replay showed. `used` is the mean share of the pool held by running rows while requests waited."""

    steps: int = 0
    tokens: int = 0
    pauses: int = 0
    refused: int = 0
    finished: int = 0
    used: float = 0.0
    used_peak: float = 0.0
    rows: float = 0.0
    router_us_per_step: float = 0.0
    _samples: list[tuple[float, int]] = field(default_factory=list, repr=False)


class Replay:
    """Plays http, launcher and the wires around a real `Router`; also its `Links`.

    Args:
        report_lag: how many steps late the router learns of a step.
    """

    def __init__(self, config: ServerConfig, kv_tokens: int, report_lag: int = 1) -> None:
        table, self.segment = SlotTable.create(config.slots, config.model.max_req_total_len)
        self.http = table.view(Writer.HTTP)
        backend = ScriptedBackend(kv_tokens, config.schedule.running_max_req_size)
        self.engine = Worker(config, table.view(Writer.ENGINE), backend, kv_tokens)
        metrics = MetricsClient(
            declare(config.model.max_req_total_len, config.schedule.batch_max_tokens), ROLE_ROUTER, 0, 0, None
        )
        self.router = Router(config, table.view(Writer.ROUTER), self, Observer(config, metrics, 0.0))
        self.router.handle(
            EngineReady(kv_tokens, config.schedule.running_max_req_size, config.schedule.batch_max_tokens), 0.0
        )
        self.free = deque(range(config.slots))
        self.active: dict[int, SlotRef] = {}
        self.outcome = Outcome()
        self._reports: deque[StepReport | None] = deque([None] * report_lag)

    def command(self, commands: Commands) -> None:
        """Links: to the engine at once."""
        self.engine.apply(commands)

    def drop(self, dropped: Dropped) -> None:
        """Links: to http."""
        self.outcome.refused += 1
        self._forget(dropped.index)

    def run(self, trace: Iterable[Request], max_steps: int = 1_000_000) -> Outcome:
        """Replay `trace` to the end."""
        arriving = deque(sorted(trace, key=lambda r: r.arrival))
        aborts: list[tuple[int, tuple[SlotRef, ...]]] = []
        step, spent = 0, 0.0
        while arriving or self.active:
            begin = time.perf_counter()
            while arriving and arriving[0].arrival <= step and len(self.free) >= len(arriving[0].lengths):
                request = arriving.popleft()
                refs = self._submit(request)
                if request.abort_at >= 0:
                    aborts.append((step + request.abort_at, refs))
            for due, refs in [a for a in aborts if a[0] <= step]:
                aborts.remove((due, refs))
                self._abort(refs)
            self._hear(self._reports.popleft(), step)
            spent += time.perf_counter() - begin
            self._reports.append(self.engine.step() if self.engine.busy else None)
            step += 1
            assert step < max_steps, "the simulation does not end"
        self._summarise(step, spent)
        return self.outcome

    def _submit(self, request: Request) -> tuple[SlotRef, ...]:
        refs = []
        for length in request.lengths:
            index = self.free.popleft()
            self.http.generation[index] += 1
            self.http.cancelled[index] = 0
            self.http.prompt_len[index] = len(request.prompt)
            self.http.prompt_ids[index, : len(request.prompt)] = request.prompt
            self.http.max_tokens[index] = request.max_tokens
            self.http.ignore_eos[index] = request.ignore_eos
            params = encode_params(
                SamplingParams(seed=length, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
            )
            self.http.params_len[index] = len(params)
            self.http.params[index, : len(params)] = np.frombuffer(params, np.uint8)
            refs.append(SlotRef(index, int(self.http.generation[index])))
            self.active[index] = refs[-1]
        self.router.handle(Submit(tuple(refs)), 0.0)
        return tuple(refs)

    def _abort(self, refs: tuple[SlotRef, ...]) -> None:
        alive = tuple(r for r in refs if self.active.get(r.index) == r)
        for ref in alive:
            self.http.cancelled[ref.index] = 1
        self.router.handle(Abort(alive), 0.0)

    def _hear(self, report: StepReport | None, step: int) -> None:
        if report:
            self.router.handle(report, float(step))
            for row in report.finished:
                self.outcome.finished += 1
                self._forget(row.index)
        self.router.conclude(float(step), step)
        if report:
            self._count(report)

    def _count(self, report: StepReport) -> None:
        outcome = self.outcome
        outcome.pauses += report.preempted
        outcome.tokens += len(report.slots) // 4
        share = report.kv.used / report.kv.total
        outcome.used_peak = max(outcome.used_peak, share)
        if len(self.active) > report.kv.running + 8:
            outcome._samples.append((share, report.kv.running))

    def _forget(self, index: int) -> None:
        del self.active[index]
        self.free.append(index)

    def _summarise(self, steps: int, spent: float) -> None:
        self.outcome.steps = steps
        self.outcome.router_us_per_step = round(1e6 * spent / steps, 1)
        if self.outcome._samples:
            used, rows = np.array(self.outcome._samples).mean(axis=0)
            self.outcome.used, self.outcome.rows = round(float(used), 3), round(float(rows), 1)
        self.outcome.used_peak = round(self.outcome.used_peak, 3)


def settings(ratio: float, rows: int = 256, cache: bool = True) -> ServerConfig:
    """A server of 256 rows with chunks of 512 tokens."""
    return ServerConfig(
        model=ModelPart(max_req_total_len=8192, eos_id=(EOS,)),
        facts=ModelFacts(vocab_size=1_000_000),
        engine=EnginePart(disable_dynamic_prompt_cache=not cache, pipeline_depth=1),
        schedule=SchedulePart(
            running_max_req_size=rows,
            max_queued_requests=1024,
            batch_max_tokens=2048,
            chunked_prefill_size=512,
            router_token_ratio=ratio,
        ),
    )


def chat_trace(requests: int, seed: int = 0) -> list[Request]:
    """Chat-like: 4 system prompts of 600 tokens, questions of 20 to 2000 tokens, answers of mean 250, limit 2048."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(1, 100_000, 600).astype(np.int32) for _ in range(4)]
    trace = []
    for i in range(requests):
        question = rng.integers(1, 100_000, int(np.clip(rng.lognormal(5.0, 1.0), 20, 2000))).astype(np.int32)
        length = int(np.clip(rng.lognormal(5.0, 1.0), 1, 2048))
        prompt = np.concatenate([systems[rng.integers(4)], question])
        trace.append(Request(i // 2, prompt, 2048, (length,)))
    return trace


def main() -> None:
    """Replay the trace under each setting and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kv-tokens", type=int, default=60_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for cache in (True, False):
        for ratio in (0.0, 0.5, 0.85, 1.0):
            replay = Replay(settings(ratio, cache=cache), args.kv_tokens)
            outcome = replay.run(chat_trace(args.requests))
            line = {"prefix_cache": cache, "router_token_ratio": ratio, **asdict(replace(outcome, _samples=[]))}
            del line["_samples"]
            results.append(line)
            print(json.dumps(line), file=sys.stderr)
    if args.out:
        args.out.write_text(
            json.dumps({"kv_tokens": args.kv_tokens, "requests": args.requests, "runs": results}, indent=1)
        )


if __name__ == "__main__":
    main()
