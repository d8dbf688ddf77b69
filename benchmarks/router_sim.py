"""The real router over a simulated engine with the real KV ledger: how full the pool gets, and what that costs in pauses.

    python -m benchmarks.router_sim [--requests 2000] [--out benchmarks/results/router_sim.json]

Time is counted in engine steps. A synthetic trace (chat-like prompts with shared system prompts, outputs far shorter
than `max_tokens`) arrives faster than it can be served; each setting of `--router-token-ratio` replays the same trace.
The simulated engine gives every started row a token in each step, fills the rest of the step with prefill chunks, frees
a row one step after its end (it computes one step ahead) and pauses the youngest rows when the pool is short.
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

from inferserve.config.schema import EnginePart, ModelPart, SchedulePart, ServerConfig
from inferserve.kv.ledger import KvLedger
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import declare
from inferserve.protocol.boot import ROLE_ROUTER
from inferserve.protocol.messages import (
    Abort,
    Commands,
    Dropped,
    EngineReady,
    Finish,
    FinishedRow,
    SlotRef,
    StepReport,
    Submit,
)
from inferserve.router.loop import Router
from inferserve.router.observe import Observer
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable, SlotView

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Request:
    """One request of a trace: `lengths` has the true output length of each sibling; `abort_at` is a step or -1."""

    arrival: int
    prompt: Ints
    max_tokens: int
    lengths: tuple[int, ...]
    ignore_eos: bool = False
    abort_at: int = -1


@dataclass
class SimulatedRow:
    """A sequence in the simulated engine. `computed` counts tokens of prompt + output in KV."""

    ref: SlotRef
    tokens: Ints
    prompt_len: int
    length: int
    leader: int
    limit: int
    row: int = -1
    generated: int = 0
    computed: int = 0
    end: Finish = Finish.NONE

    @property
    def prefilling(self) -> bool:
        """It has tokens to compute before it can produce the next one."""
        return self.computed < self.prompt_len + max(0, self.generated - 1)


class SimulatedEngine:
    """Continuous batching over a real `KvLedger`, without a model. `true_length` says where each slot's text ends."""

    def __init__(self, config: ServerConfig, kv_tokens: int, slots: SlotView, true_length: dict[int, int]) -> None:
        schedule = config.schedule
        self._schedule = schedule
        self._slots = slots
        self._true_length = true_length
        cache = not config.engine.disable_dynamic_prompt_cache
        self.ledger = KvLedger(kv_tokens, schedule.running_max_req_size, slots.prompt_ids.shape[1] + 2, cache)
        self._free = list(range(schedule.running_max_req_size))
        self._rows: dict[int, SimulatedRow] = {}
        self._waiting: deque[SimulatedRow] = deque()
        self._steps = 0
        self._preempted = 0
        self._last_seq = 0

    def command(self, commands: Commands) -> None:
        """Take one message of the router."""
        assert commands.seq == self._last_seq + 1
        self._last_seq = commands.seq
        for admit in commands.admit:
            assert admit.index not in self._rows
            ref = SlotRef(admit.index, admit.generation)
            prompt = self._slots.prompt(admit.index)
            limit = int(self._slots.max_tokens[admit.index])
            output = np.arange(limit, dtype=np.int32) + 1_000_000 * (admit.index + 1)
            length = min(limit, self._true_length[admit.index])
            tokens = np.concatenate([prompt, output])
            self._slots.cached_tokens[admit.index] = 0
            self._rows[admit.index] = row = SimulatedRow(ref, tokens, len(prompt), length, admit.leader, limit)
            self._waiting.append(row)
        for ref in (*commands.abort, *commands.stop):
            if ref.index in self._rows and self._rows[ref.index].ref == ref:
                self._rows[ref.index].end = Finish.ABORT

    def step(self) -> StepReport:
        """Run one step and report it."""
        self._steps += 1
        finished = self._close_ended()
        decoding = [r for r in self._rows.values() if r.row >= 0 and not r.prefilling and r.generated]
        decoding = self._pause_until_it_fits(decoding)
        chunks = self._chunks(self._schedule.batch_max_tokens - len(decoding))
        work = [(r, 1) for r in decoding] + chunks
        if work:
            rows = np.array([r.row for r, _ in work], np.int32)
            self.ledger.extend(rows, np.array([c for _, c in work], np.int32))
        produced = []
        for row, count in work:
            row.computed += count
            if not row.prefilling:
                if row.generated == 0:
                    self.ledger.publish(row.row, row.tokens[: row.prompt_len])
                row.generated += 1
                produced.append(row)
                if row.generated >= row.length:
                    row.end = Finish.LENGTH if row.length == row.limit else Finish.STOP
        return self._report(produced, finished, sum(c for _, c in chunks), len(decoding))

    def _close_ended(self) -> list[FinishedRow]:
        finished = []
        for row in [r for r in self._rows.values() if r.end]:
            if row.row >= 0:
                self._close(row)
            else:
                self._waiting.remove(row)
            del self._rows[row.ref.index]
            finished.append(FinishedRow(row.ref.index, row.ref.generation, row.end))
        return finished

    def _close(self, row: SimulatedRow) -> None:
        self.ledger.close(row.row, row.tokens[: int(self.ledger.length[row.row])])
        self._free.append(row.row)
        row.row = -1

    def _pause_until_it_fits(self, decoding: list[SimulatedRow]) -> list[SimulatedRow]:
        while decoding and self.ledger.available < len(decoding):
            victim = decoding.pop()
            self._close(victim)
            self._waiting.appendleft(victim)
            self._preempted += 1
        return decoding

    def _chunks(self, budget: int) -> list[tuple[SimulatedRow, int]]:
        """Prefill work: rows that are in it, then waiting ones in order while pool and budget last."""
        chunks = []
        room = self.ledger.available - sum(1 for r in self._rows.values() if r.row >= 0 and not r.prefilling)
        rows = [r for r in self._rows.values() if r.row >= 0 and r.prefilling]
        for row in rows:
            count = min(self._schedule.chunked_prefill_size, budget, room, _goal(row) - row.computed)
            if count > 0:
                chunks.append((row, count))
                budget, room = budget - count, room - count
        while self._waiting and budget > 0 and not self._leader_prefills(self._waiting[0]):
            row = self._waiting[0]
            if _goal(row) + 1 > room and len(self._rows) > len(self._waiting):
                break
            self._waiting.popleft()
            row.row = self._free.pop()
            row.computed = self.ledger.open(row.row, row.tokens[: _goal(row)])
            if not row.generated:
                self._slots.cached_tokens[row.ref.index] = row.computed
            count = min(self._schedule.chunked_prefill_size, budget, _goal(row) - row.computed)
            room = self.ledger.available - sum(1 for r in self._rows.values() if r.row >= 0 and not r.prefilling)
            room -= sum(c for _, c in chunks)
            if count <= 0 or count > room:
                break
            chunks.append((row, count))
            budget, room = budget - count, room - count
        return chunks

    def _leader_prefills(self, row: SimulatedRow) -> bool:
        leader = self._rows.get(row.leader)
        return leader is not None and leader.generated == 0

    def _report(
        self, produced: list[SimulatedRow], finished: list[FinishedRow], prefill: int, decode: int
    ) -> StepReport:
        paused = sum(1 for r in self._waiting if r.generated)
        cached, evicted = self.ledger.take_digests()
        self.ledger.take_new_prefixes()
        preempted, self._preempted = self._preempted, 0
        return StepReport(
            step=self._steps,
            slots=np.array([r.ref.index for r in produced], "<i4").tobytes(),
            generations=np.array([r.ref.generation for r in produced], "<u4").tobytes(),
            visible=np.array([r.generated for r in produced], "<i4").tobytes(),
            kv=self.ledger.counters(len(self._rows), paused),
            finished=tuple(finished),
            cached_digests=cached,
            evicted_digests=evicted,
            preempted=preempted,
            prefill_tokens=prefill,
            decode_tokens=decode,
        )


