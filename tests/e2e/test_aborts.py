"""Clients that go away (E20, E21): everything they held is free within two seconds, others notice nothing."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from tests.e2e.requests import COMPLETIONS, Body, post
from tests.e2e.server import RunningServer


def _request(server: RunningServer, body: Body) -> bytes:
    data = json.dumps(body).encode()
    host = server.url.removeprefix("http://")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _leave_after_first_event(server: RunningServer, body: Body) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_request(server, {**body, "stream": True}))
    seen = b""
    while b"data: " not in seen:
        piece = await asyncio.wait_for(reader.read(65536), 120)
        assert piece, seen
        seen += piece
    writer.transport.abort()


async def _leave_after(server: RunningServer, body: Body, seconds: float) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(_request(server, body))
    await writer.drain()
    await asyncio.sleep(seconds)
    writer.transport.abort()


def _limit(server: RunningServer) -> float:
    """Two seconds, or three times what the engine takes for a full step's worth of prompt: no step is broken off."""
    begin = time.monotonic()
    fresh = [random.randrange(1000, 40000) for _ in range(512)]
    assert post(server, COMPLETIONS, {"prompt": fresh, "max_tokens": 1}).status_code == 200
    return max(2.0, 3 * (time.monotonic() - begin))


def _aborted(server: RunningServer) -> float:
    return sum(
        v for k, v in server.metrics().items() if k.startswith("inferserve_request_success_total") and "abort" in k
    )


@pytest.mark.parametrize("kind", ["fake", pytest.param("model", marks=[pytest.mark.real_model, pytest.mark.slow])])
def test_e20_streams_that_are_closed(kind: str, request: pytest.FixtureRequest) -> None:
    server: RunningServer = request.getfixturevalue("fake_server" if kind == "fake" else "model_server")
    before, limit = _aborted(server), _limit(server)
    clients = 300

    async def crowd() -> None:
        body: Body = {"prompt": "Tell me a long story about", "max_tokens": 1500, "ignore_eos": True}
        gate = asyncio.Semaphore(300)

        async def one(i: int) -> None:
            async with gate:
                await _leave_after_first_event(server, {**body, "prompt": f"{i} {body['prompt']}"})

        await asyncio.gather(*[one(i) for i in range(clients)])

    asyncio.run(crowd())
    server.wait_until_idle(limit)
    assert _aborted(server) - before == clients
    assert post(server, COMPLETIONS, {"prompt": "Hi", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("kind", ["fake", pytest.param("model", marks=pytest.mark.real_model)])
@pytest.mark.parametrize("when", [0.0, 0.01, 0.2])
def test_e21_unstreamed_requests_that_are_closed(kind: str, when: float, request: pytest.FixtureRequest) -> None:
    server: RunningServer = request.getfixturevalue("fake_server" if kind == "fake" else "model_server")

    limit = _limit(server)

    async def crowd() -> None:
        body: Body = {"prompt": [17, 18, 19] * 500, "max_tokens": 500, "ignore_eos": True}
        await asyncio.gather(*[_leave_after(server, body, when) for _ in range(20)])

    asyncio.run(crowd())
    server.wait_until_idle(limit)
    assert post(server, COMPLETIONS, {"prompt": "Hi", "max_tokens": 2}).status_code == 200


def test_aborts_while_queued() -> None:
    """With two running rows the rest waits; those that leave while waiting go at once."""
    with RunningServer("--engine", "fake", "--fake-step-ms", "20", "--running-max-req-size", "2") as server:

        async def crowd() -> None:
            body: Body = {"prompt": "a b c", "max_tokens": 400}
            await asyncio.gather(*[_leave_after(server, body, 0.5) for _ in range(30)])

        asyncio.run(crowd())
        server.wait_until_idle(2.0)
