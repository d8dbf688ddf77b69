"""Several ranks of an engine in one process: over queues, without devices, and over threads that stand for GPUs."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch

from inferserve.config.schema import ServerConfig
from inferserve.engine.follower import Follower, RefusingBackend
from inferserve.engine.leader import Leader, NotingBackend
from inferserve.engine.planner import Budget
from inferserve.engine.rows import DECODING
from inferserve.engine.step import Ints
from inferserve.engine.worker import Worker
from inferserve.errors import RankLost
from inferserve.parallel.ranks import LEADER, Ranks
from inferserve.protocol.codec import Codec
from inferserve.protocol.messages import Admit, Commands, EngineMessage, SlotRef, StepReport
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable
from tests.fakes.engine import KvBackend, fill_slot

T = TypeVar("T")
UNLUCKY = 13
"""Rows with this seed cannot be opened on the leader."""


class UnluckyBackend(KvBackend):
    """Cannot open some rows: what a lack of device memory does, on one rank alone."""

    def open_row(self, row: int, params: SamplingParams, prompt: Ints, output: Ints) -> None:
        if params.seed == UNLUCKY:
            raise MemoryError("no room for penalties")
        super().open_row(row, params, prompt, output)


class Link:
    """An outbox to a follower, as a queue of what was encoded."""

    def __init__(self) -> None:
        self.codec: Codec[EngineMessage] = Codec(EngineMessage)
        self.queue: deque[EngineMessage] = deque()

    def send_frame(self, frame: bytes) -> None:
        self.queue.append(self.codec.decode(frame))


class TwoRanks:
    """A leader over a shared slot table, and a follower that hears of everything as late as `chance` likes.

    The leader's budgets are random, like those of a clock. Slots are given to the next tenant as soon as the leader is
    done with them.
    """

    def __init__(self, config: ServerConfig, kv: int, chance: random.Random) -> None:
        self.config, self.chance = config, chance
        rows, max_len = config.schedule.running_max_req_size, config.model.max_req_total_len
        self.table, self._segment = SlotTable.create(config.slots, max_len)
        self.http = self.table.view(Writer.HTTP)
        noting = NotingBackend(UnluckyBackend(kv, rows, max_len))
        self.leading = Worker(config, self.table.view(Writer.ENGINE), noting, kv)
        self.link = Link()
        self.leader = Leader(self.leading, noting, self.table.view(Writer.ENGINE), [self.link], digest_every=1)  # type: ignore[list-item]
        self._fixed = self.leading.budget()
        self.leading.budget = self._budget  # type: ignore[method-assign]
        own, self._own_segment = SlotTable.create(config.slots, max_len)
        refusing = RefusingBackend(KvBackend(kv, rows, max_len))
        self.following = Worker(config, own.view(Writer.ENGINE), refusing, kv)
        self.follower = Follower(self.following, refusing, own.view(Writer.HTTP))
        self.from_router: deque[Commands] = deque()
        self.reports: list[StepReport] = []
        self._seq = 0

    def _budget(self) -> Budget:
        decodes = bool((self.leading.sequences.rows.state == DECODING).any())
        prompts = self.chance.choice([None, 1, 5, 40]) if decodes else None
        return replace(self._fixed, prompts=prompts, drafts=self.chance.randint(0, self._fixed.drafts))

    def fill(self, index: int, prompt: list[int], **params: object) -> SlotRef:
        """What http does with a slot whose last tenant is gone."""
        return fill_slot(self.http, index, prompt, **params)

    def turn(self, *admit: Admit, abort: tuple[SlotRef, ...] = (), stop: tuple[SlotRef, ...] = ()) -> None:
        """One turn of the leader, and whatever the follower gets to hear by then."""
        commands = []
        if admit or abort or stop:
            commands.append(Commands(self._seq, admit, abort, stop))
            self._seq += 1
            self.from_router += commands
        if report := self.leader.turn(commands):
            self.reports.append(report)
        while self.chance.random() < 0.6 and self.hear():
            pass

    def hear(self) -> bool:
        """Let the follower hear one message of router or leader; False when there is none."""
        queues = [queue for queue in (self.from_router, self.link.queue) if queue]
        if queues:
            self.follower.hear(self.chance.choice(queues).popleft())
        return bool(queues)

    def finish(self) -> None:
        """Run to the end of everything on both ranks."""
        while self.leading.busy:
            self.turn()
        while self.hear():
            pass


class ThreadRanks:
    """`Ranks` of one process: threads that meet at a barrier. A thread that leaves breaks the others."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._meeting.exchange(self.rank, x.clone())
        return torch.stack(parts).sum(0).to(x.dtype)

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._meeting.exchange(self.rank, x.clone()))

    def from_leader(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._meeting.exchange(self.rank, x.clone())[LEADER])

    def least(self, number: int) -> int:
        return min(self._meeting.exchange(self.rank, number))


class _Meeting:
    """A place for everybody's value, and a barrier before it is read and before it is overwritten."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        try:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankLost("a rank left") from error
        return values

    def leave(self) -> None:
        self._barrier.abort()


def side_by_side(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Results of `work` in one thread for each rank, in their order. The first error of any rank is raised."""
    meeting = _Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, size, meeting))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda e: isinstance(e, RankLost)):
        raise error
    return [future.result() for future in futures]


class SeatedRank(ThreadRanks):
    """A rank that nobody answers: for loading floats, which needs nobody."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, _Meeting(1))
