"""Whatever the router does: captured steps get the right ids, places and page table, among steps launched as they are.

A model that echoes its inputs runs through graphs beside the backend that proves the KV right (`tests/fakes/engine`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from inferserve.attention.base import Bucket
from inferserve.engine.graphs import Parts, capture
from inferserve.engine.recorder import EagerRecorder
from inferserve.engine.staging import CudaStaging, DeviceRows
from inferserve.engine.step import FROM_DEVICE, StepBatch
from inferserve.kernels.dispatch import kernels_for
from inferserve.kv.pool import KvPool, KvShape
from inferserve.layers.context import ForwardContext
from tests.fakes import engine as fakes
from tests.fakes.listed_attention import ListedAttention
from tests.unit.engine.test_pressure import WorkerMachine

CPU = torch.device("cpu")


class Echo:
    """Logits that say which token stands where, and where its K and V go."""

    kv_shapes = (KvShape(1, 1),)
    capturable = True

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.hidden(token_ids, ctx)[ctx.logits_index]

    def hidden(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return torch.stack((token_ids, ctx.batch.positions, ctx.batch.kv_index), dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class GraphBackend(fakes.KvBackend):
    """Checks each step on its way through the static inputs, and remembers on "the device" what it sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, most = self.max_rows, min(8, self.max_rows)
        pool = KvPool(Echo.kv_shapes, self.kv_tokens, torch.float32, CPU)
        self.rows = DeviceRows.make(rows, self.max_len, CPU)
        self.staging = CudaStaging(self.rows)
        parts = Parts(Echo(), ListedAttention(pool, CPU), kernels_for(CPU), self.rows, pool.spare)
        wanted = (Bucket(9, most, most), Bucket(6, most, most), Bucket(4, 4, 0), Bucket(2, 2, 0))
        self.graphs = capture(parts, wanted, EagerRecorder())
        self.replayed = 0

    def launch(self, batch: StepBatch) -> fakes.ReadyStep:
        owner = np.repeat(batch.rows, batch.query_len)
        ids = [self.newest[row] if t == FROM_DEVICE else t for row, t in zip(owner, batch.token_ids, strict=True)]
        expected = torch.tensor([ids, batch.positions.tolist(), batch.kv_index.tolist()]).T[batch.sampled_at()]
        outcome = super().launch(batch)
        replayed = self.graphs.launch(batch)
        self.replayed += replayed is not None
        logits, sample_rows = replayed or self._as_it_is(batch)
        assert torch.equal(logits, expected)
        assert sample_rows.tolist() == batch.rows[batch.sample].tolist()
        for row, length in zip(batch.rows, batch.kv_len, strict=True):
            assert self.rows.table[row, :length].tolist() == batch.table[row, :length].tolist()
        newest = torch.tensor([self.newest[row] for row in sample_rows.tolist()], dtype=torch.int64)
        none = torch.zeros(len(newest))
        self.staging.finish(sample_rows, newest, none, none.bool())
        return outcome

    def _as_it_is(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        step = self.staging.put(batch)
        context: Any = type("Context", (), {"batch": step.attention, "logits_index": step.logits_index})
        return Echo().forward(step.token_ids, context), step.sample_rows


class GraphMachine(WorkerMachine):
    depth = 1


class DraftingMachine(WorkerMachine):
    drafts, alphabet = 3, 3
    params = (("temperature", 0.0),)


@pytest.mark.parametrize("machine", [GraphMachine, DraftingMachine])
def test_any_course_of_steps(machine: type[WorkerMachine], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[GraphBackend] = []

    def make(*args: Any) -> GraphBackend:
        made.append(GraphBackend(*args))
        return made[-1]

    monkeypatch.setattr(fakes, "KvBackend", make)
    case = machine.TestCase()
    case.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
    case.runTest()
    steps = sum(len(backend.batches) for backend in made)
    assert 0 < sum(backend.replayed for backend in made) < steps
