"""The process tree of a serving instance: what is loaded where, what is left behind, how it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.requests import CHAT, COMPLETIONS, post
from tests.e2e.server import RunningServer
from tests.pace import slowness

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def _libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.real_model
def test_torch_is_loaded_in_the_engine_only(model_server: RunningServer) -> None:
    assert post(model_server, CHAT, HELLO).status_code == 200
    children = model_server.children()
    assert set(children) == {"http", "router", "engine", "detokenize", "metrics"}
    for role, process in {**children, "launcher": psutil.Process(model_server.process.pid)}.items():
        loaded = "libtorch" in _libraries(process.pid) or "libtriton" in _libraries(process.pid)
        assert loaded == (role == "engine"), role


def test_secrets_and_config_are_in_no_command_line(fake_server: RunningServer) -> None:
    for process in fake_server.children().values():
        assert len(process.cmdline()) == 5, process.cmdline()
        assert not any("inferserve" in key.lower() for key in process.environ() if key != "INFERSERVE_CACHE")


def test_only_the_api_port_listens(fake_server: RunningServer) -> None:
    port = int(fake_server.url.rsplit(":", 1)[1])
    for process in [psutil.Process(fake_server.process.pid), *fake_server.children().values()]:
        listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {(c.laddr.ip, c.laddr.port) for c in listening} <= {("127.0.0.1", port)}


def test_fake_engine_starts_fast() -> None:
    with RunningServer("--engine", "fake") as server:
        assert post(server, CHAT, HELLO).status_code == 200
        assert server.start_seconds <= 3.0 * slowness()


@pytest.mark.real_model
def test_warm_demo_model_starts_fast() -> None:
    with RunningServer(timeout_s=120) as server:
        assert post(server, CHAT, HELLO).status_code == 200
        assert server.start_seconds <= 15.0 * slowness()


def test_kill_of_the_launcher_takes_everything_with_it() -> None:
    with RunningServer("--engine", "fake") as server:
        children = list(server.children().values())
        port = server.url.rsplit(":", 1)[1]
        shm = set(Path("/dev/shm").iterdir())
        os.kill(server.process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=2 * slowness())
        assert not alive
        assert set(Path("/dev/shm").iterdir()) <= shm
    with RunningServer("--engine", "fake", "--port", port) as again:
        assert again.url.endswith(port)
        assert post(again, CHAT, HELLO).status_code == 200


def _stream_in_background(server: RunningServer, tokens: int) -> tuple[threading.Thread, list[str]]:
    pieces: list[str] = []

    def read() -> None:
        body = {"prompt": "Go on", "max_tokens": tokens, "stream": True}
        with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
            pieces.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 10
    while not pieces and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pieces
    return thread, pieces


def test_sigterm_drains() -> None:
    with RunningServer("--engine", "fake", "--fake-step-ms", "20", "--drain-timeout", "30") as server:
        thread, pieces = _stream_in_background(server, 100)
        server.process.send_signal(signal.SIGTERM)
        server.until_logged("draining in_flight")
        refused = post(server, CHAT, HELLO)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert httpx.get(server.url + "/readiness").status_code == 503
        thread.join(20)
        assert pieces[-1] == "data: [DONE]" and len(pieces) > 100
        assert server.process.wait(5) == 0


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["SIGINT", "SIGTERM twice"]
)
def test_stop_now_tells_clients(signals: list[signal.Signals]) -> None:
    with RunningServer("--engine", "fake", "--fake-step-ms", "20") as server:
        thread, pieces = _stream_in_background(server, 4000)
        for each, answer in zip(signals, ["draining", "stopping"][-len(signals) :], strict=True):
            server.process.send_signal(each)
            server.until_logged(f"{answer} signal={each.name}")  # two at once may reach a process as one
        thread.join(5)
        assert pieces[-1] == "data: [DONE]" and '"error"' in pieces[-2]
        assert server.process.wait(5) == 0


@pytest.mark.parametrize("role", ["router", "engine", "detokenize"])
def test_death_of_a_vital_child_ends_the_service(role: str) -> None:
    with RunningServer("--engine", "fake", "--fake-step-ms", "20") as server:
        thread, pieces = _stream_in_background(server, 4000)
        server.children()[role].kill()
        assert server.process.wait(3 * slowness()) != 0
        thread.join(5)
        assert '"error"' in pieces[-2], pieces[-2:]
        assert role in server.lines[-1], server.lines[-3:]


@pytest.mark.parametrize("role", ["http", "metrics"])
def test_http_and_metrics_are_restarted(role: str) -> None:
    with RunningServer("--engine", "fake", "--fake-step-ms", "5") as server:
        assert post(server, CHAT, HELLO).status_code == 200
        if role == "metrics":
            thread, pieces = _stream_in_background(server, 300)
        dead = server.children()[role]
        dead.kill()
        deadline = time.monotonic() + 5 * slowness()
        answered = False
        while time.monotonic() < deadline and not answered:
            try:
                answered = (
                    httpx.get(server.url + "/metrics", timeout=3).status_code == 200
                    and post(server, CHAT, HELLO).status_code == 200
                    and server.children()[role].pid != dead.pid
                )
            except httpx.HTTPError:
                time.sleep(0.05)
        assert answered
        if role == "metrics":
            thread.join(20)
            assert pieces[-1] == "data: [DONE]" and len(pieces) > 300
        server.wait_until_idle(3)
