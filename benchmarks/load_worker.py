"""One client process of the load generator: runs its clients on uvloop, parses afterwards, writes outcomes to stdout.

Started by `serve_load` with its orders on stdin: first the orders, then, once it has said that it is ready, the moment
at which to begin (CLOCK_MONOTONIC, the same for every process).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import sys
import time
from dataclasses import dataclass

import msgspec
import uvloop

from benchmarks.load_client import Connection, Exchange, Target
from benchmarks.load_events import Outcome, outcome
from benchmarks.load_plan import Drawer, Job, Plan

_AFTER_FAILURE_S = 0.1
"""A client whose request failed waits so long: a dead server is not hammered."""


class Orders(msgspec.Struct, frozen=True):
    """What one process does: `clients` are the numbers of its clients, `requests` its share (0 = as many as there is time for)."""

    plan: Plan
    base: str
    path: str
    clients: list[int]
    requests: int
    timeout_s: float


class Results(msgspec.Struct):
    """`idle_ns`: when the first client found nothing more to do (the end of steady load). `cpu_s`: while under load."""

    outcomes: list[Outcome]
    idle_ns: int
    cpu_s: float


@dataclass
class _Sent:
    """A request and what is remembered about it."""

    exchange: Exchange
    job: Job
    client: int
    due_ns: int = 0

    def outcome(self) -> Outcome:
        """Parsed."""
        return outcome(self.exchange, asked=self.job.asked, client=self.client, turn=self.job.turn, due_ns=self.due_ns)


class Load:
    """The clients of this process."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._plan = orders.plan
        self._target = Target(orders.base)
        self._left = orders.requests
        self._end_ns = 0
        self.sent: list[_Sent] = []
        self.idle_ns = 0

    async def run(self, start_ns: int) -> None:
        """From `start_ns` until the requests have been answered, or time is up: then what is under way is cut."""
        plan = self._plan
        await asyncio.sleep(max(0.0, (start_ns - time.monotonic_ns()) / 1e9))
        self._end_ns = start_ns + int(plan.duration_s * 1e9)
        if plan.workload == "bursty":
            tasks = [asyncio.create_task(self._arrivals(self._orders.clients[0]))]
        else:
            client = self._conversations if plan.workload == "multi-turn" else self._client
            tasks = [asyncio.create_task(client(number)) for number in self._orders.clients]
        done, late = await asyncio.wait(tasks, timeout=plan.duration_s or None)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        self._idle()
        faults = [fault for task in done if (fault := task.exception())]
        if faults:
            raise faults[0]  # ours: what a server does wrong is in the exchange

    def _idle(self) -> None:
        self.idle_ns = self.idle_ns or time.monotonic_ns()

    def _more(self) -> bool:
        """Whether another request is to be sent; counts it."""
        self._left -= 1
        more = self._left >= 0 or not self._orders.requests
        if self._plan.duration_s and time.monotonic_ns() >= self._end_ns:
            more = False
        if not more:
            self._idle()
        return more

    async def _client(self, number: int) -> None:
        connection = Connection(self._target, self._orders.timeout_s)
        for job in Drawer(self._plan, number).jobs():
            if not self._more():
                break
            await self._one(connection, job, number)
        connection.close()

    async def _conversations(self, number: int) -> None:
        connection = Connection(self._target, self._orders.timeout_s)
        drawer = Drawer(self._plan, number)
        while True:
            said = ""
            for turn in range(self._plan.turns):
                if not self._more():
                    connection.close()
                    return
                sent = await self._one(connection, drawer.turn(turn, said), number)
                said = sent.outcome().text

    async def _arrivals(self, number: int) -> None:
        """Open loop: requests come when they come, however many are under way."""
        spare: list[Connection] = []
        running: set[asyncio.Task[None]] = set()
        due = time.monotonic_ns()
        try:
            for job in Drawer(self._plan, number).jobs():
                if not self._more():
                    break
                due += int(job.wait_s * 1e9)
                await asyncio.sleep(max(0.0, (due - time.monotonic_ns()) / 1e9))
                connection = spare.pop() if spare else Connection(self._target, self._orders.timeout_s)
                task = asyncio.create_task(self._arrival(connection, spare, job, number, due))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _arrival(self, connection: Connection, spare: list[Connection], job: Job, number: int, due: int) -> None:
        await self._one(connection, job, number, due)
        spare.append(connection)

    async def _one(self, connection: Connection, job: Job, number: int, due_ns: int = 0) -> _Sent:
        sent = _Sent(Exchange(), job, number, due_ns)
        self.sent.append(sent)
        await connection.send(self._target.request(self._orders.path, job.body), sent.exchange)
        if sent.exchange.error:
            await asyncio.sleep(_AFTER_FAILURE_S)
        return sent


def main() -> None:
    """Read orders, wait for the start, run, write results."""
    size = int(sys.stdin.buffer.readline())
    orders = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=Orders)
    load = Load(orders)
    gc.collect()
    gc.disable()  # nothing here makes cycles, and a collection would be a pause in everybody's stream
    print("ready", flush=True)
    start_ns = int(sys.stdin.buffer.readline())
    before = resource.getrusage(resource.RUSAGE_SELF)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(load.run(start_ns))
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    results = Results([sent.outcome() for sent in load.sent], load.idle_ns, cpu_s)
    for seen in results.outcomes:
        seen.text = ""
    data = msgspec.msgpack.encode(results)
    sys.stdout.buffer.write(b"%d\n%b" % (len(data), data))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
