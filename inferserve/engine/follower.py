"""`Follower`: a rank that repeats the leader's turns on its own state. It decides nothing and writes to no shared column.

Its worker runs over a slot table of its own, in which stands only what the leader has read for it. So admissions that
the leader dropped find another generation here and are dropped as well, and nothing depends on when a slot is read.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np

from inferserve.engine.leader import digest
from inferserve.engine.step import BackendFacts, EngineBackend, Ints, PendingStep, StepBatch
from inferserve.engine.worker import Worker
from inferserve.errors import EngineError
from inferserve.process import Waiter
from inferserve.protocol.messages import Admitted, Commands, EngineMessage, StepHeader
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.slots import SlotView

COMMANDS_WITHIN_S = 30.0
"""How long a header may wait for the router's commands that it names."""


class RefusingBackend:
    """A follower's backend; it opens no row that the leader could not open."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
        self.refused: tuple[int, ...] = ()

    def start(self) -> BackendFacts:
        """See EngineBackend."""
        return self._backend.start()

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """See EngineBackend."""
        if row in self.refused:
            raise EngineError("the leading rank could not start it")
        self._backend.open_row(row, params, prompt, output)

    def close_row(self, row: int) -> None:
        """See EngineBackend."""
        self._backend.close_row(row)

    def launch(self, batch: StepBatch) -> PendingStep:
        """See EngineBackend."""
        return self._backend.launch(batch)


class Follower:
    """Repeats turns.

    Args:
        worker: over `backend` and a slot table of its own.
        slots: that table, as http writes it.
        debug_checks: audit the worker when it is idle.
    """

    def __init__(self, worker: Worker, backend: RefusingBackend, slots: SlotView, debug_checks: bool = False) -> None:
        self._worker = worker
        self._backend = backend
        self._slots = slots
        self._debug_checks = debug_checks
        self._fixed = worker.budget()
        self._commands: deque[Commands] = deque()
        self._told: deque[Admitted | StepHeader] = deque()
        self._heard_upto = -1
        self._turn = 0

    @property
    def waits_for(self) -> int | None:
        """Number of a command that the next turn needs and that has not come, None if there is none."""
        first = self._told[0] if self._told else None
        return first.commands_upto if isinstance(first, StepHeader) else None

    def hear(self, message: EngineMessage) -> None:
        """Take in one message and make the turns that are possible now. Raises EngineError when ranks have parted."""
        if isinstance(message, Commands):
            self._commands.append(message)
            self._heard_upto = message.seq
        else:
            self._told.append(message)
        while self._told:
            match self._told[0]:
                case Admitted() as admitted:
                    self._write(admitted)
                case StepHeader() as header:
                    if header.commands_upto > self._heard_upto:
                        return
                    self._repeat(header)
            self._told.popleft()

    def _repeat(self, header: StepHeader) -> None:
        self._turn += 1
        if header.turn != self._turn:
            raise EngineError(f"turn {header.turn} of the leading rank came after {self._turn - 1}")
        if header.digest and header.digest != digest(self._worker):
            raise EngineError(f"the engine ranks have parted before turn {header.turn}: their KV ledgers differ")
        while self._commands and self._commands[0].seq <= header.commands_upto:
            self._worker.apply(self._commands.popleft())
        self._backend.refused = header.refused
        prompts = None if header.prefill_budget < 0 else header.prefill_budget
        budget = replace(self._fixed, prompts=prompts, drafts=header.draft_budget)
        self._worker.run(self._worker.plan(budget))
        if self._debug_checks and not self._worker.busy:
            self._worker.check()

    def _write(self, admitted: Admitted) -> None:
        slots, index = self._slots, admitted.index
        prompt = np.frombuffer(admitted.prompt, dtype=np.int32)
        params = np.frombuffer(admitted.params, dtype=np.uint8)
        slots.prompt_len[index], slots.params_len[index] = len(prompt), len(params)
        slots.prompt_ids[index, : len(prompt)] = prompt
        slots.params[index, : len(params)] = params
        slots.generation[index] = admitted.generation


def follow(follower: Follower, waiter: Waiter[EngineMessage]) -> None:
    """Run until StopRequested is raised, or an error that ends the process."""
    since = time.monotonic()
    while True:
        missing = follower.waits_for
        if missing is None:
            since = time.monotonic()
        elif time.monotonic() - since > COMMANDS_WITHIN_S:
            raise EngineError(f"commands {missing} of the router did not come within {COMMANDS_WITHIN_S:g} s")
        for message in waiter.wait(None if missing is None else COMMANDS_WITHIN_S):
            follower.hear(message)
            since = time.monotonic()
