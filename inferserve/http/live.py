"""`LiveRequests`: the sequences under way in this worker: opening them, their text as it arrives, their ends.

    open → items → end (stop, length)      → release
         ↘ error, Dropped, disconnect, stop → cancelled column, Abort → release

Everything here is synchronous: between taking rows and submitting them nothing can be cancelled, and an item is
handed on in one step. Knows nothing of HTTP and tokenizers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from inferserve.errors import (
    Overloaded,
    PeerGone,
    RequestError,
    RequestFailed,
    TooLong,
    Unavailable,
)
from inferserve.http.generation import GenerateRequest, Generation, Piece, TokenDetails
from inferserve.http.problems import failure_reason
from inferserve.http.request_log import RequestLog
from inferserve.http.slot_client import SlotClient
from inferserve.log import event
from inferserve.metrics.requests import RequestMeter, RequestMetrics
from inferserve.protocol.messages import Abort, Dropped, Finish, SlotRef, Submit, TextItem
from inferserve.protocol.seeds import sibling_seed

log = logging.getLogger(__name__)

_GRAVITY = (Finish.NONE, Finish.STOP, Finish.LENGTH, Finish.ABORT, Finish.ERROR)
_REASONS = ("stop", "stop", "length", "abort", "error")
_TOO_LONG_CODES = frozenset({"never_fits", "context_length_exceeded"})


class RouterLink(Protocol):
    """What is needed of the outbox to the router."""

    def send(self, message: Any) -> None:
        """Queue `message` or raise PeerGone."""


class _Run:
    """One prompt of a request with its `n` sequences; what the metrics call a request."""

    __slots__ = ("first_ns", "first_token_ns", "gravity", "last_token_ns", "meter", "preemptions", "refs", "start_ns")

    def __init__(self, refs: tuple[SlotRef, ...], meter: RequestMeter) -> None:
        self.refs = refs
        self.meter = meter
        self.first_ns = 0  # when its first item arrived here; the others are the slot's own stamps
        self.start_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.preemptions = 0
        self.gravity = 0


class _Sequence:
    """One row under way."""

    __slots__ = ("choice", "generation", "number", "owner", "received", "ref", "run", "want_tokens")

    def __init__(self, ref: SlotRef, owner: Generation, run: _Run, number: int, choice: int) -> None:
        self.ref = ref
        self.generation = ref.generation
        self.owner = owner
        self.run = run
        self.number = number
        self.choice = choice
        self.received = 0
        self.want_tokens = owner.request.want_tokens


class LiveRequests:
    """All requests of this worker.

    Args:
        context: longest prompt plus output, tokens.
    """

    def __init__(
        self, slots: SlotClient, router: RouterLink, metrics: RequestMetrics, request_log: RequestLog, context: int
    ) -> None:
        self._slots = slots
        self._router = router
        self._metrics = metrics
        self._log = request_log
        self._context = context
        self._live: dict[int, _Sequence] = {}
        self._generations: dict[int, Generation] = {}

    def open(self, request: GenerateRequest) -> Generation:
        """Take rows for all sequences, fill and submit them. Raises Overloaded, InvalidRequest or Unavailable."""
        n = request.n
        runs: list[_Run] = []
        generation = Generation(request, partial(self._close, runs))
        with self._slots.take(len(request.prompts) * n) as claim:
            groups = [claim.refs[i : i + n] for i in range(0, len(claim.refs), n)]
            for number, refs in enumerate(groups):
                self._fill(request, number, refs)
            try:
                for number, refs in enumerate(groups):
                    self._router.send(Submit(refs))
                    claim.submitted(refs)
                    runs.append(self._begin(generation, number, refs))
            except BaseException as error:
                generation.close()
                if isinstance(error, PeerGone):
                    raise Unavailable("The router takes no requests.") from error
                raise
        self._generations[id(generation)] = generation
        return generation

    def deliver(self, items: Iterable[TextItem], now_ns: int) -> None:
        """Hand text items to the requests they name. Items of rows that are no longer ours are ignored."""
        live, delivered = self._live, self._slots.view.delivered_tokens
        for item in items:
            index = item.index
            sequence = live.get(index)
            if sequence is None or sequence.generation != item.generation:
                continue
            received, finish = sequence.received, item.finish
            if item.from_token < received and not finish:
                continue
            owner, run, tokens = sequence.owner, sequence.run, item.to_token
            details = self._details(sequence, item) if sequence.want_tokens else None
            if tokens > received:
                sequence.received = tokens
                delivered[index] = tokens
                owner.usage.completion_tokens += tokens - received
                if not run.first_ns:
                    self._first_item(run, owner, now_ns)
                run.meter.tokens(sequence.number, tokens - received, now_ns)
            if finish:
                self._end(sequence, finish)
                if finish >= Finish.ABORT:
                    owner.fail(_ended(item))
                    continue
            owner.put(Piece(sequence.choice, item.text, tokens, finish, item.stop_reason, details))

    def dropped(self, message: Dropped) -> None:
        """The router did not run a row."""
        sequence = self._live.get(message.index)
        if sequence is None or sequence.generation != message.generation:
            return
        error = _refused(message)
        del self._live[message.index]
        self._slots.release(sequence.ref)
        sequence.run.meter.refused(failure_reason(error.status))
        sequence.owner.fail(error)

    def fail_all(self, error: RequestError) -> None:
        """End every request with `error`."""
        for generation in list(self._generations.values()):
            generation.fail(error)

    def __len__(self) -> int:
        return len(self._live)

    def _fill(self, request: GenerateRequest, prompt: int, refs: tuple[SlotRef, ...]) -> None:
        ids = np.asarray(request.prompts[prompt], np.int32)
        max_tokens = min(request.params.max_tokens, self._context - len(ids))
        first = prompt * request.n if request.drawn_seed else 0
        for number, ref in enumerate(refs, first):
            params = msgspec.structs.replace(
                request.params,
                max_tokens=max_tokens,
                min_tokens=min(request.params.min_tokens, max_tokens),
                seed=sibling_seed(request.params.seed, number),
            )
            self._slots.fill(ref, ids, params, request.arrival_ns)

    def _begin(self, generation: Generation, prompt: int, refs: tuple[SlotRef, ...]) -> _Run:
        request = generation.request
        meter = self._metrics.begin(
            request.arrival_ns,
            time.monotonic_ns(),
            prompt_tokens=len(request.prompts[prompt]),
            n=request.n,
            max_tokens=int(self._slots.view.max_tokens[refs[0].index]),
        )
        run = _Run(refs, meter)
        for number, ref in enumerate(refs):
            self._live[ref.index] = _Sequence(ref, generation, run, number, prompt * request.n + number)
        return run

    def _first_item(self, run: _Run, owner: Generation, now_ns: int) -> None:
        cached = int(self._slots.view.cached_tokens[run.refs[0].index])
        run.first_ns = now_ns
        owner.usage.cached_tokens += cached
        run.meter.first_token(now_ns, cached)

    def _details(self, sequence: _Sequence, item: TextItem) -> TokenDetails:
        view, index = self._slots.view, item.index
        span = slice(sequence.received, max(sequence.received, item.to_token))
        return TokenDetails(view.output_ids[index, span].tolist(), view.logprobs[index, span].tolist(), item.tops)

    def _end(self, sequence: _Sequence, finish: int) -> None:
        """A row ended by itself: keep what its columns say and let it go."""
        self._settle(sequence, finish)
        self._slots.release(sequence.ref)
        if not any(self._is_live(ref) for ref in sequence.run.refs):
            self._finish(sequence.run)

    def _settle(self, sequence: _Sequence, finish: int) -> None:
        run, index, view = sequence.run, sequence.ref.index, self._slots.view
        del self._live[index]
        run.gravity = max(run.gravity, _GRAVITY.index(finish))
        if int(view.admitted[index]) != sequence.generation:
            return
        # A row that never began has the time of an earlier tenant there, or 0.
        start = max(int(view.admit_ns[index]), int(view.prefill_start_ns[index]))
        run.start_ns = min(run.start_ns or start, start)
        if int(view.visible[index]) and sequence.received:
            first = int(view.first_token_ns[index])
            run.first_token_ns = min(run.first_token_ns or first, first)
            run.last_token_ns = max(run.last_token_ns, int(view.last_token_ns[index]))
            run.preemptions += int(view.preemptions[index])

    def _finish(self, run: _Run) -> None:
        run.meter.finish(
            _REASONS[run.gravity],
            time.monotonic_ns(),
            start_ns=run.start_ns,
            first_token_ns=run.first_token_ns,
            last_token_ns=run.last_token_ns,
            preemptions=run.preemptions,
        )

    def _is_live(self, ref: SlotRef) -> bool:
        sequence = self._live.get(ref.index)
        return sequence is not None and sequence.generation == ref.generation

    def _close(self, runs: list[_Run], generation: Generation) -> None:
        """The one end of every request: cancel the rows that still run, count it, log it."""
        self._generations.pop(id(generation), None)
        left: list[SlotRef] = []
        failed = generation.failed is not None
        for run in runs:
            rows = [ref for ref in run.refs if self._is_live(ref)]
            for ref in rows:
                self._settle(self._live[ref.index], Finish.ERROR if failed else Finish.ABORT)
                self._slots.cancel(ref)
            if rows:
                self._finish(run)
            left += rows
        if left:
            self._abort(tuple(left))
        if runs:
            now_ns = time.monotonic_ns()
            first_ns = min((run.first_ns for run in runs if run.first_ns), default=0)
            self._log.finished(generation, _REASONS[max(run.gravity for run in runs)], first_ns, now_ns)
        self._slots.reclaim()

    def _abort(self, refs: tuple[SlotRef, ...]) -> None:
        try:
            self._router.send(Abort(refs))
        except PeerGone as gone:  # the `cancelled` column says it too
            event(log, "abort not sent", logging.WARNING, reason=str(gone))


def _ended(item: TextItem) -> RequestError:
    if item.finish == Finish.ABORT:
        return Unavailable("The request was aborted by the server.", code="aborted")
    return RequestFailed(item.error or "The engine ended this request.")


def _refused(message: Dropped) -> RequestError:
    text = message.message or "The request was dropped before it ran."
    if message.code in _TOO_LONG_CODES:
        return TooLong(text)
    if message.code in ("overloaded", "queue_full"):
        return Overloaded(text, code=message.code)
    if message.code == "internal_error":
        return RequestFailed(text)
    return Unavailable(text, code=message.code or "dropped")
