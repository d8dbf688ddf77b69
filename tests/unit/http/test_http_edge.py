"""The HTTP border, driven as an ASGI server would: disconnects, limits, deadlines, gates, request ids."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from inferserve.http import edge
from inferserve.http.main import limit_writes
from inferserve.http.serving import Serving
from tests.fakes.http_service import FakeService, ask, events, make_app, post, problem, run

TEXT = {"prompt": "hi", "max_tokens": 5, "temperature": 0}


class Connection:
    """One request on the app, message by message."""

    def __init__(
        self, service: FakeService, path: str, body: bytes, headers: dict[str, str] | None = None, **scope: Any
    ) -> None:
        given = {"content-type": "application/json", "content-length": str(len(body))} | (headers or {})
        raw = [(k.encode(), v.encode()) for k, v in given.items() if v]
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "http_version": "1.1",
            "headers": raw,
            "state": {},
        } | scope
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.on_send: Callable[[dict[str, Any]], Awaitable[None]] | None = None
        self.app = make_app(service)
        if body:
            self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": True})
        self.inbox.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if self.on_send:
            await self.on_send(message)

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def serve(self) -> None:
        async with asyncio.timeout(5):
            await self.app(self.scope, self.inbox.get, self.send)

    @property
    def status(self) -> int:
        return self.sent[0]["status"] if self.sent else 0


def play(main: Callable[[FakeService], Awaitable[None]], service: FakeService | None = None) -> FakeService:
    """Run a scenario in a loop of its own."""
    service = service or FakeService()

    async def inside() -> None:
        service.__post_init__()
        await main(service)

    asyncio.run(inside())
    return service


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop turn until it holds."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_waiting(stream: bool) -> None:
    async def main(service: FakeService) -> None:
        service.gate.clear()
        connection = Connection(service, "/v1/completions", json.dumps(TEXT | {"stream": stream}).encode())
        task = asyncio.create_task(connection.serve())
        await until(lambda: service.requests)
        assert service.serving.in_flight == 1
        connection.leave()
        await task
        assert len(service.closed) == 1 and not connection.sent and service.serving.in_flight == 0

    play(main)


def test_a_client_that_leaves_in_the_stream() -> None:
    async def main(service: FakeService) -> None:
        connection = Connection(service, "/v1/completions", json.dumps(TEXT | {"stream": True}).encode())

        async def stop_after_two(message: dict[str, Any]) -> None:
            if len(connection.sent) == 3:
                service.gate.clear()
                connection.leave()

        connection.on_send = stop_after_two
        await connection.serve()
        assert len(service.closed) == 1 and len(connection.sent) <= 4

    play(main)


def test_the_head_is_held_back_until_the_first_text() -> None:
    async def main(service: FakeService) -> None:
        service.gate.clear()
        connection = Connection(
            service, "/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"stream":true}'
        )
        task = asyncio.create_task(connection.serve())
        await until(lambda: service.requests)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not connection.sent
        service.gate.set()
        await task
        assert connection.status == 200 and dict(connection.sent[0]["headers"])[b"cache-control"] == b"no-cache"

    play(main)


@pytest.mark.parametrize("at", range(12))
def test_cancelled_at_any_await(at: int) -> None:
    """The server may cancel a request's task anywhere: what it holds is given back, and it is no longer in flight."""

    async def main(service: FakeService) -> None:
        for stream in (False, True):
            connection = Connection(service, "/v1/completions", json.dumps(TEXT | {"stream": stream}).encode())
            task = asyncio.create_task(connection.serve())
            for _ in range(at):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert service.serving.in_flight == 0
            assert len(service.closed) == len(service.requests)

    play(main)


def test_a_send_that_fails_gives_everything_back() -> None:
    async def main(service: FakeService) -> None:
        connection = Connection(service, "/v1/completions", json.dumps(TEXT | {"stream": True}).encode())

        async def fail(_: dict[str, Any]) -> None:
            raise OSError("gone")

        connection.on_send = fail
        await connection.serve()
        assert service.serving.in_flight == 0 and len(service.closed) == 1

    play(main)


