"""`Leader`: the rank that decides. Before it launches anything it tells the others all that they cannot know.

A turn of a rank follows from its state, the router's commands and a `StepHeader`: what this rank's clock, memory and
view of the slot table decide is in the header, what the device decides (sampled ids) is broadcast there.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from inferserve.engine.step import BackendFacts, EngineBackend, Ints, PendingStep, StepBatch
from inferserve.engine.worker import Worker
from inferserve.protocol.codec import Codec
from inferserve.protocol.messages import Admit, Admitted, Commands, EngineMessage, StepHeader, StepReport
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.slots import SlotView
from inferserve.transport.channel import Outbox

DIGEST_EVERY = 100
"""Turns between two comparisons of the ranks' states."""


class NotingBackend:
    """The leader's backend; it notes the rows that could not be opened."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
        self._refused: list[int] = []

    def start(self) -> BackendFacts:
        """See EngineBackend."""
        return self._backend.start()

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        """See EngineBackend."""
        try:
            self._backend.open_row(row, params, prompt, output)
        except Exception:
            self._refused.append(row)
            raise

    def close_row(self, row: int) -> None:
        """See EngineBackend."""
        self._backend.close_row(row)

    def launch(self, batch: StepBatch) -> PendingStep:
        """See EngineBackend."""
        return self._backend.launch(batch)

    def take_refused(self) -> tuple[int, ...]:
        """Rows that could not be opened since the last call, in order."""
        refused, self._refused = tuple(self._refused), []
        return refused


class Leader:
    """Turns that the other ranks repeat.

    Args:
        worker: over `backend` and the slot table that `slots` shows.
        followers: where the headers go.
        digest_every: turns between two comparisons.
    """

    def __init__(
        self,
        worker: Worker,
        backend: NotingBackend,
        slots: SlotView,
        followers: Sequence[Outbox[EngineMessage]],
        digest_every: int = DIGEST_EVERY,
    ) -> None:
        self._worker = worker
        self._backend = backend
        self._slots = slots
        self._followers = followers
        self._digest_every = digest_every
        self._codec: Codec[EngineMessage] = Codec(EngineMessage)
        self._turn = 0
        self._commands_upto = -1

    def turn(self, commands: Sequence[Commands]) -> StepReport | None:
        """Apply `commands`, plan, tell the followers, run."""
        self._turn += 1
        state = digest(self._worker) if self._turn % self._digest_every == 0 else b""
        for each in commands:
            self._apply(each)
        budget = self._worker.budget()
        plan = self._worker.plan(budget)
        header = StepHeader(
            turn=self._turn,
            commands_upto=self._commands_upto,
            prefill_budget=-1 if budget.prompts is None else budget.prompts,
            draft_budget=budget.drafts,
            refused=self._backend.take_refused(),
            digest=state,
        )
        self._tell(header)
        return self._worker.run(plan)

    def _apply(self, commands: Commands) -> None:
        """Carry out and tell what was read of the slots that got a row. The commands may also end them, so read first."""
        read = {admit: self._read(admit) for admit in commands.admit if 0 <= admit.index < len(self._slots.generation)}
        taken = self._worker.apply(commands)
        self._commands_upto = commands.seq
        for admit in taken:
            self._tell(read[admit])

    def _tell(self, message: Admitted | StepHeader) -> None:
        frame = self._codec.encode(message)
        for follower in self._followers:
            follower.send_frame(frame)

    def _read(self, admit: Admit) -> Admitted:
        slots, index = self._slots, admit.index
        params = slots.params[index, : int(slots.params_len[index])].tobytes()
        return Admitted(index, admit.generation, params, slots.prompt(index).tobytes())


def digest(worker: Worker) -> bytes:
    """16 bytes that are equal for ranks in the same state. O(rows)."""
    rows = worker.sequences.rows
    state = blake2b(worker.ledger.digest(), digest_size=16)
    for column in (rows.state, rows.slot, rows.generation, rows.epoch, rows.out_len, rows.planned, rows.good):
        state.update(column.tobytes())
    return state.digest()
