"""The slot table of a running server, read from outside: rows that somebody still holds although nobody waits."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np

from inferserve.shm.layout import Column, columns, element_bytes
from tests.e2e.server import RunningServer

_HEADER_BYTES = 4096
_PAGE = 4096
_LOOKED_AT = ("generation", "in_use", "router_done", "admitted", "engine_done", "detok_done")


class SlotRows:
    """A read-only view of the launcher's segment."""

    def __init__(self, server: RunningServer) -> None:
        links = list(Path(f"/proc/{server.process.pid}/fd").iterdir())
        segment = next(link for link in links if "memfd:inferserve-slots" in str(link.readlink()))
        fd = os.open(segment, os.O_RDONLY)
        self._mmap = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        os.close(fd)
        header = np.frombuffer(self._mmap, np.int64, 4)
        self.count, context = int(header[2]), int(header[3])
        offset = _HEADER_BYTES
        self._columns: dict[str, np.ndarray] = {}
        for column in columns(context):
            if column.name in _LOOKED_AT:
                self._columns[column.name] = np.frombuffer(self._mmap, column.dtype, self.count, offset)
            offset += _padded(column, self.count)

    def held(self) -> list[int]:
        """Rows in use that some process has not forgotten; http takes the others back when it needs them."""
        look = self._columns
        used = np.flatnonzero(look["in_use"])
        generation = look["generation"][used]
        ran = look["admitted"][used] == generation
        ended = (look["engine_done"][used] == generation) & (look["detok_done"][used] == generation)
        forgotten = (look["router_done"][used] == generation) & (~ran | ended)
        return used[~forgotten].tolist()

    def wait_until_none_is_held(self, seconds: float) -> None:
        """Raises AssertionError naming a row that is still held after `seconds`."""
        deadline = time.monotonic() + seconds
        while held := self.held():
            row = {name: int(values[held[0]]) for name, values in self._columns.items()}
            assert time.monotonic() < deadline, f"{len(held)} rows are held, such as {held[0]}: {row}"
            time.sleep(0.02)


def _padded(column: Column, count: int) -> int:
    return -(-element_bytes(column) * count // _PAGE) * _PAGE
