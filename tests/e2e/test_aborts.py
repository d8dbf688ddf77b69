"""Clients that go away (E20, E21): everything they held is free within two seconds, others notice nothing."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.requests import COMPLETIONS, Body, post
from tests.e2e.server import RunningServer

LIMIT_S = 2.0


def _request(server: RunningServer, body: Body) -> bytes:
    data = json.dumps(body).encode()
    host = server.url.removeprefix("http://")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Crowd:
    """Clients with a stream each, who all leave at the moment when `begun` of them have seen their first event."""

    def __init__(self, server: RunningServer, clients: int, begun: int) -> None:
        self._server = server
        self._clients = clients
        self._begun = begun
        self._seen = 0
        self._leave = asyncio.Event()

    async def run(self, body: Body) -> None:
        """Returns when all have left."""
        await asyncio.gather(*[self._one({**body, "prompt": f"{i} {body['prompt']}"}) for i in range(self._clients)])

    async def _one(self, body: Body) -> None:
        host, port = self._server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(_request(self._server, {**body, "stream": True}))
        reading = asyncio.create_task(self._read_to_the_end(reader))
        await asyncio.wait_for(self._leave.wait(), 120)
        assert not reading.done(), "a stream ended before all had left"
        reading.cancel()
        writer.transport.abort()

    async def _read_to_the_end(self, reader: asyncio.StreamReader) -> None:
        begun, tail = False, b""
        while b"[DONE]" not in tail:
            piece = await reader.read(65536)
            assert piece, tail
            if not begun and b"data: " in piece:
                begun = True
                self._seen += 1
                if self._seen >= self._begun:
                    self._leave.set()
            tail = tail[-6:] + piece


async def _leave_after(server: RunningServer, body: Body, seconds: float) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(_request(server, body))
    await writer.drain()
    await asyncio.sleep(seconds)
    writer.transport.abort()


def _aborted(server: RunningServer) -> float:
    return sum(
        v for k, v in server.metrics().items() if k.startswith("inferserve_request_success_total") and "abort" in k
    )


KINDS = ["fake_server", pytest.param("model_server", marks=[pytest.mark.real_model, pytest.mark.slow])]
MODEL_ROWS = 256
"""--running-max-req-size of the model's server (the default): the other clients wait."""


@pytest.mark.parametrize("kind", KINDS)
def test_e20_streams_that_are_closed(kind: str, request: pytest.FixtureRequest) -> None:
    server: RunningServer = request.getfixturevalue(kind)
    before, clients = _aborted(server), 300
    fake = kind == "fake_server"
    # Not done when all have begun, and all that run fit into the KV cache.
    body: Body = {"prompt": "Tell me a long story about", "max_tokens": 1500 if fake else 300, "ignore_eos": True}
    asyncio.run(Crowd(server, clients, clients if fake else MODEL_ROWS).run(body))
    server.wait_until_idle(LIMIT_S)
    assert _aborted(server) - before == clients
    assert post(server, COMPLETIONS, {"prompt": "Hi", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", [0.0, 0.01, 0.2, 2.0])
def test_e21_unstreamed_requests_that_are_closed(kind: str, when: float, request: pytest.FixtureRequest) -> None:
    """300 that leave together: while they arrive, wait, prefill or decode."""
    server: RunningServer = request.getfixturevalue(kind)

    async def crowd() -> None:
        body: Body = {"prompt": [17, 18, 19] * 500, "max_tokens": 500, "ignore_eos": True}
        await asyncio.gather(*[_leave_after(server, body, when) for _ in range(300)])

    asyncio.run(crowd())
    server.wait_until_idle(LIMIT_S)
    assert post(server, COMPLETIONS, {"prompt": "Hi", "max_tokens": 2}).status_code == 200


def test_aborts_while_queued() -> None:
    """With two running rows the rest waits; those that leave while waiting go at once."""
    with RunningServer("--engine", "fake", "--fake-step-ms", "20", "--running-max-req-size", "2") as server:

        async def crowd() -> None:
            body: Body = {"prompt": "a b c", "max_tokens": 400}
            await asyncio.gather(*[_leave_after(server, body, 0.5) for _ in range(30)])

        asyncio.run(crowd())
        server.wait_until_idle(LIMIT_S)
