"""`World`: a `Router` on a real slot table, without sockets; it remembers what the router said."""

from __future__ import annotations

import numpy as np

from inferserve.config.schema import EnginePart, HttpPart, LogPart, ModelPart, SchedulePart, ServerConfig
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import declare
from inferserve.protocol.boot import ROLE_ROUTER
from inferserve.protocol.messages import (
    Commands,
    Dropped,
    EngineReady,
    Finish,
    FinishedRow,
    KvCounters,
    RouterMessage,
    SlotRef,
    StepReport,
)
from inferserve.router.loop import Router
from inferserve.router.observe import Observer
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable

POOL = 2000


class World:
    """A router, the slot table, and what the router said."""

    def __init__(self, ratio: float = 0.0, rows: int = 8, cache: bool = True, ready: bool = True) -> None:
        config = ServerConfig(
            model=ModelPart(max_req_total_len=4096),
            engine=EnginePart(disable_dynamic_prompt_cache=not cache),
            schedule=SchedulePart(
                running_max_req_size=rows,
                max_queued_requests=24,
                batch_max_tokens=4096,
                chunked_prefill_size=512,
                router_token_ratio=ratio,
            ),
            http=HttpPart(httpserver_workers=2),
            log=LogPart(log_stats_interval=5.0),
        )
        table, self.segment = SlotTable.create(config.slots, 4096)
        self.http, self.engine = table.view(Writer.HTTP), table.view(Writer.ENGINE)
        self.commands: list[Commands] = []
        self.dropped: list[Dropped] = []
        self.metrics = MetricsClient(declare(4096, 4096), ROLE_ROUTER, 0, 0, None)
        self.router = Router(config, table.view(Writer.ROUTER), self, Observer(config, self.metrics, 0.0))
        self.now = 0.0
        self.rows = rows
        if ready:
            self.tell(EngineReady(POOL, rows, 4096))

    def command(self, commands: Commands) -> None:
        self.commands.append(commands)

    def drop(self, dropped: Dropped) -> None:
        self.dropped.append(dropped)

    def tell(self, *messages: RouterMessage) -> Commands | None:
        """One wake-up with these messages; what the engine was told."""
        before = len(self.commands)
        for message in messages:
            self.router.handle(message, self.now)
        self.router.conclude(self.now, int(self.now * 1e9) + 1)
        self.router.check()
        assert len(self.commands) <= before + 1
        assert [c.seq for c in self.commands] == list(range(1, len(self.commands) + 1))
        return self.commands[before] if len(self.commands) > before else None

    def slot(self, index: int, prompt: int | np.ndarray = 10, max_tokens: int = 10) -> SlotRef:
        ids = np.full(prompt, index + 1, np.int32) if isinstance(prompt, int) else prompt
        self.http.generation[index] += 1
        self.http.cancelled[index] = 0
        self.http.prompt_len[index] = len(ids)
        self.http.prompt_ids[index, : len(ids)] = ids
        self.http.max_tokens[index] = max_tokens
        return SlotRef(index, int(self.http.generation[index]))

    def gauges(self) -> dict[str, float]:
        return {s.name: s.values[0] for s in self.metrics.samples() if len(s.values) == 1}


def report(
    rows: dict[SlotRef, int] | None = None,
    finished: dict[SlotRef, Finish] | None = None,
    paused: int = 0,
    queued: int = 0,
    cached: tuple[bytes, ...] = (),
    evicted: tuple[bytes, ...] = (),
) -> StepReport:
    rows, finished = rows or {}, finished or {}
    return StepReport(
        step=1,
        slots=np.array([r.index for r in rows], "<i4").tobytes(),
        generations=np.array([r.generation for r in rows], "<u4").tobytes(),
        visible=np.array(list(rows.values()), "<i4").tobytes(),
        kv=KvCounters(POOL, 500, 0, POOL - 500, len(rows), paused, queued),
        finished=tuple(FinishedRow(r.index, r.generation, f) for r, f in finished.items()),
        cached_digests=cached,
        evicted_digests=evicted,
        prefill_tokens=3,
        decode_tokens=len(rows),
        step_seconds=0.01,
    )
