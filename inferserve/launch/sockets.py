"""Sockets that the launcher makes and children inherit: the API socket and one unix socket for each inbox.

Because the launcher keeps every descriptor, a restarted process finds its address, and what arrives meanwhile waits in
the kernel's backlog. Nothing here knows ZMQ or HTTP.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from inferserve.errors import ConfigError

_API_BACKLOG = 2048
_INBOX_BACKLOG = 128
# sun_path of a unix socket, with its closing NUL.
_UNIX_PATH_BYTES = 108


def bind_api(host: str, port: int) -> socket.socket:
    """The API's listening socket. Raises ConfigError naming --host or --port.

    Args:
        host: name or address, IPv4 or IPv6.
        port: 0 for any free port; `getsockname()` tells which.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be in [0, 65535]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {getattr(error, 'strerror', None) or error}") from error
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(_API_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(_why_not(error, host, port)) from error
    sock.setblocking(False)
    return sock


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: already in use on {host}"
    if error.errno == errno.EACCES:
        return f"--port {port}: not permitted (ports below 1024 need privileges)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: not an address of this machine"
    return f"--host {host} --port {port}: {error.strerror}"


def url_of(sock: socket.socket) -> str:
    """Where clients reach `sock`: an address of every interface is shown as loopback."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind_inbox(folder: Path, name: str) -> tuple[socket.socket, str]:
    """A listening unix socket for the process called `name`, and its ZMQ endpoint. Raises ConfigError."""
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) >= _UNIX_PATH_BYTES:
        raise ConfigError(f"{path}: too long for a unix socket; set INFERSERVE_RUN_DIR to a shorter folder")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen(_INBOX_BACKLOG)
    sock.setblocking(False)
    return sock, f"ipc://{path}"
