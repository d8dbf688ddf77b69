"""The real http process over real sockets; the test plays router, engine, detokenizer, metrics and launcher."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inferserve.config.schema import HttpPart, ModelFacts, ModelPart, SchedulePart, ServerConfig
from inferserve.process import EXIT_FAULT
from inferserve.protocol.messages import (
    Abort,
    Drain,
    Drained,
    Dropped,
    Fault,
    Finish,
    MetricsPush,
    Opened,
    Scrape,
    ScrapeReply,
    ServiceReady,
    SlotRef,
    Stop,
    Submit,
    TextItem,
    TextReady,
)
from inferserve.shm.layout import Writer
from tests.fakes.neighbours import Neighbours
from tests.fakes.tiny_tokenizers import MAKERS

CONTEXT = 64
TEXT: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 8, "seed": 1}


class Http:
    """The process and its address; helpers of the neighbours' parts."""

    def __init__(self, world: Neighbours, port: int) -> None:
        self.world = world
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.pool = ThreadPoolExecutor(32)

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> Future[httpx.Response]:
        return self.pool.submit(lambda: httpx.post(self.url + path, json=body, timeout=20))

    def submitted(self, count: int = 1) -> list[SlotRef]:
        """Slots of the next `count` requests, admitted."""
        messages = self.world.receive_all("router", Submit, count)
        refs = [ref for m in messages for ref in m.slots]
        for ref in refs:
            self.world.view(Writer.ROUTER).admitted[ref.index] = ref.generation
        return refs

    def say(self, ref: SlotRef, begin: int, end: int, text: str, finish: Finish = Finish.NONE, **more: Any) -> None:
        self.world.send(TextReady((TextItem(ref.index, ref.generation, begin, end, text, finish, **more),)))

    def forget(self, *refs: SlotRef) -> None:
        for ref in refs:
            self.world.view(Writer.ROUTER).router_done[ref.index] = ref.generation
            self.world.view(Writer.ENGINE).engine_done[ref.index] = ref.generation
            self.world.view(Writer.DETOKENIZE).detok_done[ref.index] = ref.generation

    def connect(self, body: dict[str, Any]) -> socket.socket:
        """A raw connection with a request sent."""
        content = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        return sock

    def cancelled(self, refs: list[SlotRef]) -> bool:
        return all(bool(self.world.view(Writer.ROUTER).cancelled[r.index]) for r in refs)


def config(folder: Path, **http: Any) -> ServerConfig:
    return ServerConfig(
        model=ModelPart(max_req_total_len=CONTEXT, served_model_name="m"),
        schedule=SchedulePart(running_max_req_size=8, max_queued_requests=24),
        http=HttpPart(httpserver_workers=2, **http),
        facts=ModelFacts(folder=str(folder), vocab_size=600),
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Http]:
    folder = MAKERS["byte_level"](tmp_path / "model")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Neighbours("http-0", config(folder), listener) as world,
    ):
        world.wait_ready()
        http = Http(world, listener.getsockname()[1])
        assert httpx.get(http.url + "/health").status_code == 503
        assert httpx.get(http.url + "/liveness").status_code == 200
        world.tell(ServiceReady())
        assert isinstance(world.wait_control(5), Opened)
        assert httpx.get(http.url + "/readiness").status_code == 200
        yield http
        http.pool.shutdown(wait=False)


