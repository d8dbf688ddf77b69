"""`Sequences`: what happens to one sequence at a time, from admission to its end. Row, KV, backend and slot change together here.

Everything in this module is an event, not a part of every step. Knows no messages but those that name a row's end.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import numpy as np

from inferserve.engine.planner import tokens_promised
from inferserve.engine.proposer import QUIET_TOKENS
from inferserve.engine.rows import DECODING, FILLING, FOLLOWING, FREE, PAUSED, QUEUED, EndRules, Rows
from inferserve.engine.step import EngineBackend, Ints
from inferserve.errors import EngineError
from inferserve.kv.ledger import KvLedger
from inferserve.protocol.messages import Admit, Finish, FinishedRow, SlotRef
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.slots import SlotView

log = logging.getLogger(__name__)


@dataclass
class Events:
    """What the next report must tell."""

    finished: list[FinishedRow]
    preempted: int = 0


class Sequences:
    """The running sequences of one engine.

    Args:
        keeps_answers: what a row has said may be cached as its prompt is. It was computed a token at a time, which may
            give other last bits than a prompt's chunks.

    Attributes:
        rows, rules: their columns.
        ledger: their KV.
        slots: the engine's view of the slot table.
    """

    def __init__(
        self,
        slots: SlotView,
        ledger: KvLedger,
        backend: EngineBackend,
        rows: Rows,
        rules: EndRules,
        keeps_answers: bool = True,
    ) -> None:
        self.rows = rows
        self.rules = rules
        self.ledger = ledger
        self.slots = slots
        self._backend = backend
        self._keeps_answers = keeps_answers
        self._free = list(range(len(rows.state)))[::-1]
        self._params: dict[int, SamplingParams] = {}
        self._row_of_slot: dict[int, int] = {}
        self._followers: dict[int, list[int]] = {}
        self._events = Events([])
        self._admissions = 0

    @property
    def count(self) -> int:
        """Sequences that were admitted and have not ended."""
        return len(self._row_of_slot)

    # ---------------------------------------------------------------------------------------------- admission

    def admit(self, admit: Admit) -> bool:
        """Take over a slot: reset the engine's columns and queue a row for it (True), or end it at once. Stale ones are dropped."""
        slots, index = self.slots, admit.index
        if not 0 <= index < len(slots.generation) or int(slots.generation[index]) != admit.generation:
            return False
        slots.visible[index] = slots.cached_tokens[index] = slots.preemptions[index] = 0
        slots.prefill_start_ns[index] = slots.first_token_ns[index] = slots.last_token_ns[index] = 0
        slots.finish[index] = Finish.NONE
        if slots.cancelled[index]:
            self._report_end(index, admit.generation, Finish.ABORT)
            return False
        try:
            params = slots.sampling_params(index)
        except msgspec.MsgspecError as error:
            self._report_end(index, admit.generation, Finish.ERROR, error=f"sampling parameters: {error}")
            return False
        prompt, max_len = slots.prompt(index), self.rows.tokens.shape[1]
        if not 0 < len(prompt) < max_len:
            problem = f"a prompt of {len(prompt)} tokens; 1 to {max_len - 1} fit"
            self._report_end(index, admit.generation, Finish.ERROR, error=problem)
            return False
        self._take_row(admit, params, prompt)
        return True

    def _take_row(self, admit: Admit, params: SamplingParams, prompt: Ints) -> None:
        rows = self.rows
        if not self._free:
            raise EngineError(f"more than {len(rows.state)} sequences admitted")
        row = self._free.pop()
        self._admissions += 1
        rows.slot[row], rows.generation[row], rows.order[row] = admit.index, admit.generation, self._admissions
        rows.prompt_len[row] = len(prompt)
        rows.out_len[row] = rows.planned[row] = rows.fill[row] = rows.good[row] = 0
        rows.drafting.pending[row] = rows.drafting.quiet[row] = 0
        rows.drafting.plain[row] = params.plain
        rows.tokens[row, : len(prompt)] = prompt
        self.rules.set(row, params, rows.tokens.shape[1] - len(prompt))
        self._params[row] = params
        self._row_of_slot[admit.index] = row
        leader = self._row_of_slot.get(admit.leader)
        if leader is not None and self.ledger.shares and not self._has_prompt(leader):
            rows.state[row] = FOLLOWING
            self._followers.setdefault(leader, []).append(row)
        else:
            rows.state[row] = QUEUED

    def _has_prompt(self, row: int) -> bool:
        """True when the row's prompt is in the prefix cache (while the row runs, or just before it ends)."""
        return bool(self.rows.good[row] >= self.rows.prompt_len[row])

    # ---------------------------------------------------------------------------------------------- KV

    def start(self, row: int, now_ns: int) -> bool:
        """Give a queued or paused row its cached prefix, so that the rest can be computed. False: there is no room yet.

        A row that the backend cannot take ends with ERROR; the others do not notice.
        """
        rows, ledger = self.rows, self.ledger
        resumes = bool(rows.state[row] == PAUSED)
        known = rows.tokens[row, : rows.prompt_len[row] + rows.out_len[row]]
        promised = tokens_promised(rows, ledger.length, resumes)
        cached = ledger.open(row, known)
        if len(known) - cached + promised > ledger.available:
            ledger.close(row, known[:0])
            return False
        prompt_len = int(rows.prompt_len[row])
        try:
            self._backend.open_row(row, self._params[row], known[:prompt_len], known[prompt_len:])
        except Exception as error:
            log.exception("slot %d cannot start", rows.slot[row])
            ledger.close(row, known[:0])
            self.end(row, Finish.ERROR, error=f"it could not be started: {error}")
            return True
        if not resumes:
            self.slots.cached_tokens[rows.slot[row]] = cached
            self.slots.prefill_start_ns[rows.slot[row]] = now_ns
        rows.state[row], rows.fill[row], rows.good[row] = FILLING, len(known), cached
        return True

    def pause(self, row: int) -> None:
        """Take the KV away from a row that no step in flight computes; what is good of it stays cached as long as it can."""
        self._release(row, int(self.rows.good[row]))
        self.rows.state[row] = PAUSED
        self.rows.good[row] = 0
        self.slots.preemptions[self.rows.slot[row]] += 1
        self._events.preempted += 1

    def publish(self, row: int) -> None:
        """Share the prompt of a row that has just computed it; its siblings need not wait any more."""
        self.ledger.publish(row, self.rows.tokens[row, : self.rows.good[row]])
        self._let_follow(row)

    def settle(self, row: int) -> None:
        """Take back what a row was given for a draft beyond the tokens that turned out right."""
        rows = self.rows
        right = int(rows.drafting.pending[row] - (rows.planned[row] - rows.out_len[row]))
        if right <= 0:
            rows.drafting.quiet[row] = rows.out_len[row] + QUIET_TOKENS
        rows.planned[row], rows.drafting.pending[row] = rows.out_len[row], 0
        self.ledger.truncate(row, int(rows.prompt_len[row] + rows.out_len[row]) - 1)

    def _release(self, row: int, good: int) -> None:
        if self.rows.state[row] >= FILLING:
            if not self._keeps_answers:
                good = min(good, int(self.rows.prompt_len[row]))
            self.ledger.close(row, self.rows.tokens[row, :good])
            self._backend.close_row(row)
            self.rows.epoch[row] += 1

    def _let_follow(self, leader: int) -> None:
        self.rows.state[self._followers.pop(leader, [])] = QUEUED

    # ---------------------------------------------------------------------------------------------- ends

    def end_slot(self, ref: SlotRef, finish: Finish) -> None:
        """End the sequence of a slot, whatever it is doing. One that has ended already is left alone."""
        row = self._row_of_slot.get(ref.index)
        if row is not None and int(self.rows.generation[row]) == ref.generation:
            self.end(row, finish)

    def end(self, row: int, finish: Finish, stop_token: int = -1, error: str = "") -> None:
        """End a row. The KV of one that failed never enters the cache; steps in flight lose it."""
        rows = self.rows
        self._release(row, 0 if finish is Finish.ERROR else int(rows.good[row]))
        if finish is not Finish.ERROR and self._has_prompt(row):
            self._let_follow(row)
        self._leave_siblings(row)
        self._report_end(int(rows.slot[row]), int(rows.generation[row]), finish, stop_token, error)
        del self._row_of_slot[int(rows.slot[row])], self._params[row]
        rows.state[row], rows.slot[row] = FREE, -1
        rows.good[row] = 0
        self._free.append(row)

    def _leave_siblings(self, row: int) -> None:
        """The first of those that follow `row` leads the others; `row` follows nobody."""
        if self.rows.state[row] == FOLLOWING:
            for leader, followers in list(self._followers.items()):
                if row in followers:
                    followers.remove(row)
                    if not followers:
                        del self._followers[leader]
        if heirs := self._followers.pop(row, []):
            heir, *others = heirs
            self.rows.state[heir] = QUEUED
            if others:
                self._followers[heir] = others

    def _report_end(self, index: int, generation: int, finish: Finish, stop_token: int = -1, error: str = "") -> None:
        self.slots.finish[index] = finish
        self.slots.engine_done[index] = generation
        self._events.finished.append(FinishedRow(index, generation, int(finish), stop_token, error))

    # ---------------------------------------------------------------------------------------------- reports

    def take_events(self) -> Events:
        """Ends and pauses since the last call."""
        taken, self._events = self._events, Events([])
        return taken

    def check(self) -> None:
        """Raise AssertionError on any disagreement between rows, slots and ledger. O(total KV)."""
        rows = self.rows
        self.ledger.check()
        used = set(self._row_of_slot.values())
        assert used == set(self._params) == set(np.flatnonzero(rows.state != FREE).tolist())
        assert sorted([*used, *self._free]) == list(range(len(rows.state)))
        following = sorted(row for followers in self._followers.values() for row in followers)
        assert following == np.flatnonzero(rows.state == FOLLOWING).tolist()
        assert all(rows.state[leader] not in (FREE, FOLLOWING) for leader in self._followers)
        assert not self.ledger.length[rows.state < FILLING].any(), "KV without a running row"
        waiting = (rows.state > FREE) & (rows.state < DECODING)
        assert (rows.planned == rows.out_len)[waiting].all(), "a row that does not decode awaits a token"
        decoding = np.flatnonzero(rows.state == DECODING)
        running = rows.state != FREE
        assert not rows.drafting.pending[running & (rows.state != DECODING)].any(), (
            "a row that does not decode checks a draft"
        )
        lengths = rows.prompt_len[decoding] + rows.planned[decoding] - 1
        assert (self.ledger.length[decoding] == lengths).all(), "a decoding row has more or less KV than tokens"
