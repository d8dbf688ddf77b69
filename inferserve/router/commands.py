"""`CommandBatch`: what the engine is told at the end of a wake-up, in one numbered message.

Knows which rows were already told to end, so that each is told once.
"""

from __future__ import annotations

from inferserve.protocol.messages import Admit, Commands, SlotRef


class CommandBatch:
    """Commands of one wake-up; numbers start at 1 and have no gaps."""

    def __init__(self) -> None:
        self._seq = 0
        self._admit: list[Admit] = []
        self._abort: list[SlotRef] = []
        self._stop: list[SlotRef] = []
        self._ending: set[SlotRef] = set()

    def admit(self, ref: SlotRef, leader: int) -> None:
        """Run `ref`; `leader` is the slot whose prefill it shares, or -1."""
        self._admit.append(Admit(ref.index, ref.generation, leader))

    def abort(self, ref: SlotRef) -> None:
        """End a running row: nobody waits for it."""
        if ref not in self._ending:
            self._ending.add(ref)
            self._abort.append(ref)

    def stop(self, ref: SlotRef) -> None:
        """End a running row: its text is complete."""
        if ref not in self._ending:
            self._ending.add(ref)
            self._stop.append(ref)

    def ended(self, ref: SlotRef) -> None:
        """The engine has ended it; nothing more is said about it."""
        self._ending.discard(ref)

    def take(self) -> Commands | None:
        """The message to send, None if there is nothing to say."""
        if not (self._admit or self._abort or self._stop):
            return None
        self._seq += 1
        commands = Commands(self._seq, tuple(self._admit), tuple(self._abort), tuple(self._stop))
        self._admit, self._abort, self._stop = [], [], []
        return commands
