"""`Router`: takes messages, keeps the tables of waiting and running rows, and says who runs.

Messages only change tables; `conclude()` at the end of each wake-up decides and sends at most one `Commands`. Everything
goes by `SlotRef`: a message of another generation, of an unknown slot or said twice changes nothing. Knows neither
sockets nor clocks: what it sends goes through `Links`, times are arguments.
"""

from __future__ import annotations

from typing import Protocol, assert_never

from inferserve.config.schema import ServerConfig
from inferserve.protocol.messages import (
    Abort,
    Commands,
    Dropped,
    EngineReady,
    Finish,
    FinishedRow,
    KvCounters,
    RouterMessage,
    SlotRef,
    StepReport,
    StopMatched,
    Submit,
    WorkerLost,
)
from inferserve.router.admission import AdmissionPolicy, Admitted, Candidate, Limits, Snapshot
from inferserve.router.commands import CommandBatch
from inferserve.router.observe import Observer
from inferserve.router.output_lengths import OutputLengths
from inferserve.router.prefix_hints import PrefixHints
from inferserve.router.queue import Group, WaitingQueue
from inferserve.router.running import RunningRows
from inferserve.router.sharing import SharedSpans, granule_spans
from inferserve.router.status import Standing
from inferserve.shm.slots import SlotView


class Links(Protocol):
    """Where the router's messages go."""

    def command(self, commands: Commands) -> None:
        """To every engine rank."""

    def drop(self, dropped: Dropped) -> None:
        """To the http worker that owns the slot."""


