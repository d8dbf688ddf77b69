"""Recorders: what turns a run of launches into something that can be replayed. Knows neither models nor steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Run = Callable[[], torch.Tensor]
"""Reads and writes memory at fixed addresses only; returns its result."""


class Recorder(Protocol):
    """One way of recording."""

    def record(self, run: Run) -> Run:
        """Run once, and return what runs the same again; its result lies at the same place each time."""
        ...


class EagerRecorder:
    """Calls the function again. The same inputs, padding and results as with graphs, on any device."""

    def record(self, run: Run) -> Run:
        """See Recorder."""
        run()
        return run


class CudaRecorder:
    """CUDA graphs that share one memory pool.

    A graph's intermediate results are free for the next graph that is captured, so record the largest first; the result
    stays its own. Replays run on the caller's stream. That graphs share memory, and share the capture stream's cuBLAS
    workspace, is safe because no two run at the same time.

    Args:
        stream: to capture on. Torch keeps a workspace for every stream that ever had a product: use one.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream

    def record(self, run: Run) -> Run:
        """See Recorder.

        The first run, outside of the capture but on its stream, compiles Triton kernels (for the very pointers and
        numbers that are captured), loads cuBLAS's, and makes this stream's workspace: none of it may happen in a capture.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do with the device meanwhile is no part of this.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()
        current.wait_stream(self._stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
