"""The engine process: a worker between an inbox and two outboxes. Waits on the inbox alone when there is nothing to run.

With several ranks the first one leads: it alone reads and writes the slot table and reports; the others repeat its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from inferserve.engine.calibration import calibrated
from inferserve.engine.follower import Follower, RefusingBackend, follow
from inferserve.engine.leader import DIGEST_EVERY, Leader, NotingBackend
from inferserve.engine.parts import make_backend, meet
from inferserve.engine.step import EngineBackend
from inferserve.engine.worker import Worker
from inferserve.errors import RankLost
from inferserve.process import Child, Waiter
from inferserve.protocol.boot import ROLE_ENGINE, process_name
from inferserve.protocol.codec import Codec
from inferserve.protocol.messages import Commands, EngineMessage, EngineReady, RouterMessage, StepReport
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable
from inferserve.transport.channel import Inbox, Outbox

_LAST_WORDS_S = 2.0
"""When ranks lose each other, how long a living one lets the launcher say which has died before it faults itself."""

Turn = Callable[[Sequence[Commands]], StepReport | None]
"""Applies commands and runs a step; what is to be told, if anything."""


class Reports:
    """Step reports to the router, and to the detokenizer those that name rows: one frame for both."""

    def __init__(self, router: Outbox[RouterMessage], detokenize: Outbox[StepReport]) -> None:
        self._codec: Codec[StepReport] = Codec(StepReport)
        self._router = router
        self._detokenize = detokenize

    def send(self, report: StepReport) -> None:
        """Queue the report; raises PeerGone when a peer has stopped reading for very long."""
        frame = self._codec.encode(report)
        if report.slots or report.finished:
            self._detokenize.send_frame(frame)
        self._router.send_frame(frame)


def body(child: Child) -> None:
    """Load, say what there is, run."""
    config, rank = child.config, child.boot.index
    try:
        with meet(config, rank, Path(child.boot.run_dir)) as ranks:
            backend = make_backend(config, config.schedule.running_max_req_size, ranks)
            if rank:
                _follow(child, backend)
            else:
                _lead(child, backend)
    except RankLost:
        child.await_stop(_LAST_WORDS_S)
        raise


def _lead(child: Child, backend: EngineBackend) -> None:
    config, schedule = child.config, child.config.schedule
    slots = SlotTable.attach(child.boot.segments, config.slots, config.model.max_req_total_len).view(Writer.ENGINE)
    inbox: Inbox[Commands] = child.inbox(EngineMessage)
    router: Outbox[RouterMessage] = child.outbox("router", RouterMessage)
    reports = Reports(router, child.outbox("detokenize", StepReport))
    noting = NotingBackend(backend)
    facts = noting.start()
    worker = Worker(config, slots, noting, facts.kv_tokens, calibrated(config, noting, facts.kv_tokens))
    followers = [child.outbox(process_name(ROLE_ENGINE, i), EngineMessage) for i in range(1, config.parallel.tp)]
    turn = turns_alone(worker)
    if followers:
        turn = Leader(worker, noting, slots, followers, 1 if config.engine.debug_checks else DIGEST_EVERY).turn
    router.send(EngineReady(facts.kv_tokens, schedule.running_max_req_size, schedule.batch_max_tokens))
    child.ready(kv_tokens=facts.kv_tokens, **facts.about)
    serve(worker, turn, Waiter(child, inbox), reports, config.engine.debug_checks)


def _follow(child: Child, backend: EngineBackend) -> None:
    config = child.config
    table, _ = SlotTable.create(config.slots, config.model.max_req_total_len)
    inbox: Inbox[EngineMessage] = child.inbox(EngineMessage)
    refusing = RefusingBackend(backend)
    facts = refusing.start()
    calibrated(config, refusing, facts.kv_tokens)
    worker = Worker(config, table.view(Writer.ENGINE), refusing, facts.kv_tokens)
    child.ready(kv_tokens=facts.kv_tokens, **facts.about)
    follower = Follower(worker, refusing, table.view(Writer.HTTP), config.engine.debug_checks)
    follow(follower, Waiter(child, inbox))


def turns_alone(worker: Worker) -> Turn:
    """Turns of an engine of one rank."""

    def turn(commands: Sequence[Commands]) -> StepReport | None:
        for each in commands:
            worker.apply(each)
        return worker.step()

    return turn


def serve(worker: Worker, turn: Turn, waiter: Waiter[Commands], reports: Reports, debug_checks: bool) -> None:
    """Run until StopRequested is raised, or an error that ends the process."""
    while True:
        if not worker.busy and debug_checks:
            worker.check()
        if report := turn(waiter.wait(0 if worker.busy else None)):
            reports.send(report)