def test_a_request_from_body_to_body(server: Http) -> None:
    answer = server.post(TEXT | {"n": 2})
    refs = server.submitted()
    view = server.world.view(Writer.ENGINE)
    assert [view.prompt(r.index).tolist() for r in refs] == [[5, 6, 7]] * 2
    assert all(view.in_use[r.index] == 1 and view.max_tokens[r.index] == 8 and r.index < 32 for r in refs)
    assert time.monotonic_ns() - int(view.arrival_ns[refs[0].index]) < 5e9
    view.cached_tokens[refs[0].index] = 2
    for number, ref in enumerate(refs):
        server.say(ref, 0, 1, f"one{number}")
        server.say(ref, 1, 3, " two", Finish.STOP, stop_reason="x")
    body = answer.result(10).json()
    assert [(c["text"], c["finish_reason"], c["stop_reason"]) for c in body["choices"]] == [
        ("one0 two", "stop", "x"),
        ("one1 two", "stop", "x"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert "request finished" in server.world.log() and "out_token_counter=6" in server.world.log()


def test_tokens_arrive_one_by_one(server: Http) -> None:
    sock = server.connect(TEXT | {"stream": True})
    (ref,) = server.submitted()
    sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        sock.recv(1)  # no head before the first text
    sock.settimeout(5)
    seen = b""
    for position in range(5):
        server.say(ref, position, position + 1, f"<{position}>", Finish.LENGTH if position == 4 else Finish.NONE)
        while f"<{position}>".encode() not in seen:
            seen += sock.recv(65536)
        assert f"<{position + 1}>".encode() not in seen
    while b"[DONE]" not in seen:
        seen += sock.recv(65536)
    assert seen.startswith(b"HTTP/1.1 200") and b"text/event-stream; charset=utf-8" in seen
    assert seen.count(b"data: ") == 6
    assert int(server.world.view(Writer.ROUTER).delivered_tokens[ref.index]) == 5


def test_disconnects_abort_at_once_streamed_queued_and_unstreamed(server: Http) -> None:
    plain, waiting = (server.connect(TEXT | {"stream": s}) for s in (False, True))
    refs = server.submitted(2)
    streaming = server.connect(TEXT | {"stream": True})
    refs += server.submitted()
    server.say(refs[2], 0, 1, "text")
    seen = b""
    while b"data: " not in seen:
        seen += streaming.recv(65536)
    begin = time.monotonic()
    for sock in (plain, waiting, streaming):
        sock.close()
    aborted = server.world.receive_all("router", Abort, 3, 5)
    assert time.monotonic() - begin < 1.0
    assert {r.index for a in aborted for r in a.slots} == {r.index for r in refs}
    assert server.cancelled(refs)
    for ref in refs:
        server.say(ref, 1, 1, "", Finish.ABORT)
    server.forget(*refs)
    answer = server.post(TEXT)
    (ref,) = server.submitted()
    server.say(ref, 0, 1, "alive", Finish.STOP)
    assert answer.result(10).json()["choices"][0]["text"] == "alive"
    in_use = server.world.view(Writer.ROUTER).in_use
    assert int(in_use.sum()) <= 1


def test_a_crowd_that_leaves(server: Http) -> None:
    socks = [server.connect(TEXT | {"stream": i % 2 == 0}) for i in range(30)]
    refs = server.submitted(30)
    for sock in socks:
        sock.close()
    aborted = [r for a in server.world.receive_all("router", Abort, 30, 5) for r in a.slots]
    assert {r.index for r in aborted} == {r.index for r in refs}
    server.forget(*refs)
    answer = server.post(TEXT | {"n": 16, "max_tokens": 1})
    for ref in server.submitted():
        server.say(ref, 0, 1, "x", Finish.LENGTH)
    assert len(answer.result(10).json()["choices"]) == 16


def test_the_limit_is_429_with_retry_after(server: Http) -> None:
    running = [server.post(TEXT | {"n": 16}) for _ in range(2)]
    refs = server.submitted(2)
    refused = server.post(TEXT).result(10)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
    with pytest.raises(openai.RateLimitError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0).completions.create(model="m", prompt="a")
    for ref in refs:
        server.say(ref, 0, 1, "x", Finish.LENGTH)
    assert all(r.result(10).status_code == 200 for r in running)


def test_refused_by_the_router(server: Http) -> None:
    answer = server.post(TEXT | {"stream": True})
    (message,) = server.world.receive_all("router", Submit, 1)
    (ref,) = message.slots
    server.world.view(Writer.ROUTER).router_done[ref.index] = ref.generation
    server.world.send(Dropped(ref.index, ref.generation, "never_fits", "needs 99 tokens, the pool has 10"))
    response = answer.result(10)
    assert response.status_code == 400 and "99" in response.json()["error"]["message"]


def test_drain(server: Http) -> None:
    running = server.post(TEXT | {"stream": True})
    (ref,) = server.submitted()
    server.say(ref, 0, 1, "a")
    server.world.tell(Drain(30))
    deadline = time.monotonic() + 5
    while httpx.get(server.url + "/readiness").status_code != 503:
        assert time.monotonic() < deadline
    refused = server.post(TEXT).result(10)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert httpx.get(server.url + "/v1/models").status_code == 200
    server.say(ref, 1, 2, "b", Finish.STOP)
    text = running.result(10).text
    assert '"text":"b"' in text and text.endswith("data: [DONE]\n\n")
    assert isinstance(server.world.wait_control(5), Drained)


def test_drain_when_idle(server: Http) -> None:
    server.world.tell(Drain(30))
    assert isinstance(server.world.wait_control(5), Drained)


def test_stop_tells_every_client(server: Http) -> None:
    streaming = server.post(TEXT | {"stream": True})
    refs = server.submitted()
    waiting, plain = (server.post(TEXT | {"stream": s}) for s in (True, False))
    refs += server.submitted(2)
    view = server.world.view(Writer.ENGINE)
    assert view.in_use.sum() == 3
    server.say(refs[0], 0, 1, "a")
    time.sleep(0.2)
    begin = time.monotonic()
    server.world.tell(Stop())
    answers = [f.result(10) for f in (streaming, waiting, plain)]
    assert server.world.process.wait(5) == 0
    assert time.monotonic() - begin < 1.5
    statuses = sorted(a.status_code for a in answers)
    assert statuses == [200, 503, 503]
    for answer in answers:
        if answer.status_code == 200:
            *_, error, done, rest = answer.text.split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
        else:
            assert answer.json()["error"]["code"] == "shutting_down" and int(answer.headers["retry-after"]) > 0
    aborted = [r for a in server.world.receive_all("router", Abort, 3, 5) for r in a.slots]
    assert len(aborted) == 3 and server.cancelled(refs)
    pushes = server.world.receive_all("metrics", MetricsPush, 1)
    while not pushes[-1].last:
        pushes += server.world.receive_all("metrics", MetricsPush, 1)


def test_stop_with_a_client_that_does_not_read(server: Http) -> None:
    sock = server.connect(TEXT | {"stream": True, "max_tokens": 60})
    (ref,) = server.submitted()
    for position in range(50):
        server.say(ref, position, position + 1, "x" * 200_000)
    time.sleep(0.3)
    begin = time.monotonic()
    server.world.tell(Stop())
    assert server.world.process.wait(5) == 0
    assert time.monotonic() - begin < 2.0
    assert "Traceback" not in server.world.log()
    sock.close()


def test_a_client_that_does_not_read_holds_nobody_up(server: Http) -> None:
    slow = server.connect(TEXT | {"stream": True})
    (slow_ref,) = server.submitted()
    for position in range(100):
        server.say(slow_ref, position, position + 1, "y" * 100_000)
    begin = time.monotonic()
    answer = server.post(TEXT)
    (ref,) = server.submitted()
    server.say(ref, 0, 1, "quick", Finish.STOP)
    assert answer.result(10).json()["choices"][0]["text"] == "quick"
    assert time.monotonic() - begin < 2.0
    for position in range(100, 4300):
        server.say(slow_ref, position, position + 1, "y")
    assert server.world.receive("router", Abort, 5).slots == (slow_ref,)
    slow.close()


def test_a_message_that_cannot_be_handled_ends_the_process_and_tells_clients(server: Http) -> None:
    waiting = server.post(TEXT)
    (ref,) = server.submitted()
    server.say(ref, 0, 1, "x", Finish.NONE)
    server.world.send(TextReady((TextItem(ref.index, ref.generation, 1, 2, "y", 77),)))
    assert waiting.result(10).status_code == 500
    assert isinstance(server.world.wait_control(5), Fault)
    assert server.world.process.wait(5) == EXIT_FAULT


def test_the_launcher_is_gone(server: Http) -> None:
    server.world.control.close()
    assert server.world.process.wait(5) == 0
    server.world.control.send = lambda _: None  # type: ignore[method-assign]


def test_metrics_page(server: Http) -> None:
    answer = server.pool.submit(lambda: httpx.get(server.url + "/metrics", timeout=10))
    scrape = server.world.receive("metrics", Scrape)
    server.world.send(ScrapeReply(scrape.id + 7, b"not this"))
    server.world.send(ScrapeReply(scrape.id, b"inferserve_x 1\n"))
    response = answer.result(10)
    assert response.text == "inferserve_x 1\n"
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    begin = time.monotonic()
    silent = httpx.get(server.url + "/metrics", timeout=10)
    assert silent.status_code == 503 and 1.5 < time.monotonic() - begin < 4


def test_own_totals_are_pushed_before_the_question(server: Http) -> None:
    assert server.post({"prompt": []}).result(10).status_code == 400
    threading.Thread(target=lambda: httpx.get(server.url + "/metrics", timeout=10)).start()
    world, pushed = server.world, 0.0
    while True:
        message = world.receive("metrics", object)
        if isinstance(message, Scrape):
            break
        assert isinstance(message, MetricsPush)
        pushed = sum(s.values[0] for s in message.samples if s.name == "request_failure" and s.labels == ("invalid",))
    world.send(ScrapeReply(message.id, b"x 1\n"))
    assert pushed == 1


def test_chat_through_the_models_template(server: Http) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    talk = server.pool.submit(
        lambda: client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    )
    (ref,) = server.submitted()
    ids = server.world.view(Writer.ENGINE).prompt(ref.index).tolist()
    assert ids and ids[0] == 1  # <|im_start|>
    server.say(ref, 0, 2, "hello", Finish.STOP)
    assert talk.result(10).choices[0].message.content == "hello"


def test_connections_that_are_refused_do_not_pile_up(server: Http) -> None:
    """A body that is not wanted neither hangs the connection nor the process."""
    for path, status in (("/v1/completions", 413), ("/nowhere", 413)):
        big = httpx.post(server.url + path, content=b"x" * 20_000_000, headers={"content-type": "application/json"})
        assert big.status_code == status
    unknown = httpx.post(server.url + "/nowhere", content=b'"' + b"x" * 5_000_000 + b'"')
    assert unknown.status_code == 404
    established = subprocess.run(
        ["ss", "-Htn", "state", "established", f"( sport = :{server.port} )"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(established.stdout.splitlines()) <= 1


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
        (
            b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
            b"200",
        ),
        (
            b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"400",
        ),
        (b"GET /health HTTP/1.1\r\nHost: x/v1/models?\r\n\r\n", b"200"),
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: " + b"v" * 17_000 + b"\r\n\r\n", b"431"),
        (b"\x00\x01\r\n\r\n", b"400"),
    ],
    ids=["h2 preface", "h2c upgrade", "CL and TE", "host with a path", "large head", "junk"],
)
def test_the_wire(server: Http, request_bytes: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(request_bytes)
        assert sock.recv(4096).startswith(b"HTTP/1.1 " + status)
    assert httpx.get(server.url + "/health").status_code == 200


def test_rows_of_a_dead_incarnation_are_aborted(tmp_path: Path) -> None:
    folder = MAKERS["byte_level"](tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        world = Neighbours("http-1", config(folder), listener, incarnation=1)
        start = world._start

        def with_leftovers(*args: Any) -> Any:
            view = world.table.view(Writer.HTTP)
            for index in (3, 32, 40):  # 3 belongs to the other worker
                view.in_use[index], view.generation[index] = 1, 9
            return start(*args)

        world._start = with_leftovers  # type: ignore[method-assign]
        with world:
            world.wait_ready()
            assert world.receive("router", Abort).slots == (SlotRef(32, 9), SlotRef(40, 9))
            view = world.view(Writer.ROUTER)
            assert [int(view.cancelled[i]) for i in (3, 32, 40)] == [0, 1, 1]
