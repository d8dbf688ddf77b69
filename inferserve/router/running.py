"""`RunningRows`: what the router knows of each admitted row, in arrays by slot so that a step is a few numpy calls.

Knows nothing of waiting requests and of memory; `admission.py` reads a snapshot of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferserve.protocol.messages import SlotRef, StepReport

_NOT_RUNNING = 0


class RunningRows:
    """Rows between their `Admit` and the report that they finished.

    Attributes (arrays by slot index, meaningful where a row runs):
        generation: uint32; 0 where no row runs.
        generated: int64, output tokens reported so far.
        own: int64, prompt tokens in KV that only this row holds; written by `sharing.SharedSpans`.
        limit: int64, max_tokens.
        always_full: bool, it ignores eos and will use its limit.
        first_tokens: int64, tokens it wants to compute in its first step.
    """

    def __init__(self, slots: int) -> None:
        self.generation = np.zeros(slots, np.uint32)
        self.generated = np.zeros(slots, np.int64)
        self.own = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.always_full = np.zeros(slots, np.bool_)
        self.first_tokens = np.zeros(slots, np.int64)
        self._slots = np.zeros(slots, np.int32)
        self._position: dict[int, int] = {}
        self._starting: set[int] = set()

    def __len__(self) -> int:
        """Rows that run."""
        return len(self._position)

    def slots(self) -> NDArray[np.int32]:
        """Slot indexes of the running rows, int32 [n], in no order; a view, valid until the next change."""
        return self._slots[: len(self._position)]

    def position(self, index: int) -> int:
        """Where `slots()` has a running row."""
        return self._position[index]

    def find(self, index: int) -> SlotRef | None:
        """The running reference of a slot."""
        return SlotRef(index, int(self.generation[index])) if index in self._position else None

    def add(self, ref: SlotRef, limit: int, always_full: bool, first_tokens: int) -> None:
        """A row is admitted."""
        index = ref.index
        self.generation[index] = ref.generation
        self.generated[index] = 0
        self.limit[index] = limit
        self.always_full[index] = always_full
        self.first_tokens[index] = first_tokens
        self._slots[len(self._position)] = index
        self._position[index] = len(self._position)
        self._starting.add(index)

    def remove(self, ref: SlotRef) -> bool:
        """A row is over; False if it does not run (or in another generation)."""
        if self.find(ref.index) != ref:
            return False
        position = self._position.pop(ref.index)
        last = int(self._slots[len(self._position)])
        if last != ref.index:
            self._slots[position] = last
            self._position[last] = position
        self.generation[ref.index] = _NOT_RUNNING
        self._starting.discard(ref.index)
        return True

    def commit(self, report: StepReport) -> list[int]:
        """Take over output lengths of a step; returns the slots whose first tokens these are.

        Entries of a generation that does not run are dropped.
        """
        slots = np.frombuffer(report.slots, "<i4")
        visible = np.frombuffer(report.visible, "<i4")
        current = self.generation[slots] == np.frombuffer(report.generations, "<u4")
        if not current.all():
            slots, visible = slots[current], visible[current]
        self.generated[slots] = visible
        if not self._starting:
            return []
        started = [index for index in self._starting if self.generated[index] > 0]
        self._starting.difference_update(started)
        return started

    def range(self, first: int, last: int) -> list[SlotRef]:
        """Running references with a slot index in [first, last)."""
        return [SlotRef(i, int(self.generation[i])) for i in self._position if first <= i < last]

    def check(self) -> None:
        """Raise AssertionError if the tables disagree."""
        assert {int(s): p for p, s in enumerate(self.slots())} == self._position
        assert set(np.flatnonzero(self.generation).tolist()) == set(self._position)
        assert self._starting == {i for i in self._position if self.generated[i] == 0}
