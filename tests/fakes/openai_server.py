"""A server that speaks just enough of OpenAI's API, at a pace and with faults that a test chooses. Raw asyncio."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

from benchmarks.load_plan import Plan
from benchmarks.serve_load import parser, plan_of

FAULTS = ("status", "drop", "error_event", "no_done", "usage", "finish", "garbage", "stall")


def plan(*flags: str) -> Plan:
    """A small load for it, changed by flags of `serve_load`."""
    return plan_of(parser().parse_args(["--input-len", "8", "--output-len", "6", *flags]), "paced")


@dataclass
class PacedServer:
    """`with PacedServer(first_s=0.05, gap_s=0.01) as server:`; requests are kept in `bodies`.

    Attributes:
        first_s, gap_s: to the first event, and between events.
        per_event: tokens in each.
        faults: number of the request (from 0, in order of arrival) to one of FAULTS.
        newline: what ends an SSE line.
        sent: by request: when it came and when each event was written, seconds of time.monotonic(). A loaded machine
            keeps no pace, but the client has to see what was sent.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    per_event: int = 1
    faults: dict[int, str] = field(default_factory=dict)
    newline: bytes = b"\n"
    usage: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent: dict[int, list[float]] = field(default_factory=dict)
    most_at_once: int = 0
    _running: int = 0

    def __enter__(self) -> PacedServer:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def gaps_ms(self) -> list[float]:
        """Between events of the same answer, as they were written."""
        return [1e3 * (b - a) for times in self.sent.values() for a, b in pairwise(times[1:])]

    def firsts_ms(self) -> list[float]:
        """From a request to its first event."""
        return [1e3 * (times[1] - times[0]) for times in self.sent.values()]

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._request(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _request(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET /v1/models"):
            self._whole(writer, {"data": [{"id": "paced"}]})
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        fault = self.faults.get(len(self.bodies), "")
        times = self.sent[len(self.bodies)] = [time.monotonic()]
        self.bodies.append(body)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            await self._answer(body, fault, times, writer)
        finally:
            self._running -= 1

    async def _answer(self, body: dict[str, Any], fault: str, times: list[float], writer: asyncio.StreamWriter) -> None:
        if fault == "status":
            self._whole(writer, {"error": {"message": "too busy"}}, b"503 Busy")
            return
        if not body.get("stream"):
            await asyncio.sleep(self.first_s)
            choice = {"text": "w" * body["max_tokens"], "finish_reason": "length"}
            self._whole(writer, {"choices": [choice], "usage": self._usage(body)})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(self.first_s)
        async for event in self._events(body, fault):
            if fault == "drop" and not event:
                writer.transport.abort()
                raise ConnectionResetError
            data = b"data: " + event + 2 * self.newline
            if b'"text"' in event:
                times.append(time.monotonic())
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def _events(self, body: dict[str, Any], fault: str) -> AsyncIterator[bytes]:
        left, count = body["max_tokens"], 0
        while left:
            if count == 2 and fault in ("drop", "stall"):
                if fault == "stall":
                    await asyncio.sleep(60)
                yield b""
            if count == 2 and fault == "error_event":
                yield b'{"error": {"message": "engine fault"}}'
                break
            if count == 2 and fault == "garbage":
                yield b"{not json"
            now = min(self.per_event, left)
            left, count = left - now, count + 1
            choice = {"index": 0, "text": " w" * now, "finish_reason": None if left else "length"}
            if fault == "finish" and not left:
                choice["finish_reason"] = "error"
            yield json.dumps({"choices": [choice]}).encode()
            if left:
                await asyncio.sleep(self.gap_s)
        if self.usage:
            usage = self._usage(body)
            usage["completion_tokens"] -= fault == "usage"
            yield json.dumps({"choices": [], "usage": usage}).encode()
        if fault != "no_done":
            yield b"[DONE]"

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        size = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        cached = {"prompt_tokens_details": {"cached_tokens": 1}}
        return {"prompt_tokens": size, "completion_tokens": body["max_tokens"], **cached}

    def _whole(self, writer: asyncio.StreamWriter, body: dict[str, Any], status: bytes = b"200 OK") -> None:
        data = json.dumps(body).encode()
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(data))
        writer.write(head + data)
