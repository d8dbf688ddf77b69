"""Python of launching a captured step, on any machine: work list, static inputs, the call of a graph that does nothing.

    python -m benchmarks.graph_launch [--steps 2000] [--out FILE.json]

What is left out is the same on every machine with a GPU and small beside it: the driver's part of the copy and of the
replay, the head's product, and sampling. Exit code 1 if a step of 256 rows takes longer than the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from benchmarks import schema
from inferserve.attention.base import AttentionBatch, AttentionPlan, Bucket, HostRows, Ints, LayerSpec
from inferserve.attention.work import WorkLists, WorkShape
from inferserve.engine.graphs import Graphs, Parts, capture
from inferserve.engine.recorder import Run
from inferserve.engine.staging import DeviceRows
from inferserve.engine.step import FROM_DEVICE, StepBatch
from inferserve.kernels.dispatch import kernels_for
from inferserve.kernels.rope_write import PackedHeads, Rotation
from inferserve.kv.pool import KvShape
from inferserve.layers.context import ForwardContext

LIMIT_MS = 0.3
CPU = torch.device("cpu")
ROWS, LENGTH, CONTEXT = 257, 4096, 1024
BUCKETS = (Bucket(512, 257, 257), Bucket(320, 257, 257), Bucket(256, 256, 0), Bucket(64, 64, 0), Bucket(1, 1, 0))
LLAMA_8B_ON_H200 = WorkShape(kv_heads=8, group=4, tile=128, slots=132)

CASES = {
    "decode 1": (1, 0),
    "decode 64": (64, 0),
    "decode 256": (256, 0),
    "64 + 256": (64, 256),
    "256 + 256": (256, 256),
}
"""Decode rows, and tokens of a chunk beside them."""


class NoModel:
    """A model whose steps cost nothing."""

    kv_shapes: tuple[KvShape, ...] = (KvShape(1, 1),)
    capturable = True

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See CausalModel."""
        return self.logits(self.hidden(token_ids, ctx))

    def hidden(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See CapturableModel."""
        return torch.zeros((len(token_ids), 1), device=ctx.logits_index.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See CapturableModel."""
        return hidden


class Lists:
    """The work lists of the triton backend, and nothing that attends."""

    def __init__(self) -> None:
        self._lists = WorkLists(LLAMA_8B_ON_H200)

    def work_size(self, bucket: Bucket) -> int:
        """See CapturableAttention."""
        return self._lists.capacity(bucket).size

    def work(self, rows: HostRows, bucket: Bucket | None) -> Ints:
        """See CapturableAttention."""
        return self._lists.make(rows, bucket)

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """See AttentionBackend."""
        return batch

    def forward(
        self, spec: LayerSpec, plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionBackend. The model has no layer that calls it."""
        del spec, plan, k, v
        return q

    def forward_packed(
        self, spec: LayerSpec, plan: AttentionPlan, qkv: torch.Tensor, heads: PackedHeads, rotation: Rotation
    ) -> torch.Tensor:
        """See AttentionBackend."""
        del spec, plan, heads, rotation
        return qkv


class Once:
    """A recorder whose replays do nothing."""

    def record(self, run: Run) -> Run:
        """See Recorder."""
        result = run()
        return lambda: result


def batch_of(decode: int, chunk: int, table: np.ndarray, random: np.random.Generator) -> StepBatch:
    """A step of rows with ragged contexts around CONTEXT, and one chunk."""
    rows = np.arange(decode + bool(chunk), dtype=np.int32)
    query_len = np.array([1] * decode + [chunk] * bool(chunk), np.int32)
    kv_len = random.integers(CONTEXT // 2, 2 * CONTEXT, len(rows)).astype(np.int32)
    tokens = int(query_len.sum())
    numbers = np.arange(tokens, dtype=np.int32)
    return StepBatch(
        step=0,
        rows=rows,
        num_decode=decode,
        query_len=query_len,
        kv_len=kv_len,
        token_ids=np.where(numbers < decode, FROM_DEVICE, numbers).astype(np.int32),
        positions=numbers,
        kv_index=numbers,
        table=table,
        new_prefix=(),
        sample=np.arange(len(rows), dtype=np.int32),
        out_position=np.ones(len(rows), np.int32),
    )


def measure(graphs: Graphs, decode: int, chunk: int, steps: int) -> float:
    """Median milliseconds of a launch."""
    random, table = np.random.default_rng(0), np.zeros((ROWS, LENGTH), np.int32)
    batches = [batch_of(decode, chunk, table, random) for _ in range(20)]
    times = []
    for i in range(steps):
        started = time.perf_counter()
        launched = graphs.launch(batches[i % len(batches)])
        times.append((time.perf_counter() - started) * 1000)
        assert launched is not None, "no bucket serves the step"
    return round(statistics.median(times), 4)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", default="benchmarks/results/graph_launch.json")
    options = parser.parse_args()
    rows = DeviceRows.make(ROWS, LENGTH, CPU)
    with torch.inference_mode():
        graphs = capture(Parts(NoModel(), Lists(), kernels_for(CPU), rows, spare=0), BUCKETS, Once())
        figures: dict[str, Any] = {f"{name} ms": measure(graphs, *case, options.steps) for name, case in CASES.items()}
    ratios = {f"{name} / limit": round(ms / LIMIT_MS, 3) for name, ms in figures.items()}
    print(json.dumps(figures, indent=1))
    schema.write(options.out, schema.result("graph_launch", {"steps": options.steps}, figures, ratios))
    return int(figures["decode 256 ms"] > LIMIT_MS)


if __name__ == "__main__":
    raise SystemExit(main())
