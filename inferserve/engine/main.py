"""The engine process: a worker between an inbox and two outboxes. Waits on the inbox alone when there is nothing to run."""

from __future__ import annotations

from inferserve.engine.parts import make_backend
from inferserve.engine.worker import Worker
from inferserve.process import Child, Waiter
from inferserve.protocol.codec import Codec
from inferserve.protocol.messages import Commands, EngineMessage, EngineReady, RouterMessage, StepReport
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable
from inferserve.transport.channel import Inbox, Outbox


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
    config = child.config
    table = SlotTable.attach(child.boot.segments, config.slots, config.model.max_req_total_len)
    inbox: Inbox[Commands] = child.inbox(EngineMessage)
    router: Outbox[RouterMessage] = child.outbox("router", RouterMessage)
    reports = Reports(router, child.outbox("detokenize", StepReport))
    backend = make_backend(config, config.schedule.running_max_req_size)
    facts = backend.start()
    worker = Worker(config, table.view(Writer.ENGINE), backend, facts.kv_tokens)
    schedule = config.schedule
    router.send(EngineReady(facts.kv_tokens, schedule.running_max_req_size, schedule.batch_max_tokens))
    child.ready(kv_tokens=facts.kv_tokens, **facts.about)
    serve(worker, Waiter(child, inbox), reports, config.engine.debug_checks)


def serve(worker: Worker, waiter: Waiter[Commands], reports: Reports, debug_checks: bool) -> None:
    """Run until StopRequested is raised, or an error that ends the process."""
    while True:
        if not worker.busy and debug_checks:
            worker.check()
        for commands in waiter.wait(0 if worker.busy else None):
            worker.apply(commands)
        if report := worker.step():
            reports.send(report)
