"""The process table: what the launcher starts, in which order, with which descriptors, and what a death means.

A new kind of process is one row here, a package with a `__main__`, and its messages in `protocol/messages.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inferserve.config.schema import ServerConfig
from inferserve.protocol.boot import ROLE_DETOKENIZE, ROLE_ENGINE, ROLE_HTTP, ROLE_METRICS, ROLE_ROUTER
from inferserve.shm.slots import SEGMENT


def _one(_: ServerConfig) -> int:
    return 1


def _http_workers(config: ServerConfig) -> int:
    return config.http.httpserver_workers


def _engine_ranks(config: ServerConfig) -> int:
    return config.parallel.tp


@dataclass(frozen=True)
class ProcessSpec:
    """One row.

    Attributes:
        role: the name in `Boot.role`, in logs and for `--foreground`.
        module: started as `python -m MODULE --boot-fd N`.
        count: how many, by configuration.
        segments: shared-memory segments it attaches.
        listens: it accepts on the API socket.
        restart: a death is repaired in place; otherwise it ends the service.
        threads: it computes on many cores; the others get one thread for their numerical libraries.
    """

    role: str
    module: str
    count: Callable[[ServerConfig], int] = _one
    segments: tuple[str, ...] = ()
    listens: bool = False
    restart: bool = False
    threads: bool = False


# The engine first, since it takes longest to be ready.
TABLE = (
    ProcessSpec(ROLE_ENGINE, "inferserve.engine", _engine_ranks, segments=(SEGMENT,), threads=True),
    ProcessSpec(ROLE_HTTP, "inferserve.http", _http_workers, segments=(SEGMENT,), listens=True, restart=True),
    ProcessSpec(ROLE_DETOKENIZE, "inferserve.detokenize", segments=(SEGMENT,)),
    ProcessSpec(ROLE_ROUTER, "inferserve.router", segments=(SEGMENT,)),
    ProcessSpec(ROLE_METRICS, "inferserve.metrics", restart=True),
)