def test_drain_refuses_new_and_finishes_old() -> None:
    drained: list[bool] = []

    async def main(service: FakeService) -> None:
        service.serving = Serving(lambda: drained.append(True))
        service.serving.ready = True
        service.gate.clear()
        old = Connection(service, "/v1/completions", json.dumps(TEXT | {"stream": True}).encode())
        task = asyncio.create_task(old.serve())
        await until(lambda: service.requests)
        service.serving.drain()
        late = Connection(service, "/v1/completions", json.dumps(TEXT).encode())
        await late.serve()
        assert late.status == 503
        head = dict(late.sent[0]["headers"])
        assert int(head[b"retry-after"]) > 0 and head[b"connection"] == b"close"
        assert msgspec.json.decode(late.sent[1]["body"])["error"]["code"] == "shutting_down"
        assert not drained
        service.gate.set()
        await task
        assert b"[DONE]" in old.sent[-1]["body"] and drained == [True]

    service = play(main)
    assert service.refusals == ["unavailable"]


def test_drain_without_requests_is_done_at_once() -> None:
    drained: list[bool] = []
    Serving(lambda: drained.append(True)).drain()
    assert drained == [True]


def test_health_follows_the_state() -> None:
    service = FakeService()
    for path in ("/health", "/healthz", "/readiness", "/liveness"):
        assert ask("GET", path, service).json() == {"status": "ok"}
    assert ask("HEAD", "/health", service).status_code == 200
    assert ask("POST", "/readiness", service).status_code == 200

    async def in_state(state: str, client: Any) -> None:
        service.serving.ready = state != "starting"
        service.serving.draining = state == "draining"
        for path in ("/health", "/healthz", "/readiness"):
            answer = await client.get(path)
            problem(answer, 503)
            assert int(answer.headers["retry-after"]) > 0
        assert (await client.get("/liveness")).status_code == 200
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 503

    for state in ("starting", "draining"):
        run(service, lambda client, state=state: in_state(state, client))


def test_request_id_is_echoed_or_made() -> None:
    given = ask("GET", "/v1/models", headers={"x-request-id": "trace-1"})
    assert given.headers["x-request-id"] == "trace-1"
    for bad in ("a b", "x" * 129, "é", ""):
        made = ask("GET", "/v1/models", headers={"x-request-id": bad.encode("latin-1")})
        assert made.headers["x-request-id"] not in (bad, "") and len(made.headers["x-request-id"]) == 32
    service = FakeService()
    answer = ask("POST", "/v1/completions", service, json=TEXT, headers={"x-request-id": "r7", "x-session-id": "s7"})
    assert service.requests[0].request_id == "r7" and service.requests[0].session_id == "s7"
    assert answer.json()["id"] == service.requests[0].name


def test_body_limit_by_length_and_by_count() -> None:
    service = FakeService()
    big = b'{"prompt": "' + b"x" * 200_000 + b'"}'
    answer = ask("POST", "/v1/completions", service, content=big, headers={"content-type": "application/json"})
    assert problem(answer, 413)["code"] == "body_too_large" and answer.headers["connection"] == "close"

    async def lying(service: FakeService) -> None:
        connection = Connection(service, "/v1/completions", b"", {"transfer-encoding": "chunked", "content-length": ""})
        connection.inbox = asyncio.Queue()
        for _ in range(40):
            connection.inbox.put_nowait({"type": "http.request", "body": b"x" * 10_000, "more_body": True})
        connection.inbox.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        await connection.serve()
        assert connection.status == 413 and connection.inbox.empty()  # the rest was discarded, not left to block

    play(lying)
    assert service.refusals == ["invalid"]


def test_slow_bodies_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "BODY_DEADLINE_S", 0.05)
    monkeypatch.setattr(edge, "BODY_BYTES_PER_S", 10**9)
    monkeypatch.setattr(edge, "DISCARD_DEADLINE_S", 0.05)

    async def main(service: FakeService) -> None:
        connection = Connection(service, "/v1/completions", b'{"a', {"content-length": "50"})
        await connection.inbox.get()
        await connection.inbox.get()
        connection.inbox.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        await connection.serve()
        assert connection.status == 408

    play(main)


