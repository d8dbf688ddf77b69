"""The detokenizer process: step reports in, texts out. Knows the tokenizer and the slot table, no requests."""

from __future__ import annotations

from inferserve.detokenize.loop import Detokenizer
from inferserve.process import Child, Waiter
from inferserve.protocol.messages import DetokMessage, HttpMessage, RouterMessage
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable
from inferserve.tokenize.load import check_tokenizer, load_tokenizer


def body(child: Child) -> None:
    """Serve until the launcher says stop. Raises ConfigError for a tokenizer that is not the model's."""
    config = child.config
    inbox = child.inbox(DetokMessage)
    tokenizer = load_tokenizer(config)
    check_tokenizer(tokenizer, config.facts)
    table = SlotTable.attach(child.boot.segments, config.slots, config.model.max_req_total_len)
    detokenizer = Detokenizer(
        table.view(Writer.DETOKENIZE),
        tokenizer,
        config.slots_per_worker,
        [child.outbox(f"http-{worker}", HttpMessage) for worker in range(config.http.httpserver_workers)],
        child.outbox("router", RouterMessage),
    )
    child.ready(vocab=tokenizer.vocab_size)
    waiter = Waiter(child, inbox)
    while True:
        for report in waiter.wait(None):
            detokenizer.handle(report)