class Router:
    """Queue, running rows and the rules that move a request from one to the other.

    Args:
        slots: the router's view of the slot table.
    """

    def __init__(self, config: ServerConfig, slots: SlotView, links: Links, observer: Observer) -> None:
        self._config = config
        self._slots = slots
        self._links = links
        self._observer = observer
        self._queue = WaitingQueue()
        self._rows = RunningRows(config.slots)
        self._shared = SharedSpans(self._rows.own)
        self._hints = PrefixHints()
        self._lengths = OutputLengths(config.model.max_req_total_len)
        self._commands = CommandBatch()
        self._engine = _EngineState()

    def due_in(self, now: float) -> float:
        """Seconds until `conclude` has something to do without a message (`now` is time.monotonic())."""
        return self._observer.due_in(now)

    def handle(self, message: RouterMessage, now: float) -> None:
        """Take in one message."""
        match message:
            case Submit():
                self._submit(message)
            case StepReport():
                self._step(message, now)
            case Abort():
                for ref in message.slots:
                    self._abort(ref)
            case StopMatched():
                for ref in message.slots:
                    if self._rows.find(ref.index) == ref:
                        self._commands.stop(ref)
            case EngineReady():
                self._engine_ready(message)
            case WorkerLost():
                self._worker_lost(message)
            case _:
                assert_never(message)

    def conclude(self, now: float, now_ns: int) -> None:
        """End a wake-up: admit who may run, send commands, publish figures (`now_ns` is time.monotonic_ns())."""
        if self._engine.look and self._engine.policy and len(self._queue):
            self._admit_waiting(self._engine.policy, now_ns)
        commands = self._commands.take()
        if commands:
            self._links.command(commands)
        self._observer.stand(self._standing(), now)
        if self._observer.push_due(now):
            self._observer.push(self._peak(), now)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not len(self._queue) and not len(self._rows)

    def check(self) -> None:
        """Raise AssertionError if the tables disagree."""
        self._queue.check()
        self._rows.check()
        self._shared.check()

    # ------------------------------------------------------------------------------------------------------ messages

    def _submit(self, message: Submit) -> None:
        members = {ref.index: ref for ref in message.slots if self._is_news(ref)}
        for ref in list(members.values()):
            if self._slots.cancelled[ref.index]:
                self._drop(members.pop(ref.index))
            elif self._rows.find(ref.index):
                self._drop(members.pop(ref.index), "internal_error", "the slot still runs an earlier request")
        if not members:
            return
        first = next(iter(members))
        group = Group(
            members=members,
            prompt_len=int(self._slots.prompt_len[first]),
            max_tokens=int(self._slots.max_tokens[first]),
            ignore_eos=bool(self._slots.ignore_eos[first]),
        )
        # Behind others there is nothing new to decide: nobody overtakes.
        self._engine.look |= not len(self._queue)
        self._queue.put(group)
        self._refuse_misfits([group])

    def _is_news(self, ref: SlotRef) -> bool:
        """Whether `ref` is the slot's current tenant and was never submitted before."""
        if not 0 <= ref.index < self._config.slots or self._slots.generation[ref.index] != ref.generation:
            return False
        waiting = self._queue.find(ref.index)
        if waiting and waiting != ref:
            self._queue.remove(waiting)
        known = waiting == ref or self._rows.find(ref.index) == ref
        return not known and bool(self._slots.router_done[ref.index] != ref.generation)

    def _abort(self, ref: SlotRef) -> None:
        if self._queue.remove(ref):
            self._engine.look = True
            self._drop(ref)
        elif self._rows.find(ref.index) == ref:
            self._commands.abort(ref)
        elif self._is_news(ref):
            # Its Submit died with the worker that sent it, or comes later: either way it never runs.
            self._drop(ref)

    def _engine_ready(self, message: EngineReady) -> None:
        schedule = self._config.schedule
        chunk = message.batch_max_tokens if schedule.disable_chunked_prefill else schedule.chunked_prefill_size
        limits = Limits(
            kv_tokens=message.kv_tokens,
            max_rows=min(message.max_rows, schedule.running_max_req_size),
            batch_max_tokens=message.batch_max_tokens,
            first_chunk=chunk,
            token_ratio=schedule.router_token_ratio,
            prefix_cache=self._prefix_cache,
        )
        self._engine.policy = AdmissionPolicy(limits)
        self._engine.look = True
        self._observer.engine_ready(message)
        self._refuse_misfits(list(self._queue))

    def _worker_lost(self, message: WorkerLost) -> None:
        """Nobody is there to be told, so waiting rows are just forgotten."""
        for ref in self._queue.members(message.first, message.last):
            self._queue.remove(ref)
            self._slots.router_done[ref.index] = ref.generation
            self._engine.look = True
        for ref in self._rows.range(message.first, message.last):
            self._commands.abort(ref)

    def _step(self, report: StepReport, now: float) -> None:
        self._hints.update(report.cached_digests, report.evicted_digests)
        started = self._rows.commit(report)
        for index in started:
            prompt_len = int(self._slots.prompt_len[index])
            self._observer.first_token(prompt_len, int(self._slots.cached_tokens[index]))
            self._shared.settle(index, prompt_len, self._hints.hits)
        for row in report.finished:
            self._finished(row)
        resumed = self._engine.kv.paused and not report.kv.paused
        self._engine.kv = report.kv
        if started or report.finished or resumed:
            self._engine.look = True
        self._observer.step(report, now)

    def _finished(self, row: FinishedRow) -> None:
        ref = SlotRef(row.index, row.generation)
        self._commands.ended(ref)
        if not self._rows.remove(ref):
            return
        self._shared.leave(row.index)
        length = int(self._rows.generated[row.index])
        if row.finish != Finish.ERROR and length and not self._rows.always_full[row.index]:
            self._lengths.observe(length, ended=row.finish == Finish.STOP)
        self._slots.router_done[row.index] = row.generation

    # ----------------------------------------------------------------------------------------------------- admission

    def _admit_waiting(self, policy: AdmissionPolicy, now_ns: int) -> None:
        self._engine.look = False
        before = len(self._rows)
        decisions = policy.open(self._snapshot())
        while group := self._queue.head():
            hits = self._expected_hits(group)
            candidate = self._candidate(policy, group, hits, before)
            if not isinstance(decisions.consider(candidate), Admitted):
                return
            self._run(group, candidate, hits, now_ns)

    def _expected_hits(self, group: Group) -> int:
        if group.spans is None:
            prompt = self._slots.prompt(next(iter(group.members)))
            group.spans = granule_spans(prompt) if self._prefix_cache else ()
        return self._hints.hits(group.spans)

    def _candidate(self, policy: AdmissionPolicy, group: Group, hits: int, before: int) -> Candidate:
        spans = group.spans or ()
        rows = policy.together(len(group.members), group.prompt_len, group.max_tokens)
        overlap = self._shared.overlap(spans, hits)
        # Rows admitted in this very round have positions behind the snapshot; they are counted to the end anyway.
        sole = tuple((p, t) for p, t in ((self._rows.position(s), t) for s, t in overlap.sole) if p < before)
        prefill = group.prompt_len - sum(span.tokens for span in spans[:hits])
        return Candidate(
            rows=rows,
            prompt_tokens=policy.prompt_tokens(rows, group.prompt_len, overlap.tokens),
            sole=sole,
            first_tokens=policy.first_tokens(rows, prefill),
            max_tokens=group.max_tokens,
            ignore_eos=group.ignore_eos,
        )

    def _run(self, group: Group, candidate: Candidate, hits: int, now_ns: int) -> None:
        """Take the candidate's members of `group` out of the queue and have the engine run them."""
        refs = self._queue.take(group, candidate.rows)
        spans = group.spans or ()
        for position, ref in enumerate(refs):
            tokens = candidate.first_tokens - (len(refs) - 1) if position == 0 else 1
            self._rows.add(ref, group.max_tokens, group.ignore_eos, tokens)
            self._slots.admitted[ref.index] = ref.generation
            self._slots.admit_ns[ref.index] = now_ns
            self._commands.admit(ref, refs[0].index if position else -1)
        indexes = [ref.index for ref in refs]
        if len(refs) > 1 and self._prefix_cache:
            self._shared.join_siblings(indexes, group.prompt_len, spans, hits, group.ticket)
        else:
            for index in indexes:
                self._shared.join(index, group.prompt_len, spans, hits)

    def _refuse_misfits(self, groups: list[Group]) -> None:
        """Drop groups that can never fit; before the pool's size is known nobody can tell."""
        policy = self._engine.policy
        for group in groups:
            reason = policy.refusal(group.prompt_len, group.max_tokens) if policy else ""
            for ref in self._queue.take(group, len(group.members)) if reason else ():
                self._drop(ref, "never_fits", reason)

    def _drop(self, ref: SlotRef, code: str = "", message: str = "") -> None:
        self._slots.router_done[ref.index] = ref.generation
        self._links.drop(Dropped(ref.index, ref.generation, code, message))

    # -------------------------------------------------------------------------------------------------------- figures

    @property
    def _prefix_cache(self) -> bool:
        return not self._config.engine.disable_dynamic_prompt_cache

    def _snapshot(self) -> Snapshot:
        rows, slots = self._rows, self._rows.slots()
        return Snapshot(
            own=rows.own[slots],
            generated=rows.generated[slots],
            limit=rows.limit[slots],
            always_full=rows.always_full[slots],
            first_tokens=rows.first_tokens[slots],
            shared=self._shared.tokens,
            paused=self._engine.kv.paused,
            lengths=self._lengths.curve(),
        )

    def _standing(self) -> Standing:
        kv = self._engine.kv
        paused = min(kv.paused, len(self._rows))
        queued = min(kv.queued, len(self._rows) - paused)
        usage = kv.used / kv.total if kv.total else 0.0
        return Standing(len(self._rows) - paused - queued, len(self._queue) + queued, paused, usage)

    def _peak(self) -> int:
        return self._engine.policy.open(self._snapshot()).peak() if self._engine.policy else 0


class _EngineState:
    """What the engine said last, and whether something happened since that may let the head of the queue run."""

    def __init__(self) -> None:
        self.policy: AdmissionPolicy | None = None
        self.kv = KvCounters(0, 0, 0, 0, 0, 0)
        self.look = False