def test_a_client_that_leaves_in_its_body() -> None:
    async def main(service: FakeService) -> None:
        connection = Connection(service, "/v1/completions", b"{", {"content-length": "50"})
        connection.inbox = asyncio.Queue()
        connection.inbox.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        connection.leave()
        await connection.serve()
        assert not connection.sent and service.serving.in_flight == 0

    assert play(main).refusals == []


@pytest.mark.parametrize(
    ("headers", "scope", "status"),
    [
        ({"content-type": "text/plain"}, {}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, {}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, {}, 415),
        ({"content-type": "application/json; charset=utf-8"}, {}, 200),
        ({"content-type": ""}, {}, 200),
        ({"transfer-encoding": "chunked"}, {}, 400),
        ({f"x-{i}": "v" for i in range(120)}, {}, 431),
        ({"x-big": "v" * 20_000}, {}, 431),
        ({}, {"http_version": "2"}, 505),
    ],
    ids=str,
)
def test_heads(headers: dict[str, str], scope: dict[str, Any], status: int) -> None:
    async def main(service: FakeService) -> None:
        connection = Connection(service, "/v1/completions", json.dumps(TEXT).encode(), headers, **scope)
        await connection.serve()
        assert connection.status == status
        if status != 200:
            assert set(msgspec.json.decode(connection.sent[1]["body"])["error"]) == {"message", "type", "param", "code"}

    play(main)


@pytest.mark.parametrize("where", ["submit", "encode"])
def test_a_bug_is_a_500_with_a_body_and_a_log_line(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: FakeService, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(FakeService, where, broken)
    service = FakeService()
    assert "bug" not in problem(post("/v1/completions", TEXT, service), 500)["message"]
    assert service.serving.in_flight == 0 and service.refusals == ["error"]
    assert "ZeroDivisionError" in caplog.text


def test_web_sockets_are_closed() -> None:
    async def main(service: FakeService) -> None:
        connection = Connection(service, "/v1/completions", b"", type="websocket")
        await connection.serve()
        assert connection.sent == [{"type": "websocket.close", "code": 1000}]

    play(main)


def test_metrics_page() -> None:
    answer = ask("GET", "/metrics", FakeService(metrics_page=b"a 1\n"))
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8" and answer.text == "a 1\n"


def test_models() -> None:
    data = ask("GET", "/v1/models").json()
    assert data["object"] == "list" and [m["id"] for m in data["data"]] == ["fake-model", "alias"]
    assert ask("GET", "/v1/models/alias").json()["max_model_len"] == 128
    found = problem(ask("GET", "/v1/models/org/nope"), 404)
    assert found["code"] == "model_not_found" and "org/nope" in found["message"]


def test_openapi_shows_the_bodies() -> None:
    document = ask("GET", "/openapi.json").json()
    for path, name in (
        ("/v1/chat/completions", "ChatBody"),
        ("/v1/completions", "CompletionBody"),
        ("/generate", "NativeBody"),
        ("/tokens", "TokensBody"),
    ):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert document["components"]["schemas"][name]["properties"]
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert fields["messages"]["items"]["$ref"].endswith("/Message")
    references = [v for v in json.dumps(document).split('"') if v.startswith("#/components/schemas/")]
    assert all(r.rsplit("/", 1)[1] in document["components"]["schemas"] for r in references)


def test_streams_of_native_route_have_their_framing() -> None:
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 3}}
    assert len(events(post("/generate_stream", body), "data:")) == 3


def test_peers_that_take_nothing_are_cut_off_by_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        limit_writes(listener.fileno(), deadline_ms=300)
        with socket.create_connection(listener.getsockname()):
            server_side, _ = listener.accept()
            with server_side, pytest.raises(TimeoutError) as caught:
                server_side.settimeout(5)
                while True:
                    server_side.send(b"x" * 65536)
            assert caught.value.errno == errno.ETIMEDOUT  # the kernel's, not settimeout's
