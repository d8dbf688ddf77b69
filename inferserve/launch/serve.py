"""`inferserve serve`: configuration, sockets, segments, then the supervisor, each phase logged with its seconds."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

import zmq

from inferserve import log as logs
from inferserve.config import schema
from inferserve.config.cli import Invocation
from inferserve.config.machine import process_age
from inferserve.config.resolve import resolve
from inferserve.config.schema import ServerConfig
from inferserve.errors import ConfigError, PeerGone
from inferserve.launch.child import Wiring
from inferserve.launch.family import Family
from inferserve.launch.memory import check_memory
from inferserve.launch.processes import TABLE, ProcessSpec
from inferserve.launch.run_dir import RunDir
from inferserve.launch.signals import Signals
from inferserve.launch.sockets import bind_api, bind_inbox, url_of
from inferserve.launch.supervisor import Hooks, State, Supervisor, Timing
from inferserve.log import event
from inferserve.protocol.boot import ROLE_ROUTER, process_name
from inferserve.protocol.messages import RouterMessage, WorkerLost
from inferserve.shm.segment import Segment
from inferserve.shm.slots import SEGMENT, SlotTable, table_bytes
from inferserve.transport.channel import Outbox

log = logging.getLogger(__name__)


def serve(invocation: Invocation, signals: Signals, table: Sequence[ProcessSpec] = TABLE) -> int:
    """Run the service until it ends; returns the exit status. Raises ConfigError before anything is started."""
    asked = invocation.settings
    logs.setup("launcher", asked.log.log_level, asked.log.log_format)
    # The port first: it costs nothing, and a taken one must not show after minutes of loading.
    with bind_api(asked.http.host, asked.http.port) as api:
        config = _resolved(asked, api)
        run_dir = RunDir.create()
        try:
            return _Service(config, api, run_dir, table).run(signals, invocation.foreground)
        finally:
            run_dir.close()


def _resolved(asked: ServerConfig, api: socket.socket) -> ServerConfig:
    began = time.monotonic()
    config = resolve(asked, report=log.info)
    check_memory(config)
    config = replace(config, http=replace(config.http, port=api.getsockname()[1]))
    fields = {"model": config.model_names[0], "engine": config.engine.engine, "device": config.engine.device}
    event(log, "configuration", seconds=_since(began), dtype=config.model.data_type, **fields)
    return config


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def _slot_table(config: ServerConfig) -> tuple[SlotTable, Segment]:
    try:
        return SlotTable.create(config.slots, config.model.max_req_total_len)
    except (OSError, ValueError) as error:  # address space, or a size that mmap does not take
        size = table_bytes(config.slots, config.model.max_req_total_len)
        raise ConfigError(
            f"the request table of {size} bytes (--httpserver-workers x (--running-max-req-size + --max-queued-requests)"
            f" rows of --max-req-total-len) cannot be mapped: {error}"
        ) from error


class _Service:
    """One boot: its sockets and segments, and what the supervisor reports to."""

    def __init__(self, config: ServerConfig, api: socket.socket, run_dir: RunDir, table: Sequence[ProcessSpec]) -> None:
        self._config = config
        self._url = url_of(api)
        self._run_dir = run_dir
        self._table = [(spec, spec.count(config)) for spec in table]
        began = time.monotonic()
        # Kept for the life of the service: a restarted process inherits the same descriptors.
        self._slots, segment = _slot_table(config)
        self._inboxes: dict[str, socket.socket] = {}
        endpoints: dict[str, str] = {}
        for name in (process_name(spec.role, i) for spec, count in self._table for i in range(count)):
            self._inboxes[name], endpoints[name] = bind_inbox(run_dir.path, name)
        self._wiring = Wiring(
            config=schema.encode(config),
            run_dir=str(run_dir.path),
            listen_fd=api.fileno(),
            inboxes={name: sock.fileno() for name, sock in self._inboxes.items()},
            endpoints=endpoints,
            segments={SEGMENT: segment.fd},
        )
        event(log, "sockets and segments", seconds=_since(began), url=self._url, run_dir=run_dir.path)

    def run(self, signals: Signals, foreground: str) -> int:
        """Start the processes, supervise them, return the exit status."""
        hooks = Hooks(ready=self._ready, worker_lost=self._worker_lost, changed=self._changed)
        family = Family(self._wiring, signals, foreground)
        supervisor = Supervisor(family, hooks, Timing(drain=self._config.http.drain_timeout))
        signals.collect()
        try:
            return supervisor.run(self._table)
        finally:
            for sock in self._inboxes.values():
                sock.close()

    def _ready(self) -> None:
        log.info("serving %s on %s in %.1f s", self._config.model_names[0], self._url, process_age())

    def _worker_lost(self, index: int) -> None:
        """Tell the router that nobody waits for the slots of http worker `index` any more."""
        first = index * self._config.slots_per_worker
        with zmq.Context() as context:
            outbox: Outbox[RouterMessage] = Outbox(context, RouterMessage, self._wiring.endpoints[ROLE_ROUTER])
            try:
                outbox.send(WorkerLost(first, first + self._config.slots_per_worker))
            except PeerGone as error:
                log.error("the router does not hear of the lost worker: %s", error)
            finally:
                outbox.close()

    def _changed(self, state: State, family: Family) -> None:
        processes = {c.name: {"pid": c.popen.pid, "incarnation": c.boot.incarnation} for c in family}
        try:
            self._run_dir.write_status(state=str(state), launcher=os.getpid(), url=self._url, processes=processes)
        except OSError as error:  # a full disk does not end a service
            log.warning("the status file is out of date: %s", error)
