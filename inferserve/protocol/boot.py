"""`Boot`: all that a child process is told at birth, read once from an inherited descriptor (never argv or environ)."""

from __future__ import annotations

import msgspec

ROLE_HTTP = "http"
ROLE_ROUTER = "router"
ROLE_ENGINE = "engine"
ROLE_DETOKENIZE = "detokenize"
ROLE_METRICS = "metrics"
ROLES = (ROLE_HTTP, ROLE_ROUTER, ROLE_ENGINE, ROLE_DETOKENIZE, ROLE_METRICS)


def process_name(role: str, index: int) -> str:
    """The process name in logs and in `endpoints`: `router`, `http-0`, `engine-0`."""
    return f"{role}-{index}" if role in (ROLE_HTTP, ROLE_ENGINE) else role


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher hands to one child.

    Attributes:
        role: one of the ROLE_ names; `index` counts processes of that role (http worker, engine rank).
        incarnation: rises with each restart of this role and index.
        config: the ServerConfig as `config.schema.encode()` made it.
        control_fd: SOCK_SEQPACKET socket to the launcher; EOF on it means the launcher is gone.
        inbox_fd: listening unix socket of this process's inbox (ZMQ USE_FD), -1 for none.
        listen_fd: the API listening socket (http only), -1 otherwise.
        segments: shared-memory segment name to memfd.
        endpoints: process name (`router`, `engine-0`, `http-1`, …) to the ZMQ address of its inbox.
        run_dir: private 0700 directory of this boot.
    """

    role: str
    index: int
    incarnation: int
    config: bytes
    control_fd: int
    inbox_fd: int = -1
    listen_fd: int = -1
    segments: dict[str, int] = {}
    endpoints: dict[str, str] = {}
    run_dir: str = ""

    @property
    def name(self) -> str:
        """As `process_name()` makes it."""
        return process_name(self.role, self.index)
