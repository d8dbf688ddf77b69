"""Clients that leave at any moment, read nothing, come in crowds, and workers that die: nothing is lost or left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.requests import CHAT, COMPLETIONS, Body, chunks, post, streamed_text, text_of
from tests.e2e.server import RunningServer
from tests.e2e.slot_rows import SlotRows

FAULTS = ("ERROR", "Traceback", "WARNING")


def raw_request(path: str, body: Body) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def assert_clean(server: RunningServer, seconds: float = 3.0) -> None:
    """Nothing runs, waits or is held, no KV is used, and nobody complained."""
    SlotRows(server).wait_until_none_is_held(seconds)
    server.wait_until_idle(seconds)
    assert not [line for line in server.lines if any(word in line for word in FAULTS)]


def any_request(chance: random.Random) -> bytes:
    words = " ".join(f"w{chance.randrange(1000)}" for _ in range(chance.choice([1, 10, 300])))
    body: Body = {
        "max_tokens": chance.choice([1, 20, 500]),
        "n": chance.choice([1, 1, 3]),
        "stream": chance.random() < 0.6,
    }
    kind = chance.randrange(4)
    if kind == 0:
        return raw_request(CHAT, body | {"messages": [{"role": "user", "content": words}]})
    if kind == 1:
        return raw_request(COMPLETIONS, body | {"prompt": [words, "b", "c"], "logprobs": 2})
    if kind == 2:
        return raw_request("/generate_stream", {"inputs": words, "parameters": {"max_new_tokens": 20}})
    return raw_request(COMPLETIONS, body | {"prompt": words})


Leave = Callable[[socket.socket, bytes, random.Random], Any]


def in_the_head(sock: socket.socket, data: bytes, chance: random.Random) -> None:
    sock.sendall(data[: chance.randrange(1, 60)])


def in_the_body(sock: socket.socket, data: bytes, chance: random.Random) -> None:
    sock.sendall(data[: chance.randrange(data.index(b"\r\n\r\n") + 4, len(data))])


def at_once(sock: socket.socket, data: bytes, _: random.Random) -> None:
    sock.sendall(data)


def soon(sock: socket.socket, data: bytes, chance: random.Random) -> None:
    sock.sendall(data)
    time.sleep(chance.random() * 0.05)


def after_the_first_bytes(sock: socket.socket, data: bytes, _: random.Random) -> None:
    sock.sendall(data)
    sock.recv(100)


def with_a_second_request_behind(sock: socket.socket, data: bytes, _: random.Random) -> None:
    sock.sendall(data + data)
    sock.recv(100)


def half_closed(sock: socket.socket, data: bytes, chance: random.Random) -> None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    time.sleep(chance.random() * 0.03)


def on_a_reused_connection(sock: socket.socket, data: bytes, chance: random.Random) -> None:
    sock.sendall(raw_request(COMPLETIONS, {"prompt": "x", "max_tokens": 1}))
    sock.recv(4096)
    sock.sendall(data)
    time.sleep(chance.random() * 0.02)


def right_after_the_end(sock: socket.socket, data: bytes, _: random.Random) -> None:
    sock.sendall(data.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n"))
    while sock.recv(65536):
        pass


LEAVES: tuple[Leave, ...] = (
    in_the_head, in_the_body, at_once, soon, after_the_first_bytes, with_a_second_request_behind, half_closed,
    on_a_reused_connection, right_after_the_end,
)  # fmt: skip


def leave(server: RunningServer, how: Leave, seed: int) -> None:
    chance = random.Random(seed)
    sock = connect(server)
    with contextlib.suppress(OSError):
        how(sock, any_request(chance), chance)
    if chance.random() < 0.5:  # RST instead of FIN
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def run_all(calls: list[Callable[[], None]]) -> None:
    gate = asyncio.Semaphore(16)

    async def one(call: Callable[[], None]) -> None:
        async with gate:
            await asyncio.to_thread(call)

    await asyncio.gather(*map(one, calls))


def test_clients_that_leave_at_any_moment() -> None:
    flags = ("--httpserver-workers", "2", "--running-max-req-size", "8", "--max-queued-requests", "60",
             "--fake-kv-tokens", "10000", "--chunked-prefill-size", "64")  # fmt: skip
    with RunningServer("--engine", "fake", "--fake-step-ms", "1", *flags) as server:
        calls = [lambda how=how, i=i: leave(server, how, i) for i in range(24) for how in LEAVES]
        asyncio.run(run_all(calls))
        assert_clean(server)
        assert post(server, COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_clients_that_leave_with_bytes_behind_their_request() -> None:
    """Hypercorn stops reading then, and would not see them leave."""
    with RunningServer("--engine", "fake", "--fake-step-ms", "5") as server:
        left = 0
        for behind in (b"\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"x" * 300_000):
            for reset in (False, True):
                sock = connect(server)
                sock.sendall(raw_request(COMPLETIONS, {"prompt": "a", "max_tokens": 4000}) + behind)
                time.sleep(0.3)
                assert SlotRows(server).held()
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
                assert_clean(server)
                left += 1
                assert server.metric("request_success_total") == left


def test_a_crowd_beyond_the_limit() -> None:
    """Exactly the limit runs and queues, the rest gets 429 and Retry-After; then all is as before; the counts are exact."""
    with RunningServer(
        "--engine", "fake", "--fake-step-ms", "3", "--running-max-req-size", "2", "--max-queued-requests", "4"
    ) as server:

        async def crowd() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                body: Body = {"prompt": "p", "max_tokens": 400}
                return await asyncio.gather(*[client.post(COMPLETIONS, json=body) for _ in range(40)])

        answers = asyncio.run(crowd())
        assert Counter(a.status_code for a in answers) == {200: 6, 429: 34}
        assert all(int(a.headers["retry-after"]) > 0 for a in answers if a.status_code == 429)
        assert all(a.json()["error"]["type"] == "rate_limit_error" for a in answers if a.status_code == 429)
        for _ in range(10):
            assert post(server, COMPLETIONS, {"prompt": "p", "max_tokens": 3}).status_code == 200
        assert_clean(server)
        assert server.metric("request_success_total") == 16
        assert server.metric("request_failure_total") == 34
        assert server.metric("generation_tokens_total") == 6 * 400 + 10 * 3


def test_clients_that_read_nothing_hold_up_nobody() -> None:
    with RunningServer("--engine", "fake", "--fake-step-ms", "2") as server:
        body: Body = {"prompt": "x", "max_tokens": 8000, "stream": True, "logprobs": 5}
        host, port = server.url.removeprefix("http://").split(":")
        deaf = []
        for _ in range(20):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect((host, int(port)))
            sock.sendall(raw_request(COMPLETIONS, body))
            deaf.append(sock)
        for _ in range(20):
            begin = time.monotonic()
            assert post(server, COMPLETIONS, {"prompt": "a", "max_tokens": 5}).status_code == 200
            assert time.monotonic() - begin < 5
        for sock in deaf:
            sock.close()
        assert_clean(server)


def test_pipelined_requests_are_answered_in_order(fake_server: RunningServer) -> None:
    with connect(fake_server) as sock:
        asked = [raw_request(COMPLETIONS, {"prompt": "a", "max_tokens": n, "stream": n % 2 == 0}) for n in (1, 2, 3, 4)]
        sock.sendall(b"".join(asked) + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        seen = b""
        while piece := sock.recv(65536):
            seen += piece
    answers = seen.split(b"HTTP/1.1 ")[1:]
    assert [a[:3] for a in answers] == [b"200"] * 5
    assert [a.count(b"[DONE]") for a in answers] == [0, 1, 0, 1, 0]
    assert [f'"completion_tokens":{n}'.encode() in answers[n - 1] for n in (1, 3)] == [True, True]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_streams_are_framed_as_the_version_asks(fake_server: RunningServer, version: str) -> None:
    """HTTP/1.0 knows no chunks: there the end of the connection ends the answer."""
    data = raw_request(COMPLETIONS, {"prompt": "a", "max_tokens": 5, "stream": True})
    data = data.replace(b"HTTP/1.1\r\n", f"HTTP/{version}\r\nConnection: close\r\n".encode())
    seen = b""
    with connect(fake_server) as sock:
        sock.sendall(data)
        while piece := sock.recv(65536):
            seen += piece
    head, _, body = seen.partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head.lower()) is (version == "1.1")
    events = []
    while body and version == "1.1":
        size, _, rest = body.partition(b"\r\n")
        events.append(rest[: int(size, 16)])
        assert rest[int(size, 16) :].startswith(b"\r\n")
        body = rest[int(size, 16) + 2 :]
    text = b"".join(events) or body
    assert len(text.split(b"\n\n")) == 5 + 1 + 1
    assert text.endswith(b"data: [DONE]\n\n")
    assert all(part.startswith(b"data: ") for part in text.split(b"\n\n")[:-1])


class Crowd:
    """Many streams; `seen` counts how they ended: full, refused, failed (an error event), cut, or unanswered."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=url, timeout=60, limits=limits)
        self.seen: Counter[str] = Counter()
        self.started = 0

    async def read(self, streams: int, tokens: int, pause_s: float = 0.0) -> None:
        """Stream `tokens` tokens each; `pause_s` lies between one start and the next."""
        async with self._client:
            await asyncio.gather(*[self._read(tokens, i * pause_s) for i in range(streams)])

    async def wait_for(self, started: int) -> None:
        """Until so many streams have begun."""
        while self.started < started:
            await asyncio.sleep(0.01)

    async def _read(self, tokens: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        events: list[str] | None = None
        body: Body = {"prompt": "p", "max_tokens": tokens, "stream": True}
        try:
            async with self._client.stream("POST", COMPLETIONS, json=body) as response:
                if response.status_code == 503:
                    self.seen["refused"] += 1
                    return
                self.started += 1
                events = []
                async for line in response.aiter_lines():
                    if line:
                        events.append(line)
        except httpx.HTTPError:
            self.seen["unanswered" if events is None else "cut"] += 1
            return
        ended = events[-1:] == ["data: [DONE]"]
        failed = ended and '"error"' in events[-2]
        self.seen["failed" if failed else "full" if ended and len(events) == tokens + 1 else "cut"] += 1


def test_a_worker_that_is_killed_under_load() -> None:
    """Its streams break; the other's do not notice; the rows come back, so that all of the limit is there again."""
    flags = ("--httpserver-workers", "2", "--running-max-req-size", "40", "--max-queued-requests", "40")
    with RunningServer("--engine", "fake", "--fake-step-ms", "5", *flags) as server:

        async def load() -> Counter[str]:
            crowd = Crowd(server.url)
            reading = asyncio.create_task(
                crowd.read(40, 600, pause_s=0.02)
            )  # a busy worker leaves the next to the other
            await crowd.wait_for(40)
            server.children()["http"].kill()
            await reading
            return crowd.seen

        seen = asyncio.run(load())
        assert seen["full"] + seen["cut"] == 40 and min(seen["full"], seen["cut"]) > 0, seen
        SlotRows(server).wait_until_none_is_held(3)
        deadline = time.monotonic() + 5
        while len(re.findall(r"http-\d +ready", server.log())) < 3 and time.monotonic() < deadline:  # three times ready
            time.sleep(0.05)
        again = Crowd(server.url)
        asyncio.run(again.read(80, 50))
        assert again.seen == {"full": 80}
        SlotRows(server).wait_until_none_is_held(3)
        server.wait_until_idle(3)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_loses_no_stream(workers: str) -> None:
    """200 streams; those that began end whole, those that came too late are refused, none is cut."""
    flags = ("--running-max-req-size", "256", "--httpserver-workers", workers)
    with RunningServer("--engine", "fake", "--fake-step-ms", "5", *flags) as server:

        async def load() -> Counter[str]:
            crowd = Crowd(server.url)
            reading = asyncio.create_task(crowd.read(200, 300))
            await crowd.wait_for(100)
            server.process.send_signal(signal.SIGTERM)
            await reading
            return crowd.seen

        seen = asyncio.run(load())
        assert set(seen) <= {"full", "refused"} and seen["full"] >= 100 and seen.total() == 200, seen
        assert server.process.wait(10) == 0


def test_equal_prompts_differ_without_a_seed(fake_server: RunningServer) -> None:
    body: Body = {"prompt": ["same"] * 4, "max_tokens": 8, "temperature": 1}
    texts = {c["text"] for c in post(fake_server, COMPLETIONS, body).json()["choices"]}
    assert len(texts) == 4
    seeded = {c["text"] for c in post(fake_server, COMPLETIONS, body | {"seed": 5}).json()["choices"]}
    assert len(seeded) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("seed", range(6))
def test_logprobs_match_the_text_that_a_stop_string_left(fake_server: RunningServer, path: str, seed: int) -> None:
    chance = random.Random(seed)
    body: Body = {"max_tokens": 40, "seed": seed}
    body |= {"prompt": "hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    whole = text_of(post(fake_server, path, body).json())
    at = chance.randrange(len(whole) // 2)
    body |= {"stop": [whole[at : at + 5]], "logprobs": 1 if path == COMPLETIONS else True}
    answer = post(fake_server, path, body).json()
    stream = chunks(fake_server, path, body | {"stream_options": {"include_usage": True}})
    text = text_of(answer)
    assert streamed_text(stream) == text == whole[: whole.index(body["stop"][0])]
    parts = [c["choices"][0]["logprobs"] for c in stream if c["choices"] and c["choices"][0]["logprobs"]]
    logprobs = answer["choices"][0]["logprobs"]
    for name, values in logprobs.items():
        assert [v for part in parts for v in part[name]] == values, name
    tokens = logprobs["tokens"] if path == COMPLETIONS else [entry["token"] for entry in logprobs["content"]]
    joined = "".join(tokens)
    assert joined.startswith(text)
    assert not tokens or len(joined) - len(tokens[-1]) < len(text), "a token of which nothing is shown"
    assert stream[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] >= len(tokens)
