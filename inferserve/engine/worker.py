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
from inferserve.engine.planner import Budget, StepPlan, next_to_start, plan_step, tokens_wanted, youngest_holder
from inferserve.engine.rows import FILLING, PAUSED, EndRules, Rows
from inferserve.engine.sequences import Sequences
from inferserve.engine.step import EngineBackend
from inferserve.errors import EngineError
from inferserve.kv.ledger import KvLedger
from inferserve.protocol.messages import Commands, Finish, KvCounters, StepReport
from inferserve.shm.slots import SlotView


def budget_of(config: ServerConfig) -> Budget:
    """The fixed step budget that the flags ask for."""
    schedule = config.schedule
    return Budget(schedule.batch_max_tokens, schedule.chunked_prefill_size, schedule.disable_chunked_prefill)


class Worker:
    """One engine rank.

    Args:
        config: resolved.
        slots: the engine's view of the slot table.
        backend: started.
        kv_tokens: size of its KV pool.
        clock: nanoseconds of CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        config: ServerConfig,
        slots: SlotView,
        backend: EngineBackend,
        kv_tokens: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        max_rows, max_len = config.schedule.running_max_req_size, config.model.max_req_total_len
        caches = not config.engine.disable_dynamic_prompt_cache
        rules = EndRules(max_rows, config.facts.vocab_size, config.model.eos_id)
        self.ledger = KvLedger(kv_tokens, max_rows, max_len, caches)
        self.sequences = Sequences(slots, self.ledger, backend, Rows(max_rows, max_len), rules)
        self._backend = backend
        self._budget = budget_of(config)
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

    def apply(self, commands: Commands) -> None:
        """Carry out the router's commands. Raises EngineError when one before them is missing."""
        if self._command_seq >= 0 and commands.seq != self._command_seq + 1:
            raise EngineError(f"commands {commands.seq} came after {self._command_seq}")
        self._command_seq = commands.seq
        for admit in commands.admit:
            self.sequences.admit(admit)
        for ref in commands.abort:
            self.sequences.end_slot(ref, Finish.ABORT)
        for ref in commands.stop:
            self.sequences.end_slot(ref, Finish.STOP)

    def step(self) -> StepReport | None:
        """Launch the next step if there is one, commit the oldest if it is due; what is to be told, if anything."""
        plan = self._plan()
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

    def _plan(self) -> StepPlan:
        """The next step's rows. Under KV pressure the steps in flight are read first, then rows are paused."""
        self._start_rows()
        while True:
            sequences = self.sequences
            plan = plan_step(sequences.rows, sequences.rules, self.ledger.length, self._budget, self.ledger.available)
            if not plan.short or self._inflight:
                return plan
            row, alone = youngest_holder(sequences.rows)
            if alone:
                self._does_not_fit(row)
            else:
                sequences.pause(row)

    def _start_rows(self) -> None:
        """Give KV to waiting rows, oldest first, as far as the next step has use for them."""
        sequences = self.sequences
        row = next_to_start(sequences.rows)
        while row is not None:
            if tokens_wanted(sequences.rows, sequences.rules, self.ledger.length, self._budget) >= self._budget.tokens:
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
        self._inflight.append(LaunchedStep(batch, self._backend.launch(batch), epochs, now))

    def _commit(self) -> tuple[LaunchedStep, Committed, float]:
        step = self._inflight.popleft()
        result = step.pending.result()
        now = self._clock()
        seconds = (now - max(step.launched_ns, self._committed_ns)) / 1e9
        self._committed_ns = now
        return step, commit(step, result, self.sequences, now), seconds

    def _report(
        self, step: LaunchedStep | None = None, committed: Committed | None = None, seconds: float = 0.0
    ) -> StepReport | None:
        events = self.sequences.take_events()
        paused = int(np.count_nonzero(self.sequences.rows.state == PAUSED))
        counters = self.ledger.counters(self.sequences.count - paused, paused)
        if step is None and not events.finished and not events.preempted and counters == self._reported:
            return None
        self._reported = counters
        cached, evicted = self.ledger.take_digests()
        batch = step.batch if step else None
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
            prefill_tokens=len(batch.token_ids) - batch.num_decode if batch else 0,
            decode_tokens=batch.num_decode if batch else 0,
        )
