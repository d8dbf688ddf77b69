"""`SlotClient`: this worker's range of the slot table: take, fill, give back, reclaim. The only writer of http columns.

    free → taken (in_use = 1, generation + 1) → submitted → leaving → free

A row that no other process has seen goes straight back to free. A submitted row is `leaving` from the moment that this
process needs it no more, and free once every stage that could hold it has said so; that is looked up when rows are
needed, so nothing waits for it. Knows nothing of requests.
"""

from __future__ import annotations

from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from inferserve.errors import InvalidRequest, Overloaded
from inferserve.protocol.messages import SlotRef
from inferserve.protocol.sampling import SamplingParams
from inferserve.shm.layout import PARAMS_BYTES
from inferserve.shm.slots import SlotView, encode_params

_GENERATIONS = 2**32


class SlotClient:
    """Rows [first, first + count) of the table.

    Args:
        view: the http view of the whole table.
        limit: sequences in flight over all workers; each range is as large as that.
    """

    def __init__(self, view: SlotView, first: int, count: int, limit: int) -> None:
        self.view = view
        self._first = first
        self._count = count
        self._limit = limit
        self._free = list(range(first + count - 1, first - 1, -1))  # a stack: few rows, so few pages, are ever touched
        self._leaving: set[int] = set()

    def recover(self) -> tuple[SlotRef, ...]:
        """Cancel rows that a dead incarnation of this worker left in use; returns those whose Abort must be sent."""
        used = {self._first + int(i) for i in np.flatnonzero(self.view.in_use[self._first : self._first + self._count])}
        self._free = [i for i in self._free if i not in used]
        self._leaving = used
        self.reclaim()
        for index in self._leaving:
            self.view.cancelled[index] = 1
        return tuple(SlotRef(i, int(self.view.generation[i])) for i in sorted(self._leaving))

    def take(self, n: int) -> Claim:
        """All of `n` rows or none. Raises Overloaded when the range or the limit over all workers is reached."""
        self.reclaim()
        if n > len(self._free) or not self._fits(n):
            raise Overloaded("Too many requests are in flight; try again later.", code="too_many_requests")
        indexes = [self._free.pop() for _ in range(n)]
        view = self.view
        refs = []
        for index in indexes:
            generation = (int(view.generation[index]) + 1) % _GENERATIONS or 1
            view.generation[index] = generation
            view.cancelled[index] = 0
            view.delivered_tokens[index] = 0
            view.in_use[index] = 1
            refs.append(SlotRef(index, generation))
        return Claim(self, tuple(refs))

    def fill(self, ref: SlotRef, prompt: NDArray[np.int32], params: SamplingParams, arrival_ns: int) -> None:
        """Write the request's columns of a taken row.

        Args:
            prompt: int32 [tokens], shorter than the context.
            arrival_ns: CLOCK_MONOTONIC when the request arrived.

        Raises InvalidRequest when the encoded params do not fit their column.
        """
        encoded = encode_params(params)
        if len(encoded) > PARAMS_BYTES:
            raise InvalidRequest("stop strings and logit_bias together are too large", param="stop")
        view, index = self.view, ref.index
        view.prompt_ids[index, : len(prompt)] = prompt
        view.prompt_len[index] = len(prompt)
        view.params[index, : len(encoded)] = np.frombuffer(encoded, np.uint8)
        view.params_len[index] = len(encoded)
        view.max_tokens[index] = params.max_tokens
        view.ignore_eos[index] = params.ignore_eos
        view.arrival_ns[index] = arrival_ns

    def cancel(self, ref: SlotRef) -> None:
        """Nobody waits for a submitted row any more. Send Abort after this, not before."""
        if self._holds(ref):
            self.view.cancelled[ref.index] = 1
            self._leaving.add(ref.index)

    def release(self, ref: SlotRef) -> None:
        """This process needs a submitted row no more; its terminal item or `Dropped` arrived."""
        if self._holds(ref):
            self._leaving.add(ref.index)

    def reclaim(self) -> None:
        """Free the leaving rows that every stage has forgotten."""
        if not self._leaving:
            return
        indexes = np.fromiter(self._leaving, np.intp, len(self._leaving))
        for index in indexes[self._forgotten(indexes)].tolist():
            self._leaving.discard(index)
            self._put_back(index)

    def check(self) -> None:
        """Every row is free, or in use and either leaving or held by a request. For tests."""
        free = set(self._free)
        assert len(free) == len(self._free) and not free & self._leaving
        own = range(self._first, self._first + self._count)
        assert free <= set(own) and self._leaving <= set(own)
        assert all(bool(self.view.in_use[i]) == (i not in free) for i in own)

    @property
    def free(self) -> int:
        """Rows of the range that can be taken without reclaiming."""
        return len(self._free)

    @property
    def leaving(self) -> int:
        """Rows that other stages may still hold."""
        return len(self._leaving)

    def _holds(self, ref: SlotRef) -> bool:
        return bool(self.view.in_use[ref.index]) and int(self.view.generation[ref.index]) == ref.generation

    def _put_back(self, index: int) -> None:
        self.view.in_use[index] = 0
        self._free.append(index)

    def _forgotten(self, indexes: NDArray[np.intp]) -> NDArray[np.bool_]:
        view, generation = self.view, self.view.generation[indexes]
        ran = view.admitted[indexes] == generation
        ended = (view.engine_done[indexes] == generation) & (view.detok_done[indexes] == generation)
        forgotten: NDArray[np.bool_] = (view.router_done[indexes] == generation) & (~ran | ended)
        return forgotten

    def _fits(self, n: int) -> bool:
        """Whether `n` more stay within the limit; other workers' rows that only wait to be reclaimed do not count."""
        if int(np.count_nonzero(self.view.in_use)) + n <= self._limit:
            return True
        indexes = np.flatnonzero(self.view.in_use)
        return len(indexes) - int(np.count_nonzero(self._forgotten(indexes))) + n <= self._limit


class Claim:
    """Rows between allocation and submission: leaving the block gives back those that were not submitted."""

    def __init__(self, slots: SlotClient, refs: tuple[SlotRef, ...]) -> None:
        self.refs = refs
        self._slots = slots
        self._unsubmitted = {ref.index for ref in refs}

    def __enter__(self) -> Claim:
        return self

    def submitted(self, refs: tuple[SlotRef, ...]) -> None:
        """Other processes may hold these from now on."""
        self._unsubmitted.difference_update(ref.index for ref in refs)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._unsubmitted:
            self._slots._put_back(self._unsubmitted.pop())
