"""`Worker`: the engine without its sockets. Commands in, steps, reports out; nothing here waits for anything but the backend.

With a pipeline of depth 0 a step is committed as soon as it is launched; with depth 1 the next one is launched first, so
that the device computes while results are read. What a step's results change in plans already made is undone by epochs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from inferserve.config.schema import ServerConfig
from inferserve.engine.batch import build_batch
from inferserve.engine.commit import Committed, LaunchedStep, commit
from inferserve.engine.cost_model import CostModel
from inferserve.engine.pacing import Pace, Target, cost_of
from inferserve.engine.planner import Budget, StepPlan, has_room, next_to_start, plan_step, youngest_holder
from inferserve.engine.proposer import NgramProposer, Proposer
from inferserve.engine.rows import FILLING, PAUSED, QUEUED, EndRules, Rows
from inferserve.engine.sequences import Sequences
from inferserve.engine.step import EngineBackend
from inferserve.errors import EngineError
from inferserve.kv.ledger import KvLedger
from inferserve.protocol.messages import Admit, Commands, Finish, KvCounters, StepReport
from inferserve.shm.slots import SlotView


def make_pace(config: ServerConfig, model: CostModel | None) -> Pace:
    """The budgets that the flags ask for."""
    schedule = config.schedule
    limits = Budget(
        schedule.batch_max_tokens,
        schedule.chunked_prefill_size,
        schedule.disable_chunked_prefill,
        drafts=0 if make_proposer(config) is None else config.engine.spec_tokens,
    )
    return Pace(limits, model, Target(schedule.target_step_ms, schedule.target_step_ratio))


def make_proposer(config: ServerConfig) -> Proposer | None:
    """What guesses tokens, as `--spec-mode` says."""
    return NgramProposer() if config.engine.spec_mode == "ngram" else None


class Worker:
    """One engine rank.

    Args:
        config: resolved.
        slots: the engine's view of the slot table.
        backend: started.
        kv_tokens: size of its KV pool.
        cost: predicts the time of steps; None = steps are as large as the fixed budget allows.
        clock: nanoseconds of CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        config: ServerConfig,
        slots: SlotView,
        backend: EngineBackend,
        kv_tokens: int,
        cost: CostModel | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        max_rows, max_len = config.schedule.running_max_req_size, config.model.max_req_total_len
        caches = not config.engine.disable_dynamic_prompt_cache
        rules = EndRules(max_rows, config.facts.vocab_size, config.model.eos_id)
        self.ledger = KvLedger(kv_tokens, max_rows, max_len, caches)
        keeps = not config.engine.deterministic
        self.sequences = Sequences(slots, self.ledger, backend, Rows(max_rows, max_len), rules, keeps)
        self._backend = backend
        self._pace = make_pace(config, cost)
        self._proposer = make_proposer(config)
        self._depth = max(0, config.engine.pipeline_depth)
        self._clock = clock
        self._inflight: deque[LaunchedStep] = deque()
        self._steps = 0
        self._command_seq = -1
        self._committed_ns = 0
        self._reported: KvCounters | None = None

    @property
    def busy(self) -> bool:
        """True while `step` has something to do."""
        return bool(self._inflight) or self.sequences.count > 0

    def apply(self, commands: Commands) -> tuple[Admit, ...]:
        """Carry out the router's commands; the admissions that took a row. Raises EngineError when commands are missing."""
        if self._command_seq >= 0 and commands.seq != self._command_seq + 1:
            raise EngineError(f"commands {commands.seq} came after {self._command_seq}")
        self._command_seq = commands.seq
        taken = tuple(admit for admit in commands.admit if self.sequences.admit(admit))
        for ref in commands.abort:
            self.sequences.end_slot(ref, Finish.ABORT)
        for ref in commands.stop:
            self.sequences.end_slot(ref, Finish.STOP)
        return taken

    def step(self) -> StepReport | None:
        """One turn: `budget`, `plan` and `run`."""
        return self.run(self.plan(self.budget()))

    def budget(self) -> Budget:
        """Limits of the next step, by this process's clock."""
        return self._pace.budget(self.sequences.rows, self.ledger.length)

    def run(self, plan: StepPlan) -> StepReport | None:
        """Launch `plan` if it holds anything, commit the oldest step if it is due; what is to be told, if anything."""
        if not plan.empty:
            self._launch(plan)
        due = len(self._inflight) > (0 if plan.empty else self._depth)
        report = self._report(*self._commit()) if due else self._report()
        if plan.empty and not due and report is None and self.busy:
            raise EngineError(f"{self.sequences.count} sequences, and none can go on")
        return report

    def check(self) -> None:
        """Raise AssertionError on any broken invariant. For tests and idle times."""
        self.sequences.check()
        if not self.busy:
            assert self.ledger.available == self.ledger.total, "KV is held by nobody"

    # ---------------------------------------------------------------------------------------------- plan

    def plan(self, budget: Budget) -> StepPlan:
        """The next step's rows. Under KV pressure the steps in flight are read first, then rows are paused."""
        self._start_rows(budget)
        while True:
            rows, rules, ledger = self.sequences.rows, self.sequences.rules, self.ledger
            plan = plan_step(rows, rules, ledger.length, budget, ledger.available, self._proposer)
            if not plan.short or self._inflight:
                return plan
            row, alone = youngest_holder(rows)
            if alone:
                self._does_not_fit(row)
            else:
                self.sequences.pause(row)

    def _start_rows(self, budget: Budget) -> None:
        """Give KV to waiting rows, oldest first, as far as the next step has use for them."""
        sequences = self.sequences
        row = next_to_start(sequences.rows)
        while row is not None:
            if not has_room(sequences.rows, sequences.rules, self.ledger.length, budget):
                return
            if not sequences.start(row, self._clock()):
                if (sequences.rows.state >= FILLING).any():
                    return
                self._does_not_fit(row)
            row = next_to_start(sequences.rows)

    def _does_not_fit(self, row: int) -> None:
        self.sequences.end(row, Finish.ERROR, error=f"the KV cache of {self.ledger.total} tokens is too small for this")

    # ---------------------------------------------------------------------------------------------- launch, commit

    def _launch(self, plan: StepPlan) -> None:
        rows = self.sequences.rows
        self._steps += 1
        batch = build_batch(self._steps, plan, rows, self.ledger)
        epochs = rows.epoch[batch.rows[batch.sample]]
        now = self._clock()
        chunks_from = len(batch.rows) - len(plan.prefill)
        self._inflight.append(LaunchedStep(batch, chunks_from, self._backend.launch(batch), epochs, now))

    def _commit(self) -> tuple[LaunchedStep, Committed, float]:
        step = self._inflight.popleft()
        result = step.pending.result()
        now = self._clock()
        seconds = (now - max(step.launched_ns, self._committed_ns)) / 1e9
        self._committed_ns = now
        if self._pace.learns:
            self._pace.observe(cost_of(step.batch, step.chunks_from), seconds * 1e3)
        return step, commit(step, result, self.sequences, now), seconds

    def _report(
        self, step: LaunchedStep | None = None, committed: Committed | None = None, seconds: float = 0.0
    ) -> StepReport | None:
        events = self.sequences.take_events()
        paused, queued = (int(np.count_nonzero(self.sequences.rows.state == state)) for state in (PAUSED, QUEUED))
        counters = self.ledger.counters(self.sequences.count - paused - queued, paused, queued)
        if step is None and not events.finished and not events.preempted and counters == self._reported:
            return None
        self._reported = counters
        cached, evicted = self.ledger.take_digests()
        batch = step.batch if step else None
        prompt_tokens = step.prompt_tokens if step else 0
        return StepReport(
            step=batch.step if batch else self._steps,
            slots=committed.slots.tobytes() if committed else b"",
            generations=committed.generations.tobytes() if committed else b"",
            visible=committed.visible.tobytes() if committed else b"",
            kv=counters,
            finished=tuple(events.finished),
            tops=committed.tops if committed else (),
            cached_digests=cached,
            evicted_digests=evicted,
            preempted=events.preempted,
            step_seconds=seconds,
            prefill_tokens=prompt_tokens,
            decode_tokens=len(batch.token_ids) - prompt_tokens if batch else 0,
            drafts=step.chunks_from - step.batch.num_decode if step else 0,
            draft_tokens=committed.drafted if committed else 0,
            accepted=committed.accepted if committed else (),
        )