def _goal(row: SimulatedRow) -> int:
    return row.prompt_len + max(0, row.generated - 1)


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
        self.true_length: dict[int, int] = {}
        self.engine = SimulatedEngine(config, kv_tokens, table.view(Writer.ENGINE), self.true_length)
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
        self._reports: deque[StepReport] = deque([_NO_REPORT] * report_lag)

    def command(self, commands: Commands) -> None:
        """Links: to the engine at once."""
        self.engine.command(commands)

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
            self._reports.append(self.engine.step())
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
            self.true_length[index] = length
            refs.append(SlotRef(index, int(self.http.generation[index])))
            self.active[index] = refs[-1]
        self.router.handle(Submit(tuple(refs)), 0.0)
        return tuple(refs)

    def _abort(self, refs: tuple[SlotRef, ...]) -> None:
        alive = tuple(r for r in refs if self.active.get(r.index) == r)
        for ref in alive:
            self.http.cancelled[ref.index] = 1
        self.router.handle(Abort(alive), 0.0)

    def _hear(self, report: StepReport, step: int) -> None:
        self.router.handle(report, float(step))
        for row in report.finished:
            self.outcome.finished += 1
            self._forget(row.index)
        self.router.conclude(float(step), step)
        outcome = self.outcome
        outcome.pauses += report.preempted
        outcome.tokens += len(report.slots) // 4
        share = report.kv.used / report.kv.total if report.kv.total else 0.0
        outcome.used_peak = max(outcome.used_peak, share)
        if len(self.active) > report.kv.running + 8:
            outcome._samples.append((share, report.kv.running - report.kv.paused))

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


_NO_REPORT = StepReport(0, b"", b"", b"", KvLedger(1, 1, 1).counters(0, 0))


def settings(ratio: float, rows: int = 256, cache: bool = True) -> ServerConfig:
    """A server of 256 rows with chunks of 512 tokens."""
    return ServerConfig(
        model=ModelPart(max_req_total_len=8192),
        engine=EnginePart(disable_dynamic_prompt_cache=not cache),
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
    systems = [rng.integers(0, 100_000, 600).astype(np.int32) for _ in range(4)]
    trace = []
    for i in range(requests):
        question = rng.integers(0, 100_000, int(np.clip(rng.lognormal(5.0, 1.0), 20, 2000))).astype(np.int32)
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
