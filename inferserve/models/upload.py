"""`Uploader`: tensors from files to a device, as fast as memory and bus allow, without a copy of a file in memory.

A file's tensors are mapped, so that reading one is mostly page faults, which one thread takes at a few GB/s. Here several
threads copy a piece into a pinned buffer while the piece before it travels to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

PIECE = 64 * 2**20
"""Bytes of a pinned buffer."""
_BUFFERS = 3
_THREADS = 8
_SMALL = 2**20
"""Bytes below which a tensor is not worth the threads."""


class Uploader:
    """Called with a tensor, returns it on the device."""

    def __init__(self, device: torch.device, pool: ThreadPoolExecutor, piece: int = PIECE) -> None:
        """`piece`: bytes of a buffer."""
        pinned = device.type == "cuda"
        self._device = device
        self._pool = pool
        self._buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=pinned) for _ in range(_BUFFERS)]
        self._sent: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._next = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Any tensor; one that is on the device already, or small, takes torch's own way."""
        if tensor.device.type == self._device.type or tensor.nbytes < _SMALL:
            return tensor.to(self._device)
        source = tensor.contiguous().view(-1).view(torch.uint8)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        pieces = zip(
            source.split(len(self._buffers[0])),
            target.view(-1).view(torch.uint8).split(len(self._buffers[0])),
            strict=True,
        )
        for mapped, place in pieces:
            self._send(mapped, place)
        return target

    def _send(self, mapped: torch.Tensor, place: torch.Tensor) -> None:
        """Fill the next buffer, once the device has read what it held, and have the device read it."""
        turn, self._next = self._next, (self._next + 1) % _BUFFERS
        sent = self._sent[turn]
        if sent is not None:
            sent.synchronize()
        buffer = self._buffers[turn][: len(mapped)]
        # numpy, since torch's inference mode does not reach into other threads.
        shares = zip(np.array_split(mapped.numpy(), _THREADS), np.array_split(buffer.numpy(), _THREADS), strict=True)
        list(self._pool.map(lambda share: np.copyto(share[1], share[0]), shares))
        place.copy_(buffer, non_blocking=True)
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._sent[turn] = event


@contextmanager
def uploader(device: torch.device) -> Iterator[Uploader]:
    """For one load; at its end all is on the device, and threads and buffers are gone."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as pool:
        yield Uploader(device, pool)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
