"""Sockets the launcher makes: errors that name the flag, addresses that clients can use."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from inferserve.errors import ConfigError
from inferserve.launch.sockets import bind_api, bind_inbox, url_of
from inferserve.protocol.messages import RouterMessage, WorkerLost
from inferserve.transport.channel import Inbox, Outbox


def test_port_0_takes_a_free_one() -> None:
    with bind_api("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
        socket.create_connection(sock.getsockname()).close()


def test_every_address_is_shown_as_loopback() -> None:
    with bind_api("0.0.0.0", 0) as sock:
        assert url_of(sock).startswith("http://127.0.0.1:")


def test_ipv6() -> None:
    try:
        sock = bind_api("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with sock:
        assert url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("127.0.0.1", -1, "--port -1"),
        ("127.0.0.1", 65536, "--port 65536"),
        ("no-such-host.invalid", 0, "--host no-such-host.invalid"),
        ("198.51.100.7", 0, "--host 198.51.100.7: not an address"),
        ("a" * 70 + ".", 0, "--host aaa"),
    ],
)
def test_errors_name_the_flag(host: str, port: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        bind_api(host, port)


def test_a_taken_port_is_named_and_a_left_one_is_free_again() -> None:
    with bind_api("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: already in use"):
            bind_api("127.0.0.1", port)
        client = socket.create_connection(sock.getsockname())
        sock.setblocking(True)
        server = sock.accept()[0]
    server.close()  # closes first: TIME_WAIT is on our side
    client.close()
    bind_api("127.0.0.1", port).close()


def test_an_inbox_survives_its_process(tmp_path: Path) -> None:
    """Two incarnations bind the same descriptor one after the other; peers find the second at the same address."""
    listener, endpoint = bind_inbox(tmp_path, "router")
    with listener, zmq.Context() as context:
        outbox: Outbox[RouterMessage] = Outbox(context, RouterMessage, endpoint)
        for incarnation in (1, 2):
            inbox: Inbox[RouterMessage] = Inbox(context, RouterMessage, socket.dup(listener.fileno()), endpoint)
            message = WorkerLost(incarnation, 0)
            # What is handed over while the first one's connection still looks alive is lost with it.
            assert any(_arrives(inbox, outbox, message) for _ in range(50))
            inbox.close()
        outbox.close()


def _arrives(inbox: Inbox[RouterMessage], outbox: Outbox[RouterMessage], message: WorkerLost) -> bool:
    outbox.send(message)
    return bool(inbox.socket.poll(100)) and message in inbox.drain()


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="INFERSERVE_RUN_DIR"):
        bind_inbox(tmp_path / ("x" * 120), "router")
